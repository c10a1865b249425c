"""Prefetcher: loads experts early, and the experts that are waited for first.

Owns its threads and two queues; promises that a demand load is never behind a guess in the queue, that a
guess takes no slot until its read begins, and that an error in a thread reaches who waits for the expert.
Called by the scheduler. With `threads=0` demand loads run in the caller and guesses are refused.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from coop.errors import ClosedError, CoopError, PrefetchError
from coop.ids import ExpertId
from coop.residency import Residency
from coop.store import Slot, Store

CLOSE_SECONDS = 2.0
MAX_WISHES = 65_536


@dataclass(slots=True)
class LoadCounters:
    """What was read, and why: counts of experts, bytes from the store, guesses that nobody used."""

    bytes_read: int = 0
    demand_loads: int = 0
    speculative_loads: int = 0
    speculative_refused: int = 0
    speculative_failed: int = 0


class Prefetcher:
    """Threads that fill slots from a store.

    Args:
        store: where experts come from.
        residency: where they go.
        threads: number of loader threads; reads at queue depth `threads`.
        on_load: called with (expert, bytes, seconds) after each load, from the loading thread.
    """

    def __init__(
        self,
        store: Store,
        residency: Residency,
        threads: int,
        on_load: Callable[[ExpertId, int, float], None],
    ) -> None:
        self.counters = LoadCounters()
        self._store, self._residency, self._on_load = store, residency, on_load
        self._demands: deque[tuple[ExpertId, Slot]] = deque()
        self._wishes: deque[ExpertId] = deque(maxlen=MAX_WISHES)
        self._seeds: deque[ExpertId] = deque(maxlen=MAX_WISHES)
        self._wake = threading.Condition()
        self._is_closed = False
        self._busy = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"coop-load-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def demand(self, expert: ExpertId, slot: Slot) -> None:
        """Load a reserved expert ahead of every guess; without threads it is loaded before this returns."""
        if not self._threads:
            self._load(expert, slot, is_speculative=False)
            return
        with self._wake:
            if self._is_closed:
                raise ClosedError("the prefetcher is closed")
            self._demands.append((expert, slot))
            self._wake.notify()

    def wish(self, experts: Iterable[ExpertId]) -> None:
        """Replace the guesses for the next layers, likeliest first."""
        with self._wake:
            self._wishes.clear()
            self._wishes.extend(experts)
            self._wake.notify_all()

    def seed(self, experts: Iterable[ExpertId]) -> None:
        """Replace the start-up list: loaded when nothing else is asked for, in the order given."""
        with self._wake:
            self._seeds.clear()
            self._seeds.extend(experts)
            self._wake.notify_all()

    def check_alive(self) -> None:
        """Raise PrefetchError if a loader thread has died."""
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        if dead and not self._is_closed:
            raise PrefetchError(f"loader thread {dead[0]} died; start again")

    def wait_idle(self, seconds: float) -> bool:
        """Wait until every queue is empty and no read is under way; False if that takes longer."""
        deadline = time.monotonic() + seconds
        with self._wake:
            while self._demands or self._wishes or self._seeds or self._busy:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._wake.wait(left)
        return True

    def close(self) -> None:
        """Stop the threads; returns within two seconds even if a read hangs (the threads are daemons)."""
        with self._wake:
            self._is_closed = True
            self._demands.clear()
            self._wishes.clear()
            self._seeds.clear()
            self._wake.notify_all()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._is_closed or self._demands or self._wishes or self._seeds):
                    self._wake.wait()
                if self._is_closed:
                    return
                demand = self._demands.popleft() if self._demands else None
                guess = None if demand else self._pop_guess()
                self._busy += 1
            try:
                if demand is not None:
                    self._load(*demand, is_speculative=False)
                elif guess is not None:
                    self._load_guess(guess)
            finally:
                with self._wake:
                    self._busy -= 1
                    self._wake.notify_all()

    def _pop_guess(self) -> ExpertId:
        return self._wishes.popleft() if self._wishes else self._seeds.popleft()

    def _load_guess(self, expert: ExpertId) -> None:
        try:
            slot = self._residency.reserve(expert, is_speculative=True)
        except CoopError:  # closed, or no memory: a guess is never a reason to fail
            slot = None
        if slot is None:
            self.counters.speculative_refused += 1
            return
        self._load(expert, slot, is_speculative=True)

    def _load(self, expert: ExpertId, slot: Slot, is_speculative: bool) -> None:
        start = time.perf_counter()
        try:
            nbytes = self._store.load(expert, slot)
        except Exception as exc:
            with self._wake:
                self.counters.speculative_failed += is_speculative
            if not self._is_closed:
                self._residency.abandon(expert, exc)
            return
        with self._wake:
            self.counters.bytes_read += nbytes
            self.counters.demand_loads += not is_speculative
            self.counters.speculative_loads += is_speculative
        self._on_load(expert, nbytes, time.perf_counter() - start)
        if not self._is_closed:
            self._residency.publish(expert)
