"""Residency: the byte account, leases and victims, as a state machine against a simple model."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coop.errors import BudgetError, ClosedError
from coop.ids import ExpertId
from coop.policy import may_displace, pick_victim
from coop.residency import Granted, Lease, Residency
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


class BatchMachine(RuleBasedStateMachine):
    """Calls that demand several experts at once, guesses beside them, budgets that move, memory that runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.likelihood = np.zeros((3, 4))
        self.has_memory = True
        self.freed: list[Slot] = []
        self.residency = Residency(GEOMETRY, 300, self.slot, self.likelihood, self.freed.append)
        self.leases: Counter[ExpertId] = Counter()
        self.loading: dict[ExpertId, bool] = {}  # True: a guess that nobody has asked for
        self.unasked: set[ExpertId] = set()  # resident on a guess
        self.wasted: list[ExpertId] = []
        self.stale: list[Lease] = []  # released: their slot may have changed hands
        self.good: list[Lease] = []
        self.is_starved = False
        self.watch_evictions()

    def slot(self, layer: int) -> Slot:
        if not self.has_memory:
            raise MemoryError
        return new_slot(layer)

    def watch_evictions(self) -> None:
        evict = self.residency._evict

        def watched(expert: ExpertId) -> None:
            assert not self.leases[expert], "a leased expert is evicted"
            if expert in self.unasked:
                self.wasted.append(expert)
                self.unasked.discard(expert)
            evict(expert)

        self.residency._evict = watched  # type: ignore[method-assign]

    def granted(self, lease: Lease) -> None:
        self.leases[lease.expert] += 1
        self.unasked.discard(lease.expert)
        self.good.append(lease)

    @rule(expert=EXPERTS, value=st.floats(0, 2))
    def forecast(self, expert: ExpertId, value: float) -> None:
        self.likelihood[expert] = value

    @rule(layer=st.integers(0, 2), experts=st.sets(st.integers(0, 3), min_size=1))
    def call_begins(self, layer: int, experts: set[int]) -> None:
        asked = [ExpertId(layer, expert) for expert in experts]
        before = self.residency.resident()
        hits = self.residency.lease_resident(asked)
        assert {lease.expert for lease in hits} == {e for e in asked if before[e]}
        for lease in hits:
            self.granted(lease)
        missing = [e for e in asked if not before[e]]
        held_before = self.residency.leased()
        try:
            got = self.residency.demand(missing)
        except BudgetError:
            assert not self.has_memory
            assert self.residency.leased() == held_before
            return
        self.is_starved = bool(got.without_room)
        self.check_grant(missing, got)

    def check_grant(self, missing: list[ExpertId], got: Granted) -> None:
        to_load = [expert for expert, _ in got.to_load]
        leased = [lease.expert for lease in got.leases]
        assert sorted([*leased, *got.joined, *to_load, *got.without_room]) == sorted(missing)
        assert leased == []  # none of them was resident and no thread loads beside this one
        assert all(e in self.loading for e in got.joined)
        assert not any(e in self.loading for e in to_load)
        for expert in got.joined:
            self.loading[expert] = False
        for expert, slot in got.to_load:
            assert int(slot.weights["kind"]) == GEOMETRY[expert.layer].kind
            self.loading[expert] = False
        self.leases.update([*got.joined, *to_load])

    @rule(expert=EXPERTS)
    def guess(self, expert: ExpertId) -> None:
        before = self.residency.resident()
        try:
            slot = self.residency.reserve(expert, is_speculative=True)
        except BudgetError:
            assert not self.has_memory
            return
        evicted = before & ~self.residency.resident()
        assert not (self.likelihood[evicted] >= self.likelihood[expert]).any()
        assert not (self.is_starved and (slot is not None or evicted.any()))
        if slot is not None:
            self.loading[expert] = True

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), is_good=st.booleans())
    def load_ends(self, data: st.DataObject, is_good: bool) -> None:
        expert = data.draw(st.sampled_from(sorted(self.loading)))
        is_unasked = self.loading.pop(expert)
        if is_good:
            self.unasked |= {expert} if is_unasked else set()
            self.residency.publish(expert)
            assert self.residency.failure(expert) is None
        else:
            error = OSError()
            self.residency.abandon(expert, error)
            assert self.residency.failure(expert) is error

    @precondition(lambda self: +self.leases)
    @rule(data=st.data())
    def held_has_arrived(self, data: st.DataObject) -> None:
        expert = data.draw(st.sampled_from(sorted(+self.leases)))
        lease = self.residency.held(expert)
        assert (lease is not None) == bool(self.residency.resident()[expert])
        if lease is not None:
            assert int(lease.weights["kind"]) == GEOMETRY[expert.layer].kind

    @rule(expert=EXPERTS)
    def hold(self, expert: ExpertId) -> None:
        is_held = self.residency.hold(expert)
        assert is_held == (expert in self.loading)
        if is_held:
            self.loading[expert] = False
            self.leases[expert] += 1

    @precondition(lambda self: +self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        given = data.draw(st.lists(st.sampled_from(sorted(+self.leases)), unique=True, min_size=1))
        self.leases.subtract(given)
        gone = [lease for lease in self.good if not self.leases[lease.expert]]
        self.good = [lease for lease in self.good if self.leases[lease.expert]]
        self.stale += gone
        self.residency.release(*given)

    @rule(expert=EXPERTS)
    def evict(self, expert: ExpertId) -> None:
        may_go = bool(self.residency.resident()[expert]) and not self.leases[expert]
        assert self.residency.evict(expert) == may_go
        assert not (may_go and self.residency.resident()[expert])

    @rule()
    def calm(self) -> None:
        self.residency.calm()
        self.is_starved = False

    @rule(has_memory=st.booleans())
    def memory(self, has_memory: bool) -> None:
        self.has_memory = has_memory

    @rule(budget=st.integers(100, 1200))
    def resize(self, budget: int) -> None:
        self.residency.resize(budget)

    @rule(budget=st.integers(0, 99))
    def resize_below_one_expert(self, budget: int) -> None:
        before = self.residency.budget_bytes
        with pytest.raises(BudgetError, match="one expert needs 100"):
            self.residency.resize(budget)
        assert self.residency.budget_bytes == before

    @invariant()
    def waste_is_what_was_evicted_unasked(self) -> None:
        assert self.residency.wasted_loads == len(self.wasted)
        assert self.residency.wasted_bytes == sum(GEOMETRY[e.layer].slot_bytes for e in self.wasted)

    @invariant()
    def a_lease_reads_its_slot_until_the_slot_is_given_away(self) -> None:
        for lease in self.good:
            assert int(lease.weights["kind"]) == GEOMETRY[lease.expert.layer].kind
        given_up = {id(slot) for slot in self.freed}
        for lease in self.stale:
            if id(lease.slot) not in given_up or lease.slot.generation == lease.generation:
                continue
            with pytest.raises(AssertionError, match="given away under its lease"):
                _ = lease.weights

    @invariant()
    def every_free_raises_the_generation(self) -> None:
        frees = Counter(id(slot) for slot in self.freed)
        assert all(slot.generation == frees[id(slot)] for slot in self.freed)

    @invariant()
    def the_account_is_right_and_the_peak_is_no_lower(self) -> None:
        residency = self.residency
        held = sum(GEOMETRY[e.layer].slot_bytes for e in residency._slots)
        free = sum(len(s) * residency._kind_bytes[k] for k, s in residency._free.items())
        assert residency.used_bytes == held + free <= residency.used_bytes_max
        pinned = [e for e in residency._slots if self.leases[e] or e in self.loading]
        assert residency.used_bytes <= max(
            residency.budget_bytes, sum(GEOMETRY[e.layer].slot_bytes for e in pinned)
        )

    @invariant()
    def leases_are_counted(self) -> None:
        assert self.residency.leased() == self.leases.total()


TestBatchMachine = BatchMachine.TestCase
TestBatchMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)

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


