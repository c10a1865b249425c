"""Staging: page-aligned memory that bytes pass through between the disk and a slot.

Owns a ring of windows, each as large as the largest read; promises that a window has one user at a time, that
a demanded load never waits for a window that a guess holds, and that a wait has a deadline. Its depth, the
demanded loads in flight, follows the calendar. Called by the prefetcher around every load.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from coop.errors import ClosedError, PrefetchError

STAGING_DEADLINE_SECONDS = 120.0  # no disk in use takes this long for one expert


class Window:
    """One segment: `memory` is page-aligned; `read_seconds` is what its user spent in reads."""

    __slots__ = ("memory", "read_seconds")

    def __init__(self, nbytes: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, max(1, nbytes)))
        self.read_seconds = 0.0


class Staging:
    """Windows for loads in flight.

    Args:
        window_bytes: size of each, the largest read.
        demands: the most demanded loads at once; each guess at once has a window beside them.
    """

    def __init__(self, window_bytes: int, demands: int) -> None:
        self.window_bytes = window_bytes
        self.depth = self.depth_max = max(1, demands)
        self.windows = 0  # made so far; given back to the system by `close`
        self._free: deque[Window] = deque()
        self._demanding = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def set_depth(self, depth: int) -> None:
        """The demanded loads in flight from now on, at least one and at most what was planned."""
        with self._changed:
            self.depth = min(max(1, depth), self.depth_max)
            self._changed.notify_all()

    @contextmanager
    def window(self, is_speculative: bool) -> Iterator[Window]:
        """A window for one load. PrefetchError where none comes free before the deadline, ClosedError."""
        window = self._take(is_speculative)
        try:
            yield window
        finally:
            with self._changed:
                self._demanding -= not is_speculative
                if not self._is_closed:
                    self._free.append(window)
                self._changed.notify()

    def close(self) -> None:
        """Forget the windows and end every wait for one; those in use are freed by who uses them."""
        with self._changed:
            self._is_closed = True
            self._free.clear()
            self._changed.notify_all()

    def _take(self, is_speculative: bool) -> Window:
        deadline = time.monotonic() + STAGING_DEADLINE_SECONDS
        with self._changed:
            while not is_speculative and self._demanding >= self.depth:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PrefetchError(f"no staging window came free in {STAGING_DEADLINE_SECONDS:.0f} s")
                self._changed.wait(left)
                if self._is_closed:
                    raise ClosedError("the runtime is closed")
            self._demanding += not is_speculative
            if self._free:
                window = self._free.popleft()
            else:
                window = Window(self.window_bytes)
                self.windows += 1
            window.read_seconds = 0.0
            return window
