"""Loading: what a run works with, from the recipe to rows and a model that is ready to be trained.

Owns the order: data first, because it is quick to check, then the model; promises that what is loaded is shown, and
that what must be closed is given to the caller. `train.run` calls it, for a dry run without weights.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from torch import nn
from transformers import set_seed

from coop.adapters.offload import Offloaded
from coop.adapters.transformers import find_experts
from coop.errors import DataError
from train.data.load import LoadedData, load_data
from train.data.rows import Row
from train.opening import show_data, show_groups, show_model, show_offload, show_trained
from train.phases import Phases
from train.schema import Recipe
from train.tuning.balance import describe_aux_loss
from train.tuning.expert_mask import ExpertMask
from train.tuning.model import (
    Groups,
    check_trainable,
    expert_backend,
    group_sizes,
    load_model,
    load_offloaded,
    load_skeleton,
    load_tokenizer,
    make_trainable,
    plan_offloaded,
    put_experts_in_force,
    trained_weights,
)
from train.tuning.selection import Selection, choose_experts
from train.watching.progress import say
from train.watching.warmup import chosen_layers


@dataclass(slots=True)
class Loaded:
    """What a run works with. `opening` is what was shown before the first step."""

    tokenizer: Any
    model: nn.Module
    data: LoadedData
    data_digest: str
    total_steps: int
    selection: Selection | None
    mask: ExpertMask | None
    offloaded: Offloaded | None
    opening: str = ""

    @property
    def train_rows(self) -> list[Row]:
        """Rows that are trained."""
        return self.data.train_rows

    @property
    def eval_rows(self) -> list[Row]:
        """Rows that are held out."""
        return self.data.eval_rows


def load(
    recipe: Recipe, console: Console, phases: Phases, held: ExitStack, *, is_dry: bool, earlier: Path | None
) -> Loaded:
    """Everything that the recipe names; what must be closed goes onto `held`.

    is_dry: no weights, nothing that takes long. earlier: the output folder of the run that is resumed, or None.
    """
    tokenizer = load_tokenizer(recipe)
    with phases.time("data"):
        data = load_data(recipe.data, tokenizer, recipe.train.seed, console)
        digest = data.digest()
        _refuse_other_data(digest)
    show_data(console, data, tokenizer)
    with phases.time("model"):
        model, offloaded = _load_model(recipe, is_dry, console, held)
        if recipe.coop.profile.enabled:
            chosen_layers(recipe.coop.warmup, len(find_experts(model)))  # refused now, not after the start
        groups, backend = Groups(model), expert_backend(recipe, model)
        show_model(console, model, recipe, backend)
        selection = _select(recipe, model, data, backend, offloaded, is_dry=is_dry, earlier=earlier)
        set_seed(recipe.train.seed)
        model = make_trainable(model, recipe.tune, recipe.model.path)
        put_experts_in_force(model, backend, offloaded)
        mask = ExpertMask(model, selection, recipe.train.weight_decay) if selection is not None else None
    _show_trained(recipe, model, groups, selection, mask, console)
    rows = len(data.train_rows)
    return Loaded(tokenizer, model, data, digest, total_steps(recipe, rows), selection, mask, offloaded)


def total_steps(recipe: Recipe, rows: int) -> int:
    """Optimiser steps of the whole run over `rows` sequences."""
    train = recipe.train
    if train.steps is not None:
        return train.steps
    return max(1, ceil(round((train.epochs or 1) * steps_per_epoch(recipe, rows), 9)))


def steps_per_epoch(recipe: Recipe, rows: int) -> int:
    """Optimiser steps in which Trainer passes over `rows` sequences once: the last one of them may be short.

    Every process takes equally many batches (accelerate fills the last ones up), and no step spans two epochs.
    """
    train = recipe.train
    batches = ceil(rows / (train.batch_size * PartialState().num_processes))
    return ceil(batches / train.grad_accumulation)


def _refuse_other_data(digest: str) -> None:
    """Every process must train the same rows in the same order, or steps would not be what they say."""
    digests = gather_object([digest])
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise DataError(
            f"process {others[0]} has read other rows than process 0; give all machines the same data"
        )


def _load_model(
    recipe: Recipe, is_dry: bool, console: Console, held: ExitStack
) -> tuple[nn.Module, Offloaded | None]:
    """The model, and what serves its experts if they stay on disk; a dry run has neither weights nor readers."""
    device = PartialState().device.type
    if not recipe.model.experts_offload:
        return load_skeleton(recipe) if is_dry else load_model(recipe), None
    if is_dry:
        show_offload(console, plan_offloaded(recipe, device))
        return load_skeleton(recipe), None
    offloaded = held.enter_context(load_offloaded(recipe, device))
    show_offload(console, offloaded.plan)
    return offloaded.model, offloaded


def _is_counted(recipe: Recipe) -> bool:
    """Whether the experts to train are found by a pass over the data."""
    return recipe.tune.experts.select == "hot" and recipe.tune.experts.profile is None


def _select(
    recipe: Recipe,
    model: nn.Module,
    data: LoadedData,
    backend: str,
    offloaded: Offloaded | None,
    *,
    is_dry: bool,
    earlier: Path | None,
) -> Selection | None:
    """Which experts are trained; None for all of them, and in a dry run that would have to run the model for it."""
    if is_dry and _is_counted(recipe):
        return None
    if offloaded is not None and _is_counted(recipe):
        put_experts_in_force(model, backend, offloaded)  # for the pass; adapters are not there yet
    ids = [row.input_ids.tolist() for row in data.train_rows[: recipe.tune.experts.profile_rows]]
    return choose_experts(model, recipe.tune.experts, ids, earlier)


def _show_trained(
    recipe: Recipe,
    model: nn.Module,
    groups: Groups,
    selection: Selection | None,
    mask: ExpertMask | None,
    console: Console,
) -> None:
    sizes = group_sizes(model, groups, mask.frozen_elements if mask else 0)
    show_groups(console, sizes)
    show_trained(console, trained_weights(model, groups))
    check_trainable(sizes, recipe.tune.groups)
    if selection is not None:
        say(console, selection.describe([entry.num_experts for entry in find_experts(model)]))
    elif _is_counted(recipe):
        rows = recipe.tune.experts.profile_rows
        say(console, f"experts trained: chosen by a pass of {rows} training rows before the first step")
    say(console, describe_aux_loss(model, recipe))
