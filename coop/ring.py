"""RingBuffer: the memory that expert outputs are written to before they are combined.

Owns one block; promises segments that begin on a cache line of their own and never overlap while in use, so
that two workers never write to the same line. Called by the data flow (L2). A segment that does not fit is
given memory of its own and counted: slower, never wrong.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

import torch

CACHE_LINE = 64


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """A run of the block: `start` and `nbytes` in bytes; `start` is -1 for memory outside the block."""

    start: int
    nbytes: int


class RingBuffer:
    """Segments are taken round the block from where the last one ended, and given back in any order.

    Args:
        capacity_bytes: size of the block, rounded up to a cache line.
        device: where the outputs are computed.
    """

    def __init__(self, capacity_bytes: int, device: torch.device | str = "cpu") -> None:
        self.capacity_bytes = _round_up(capacity_bytes)
        self.used_bytes = 0
        self.used_bytes_max = 0
        self.overflows = 0
        self._device = torch.device(device)
        # one line more than asked: the allocator's own alignment is no promise
        block = torch.empty(self.capacity_bytes + CACHE_LINE, dtype=torch.uint8, device=self._device)
        shift = -block.data_ptr() % CACHE_LINE
        self._block = block[shift : shift + self.capacity_bytes]
        self._live: list[Segment] = []  # sorted by start, never overlapping
        self._next = 0  # where the last segment ended

    @property
    def fill(self) -> float:
        """Share of the block in use."""
        return self.used_bytes / self.capacity_bytes

    def push(self, rows: int, width: int, dtype: torch.dtype) -> tuple[Segment, torch.Tensor]:
        """A segment and its memory [rows, width] of `dtype`; each row begins on a cache line.

        Contents are undefined. Pair with `pop`.
        """
        pitch = _round_up(width * dtype.itemsize)
        nbytes = rows * pitch
        start = self._find(nbytes)
        segment = Segment(start, nbytes)
        if start < 0:
            self.overflows += 1
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        else:
            memory = self._block[start : start + nbytes]
            insort(self._live, segment)
            self._next = start + nbytes
            self.used_bytes += nbytes
            self.used_bytes_max = max(self.used_bytes_max, self.used_bytes)
        return segment, memory.view(dtype).view(rows, pitch // dtype.itemsize)[:, :width]

    def pop(self, segment: Segment) -> None:
        """Give a segment back."""
        if segment.start >= 0:
            self._live.remove(segment)
            self.used_bytes -= segment.nbytes

    def _find(self, nbytes: int) -> int:
        """Start of a free run of `nbytes`: after the last segment if there is room, else the first from the front."""
        if not self._live:
            return 0 if nbytes <= self.capacity_bytes else -1
        fallback, end = -1, 0
        for segment in (*self._live, Segment(self.capacity_bytes, 0)):
            if segment.start - max(end, self._next) >= nbytes:
                return max(end, self._next)
            if fallback < 0 and segment.start - end >= nbytes:
                fallback = end
            end = segment.start + segment.nbytes
        return fallback


def _round_up(nbytes: int) -> int:
    return max(CACHE_LINE, -(-nbytes // CACHE_LINE) * CACHE_LINE)
