"""World: real threads of which one runs at a time, chosen by a seed, under a clock that only waiting moves.

Owns the threads and the clock; promises that the same seed gives the same steps, that time moves only when every
thread waits, and that threads which wait for each other are a failure with their stacks. Stands in for
`threading` and `time` in every module of coop while `World.run` runs. Called by the simulation.
"""

from __future__ import annotations

import _thread
import contextlib
import random
import sys
import threading
import time
import traceback
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

LAST_STEPS = 60
REAL_DEADLINE_SECONDS = 120.0  # a thread that blocks outside the world is a fault of the simulation
MAX_STEPS = 150_000


class SimulationOver(BaseException):
    """Ends a thread of a world that has failed or ended."""


class SimulationFailure(AssertionError):
    """A promise was broken, or every thread waits for another."""


class Task:
    """One thread: READY to run, or waiting until `deadline` or to be woken, or done."""

    def __init__(self, name: str, priority: float) -> None:
        self.name, self.priority = name, priority
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.is_ready, self.is_done, self.was_woken = True, False, False
        self.deadline = float("inf")
        self.waits_for: object = None
        self.seconds = dict.fromkeys(
            ("sleep", "wait", "device", "lock", "stall"), 0.0
        )  # virtual, by why it stood still
        self.joiners: list[Task] = []
        self.error: BaseException | None = None
        self.ident = 0


