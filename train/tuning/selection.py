"""Selection: which routed experts a recipe trains, layer by layer.

Owns the meaning of `tune.experts`; promises that a layer or an expert that the model does not have is refused, and
that every process gets the same selection. `train.run` asks for it once the model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray
from torch import nn

from coop.adapters.recorder import Recorder
from coop.adapters.transformers import ExpertsModule, find_experts
from coop.errors import ProfileError, RecipeError
from coop.files import read_json, write_atomic
from coop.hotmap import RoutedBatch
from coop.profile import Profile

if TYPE_CHECKING:
    from train.schema import ExpertsSection

SELECTION_NAME = "selected_experts.json"


@dataclass(frozen=True, slots=True)
class Selection:
    """The experts that are trained in each MoE layer, rising, and how they were found."""

    experts: tuple[tuple[int, ...], ...]
    source: str

    def describe(self, num_experts: Sequence[int]) -> str:
        """One line: how many of all, in which layers, and why these."""
        parts = [f"{len(e)} of {n}" for e, n in zip(self.experts, num_experts, strict=True)]
        shown = ", ".join(parts[:16]) + (" ..." if len(parts) > 16 else "")
        total = sum(len(experts) for experts in self.experts)
        return f"experts trained: {total} of {sum(num_experts)} ({self.source}); by layer: {shown}"

    def save(self, folder: Path) -> None:
        """Write the selection into `folder`, so that a resumed run trains the same experts."""
        facts = {"experts": [list(experts) for experts in self.experts], "source": self.source}
        write_atomic(folder / SELECTION_NAME, (json.dumps(facts) + "\n").encode())


def read_selection(folder: Path, model: nn.Module) -> Selection | None:
    """The selection that a run saved in `folder`, or None. Raises RecipeError if it does not fit the model."""
    path = folder / SELECTION_NAME
    if not path.is_file():
        return None
    facts = read_json(path, RecipeError)
    counts = [entry.num_experts for entry in find_experts(model)]
    lists = facts.get("experts") if isinstance(facts, dict) else None
    if not isinstance(lists, list) or len(lists) != len(counts):
        raise RecipeError(f"{path}: not a selection of experts for {len(counts)} layers")
    for experts, count in zip(lists, counts, strict=True):
        if not all(type(expert) is int and 0 <= expert < count for expert in experts):
            raise RecipeError(f"{path}: names experts that the model does not have")
    return Selection(tuple(tuple(experts) for experts in lists), str(facts.get("source", "")))


def choose_experts(
    model: nn.Module, section: ExpertsSection, rows: Sequence[Sequence[int]], earlier: Path | None = None
) -> Selection | None:
    """The selection of a recipe, or None when all experts are trained; every process calls it together.

    Args:
        model: before PEFT wraps it. It is run only for hot experts without a profile.
        rows: token ids of the rows of that pass.
        earlier: output folder of the run that is resumed, whose selection is kept.

    Raises RecipeError or ProfileError.
    """
    if section.select == "all":
        return None
    saved = read_selection(earlier, model) if earlier is not None else None
    if saved is not None:
        return saved
    # the main process decides: with FSDP's loading it alone holds the weights
    boxes = [_choose(model, section, rows) if PartialState().is_main_process else None]
    chosen: Selection = broadcast_object_list(boxes)[0]
    return chosen


def _choose(model: nn.Module, section: ExpertsSection, rows: Sequence[Sequence[int]]) -> Selection:
    entries = find_experts(model)
    if section.select == "list":
        return Selection(_parse_lists(section.list, [e.num_experts for e in entries]), "tune.experts.list")
    if section.profile is None:
        uses, source = count_uses(model, rows), f"a pass of {len(rows)} training rows"
    else:
        uses, source = _profile_uses(Path(section.profile), entries), section.profile
    picked = tuple(smallest_cover(layer, section.share) for layer in uses)
    return Selection(picked, f"each layer's fewest that cover {section.share:.0%} of the uses in {source}")


def smallest_cover(uses: NDArray[np.int64], share: float) -> tuple[int, ...]:
    """The fewest experts whose `uses` [experts] reach `share` of their sum; ties go to the lower index."""
    if not uses.sum():
        raise ProfileError("tune.experts: a layer without any counted use: give a profile with counts")
    order = np.argsort(-uses, kind="stable")
    reached = np.cumsum(uses[order])
    # a sum of integers against a product of floats: a hair less, so that 0.9 of 10 is 9 and not 10
    needed = int(np.searchsorted(reached, share * int(uses.sum()) * (1 - 1e-12))) + 1
    return tuple(sorted(int(expert) for expert in order[:needed]))


def count_uses(model: nn.Module, rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """How often each expert is used, int64 [layers, experts], in a pass of token ids through the model in eval mode."""
    entries = find_experts(model)
    counts = torch.zeros(len(entries), max(e.num_experts for e in entries), dtype=torch.int64)
    device = next(parameter.device for parameter in model.parameters())

    def count(batch: RoutedBatch) -> None:
        for layer, indices in enumerate(batch.indices):
            counts[layer] += torch.bincount(indices.flatten().cpu(), minlength=counts.shape[1])

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), Recorder(model, count):
            for row in rows:
                ids = torch.tensor([list(row)], device=device)
                model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    finally:
        model.train(was_training)
    return counts.numpy()


def _profile_uses(path: Path, entries: Sequence[ExpertsModule]) -> NDArray[np.int64]:
    profile = Profile.load(path)
    layers = tuple(entry.name for entry in entries)
    if profile.identity.layers != layers or profile.identity.num_experts != max(
        e.num_experts for e in entries
    ):
        raise ProfileError(
            f"tune.experts.profile: {path} is of {len(profile.identity.layers)} layers x "
            f"{profile.identity.num_experts} experts of {profile.identity.architecture}, another model"
        )
    return profile.hot_prompt + profile.hot_answer


def _parse_lists(texts: Sequence[str], num_experts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    chosen: list[set[int]] = [set() for _ in num_experts]
    for text in texts:
        place, _, items = text.partition(":")
        layers = range(len(num_experts)) if place == "*" else [int(place)]
        for layer in layers:
            if layer >= len(num_experts):
                raise RecipeError(
                    f"tune.experts.list: {text!r}: the model has MoE layers 0-{len(num_experts) - 1}"
                )
            chosen[layer] |= _parse_experts(items, num_experts[layer], text)
    return tuple(tuple(sorted(experts)) for experts in chosen)


def _parse_experts(items: str, count: int, text: str) -> set[int]:
    found: set[int] = set()
    for item in items.split(","):
        first, _, last = item.partition("-")
        begin, end = int(first), int(last or first)
        if begin > end or end >= count:
            raise RecipeError(f"tune.experts.list: {text!r}: {item} is not within experts 0-{count - 1}")
        found |= set(range(begin, end + 1))
    return found
