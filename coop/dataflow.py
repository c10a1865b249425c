"""L2, data flow: token rows to experts and back.

Owns one layer call between its rows and its result; promises a sum whose order is fixed by expert and row
alone (experts ascending, products rounded as transformers rounds them, added in float32), so it has the same bits
whichever expert was ready first and however large the ring is. Called by the scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from coop import kernels
from coop.ctu import CTU, DECODE_ROWS, slices
from coop.errors import RoutingError
from coop.ids import ExpertId
from coop.ring import RingBuffer, Segment

COMPACT_ROWS = 1024  # a call of more rows takes its outputs unit by unit, however few each expert has


class Flow:
    """One layer call.

    Args:
        layer: ordinal of the MoE layer.
        hidden: [tokens, hidden].
        expert_ids: int64 [tokens, k], on the host.
        weights: [tokens, k].
        num_experts: of this layer. RoutingError for an id outside it.
        ring: where outputs wait for their turn in the sum.
        launch: puts work behind everything that was launched before, as a device's compute queue does.

    `units` are in the order of the sum. A compact call (a decode step) has one unit for each expert, of at
    most DECODE_ROWS rows, one segment for all of them, and is summed at once.
    """

    def __init__(
        self,
        layer: int,
        hidden: torch.Tensor,
        expert_ids: np.ndarray,
        weights: torch.Tensor,
        num_experts: int,
        ring: RingBuffer,
        launch: Callable[[Callable[[], object]], object] = lambda work: work(),
    ) -> None:
        top_k = expert_ids.shape[1]
        flat = expert_ids.reshape(-1)
        order = flat.argsort(kind="stable")
        _check_routes(layer, int(flat[order[0]]), int(flat[order[-1]]), num_experts)
        counts = np.bincount(flat).tolist()
        self.units = _units(layer, counts, hidden.shape[1])
        self.is_compact = flat.size <= COMPACT_ROWS and max(counts) <= DECODE_ROWS
        self.hidden = hidden
        self.tokens = order // top_k  # int64 [rows], which token each gathered row is
        self._order, self._weights = order, weights
        self._ring, self._launch = ring, launch
        self._unsummed = deque(self.units)
        self._done: dict[int, tuple[Segment, torch.Tensor]] = {}  # by unit index: computed, not summed
        self._whole = ring.push(flat.size, hidden.shape[1], hidden.dtype) if self.is_compact else None

    @cached_property
    def _token(self) -> torch.Tensor:
        return torch.from_numpy(self.tokens).to(self.hidden.device)

    @cached_property
    def _weight(self) -> torch.Tensor:  # [rows, 1]
        order = torch.from_numpy(self._order).to(self.hidden.device)
        return self._weights.reshape(-1)[order].unsqueeze(1)

    @cached_property
    def _sum(self) -> torch.Tensor:
        return torch.zeros(self.hidden.shape, dtype=torch.float32, device=self.hidden.device)

    @property
    def head(self) -> CTU:
        """The unit that the sum waits for."""
        return self._unsummed[0]

    def rows(self, unit: CTU) -> torch.Tensor:
        """The unit's inputs, [rows, hidden]."""
        return self.hidden.index_select(0, self._token[unit.start : unit.stop])

    @property
    def outputs(self) -> torch.Tensor:
        """Memory for all outputs of a compact call, [rows, hidden]."""
        assert self._whole is not None
        return self._whole[1]

    def output(self, unit: CTU) -> torch.Tensor:
        """Memory for the outputs of one unit, [rows, hidden], held until they are summed."""
        if self._whole is not None:
            return self._whole[1][unit.start : unit.stop]
        segment, memory = self._ring.push(unit.rows, unit.width, self.hidden.dtype)
        self._done[unit.index] = (segment, memory)
        return memory

    def add(self, unit: CTU) -> None:
        """The unit's outputs are there: sum what is next in order, and give its segments back."""
        while self._whole is None and self._unsummed and self._unsummed[0].index in self._done:
            nxt = self._unsummed.popleft()
            segment, memory = self._done.pop(nxt.index)
            self._add(nxt.start, nxt.stop, memory)
            self._ring.pop(segment)

    def result(self, synchronize: Callable[[], None] = lambda: None) -> torch.Tensor:
        """[tokens, hidden] in the dtype of the input, once every unit was added."""
        if self._whole is not None and not self._has_kernel:
            self._add_whole(self._whole[1])
        synchronize()
        if self._whole is not None and self._has_kernel:
            return self._combined(self._whole[1])
        return self._sum.to(self.hidden.dtype)

    def close(self) -> None:
        """Give back what a failed call left in the ring, and the segment of a compact one."""
        if self._whole is not None:
            self._ring.pop(self._whole[0])
            self._whole = None
        for segment, _ in self._done.values():
            self._ring.pop(segment)
        self._done.clear()

    @cached_property
    def _has_kernel(self) -> bool:
        library, _ = kernels.load()
        weights = self._weights
        is_plain = self.hidden.dtype == weights.dtype and weights.is_contiguous()
        return library is not None and is_plain and kernels.takes(self.hidden)

    def _combined(self, outputs: torch.Tensor) -> torch.Tensor:
        """The sum in one pass of a kernel, with the bits of `_add_whole`."""
        result = torch.empty(self.hidden.shape, dtype=self.hidden.dtype)
        kernels.loaded().combine(outputs, self._weights, self._order, self.tokens, result)
        return result

    def _add_whole(self, outputs: torch.Tensor) -> None:
        if self.hidden.device.type == "cpu":  # rows are added one after another, in order
            self._add(0, outputs.shape[0], outputs)
            return
        for unit in self.units:  # elsewhere one call adds rows in any order: a token must be in it once
            self._add(unit.start, unit.stop, outputs[unit.start : unit.stop])

    def _add(self, start: int, stop: int, outputs: torch.Tensor) -> None:
        total, token, weight = self._sum, self._token[start:stop], self._weight[start:stop]
        self._launch(lambda: total.index_add_(0, token, (outputs * weight).float()))


def _check_routes(layer: int, lowest: int, highest: int, num_experts: int) -> None:
    if lowest < 0 or highest >= num_experts:
        bad = lowest if lowest < 0 else highest
        raise RoutingError(f"layer {layer}: the router chose expert {bad} of {num_experts}")


def _units(layer: int, counts: list[int], width: int) -> tuple[CTU, ...]:
    """Units by expert ascending, long ones sliced; `index` is their place in the sum."""
    units: list[CTU] = []
    first = 0
    for expert, rows in enumerate(counts):
        if rows:
            identity = ExpertId(layer, expert)
            for start, stop in slices(rows):
                units.append(CTU(identity, first + start, first + stop, width, len(units)))
            first += rows
    return tuple(units)
