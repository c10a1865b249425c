"""Seeds of the simulation, run to their end; how it fails; and that a seed is the same run again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.sim.simulation import run_seed
from tests.sim.world import SimCondition, SimLock, SimRLock, SimulationFailure, World

SEEDS, SLOW_SEEDS, BATCH = 100, 3000, 10


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tensors here have eight columns: a second thread only costs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_every_promise_holds_on_every_seed(first: int) -> None:
    for seed in range(first, first + BATCH):
        run_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, SLOW_SEEDS, BATCH))
def test_every_promise_holds_on_thousands_of_seeds(first: int) -> None:
    for seed in range(first, first + BATCH):
        run_seed(seed)


@pytest.mark.parametrize("seed", [0, 5, 9, 13])
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    first, again = run_seed(seed), run_seed(seed)
    assert (first.steps, first.digest, first.now) == (again.steps, again.digest, again.now)


def test_another_seed_is_another_run() -> None:
    assert len({run_seed(seed).digest for seed in range(4)}) == 4


# the world itself


def test_two_threads_that_wait_for_each_other_are_a_deadlock_with_stacks() -> None:
    def run(seed: int) -> None:
        world = World(seed)
        one, two = SimLock(world), SimLock(world)

        def takes(first: SimLock, second: SimLock) -> None:
            with first, second:
                pass

        def work() -> None:
            threads = [
                world.threading.Thread(target=lambda: takes(one, two), name="a"),
                world.threading.Thread(target=lambda: takes(two, one), name="b"),
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        world.run(work)

    failures = []
    for seed in range(40):
        try:
            run(seed)
        except SimulationFailure as exc:
            failures.append(str(exc))
    assert 0 < len(failures) < 40
    assert all("DEADLOCK" in f and "a lock of a" in f and "in takes" in f for f in failures)


def test_time_moves_only_when_every_thread_waits() -> None:
    world = World(3)
    times = []

    def work() -> None:
        def sleeper() -> None:
            world.time.sleep(5.0)
            times.append(world.now)

        thread = world.threading.Thread(target=sleeper, name="sleeper")
        thread.start()
        for _ in range(100):
            world.block("sleep", world.now, "no time at all")
        times.append(world.now)
        thread.join()

    world._stall_share = 0.0
    world.run(work)
    assert times == [1000.0, 1005.0]


def test_a_notify_that_nobody_hears_is_lost_as_it_is_in_python() -> None:
    world = World(0)
    condition = SimCondition(world, SimRLock(world))

    def work() -> None:
        with condition:
            condition.notify()
            assert not condition.wait(1.0)

    world.run(work)


def test_a_thread_that_dies_fails_the_run_by_its_error() -> None:
    world = World(0)

    def dies() -> None:
        raise ZeroDivisionError

    def work() -> None:
        world.threading.Thread(target=dies, name="dies").start()
        world.time.sleep(1.0)

    with pytest.raises(ZeroDivisionError):
        world.run(work)
