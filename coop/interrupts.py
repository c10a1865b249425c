"""Interrupts: Ctrl-C waits until the books are straight.

Owns the SIGINT handler for the length of a layer call; promises that KeyboardInterrupt is raised before the
call, in one of its waits, or after it, and never between two lines that belong together. Called by the scheduler.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Any


class Interrupts:
    """At most one block at a time is the outer one; only the main thread receives signals."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, FrameType | None]] = []
        self._is_held = False
        self._previous: Callable[[int, FrameType | None], Any] = signal.default_int_handler

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep Ctrl-C for the end of the block, or for `check` inside it."""
        if self._is_held or current_thread() is not main_thread():
            yield
            return
        previous = signal.signal(signal.SIGINT, self._keep)
        if not callable(previous):
            signal.signal(signal.SIGINT, previous)
            yield
            return
        self._is_held, self._previous = True, previous
        try:
            yield
        finally:
            self._is_held = False
            signal.signal(signal.SIGINT, previous)
            self.check()

    def check(self) -> None:
        """Hand on what was kept, where nothing is half done; only the thread that was interrupted does.

        The handler from outside decides: Python's own raises, that of a training run may wait for the step's end.
        """
        if self._pending and current_thread() is main_thread():
            number, frame = self._pending[0]
            self._pending.clear()
            self._previous(number, frame)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._pending.append((number, frame))