def test_what_only_passes_through_may_not_displace_more_than_its_share() -> None:
    likelihood = np.array([[0.9, 0.9, 0.1, 0.1], [0.0] * 4, [0.0] * 4])
    residency = Residency(GEOMETRY, 2 * GEOMETRY[0].slot_bytes, new_slot, likelihood)
    for expert in (ExpertId(0, 0), ExpertId(0, 1)):
        residency.reserve(expert, is_speculative=True)
        residency.publish(expert)
    passing = [ExpertId(0, 2), ExpertId(0, 3)]
    granted = residency.demand(passing, streams=1)
    assert [expert for expert, _ in granted.to_load] == passing[:1]
    assert granted.without_room == passing[1:]
    assert not residency.can_reserve(passing[1], streams=1)
    assert residency.can_reserve(passing[1])
    residency.publish(passing[0])
    residency.release(passing[0])
    again = residency.demand(granted.without_room, streams=1)
    assert [expert for expert, _ in again.to_load] == passing[1:]
    assert residency.resident()[0, 1]  # the likelier one is still there: the first passer-by went


def test_a_guess_never_evicts_what_is_as_likely_as_itself() -> None:
    likelihood = np.array([[0.3, 0.3, 0.2]])
    assert not may_displace(likelihood, ExpertId(0, 0), ExpertId(0, 1))
    assert may_displace(likelihood, ExpertId(0, 0), ExpertId(0, 2))


def test_a_lease_whose_slot_was_given_away_serves_nothing() -> None:
    residency = Residency(GEOMETRY, 300, new_slot, np.zeros((3, 4)))
    assert residency.reserve(ExpertId(0, 0), is_speculative=False) is not None
    residency.publish(ExpertId(0, 0))
    lease = residency.held(ExpertId(0, 0))
    assert lease is not None and int(lease.weights["kind"]) == 0
    residency.release(ExpertId(0, 0))
    assert int(lease.weights["kind"]) == 0
    assert residency.evict(ExpertId(0, 0))
    with pytest.raises(AssertionError, match="given away under its lease"):
        _ = lease.weights


def test_a_closed_residency_refuses_by_name() -> None:
    residency = Residency(GEOMETRY, 300, new_slot, np.zeros((3, 4)))
    residency.close()
    with pytest.raises(ClosedError, match="attach again"):
        residency.lease(ExpertId(0, 0))
