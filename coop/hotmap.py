"""HotMap: how often each expert is used, by prompt tokens and by answer tokens, counted where the model runs.

Owns the counters; promises exact integers, that padding and unroutable indices are never counted, and no
synchronisation with the device until they are read. Training records into it; `Profile` keeps what it read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coop.errors import ProfileError
from coop.profile import MAX_DENSE_EXPERTS, MAX_SAMPLE_TOKENS, Profile

PADDING, PROMPT, ANSWER = 0, 1, 2
RECENT_HALF_LIFE_TOKENS = (
    4096  # about the last few optimiser steps of a small run: what the tuned model does now
)
ROWS_WINDOW_CALLS = (
    64  # percentiles of rows per expert come from this many latest calls; the maximum from all
)


@dataclass(frozen=True, slots=True)
class RoutedBatch:
    """How one forward pass was routed.

    indices: int64 [layers, tokens, k], the experts of each token; outside 0..experts-1 means not routed here.
    kinds: int64 [tokens], PADDING, PROMPT or ANSWER.
    follows: bool [tokens], whether the token continues the sequence of the token before it.
    """

    indices: Tensor
    kinds: Tensor
    follows: Tensor
    is_training: bool


@dataclass(frozen=True, slots=True)
class HotCounts:
    """What a HotMap held when it was read; shapes as in `Profile`."""

    prompt: NDArray[np.int64]
    answer: NDArray[np.int64]
    tokens_prompt: int
    tokens_answer: int
    recent_answer: NDArray[np.float32]
    same_layer: NDArray[np.int32]
    next_layer: NDArray[np.int32]
    rows: NDArray[np.int32]
    sample: NDArray[np.uint16]


class HotMap:
    """Counters of one model.

    Args:
        num_layers, num_experts, top_k: of the model; layers with fewer experts leave columns at zero.

    Counting happens where the routing arrives: the counters move there with the first pass.
    """

    def __init__(self, num_layers: int, num_experts: int, top_k: int) -> None:
        dense = num_experts if num_experts <= MAX_DENSE_EXPERTS else 0

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        self.num_layers, self.num_experts, self.top_k = num_layers, num_experts, top_k
        self._counts = zeros(2, num_layers, num_experts)  # prompt, answer
        self._tokens = zeros(2)
        self._recent = zeros(num_layers, num_experts, dtype=torch.float32)
        self._same = zeros(num_layers, dense, dense)
        self._next = zeros(num_layers - 1, dense, dense)
        self._rows_max = zeros(num_layers)
        self._rows: deque[Tensor] = deque(maxlen=ROWS_WINDOW_CALLS)  # each int32 [layers, experts]
        self._sample: deque[tuple[Tensor, Tensor]] = deque()  # (int32 [layers, tokens, k], bool [tokens])

    @torch.no_grad()
    def record(self, batch: RoutedBatch) -> None:
        """Add one forward pass. Sums stay below 2**24 per pass, so float32 products are exact."""
        assert batch.indices.shape[0] == self.num_layers and batch.indices.shape[2] == self.top_k
        assert batch.kinds.numel() < 2**24
        if self._counts.device != batch.indices.device:
            self._move(batch.indices.device)
        with torch.autocast(batch.indices.device.type, enabled=False):
            kinds = torch.stack([batch.kinds == PROMPT, batch.kinds == ANSWER]).float()  # [2, tokens]
            counts = self._record_layers(batch, kinds)  # [2, layers, experts]
        tokens = kinds.sum(dim=1).long()
        self._counts += counts
        self._tokens += tokens
        self._recent *= torch.exp2(-tokens[1] / RECENT_HALF_LIFE_TOKENS)
        self._recent += counts[1]
        self._record_rows(counts.sum(dim=0))
        self._record_sample(batch)

    def _move(self, device: torch.device) -> None:
        for name in ("_counts", "_tokens", "_recent", "_same", "_next", "_rows_max"):
            setattr(self, name, getattr(self, name).to(device))
        self._rows = deque((rows.to(device) for rows in self._rows), maxlen=ROWS_WINDOW_CALLS)
        self._sample = deque((indices.to(device), keep.to(device)) for indices, keep in self._sample)

    def _record_layers(self, batch: RoutedBatch, kinds: Tensor) -> Tensor:
        is_real = kinds.sum(dim=0)  # [tokens]
        follows = batch.follows[1:].float().unsqueeze(1)
        counts = torch.zeros_like(self._counts)
        before = None
        for layer, indices in enumerate(batch.indices):
            used = self._used(indices, is_real)  # [tokens, experts], 1 where the token uses the expert
            counts[:, layer] = (kinds @ used).long()
            if self._same.shape[1]:
                self._same[layer] += (used[:-1].T @ (used[1:] * follows)).long()
                if before is not None:
                    self._next[layer - 1] += (before.T @ used).long()
            before = used
        return counts

    def _used(self, indices: Tensor, is_real: Tensor) -> Tensor:
        is_expert = (indices >= 0) & (indices < self.num_experts)
        columns = torch.where(
            is_expert, indices, self.num_experts
        )  # the last column collects what is not counted
        used = torch.zeros(len(indices), self.num_experts + 1, device=indices.device)
        return used.scatter_(1, columns, 1.0)[:, :-1] * is_real.unsqueeze(1)

    def _record_rows(self, rows: Tensor) -> None:
        self._rows.append(rows.int())
        self._rows_max = torch.maximum(self._rows_max, rows.amax(dim=1))

    def _record_sample(self, batch: RoutedBatch) -> None:
        """Keep the latest passes, enough of them for MAX_SAMPLE_TOKENS slots."""
        indices = batch.indices[:, :MAX_SAMPLE_TOKENS]
        is_whole = ((indices >= 0) & (indices < self.num_experts)).all(dim=2).all(dim=0)
        keep = is_whole & (batch.kinds[:MAX_SAMPLE_TOKENS] != PADDING)
        self._sample.append((indices.int(), keep))
        slots = sum(len(kept) for _, kept in self._sample)
        while slots - len(self._sample[0][1]) >= MAX_SAMPLE_TOKENS:
            slots -= len(self._sample.popleft()[1])

    def read(self, reduce: Callable[[Tensor], Any] = lambda tensor: tensor) -> HotCounts:
        """The counters as numpy arrays.

        Args:
            reduce: sums a tensor over all processes; every process must call `read` together. Rows and
                sample are of the calling process alone.
        """
        counts, tokens, recent, same, following = (
            reduce(tensor.clone()).cpu().numpy()
            for tensor in (self._counts, self._tokens, self._recent, self._same, self._next)
        )
        return HotCounts(
            prompt=counts[0],
            answer=counts[1],
            tokens_prompt=int(tokens[0]),
            tokens_answer=int(tokens[1]),
            recent_answer=recent,
            same_layer=_int32(same),
            next_layer=_int32(following),
            rows=self._read_rows(),
            sample=self._read_sample(),
        )

    def _read_rows(self) -> NDArray[np.int32]:
        rows = np.zeros((self.num_layers, 3), dtype=np.int32)
        rows[:, 2] = self._rows_max.cpu().numpy()
        if self._rows:
            window = torch.stack(list(self._rows)).cpu().numpy()  # [calls, layers, experts]
            for layer in range(self.num_layers):
                used = window[:, layer][window[:, layer] > 0]
                if used.size:
                    rows[layer, :2] = np.percentile(used, [50, 95], method="higher")
        return rows

    def _read_sample(self) -> NDArray[np.uint16]:
        if not self._sample:
            return np.zeros((0, self.num_layers, self.top_k), dtype=np.uint16)
        kept = [indices[:, keep].transpose(0, 1).cpu() for indices, keep in self._sample]
        return torch.cat(kept)[-MAX_SAMPLE_TOKENS:].numpy().astype(np.uint16)

    def restore(self, profile: Profile) -> None:
        """Continue from the training counts of `profile`, as a resumed run does; call it on one process only.

        The window of rows per expert starts again; its maximum is kept. Raises ProfileError if shapes differ.
        """
        shape = (profile.num_layers, profile.identity.num_experts, profile.identity.top_k)
        if shape != (self.num_layers, self.num_experts, self.top_k):
            mine = [self.num_layers, self.num_experts, self.top_k]
            raise ProfileError(
                f"layers x experts x top-k are {list(shape)} in the profile, {mine} in the model"
            )
        counts = np.stack([profile.train_prompt, profile.train_answer])
        self._counts.copy_(torch.from_numpy(counts))
        self._tokens.copy_(torch.tensor([profile.train_tokens_prompt, profile.train_tokens_answer]))
        self._recent.copy_(torch.from_numpy(profile.recent_answer))
        self._same.copy_(torch.from_numpy(profile.same_layer))
        self._next.copy_(torch.from_numpy(profile.next_layer))
        self._rows_max.copy_(torch.from_numpy(profile.rows[:, 2].copy()))


def _int32(counts: NDArray[np.int64]) -> NDArray[np.int32]:
    return np.minimum(counts, np.iinfo(np.int32).max).astype(np.int32)
