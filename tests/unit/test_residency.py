"""Residency: the byte account, leases and victims, as a state machine against a simple model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coop.errors import ClosedError
from coop.ids import ExpertId
from coop.policy import may_displace, pick_victim
from coop.residency import Residency
from coop.store import LayerGeometry, Slot

# two layers whose slots differ in size, and a third whose slots are as large as the first's but shaped otherwise
GEOMETRY = (LayerGeometry(4, 2, 100, 0), LayerGeometry(4, 2, 64, 1), LayerGeometry(4, 2, 100, 2))
EXPERTS = st.builds(ExpertId, st.integers(0, 2), st.integers(0, 3))


def new_slot(layer: int) -> Slot:
    slot = Slot(torch.empty(GEOMETRY[layer].slot_bytes, dtype=torch.uint8), {})
    slot.weights["kind"] = torch.tensor(GEOMETRY[layer].kind)
    return slot


class ResidencyMachine(RuleBasedStateMachine):
    """Every order of lease, release, reserve, publish, abandon and resize keeps the promises."""

    def __init__(self) -> None:
        super().__init__()
        self.likelihood = np.zeros((3, 4))
        self.residency = Residency(GEOMETRY, 300, new_slot, self.likelihood)
        self.loading: dict[ExpertId, Slot] = {}
        self.leases: dict[ExpertId, int] = {}

    @rule(expert=EXPERTS, value=st.floats(0, 2))
    def forecast(self, expert: ExpertId, value: float) -> None:
        self.likelihood[expert] = value

    @rule(expert=EXPERTS, is_speculative=st.booleans())
    def reserve(self, expert: ExpertId, is_speculative: bool) -> None:
        was_absent = self.residency.is_absent(expert)
        before = self.residency.resident()
        slot = self.residency.reserve(expert, is_speculative)
        if slot is None:
            return
        assert was_absent
        assert int(slot.weights["kind"]) == GEOMETRY[expert.layer].kind
        self.loading[expert] = slot
        if not is_speculative:
            self.leases[expert] = self.leases.get(expert, 0) + 1
        if is_speculative:
            evicted = before & ~self.residency.resident()
            assert not (self.likelihood[evicted] >= self.likelihood[expert]).any()

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), is_good=st.booleans())
    def finish_load(self, data: st.DataObject, is_good: bool) -> None:
        expert = data.draw(st.sampled_from(sorted(self.loading)))
        del self.loading[expert]
        self.residency.publish(expert) if is_good else self.residency.abandon(expert, OSError())
        assert (self.residency.failure(expert) is None) == is_good

    @rule(expert=EXPERTS)
    def lease(self, expert: ExpertId) -> None:
        if self.residency.lease(expert) is not None or self.residency.hold(expert):
            self.leases[expert] = self.leases.get(expert, 0) + 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        expert = data.draw(st.sampled_from(sorted(self.leases)))
        self.residency.release(expert)
        self.leases[expert] -= 1
        if not self.leases[expert]:
            del self.leases[expert]

    @rule(budget=st.integers(200, 900))
    def resize(self, budget: int) -> None:
        self.residency.resize(budget)

    @invariant()
    def a_leased_expert_that_arrived_stays(self) -> None:
        resident = self.residency.resident()
        for expert in self.arrived():
            assert resident[expert]

    def arrived(self) -> list[ExpertId]:
        return [e for e in self.leases if self.residency.held(e) is not None]

    @invariant()
    def bytes_are_those_of_the_slots_and_only_leases_may_exceed_a_lowered_budget(self) -> None:
        residency = self.residency
        held = sum(GEOMETRY[e.layer].slot_bytes for e in residency._slots)
        free = sum(len(s) * residency._kind_bytes[k] for k, s in residency._free.items())
        assert residency.used_bytes == held + free
        pinned = sum(
            GEOMETRY[e.layer].slot_bytes for e in residency._slots if e in self.leases or e in self.loading
        )
        assert residency.used_bytes <= max(residency.budget_bytes, pinned)

    @invariant()
    def leases_are_counted(self) -> None:
        assert self.residency.leased() == sum(self.leases.values())


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("likelihood", "evictable", "victim"),
    [
        ([[0.5, 0.1], [0.3, 0.2]], [[1, 1], [1, 1]], ExpertId(0, 1)),
        ([[0.5, 0.1], [0.3, 0.2]], [[1, 0], [1, 1]], ExpertId(1, 1)),
        ([[0.0, 0.0], [0.0, 0.0]], [[0, 1], [1, 1]], ExpertId(0, 1)),
        ([[0.0, 0.0], [0.0, 0.0]], [[0, 0], [0, 0]], None),
    ],
)
def test_the_victim_is_the_least_likely_that_may_go(
    likelihood: list[list[float]], evictable: list[list[int]], victim: ExpertId | None
) -> None:
    assert pick_victim(np.array(likelihood), np.array(evictable, dtype=bool)) == victim


def test_a_guess_never_evicts_what_is_as_likely_as_itself() -> None:
    likelihood = np.array([[0.3, 0.3, 0.2]])
    assert not may_displace(likelihood, ExpertId(0, 0), ExpertId(0, 1))
    assert may_displace(likelihood, ExpertId(0, 0), ExpertId(0, 2))


def test_a_closed_residency_refuses_by_name() -> None:
    residency = Residency(GEOMETRY, 300, new_slot, np.zeros((3, 4)))
    residency.close()
    with pytest.raises(ClosedError, match="attach again"):
        residency.lease(ExpertId(0, 0))
