"""Packing: several rows in one sequence that do not see each other.

Owns which rows share a sequence and the proof that the model keeps them apart; promises that every row is in
exactly one sequence, whole. `train.data.load` packs; Trainer calls the check before the first step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coop.errors import RecipeError
from train.data.rows import Row

PROBE_TOKENS = 16
MAX_LEAK = 0.25  # of what full sight would change; bfloat16 rounding moves logits by a few percent of it


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of rows for each sequence: longest rows first, each where it leaves the least room."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, index of the bin), rising
    for row in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        place = bisect_left(room, (lengths[row], -1))
        left, target = room.pop(place) if place < len(room) else (capacity, len(bins))
        if target == len(bins):
            bins.append([])
        bins[target].append(row)
        insort(room, (left - lengths[row], target))
    return bins


def pack_rows(rows: Sequence[Row], max_length: int) -> list[Row]:
    """`rows` in sequences of up to `max_length` tokens; none of them may be longer."""
    bins = best_fit([len(row.input_ids) for row in rows], max_length)
    return [_join([rows[index] for index in indices]) for indices in bins]


def _join(rows: Sequence[Row]) -> Row:
    return Row(
        np.concatenate([row.input_ids for row in rows]),
        np.concatenate([row.labels for row in rows]),
        tuple(len(row.input_ids) for row in rows),
    )


class IsolationCheck(TrainerCallback):
    """Refuses to train packed rows with a model that lets them see each other.

    Args:
        attention: how the model computes it, for the refusal.
    """

    def __init__(self, attention: str) -> None:
        self._attention = attention

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Measure on a pair of rows, collated as in training. Raises RecipeError naming model and attention."""
        kind = model.config.get_text_config().model_type
        try:
            leak = measure_leak(model, train_dataloader.collate_fn)
        except (ValueError, NotImplementedError) as exc:  # such as of Mamba layers without their kernels
            raise RecipeError(
                f"data.packing: {kind} refuses packed rows: {exc}; set data.packing=false"
            ) from exc
        if leak > MAX_LEAK:
            raise RecipeError(
                f"data.packing: rows of one sequence see each other in {kind} with "
                f"model.attention={self._attention} ({leak:.0%} of full sight); set data.packing=false"
            )


@torch.no_grad()
def measure_leak(model: nn.Module, collate: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> float:
    """How far a row behind another is from the row alone: 0 not at all, 1 as if it saw the other one.

    The median change of its logits, as a share of the change when both are one row. Random state, counters of
    training passes and mode of the model stay as they were.
    """
    vocabulary = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (2 * PROBE_TOKENS,), generator=generator).tolist()
    device = next(model.parameters()).device

    def logits(tokens: list[int], lengths: list[int]) -> Tensor:
        """Of the last PROBE_TOKENS tokens."""
        batch = collate([{"input_ids": tokens, "labels": tokens, "seq_lengths": lengths}])
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items() if k != "labels"}
        return model(**inputs, use_cache=False).logits[0, -PROBE_TOKENS:].float()

    was_training = model.training
    model.eval()
    try:
        alone = logits(ids[PROBE_TOKENS:], [PROBE_TOKENS])
        packed = logits(ids, [PROBE_TOKENS] * 2) - alone
        joined = logits(ids, [2 * PROBE_TOKENS]) - alone
    finally:
        model.train(was_training)
    return float(packed.abs().median() / joined.abs().median().clamp(min=1e-6))
