"""RingBuffer: the memory that expert outputs are written to before they are combined.

Owns one block; promises segments that begin on a cache line of their own and never overlap while in use, so
that two workers never write to the same line. Called by the data flow (L2). A segment that does not fit is
given memory of its own and counted: slower, never wrong.
"""

from __future__ import annotations

from collections import deque

import torch

CACHE_LINE = 64


class RingBuffer:
    """First in, first out: `push` takes a segment at the head, `pop` gives back the oldest.

    Args:
        capacity_bytes: size of the block, rounded up to a cache line.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = _round_up(capacity_bytes)
        self.overflows = 0
        # one line more than asked: the allocator's own alignment is no promise
        block = torch.empty(self.capacity_bytes + CACHE_LINE, dtype=torch.uint8)
        shift = -block.data_ptr() % CACHE_LINE
        self._block = block[shift : shift + self.capacity_bytes]
        self._segments: deque[tuple[int, int]] = deque()  # (start, nbytes), oldest first; start -1: overflow

    @property
    def used_bytes(self) -> int:
        """Bytes of the block that are in use."""
        return sum(nbytes for start, nbytes in self._segments if start >= 0)

    @property
    def fill(self) -> float:
        """Share of the block in use."""
        return self.used_bytes / self.capacity_bytes

    def push(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """A segment [rows, width] of `dtype`; each row begins on a cache line. Contents are undefined."""
        pitch = _round_up(width * dtype.itemsize)
        nbytes = rows * pitch
        start = self._find(nbytes)
        if start < 0:
            self.overflows += 1
            memory = torch.empty(nbytes, dtype=torch.uint8)
        else:
            memory = self._block[start : start + nbytes]
        self._segments.append((start, nbytes))
        return memory.view(dtype).view(rows, pitch // dtype.itemsize)[:, :width]

    def pop(self) -> None:
        """Give back the oldest segment."""
        self._segments.popleft()

    def _find(self, nbytes: int) -> int:
        """Start of a free run of `nbytes`, after the newest segment or wrapped to the front; -1 if there is none."""
        live = [(start, size) for start, size in self._segments if start >= 0 and size]
        if not live:
            return 0 if nbytes <= self.capacity_bytes else -1
        tail, (head_start, head_size) = live[0][0], live[-1]
        head = head_start + head_size
        if head > tail:
            if head + nbytes <= self.capacity_bytes:
                return head
            return 0 if nbytes <= tail else -1
        return head if head + nbytes <= tail else -1


def _round_up(nbytes: int) -> int:
    return max(CACHE_LINE, -(-nbytes // CACHE_LINE) * CACHE_LINE)