class World:
    """The scheduler of the threads.

    Args:
        seed: of every choice.
        keep_all: keep every step, not only the last.
    """

    def __init__(self, seed: int, keep_all: bool = False) -> None:
        self.random = random.Random(f"world {seed}")
        self.now, self.steps, self.digest = 1000.0, 0, 0
        self.trace: deque[str] = deque(maxlen=None if keep_all else LAST_STEPS)
        self.tasks: list[Task] = []
        self.failure: BaseException | None = None
        self.is_over = False
        self.at_rest: list[Callable[[], None]] = []  # checks, before time moves
        self._by_priority = self.random.random() < 0.4
        self._switch_share = self.random.choice([0.03, 0.1, 0.3, 0.7])
        self._demote_share = self.random.choice([0.002, 0.01, 0.05])
        self._stall_share = self.random.choice([0.0, 0.0, 0.002, 0.01])
        self.threading = types.SimpleNamespace(
            Thread=lambda **kwargs: SimThread(self, **kwargs),
            Lock=lambda: SimLock(self),
            RLock=lambda: SimRLock(self),
            Condition=lambda lock=None: SimCondition(self, lock or SimRLock(self)),
            Event=lambda: SimEvent(self),
            current_thread=lambda: self.current,
            local=threading.local,
        )
        self.time = types.SimpleNamespace(
            perf_counter=lambda: self.now,
            monotonic=lambda: self.now,
            time=lambda: self.now,
            sleep=lambda seconds: self.block("sleep", self.now + seconds, "sleep"),
        )

    # running

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` and every thread that it starts; raises what any check or thread raised."""
        self.current = self._add("main")
        try:
            with _replaced(self):
                work()
                self._check_threads()
        except SimulationOver:
            pass
        except BaseException as exc:
            self.failure = self.failure or exc
        finally:
            self._end()
        if self.failure is not None:
            raise self.failure

    def _check_threads(self) -> None:
        alive = [task.name for task in self.tasks if task is not self.current and not task.is_done]
        assert not alive, f"threads live on at the end: {alive}"

    def _end(self) -> None:
        self.is_over = True
        for task in self.tasks:
            if not task.is_done and task is not self.tasks[0]:
                with contextlib.suppress(RuntimeError):
                    task.gate.release()

    def fail(self, what: str) -> None:
        """End the world with a failure, from any thread."""
        self.failure = self.failure or SimulationFailure(what)
        self.is_over = True
        with contextlib.suppress(RuntimeError):
            self.tasks[0].gate.release()
        raise SimulationOver

    def check(self, is_kept: bool, what: str) -> None:
        """Fail the world unless the promise is kept: an assertion that no `except` of the code under test eats."""
        if not is_kept:
            self.fail(what)

    def _add(self, name: str) -> Task:
        task = Task(name, self.random.random())
        self.tasks.append(task)
        return task

    def start(self, name: str, work: Callable[[], None]) -> Task:
        """A new thread, ready to run."""
        task = self._add(name)

        def body() -> None:
            task.gate.acquire()
            task.ident = threading.get_ident()
            try:
                if not self.is_over:
                    work()
            except SimulationOver:
                pass
            except BaseException as exc:
                task.error = exc
                self.failure = self.failure or exc
                self.is_over = True
                with contextlib.suppress(RuntimeError):
                    self.tasks[0].gate.release()
            self._leave(task)

        threading.Thread(target=body, name=f"sim-{name}", daemon=True).start()
        self.point(f"start {name}")
        return task

    def _leave(self, task: Task) -> None:
        task.is_done, task.is_ready = True, False
        if self.is_over:
            return
        self._note(task, "ends")
        for joiner in task.joiners:
            self.wake(joiner)
        with contextlib.suppress(SimulationOver):
            self._hand_over(self._choose())

    # steps

    def point(self, what: str) -> None:
        """A place where another thread may go on instead."""
        if self.is_over:
            raise SimulationOver
        task = self.current
        self._note(task, what)
        if self._stall_share and self.random.random() < self._stall_share:
            self.block("stall", self.now + 10 ** self.random.uniform(-5, -1.5), "stall")
            return
        if self._by_priority:
            if self.random.random() < self._demote_share:
                task.priority = min(t.priority for t in self.tasks) - 1
            self._switch(task)
        elif self.random.random() < self._switch_share:
            self._switch(task)

    def block(self, kind: str, deadline: float, waits_for: object) -> bool:
        """Wait to be woken, or until the deadline; whether it was woken."""
        if self.is_over:
            raise SimulationOver
        task, began = self.current, self.now
        task.is_ready, task.was_woken = False, False
        task.deadline, task.waits_for = deadline, waits_for
        self._note(task, f"blocks {kind} {waits_for}")
        self._switch(task)
        task.waits_for = None
        task.seconds[kind] += self.now - began
        return task.was_woken

    def wake(self, task: Task) -> None:
        """Make a waiting thread ready."""
        if not task.is_done and not task.is_ready:
            task.is_ready, task.was_woken, task.deadline = True, True, float("inf")

    def _note(self, task: Task, what: str) -> None:
        self.steps += 1
        line = f"{self.steps} {self.now:.9f} {task.name}: {what}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        self.trace.append(line)
        if self.steps > MAX_STEPS:
            self.fail(f"more than {MAX_STEPS} steps: somebody spins")

    def note(self, what: str) -> None:
        """Put a line into the trace."""
        self._note(self.current, what)

    def _switch(self, task: Task) -> None:
        chosen = self._choose()
        if chosen is task:
            return
        self._hand_over(chosen)
        if not task.gate.acquire(timeout=REAL_DEADLINE_SECONDS):
            self.fail("a thread blocks outside the world")
        if self.is_over:
            raise SimulationOver

    def _hand_over(self, chosen: Task) -> None:
        self.current = chosen
        chosen.gate.release()

    def _choose(self) -> Task:
        ready = [task for task in self.tasks if task.is_ready]
        while not ready:
            self._advance()
            ready = [task for task in self.tasks if task.is_ready]
        if len(ready) == 1:
            return ready[0]
        return max(ready, key=lambda t: t.priority) if self._by_priority else self.random.choice(ready)

    def _advance(self) -> None:
        for check in self.at_rest:
            try:
                check()
            except AssertionError as exc:
                self.fail(f"at rest: {exc}")
        waiting = [task for task in self.tasks if not task.is_done]
        earliest = min((task.deadline for task in waiting), default=float("inf"))
        if earliest == float("inf"):
            self.fail(f"DEADLOCK\n{self._stacks(waiting)}")
        self.now = max(self.now, earliest)
        for task in waiting:
            if task.deadline <= self.now:
                task.is_ready, task.deadline = True, float("inf")

    def _stacks(self, tasks: list[Task]) -> str:
        frames = sys._current_frames()
        parts = []
        for task in tasks:
            frame = frames.get(task.ident)
            inner = "".join(traceback.format_stack(frame)[-8:-3]) if frame else ""
            parts.append(f"{task.name} waits for {task.waits_for}\n{inner}")
        return "\n".join(parts)


@contextlib.contextmanager
def _replaced(world: World) -> Iterator[None]:
    """`threading` and `time` of every loaded module of coop are the world's."""
    changed: list[tuple[Any, str, Any]] = []
    stand_ins = {"threading": (threading, world.threading), "time": (time, world.time)}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "coop":
            for attribute, (real, ours) in stand_ins.items():
                if getattr(module, attribute, None) is real:
                    changed.append((module, attribute, real))
                    setattr(module, attribute, ours)
    try:
        yield
    finally:
        for module, attribute, real in changed:
            setattr(module, attribute, real)


def _deadline(world: World, timeout: float | None) -> float:
    return float("inf") if timeout is None else world.now + max(0.0, timeout)


class SimThread:
    """threading.Thread."""

    def __init__(
        self, world: World, target: Callable[[], None], name: str = "", daemon: bool = False
    ) -> None:
        self.name, self._world, self._target = name, world, target
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._world.start(self.name, self._target)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        deadline = _deadline(self._world, timeout)
        while not self._task.is_done and self._world.now < deadline:
            self._task.joiners.append(self._world.current)
            self._world.block("wait", deadline, f"end of {self.name}")


class SimRLock:
    """threading.RLock; with `is_reentrant` False, threading.Lock."""

    is_reentrant = True

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: Task | None = None
        self._count = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = self._world
        if not (self.is_reentrant and self._owner is world.current):
            world.point("acquires")
            if self._owner is not None and not blocking:
                return False
            self._take(1)
        else:
            self._count += 1
        return True

    def release(self) -> None:
        if self._world.is_over:
            return
        assert self._owner is self._world.current, "a lock is released by a thread that does not hold it"
        self._count -= 1
        if not self._count:
            self._give()
            self._world.point("releases")

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        self.release()

    def is_owned(self) -> bool:
        return self._owner is self._world.current

    def _take(self, count: int) -> None:
        while self._owner is not None:
            self._waiting.append(self._world.current)
            self._world.block("lock", float("inf"), f"a lock of {self._owner.name}")
        self._owner, self._count = self._world.current, count

    def _give(self) -> int:
        count, self._owner, self._count = self._count, None, 0
        for task in self._waiting:
            self._world.wake(task)
        self._waiting.clear()
        return count


class SimLock(SimRLock):
    """threading.Lock."""

    is_reentrant = False


class SimCondition:
    """threading.Condition; which waiters `notify` wakes is the seed's choice, as no order is promised."""

    def __init__(self, world: World, lock: SimRLock, kind: str = "wait") -> None:
        self._world, self._lock, self._kind = world, lock, kind
        self.waiting: list[Task] = []
        self.acquire, self.release = lock.acquire, lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        assert self._lock.is_owned(), "wait without the lock"
        world = self._world
        task = world.current
        self.waiting.append(task)
        count = self._lock._give() if world.is_over is False else 0
        is_woken = world.block(self._kind, _deadline(world, timeout), "a condition")
        if not is_woken and task in self.waiting:
            self.waiting.remove(task)
        self._lock._take(count)
        return is_woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        deadline = _deadline(self._world, timeout)
        while not (result := predicate()):
            if self._world.now >= deadline:
                return False
            self.wait(None if timeout is None else deadline - self._world.now)
        return result

    def notify(self, count: int = 1) -> None:
        if self._world.is_over:
            raise SimulationOver
        assert self._lock.is_owned(), "notify without the lock"
        for _ in range(min(count, len(self.waiting))):
            task = self.waiting.pop(self._world.random.randrange(len(self.waiting)))
            self._world.wake(task)

    def notify_all(self) -> None:
        self.notify(len(self.waiting))


class SimEvent:
    """threading.Event."""

    def __init__(self, world: World) -> None:
        self._condition = SimCondition(world, SimLock(world))
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._condition:
            self._is_set = True
            self._condition.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._is_set, timeout)
            return self._is_set
