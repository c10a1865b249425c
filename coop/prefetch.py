"""Prefetcher: loads experts early, and the experts that are waited for first.

Owns its threads and queues; promises that a demand never waits for a thread that guesses, that a guess takes
no slot until its read begins, and that an error in a thread reaches who waits for the expert. Called by a
layer call's demand and by the scheduler. Without threads demands load in the caller and guesses are refused.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from coop.errors import ClosedError, CoopError, PrefetchError
from coop.ids import ExpertId
from coop.residency import Residency
from coop.staging import Staging
from coop.store import Slot, Store

CLOSE_SECONDS = 2.0
MAX_WISHES = 65_536
PRESSED_SECONDS = 0.1  # how often guesses that are held back ask again


@dataclass(slots=True)
class LoadCounters:
    """What was read, and why: counts of experts, bytes from the store."""

    bytes_read: int = 0
    bytes_speculative: int = 0
    demand_loads: int = 0
    speculative_loads: int = 0
    speculative_refused: int = 0
    speculative_failed: int = 0


class Prefetcher:
    """Threads that fill slots from a store.

    Args:
        store: where experts come from.
        residency: where they go.
        staging: what they pass through.
        demand_threads: reads of demanded experts at once.
        guess_threads: reads of guessed experts at once, by threads that do nothing else.
        on_load: called with (expert, bytes, seconds, seconds of reading) after each load, from its thread.
        is_pressed: asked before each guess; guesses are held back while it answers yes.
    """

    def __init__(
        self,
        store: Store,
        residency: Residency,
        staging: Staging,
        *,
        demand_threads: int,
        guess_threads: int,
        on_load: Callable[[ExpertId, int, float, float], None] = lambda *measured: None,
        is_pressed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.counters = LoadCounters()
        self._store, self._residency, self._staging = store, residency, staging
        self._on_load, self._is_pressed = on_load, is_pressed
        self._demands: deque[tuple[ExpertId, Slot]] = deque()
        self._wishes: deque[ExpertId] = deque(maxlen=MAX_WISHES)
        self._seeds: deque[ExpertId] = deque(maxlen=MAX_WISHES)
        self._lock = threading.RLock()
        self._demanding = threading.Condition(self._lock)  # demand threads sleep here
        self._guessing = threading.Condition(self._lock)  # guess threads
        self._idle = threading.Condition(self._lock)  # `wait_idle`
        self._is_closed = False
        self._is_held_back = False
        self._guess_threads = self._guesses_at_once = guess_threads if demand_threads else 0
        self._may_guess_beside = False
        self._demanded: set[ExpertId] = set()  # being read now
        self._guessed: set[ExpertId] = set()
        self._threads = [
            *(self._thread("load", i, self._serve_demands) for i in range(demand_threads)),
            *(self._thread("guess", i, self._serve_guesses) for i in range(self._guess_threads)),
        ]
        self._started = 0
        self._start()

    def _start(self) -> None:
        """Start the threads, each of which computes alone, and put the process's own number of threads back.

        Torch's parallel loops would have a loader's copies and merges fight the compute threads for the cores.
        The number is each thread's own once set, but the last one set is what threads started later begin with.
        """
        threads = torch.get_num_threads()
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + CLOSE_SECONDS
        with self._lock:
            while self._started < len(self._threads) and time.monotonic() < deadline:
                self._idle.wait(CLOSE_SECONDS)
        torch.set_num_threads(threads)

    @staticmethod
    def _thread(kind: str, index: int, work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=work, name=f"coop-{kind}-{index}", daemon=True)

    def _begin_thread(self) -> None:
        torch.get_num_threads()  # the first call in a thread takes the process's number; the next may change it
        torch.set_num_threads(1)
        with self._lock:
            self._started += 1
            self._idle.notify_all()

    def set_guessing(self, at_once: int, beside_demand: bool) -> None:
        """How many guesses are read at once, and whether one may begin while a demanded read is under way."""
        with self._lock:
            self._guesses_at_once = min(at_once, self._guess_threads)
            self._may_guess_beside = beside_demand
            self._guessing.notify_all()

    def demand(self, batch: Sequence[tuple[ExpertId, Slot]]) -> None:
        """Load reserved experts ahead of every guess; without threads they are loaded before this returns."""
        if not self._threads:
            for expert, slot in batch:
                self._load(expert, slot, is_speculative=False)
            return
        with self._lock:
            if self._is_closed:
                raise ClosedError("the prefetcher is closed")
            self._demands.extend(batch)
            self._demanding.notify(len(batch))

    def withdraw(self, batch: Sequence[tuple[ExpertId, Slot]]) -> list[ExpertId]:
        """Take back what nobody has begun to read: those reservations are the caller's to abandon."""
        with self._lock:
            kept = [entry for entry in self._demands if entry not in batch]
            self._demands.clear()
            self._demands.extend(kept)
            experts = [expert for expert, _ in batch]
            return [e for e in experts if e not in self._demanded and self._residency.is_loading(e)]

    def wish(self, experts: Iterable[ExpertId]) -> None:
        """Replace the guesses for the next layers, likeliest first."""
        with self._lock:
            self._wishes.clear()
            self._wishes.extend(experts)
            self._guessing.notify(len(self._wishes))

    def seed(self, experts: Iterable[ExpertId]) -> None:
        """Replace the start-up list: loaded when nothing else is asked for, in the order given."""
        with self._lock:
            self._seeds.clear()
            self._seeds.extend(experts)
            self._guessing.notify(len(self._seeds))

    def check_alive(self) -> None:
        """Raise PrefetchError if a loader thread has died."""
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        if dead and not self._is_closed:
            raise PrefetchError(f"loader thread {dead[0]} died; start again")

    def wait_idle(self, seconds: float) -> bool:
        """Wait until nothing more will be read by itself; False if that takes longer.

        Guesses that are held back do not count.
        """
        deadline = time.monotonic() + seconds
        with self._lock:
            while self._is_busy():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._idle.wait(left)
        return True

    def close(self) -> None:
        """Stop the threads; returns within two seconds even if a read hangs (the threads are daemons)."""
        with self._lock:
            self._is_closed = True
            self._demands.clear()
            self._wishes.clear()
            self._seeds.clear()
            for condition in (self._demanding, self._guessing, self._idle):
                condition.notify_all()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _is_busy(self) -> bool:
        has_guesses = self._has_guesses() and not self._is_held_back
        return bool(self._demands or self._demanded or self._guessed or has_guesses)

    # the threads

    def _serve_demands(self) -> None:
        self._begin_thread()
        while True:
            with self._lock:
                while not (self._is_closed or self._demands):
                    self._demanding.wait()
                if self._is_closed:
                    return
                expert, slot = self._demands.popleft()
                self._demanded.add(expert)
            try:
                self._load(expert, slot, is_speculative=False)
            finally:
                self._finished(self._demanded, expert)

    def _serve_guesses(self) -> None:
        self._begin_thread()
        while True:
            is_pressed = self._is_pressed()  # it may look at the disk: not under the lock
            with self._lock:
                if self._is_closed:
                    return
                self._hold_back(is_pressed)
                if not self._may_guess():
                    self._guessing.wait(PRESSED_SECONDS if is_pressed and self._has_guesses() else None)
                    continue
                expert = self._wishes.popleft() if self._wishes else self._seeds.popleft()
                self._guessed.add(expert)
            try:
                self._load_guess(expert)
            finally:
                self._finished(self._guessed, expert)

    def _hold_back(self, is_pressed: bool) -> None:
        if is_pressed != self._is_held_back:
            self._is_held_back = is_pressed
            self._idle.notify_all()  # what is held back is not waited for

    def _has_guesses(self) -> bool:
        return bool(self._wishes or self._seeds) and self._guesses_at_once > 0

    def _may_guess(self) -> bool:
        is_disk_free = self._may_guess_beside or not (self._demands or self._demanded)
        has_place = not self._is_held_back and len(self._guessed) < self._guesses_at_once
        return self._has_guesses() and is_disk_free and has_place

    def _finished(self, group: set[ExpertId], expert: ExpertId) -> None:
        with self._lock:
            group.discard(expert)
            if self._may_guess():
                self._guessing.notify(self._guesses_at_once)
            self._idle.notify_all()

    def _load_guess(self, expert: ExpertId) -> None:
        try:
            slot = self._residency.reserve(expert, is_speculative=True)
        except CoopError:  # closed, or no memory: a guess is never a reason to fail
            slot = None
        if slot is None:
            with self._lock:
                self.counters.speculative_refused += 1
            return
        self._load(expert, slot, is_speculative=True)

    def _load(self, expert: ExpertId, slot: Slot, is_speculative: bool) -> None:
        start = time.perf_counter()
        try:
            with self._staging.window(is_speculative) as window:
                nbytes = self._store.load(expert, slot, window)
                read_seconds = window.read_seconds
        except BaseException as exc:
            with self._lock:
                self.counters.speculative_failed += is_speculative
            if not self._is_closed:
                self._residency.abandon(expert, exc)
            if not isinstance(exc, Exception):  # Ctrl-C, where the caller itself loads
                raise
            return
        with self._lock:
            self.counters.bytes_read += nbytes
            self.counters.bytes_speculative += nbytes * is_speculative
            self.counters.demand_loads += not is_speculative
            self.counters.speculative_loads += is_speculative
        seconds = time.perf_counter() - start
        if not self._is_closed:
            self._residency.publish(expert)
        self._on_load(expert, nbytes, seconds, read_seconds)
