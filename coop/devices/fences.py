"""Fences: points in a queue that any thread can wait for, each wait with a deadline.

Owns nothing but the state of one point; promises that the error of a queue reaches who waits for it. Made by
devices: an EventFence for the compute queue, a CopyFence for each copy.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from coop.errors import CoopError, PrefetchError

PAUSE_SECONDS_MIN = 20e-6  # shorter than the kernels of one layer call
PAUSE_SECONDS_MAX = 1e-3


class Event(Protocol):
    """What torch's accelerators call an event: a mark in a stream."""

    def query(self) -> bool:
        """Whether the stream has passed the mark; raises what went wrong on the device."""

    def synchronize(self) -> None:
        """Block until it has; raises what went wrong on the device."""


class EventFence:
    """A recorded event. Torch's events cannot be waited for with a deadline, so `wait` asks and sleeps in turns."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        """Whether the event has been passed. PrefetchError for a device that failed."""
        try:
            return self.event.query()
        except RuntimeError as exc:
            raise PrefetchError(f"the device failed: {exc}") from exc

    def wait(self, seconds: float) -> bool:
        """Sleep until done; False if that takes longer."""
        deadline = time.monotonic() + seconds
        pause = PAUSE_SECONDS_MIN
        while not self.is_done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, PAUSE_SECONDS_MAX)
        return True


class CopyFence:
    """The end of one copy, good or bad; `maker` is the thread that finishes it."""

    def __init__(self, maker: object) -> None:
        self.maker = maker
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Let go who waits, with the reason if the copy will never be done."""
        self._error = error
        self._finished.set()

    def is_done(self) -> bool:
        """Whether the bytes have arrived. Raises what `wait` raises."""
        return self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        """Block until done; False if that takes longer. PrefetchError or ClosedError if the copy failed."""
        if not self._finished.wait(seconds):
            return False
        if isinstance(self._error, CoopError):
            raise self._error
        if self._error is not None:
            raise PrefetchError(f"a copy to the device failed: {self._error}") from self._error
        return True
