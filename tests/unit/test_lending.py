"""Lending: experts that are modules of their own are announced, lent one by one, and may lie inside each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from coop.errors import ClosedError
from coop.ids import ExpertId
from coop.scheduler import Scheduler
from coop.store import LayerGeometry
from coop.strategy import get_strategy
from tests.fakes import MemoryDisk

LARGEST = max(layer.slot_bytes for layer in MemoryDisk.geometry)


def build(budget_bytes: int, disk: MemoryDisk | None = None) -> Scheduler:
    return Scheduler(
        [],
        disk or MemoryDisk(),
        budget_bytes=budget_bytes,
        strategy=get_strategy("Balanced"),
        ring_bytes=64,
        loader_threads=2,
        guess_threads=0,
        poison=True,
    )


@pytest.fixture
def narrow() -> Iterator[Scheduler]:
    """Room for one expert of the larger layer."""
    scheduler = build(LARGEST)
    yield scheduler
    scheduler.close()


def check(scheduler: Scheduler, expert: ExpertId) -> None:
    with scheduler.lend(expert) as weights:
        assert torch.equal(weights["words"].view(torch.uint8), MemoryDisk().content(expert))


def test_announced_experts_may_be_lent_in_any_order_where_only_one_fits(narrow: Scheduler) -> None:
    narrow.announce(1, np.array([[0, 1], [2, 3]]))
    for expert in (2, 0, 3, 1):
        check(narrow, ExpertId(1, expert))
    narrow.end_announcement()
    assert narrow.residency.leased() == 0


def test_an_expert_that_was_not_announced_finds_room_beside_those_that_were(narrow: Scheduler) -> None:
    narrow.announce(1, np.array([[0, 1]]))
    check(narrow, ExpertId(0, 5))
    check(narrow, ExpertId(1, 1))
    narrow.end_announcement()
    assert narrow.residency.leased() == 0


def test_an_expert_in_use_stays_while_a_layer_inside_it_is_announced() -> None:
    scheduler = build(LARGEST + 4096)
    scheduler.announce(0, np.array([[0, 1]]))
    with scheduler.lend(ExpertId(0, 0)) as outer:
        scheduler.announce(1, np.array([[0, 1], [2, 3]]))
        for expert in range(4):
            check(scheduler, ExpertId(1, expert))
        assert torch.equal(outer["words"].view(torch.uint8), MemoryDisk().content(ExpertId(0, 0)))
    scheduler.end_announcement()
    assert scheduler.residency.leased() == 0
    scheduler.close()


def test_closing_ends_an_announcement() -> None:
    scheduler = build(LARGEST)
    scheduler.announce(0, np.array([[0]]))
    scheduler.close()
    scheduler.end_announcement()
    with pytest.raises(ClosedError), scheduler.lend(ExpertId(0, 0)):
        pass


def test_only_experts_that_exist_are_seeded_where_layers_differ_in_width() -> None:
    class Uneven(MemoryDisk):
        geometry = (LayerGeometry(8, 2, 4096, 0), LayerGeometry(4, 2, 6144, 1))

        def disk_order(self, expert: ExpertId) -> tuple[str, int]:
            assert expert.expert < self.geometry[expert.layer].num_experts
            return super().disk_order(expert)

    scheduler = build(LARGEST, Uneven())
    scheduler.forecast.begin_prompt(9, [2, 2])
    scheduler.resize(20 * LARGEST)
    scheduler.close()


def test_nothing_is_waited_for_where_no_thread_guesses() -> None:
    scheduler = build(LARGEST)
    scheduler.forecast.begin_prompt(9, [2, 2])
    scheduler.resize(4 * LARGEST)
    assert scheduler.wait_idle(0.0)
    scheduler.close()
