"""Residency: who is where, in bytes, with leases.

Owns every slot of one tier and its byte account; promises that the bytes of all slots never exceed the
budget, that a leased expert is never evicted, and that no expert is loaded twice at once. Called by a
layer call's demand (leases) and by loader threads (reserve, publish). Its lock is never held over I/O or compute.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from coop.errors import BudgetError, ClosedError
from coop.ids import ExpertId
from coop.policy import UNLIMITED, may_displace, may_stream, pick_victim
from coop.store import LayerGeometry, Slot

ABSENT, LOADING, RESIDENT = 0, 1, 2  # where an expert is; plain numbers, because they are compared all day


@dataclass(slots=True)  # made eight times for each layer and token: freezing it would cost more than the rest
class Lease:
    """The right to read one expert's slot until it is released; `generation` is the slot's when it was leased."""

    expert: ExpertId
    slot: Slot
    generation: int

    @property
    def memory(self) -> Slot:
        """The slot, for reading; one that has changed hands since is a fault of ours, never served."""
        assert self.slot.generation == self.generation, (
            f"{self.expert}: the slot was given away under its lease"
        )
        return self.slot

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The expert's weights."""
        return self.memory.weights


@dataclass(slots=True)
class Granted:
    """What became of a demand for several experts."""

    leases: list[Lease] = field(default_factory=list)  # resident, leased now
    joined: list[ExpertId] = field(default_factory=list)  # a guess is bringing them, leased on arrival
    to_load: list[tuple[ExpertId, Slot]] = field(default_factory=list)  # reserved and leased, yet to be read
    without_room: list[ExpertId] = field(default_factory=list)


class Residency:
    """Slots for experts under a byte budget.

    Args:
        geometry: experts, slot bytes and slot kind of each layer.
        budget_bytes: the most that all slots together may take.
        new_slot: allocates a slot for a layer.
        likelihood: float64 [layers, experts], read when a victim is needed; owned by the forecast.
        on_free: called with each slot that is given up (tests poison it there).
    """

    def __init__(
        self,
        geometry: Sequence[LayerGeometry],
        budget_bytes: int,
        new_slot: Callable[[int], Slot],
        likelihood: np.ndarray,
        on_free: Callable[[Slot], None] = lambda slot: None,
    ) -> None:
        shape = (len(geometry), max(layer.num_experts for layer in geometry))
        self.changed = threading.Condition()
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.used_bytes_max = 0
        self.evictions = 0
        self.wasted_loads = 0  # guesses that were evicted before anyone asked for them
        self.wasted_bytes = 0
        self._slot_bytes = tuple(layer.slot_bytes for layer in geometry)
        self._kind = tuple(layer.kind for layer in geometry)
        self._kind_bytes = {layer.kind: layer.slot_bytes for layer in geometry}
        self._new_slot, self._on_free = new_slot, on_free
        self._likelihood = likelihood
        self._state = np.zeros(shape, dtype=np.int8)
        self._leases = np.zeros(shape, dtype=np.int32)
        self._is_guess = np.zeros(shape, dtype=bool)  # loaded on a guess, not asked for yet
        # the same memory, a layer at a time: one number is read in a third of the time that an array takes
        self._rows = [
            (memoryview(state), memoryview(leases), memoryview(is_guess))  # type: ignore[arg-type]
            for state, leases, is_guess in zip(self._state, self._leases, self._is_guess, strict=True)
        ]
        self._slots: dict[ExpertId, Slot] = {}
        self._free: defaultdict[int, list[Slot]] = defaultdict(list)  # by kind
        self._failures: dict[ExpertId, BaseException] = {}
        self._starved = 0  # experts of a call that found no room: guesses stand back
        self._is_closed = False

    # leases

    def lease(self, expert: ExpertId) -> Lease | None:
        """Lease a resident expert, or None if it is not resident. Pair with `release`."""
        with self.changed:
            self._check_open()
            if self._state[expert] != RESIDENT:
                return None
            return self._lease(expert)

    def lease_resident(self, experts: Iterable[ExpertId]) -> list[Lease]:
        """Lease those of a call's experts that are resident, all before any room is made."""
        with self.changed:
            self._check_open()
            return [self._lease(e) for e in experts if self._state[e] == RESIDENT]

    def lease_all(self, experts: Sequence[ExpertId]) -> list[Slot]:
        """Lease distinct experts if every one is resident, or none of them. Pair with `release`."""
        with self.changed:
            self._check_open()
            if any(self._rows[layer][0][expert] != RESIDENT for layer, expert in experts):
                return []
            for expert in experts:
                self._take_lease(expert)
            return [self._slots[expert] for expert in experts]

    def hold(self, expert: ExpertId) -> bool:
        """Lease an expert whose load is under way, so that it stays once it has arrived; False if none is."""
        with self.changed:
            if self._state[expert] != LOADING:
                return False
            self._take_lease(expert)
            return True

    def held(self, expert: ExpertId) -> Lease | None:
        """The lease of a held expert once its bytes have arrived, else None."""
        with self.changed:
            if self._state[expert] != RESIDENT:
                return None
            slot = self._slots[expert]
            return Lease(expert, slot, slot.generation)

    def release(self, *experts: ExpertId) -> None:
        """Give back one lease of each."""
        with self.changed:
            for expert in experts:
                _, leases, _ = self._rows[expert.layer]
                assert leases[expert.expert] > 0, f"{expert} released more often than leased"
                leases[expert.expert] -= 1
            self._settle()
            self.changed.notify_all()

    # loads

    def demand(
        self, experts: Sequence[ExpertId], urgent: ExpertId | None = None, streams: int = UNLIMITED
    ) -> Granted:
        """Lease or join those of a call's experts that are here or coming, then reserve the others in order.

        In that order, under one lock, making room never evicts what the call is about to use. An `urgent` one
        goes before all: its call waits for nothing else, and the others may go for it. With `streams` experts
        leased, an expert takes the place only of a less likely one: see `policy.may_stream`. BudgetError where
        memory that the budget allows cannot be had; then nothing was granted.
        """
        granted = Granted()
        with self.changed:
            try:
                # a False sorts before a True, and equal ones stay in order
                for expert in sorted(experts, key=lambda e: (e != urgent, self._state[e] == ABSENT)):
                    self._grant(expert, granted, UNLIMITED if expert == urgent else streams)
            except BaseException as exc:
                self._take_back(granted, exc)
                raise
            self._starved = len(granted.without_room)
        return granted

    def reserve(self, expert: ExpertId, is_speculative: bool, streams: int = UNLIMITED) -> Slot | None:
        """A slot to load `expert` into, marked LOADING, or None if it is not absent or no room can be made.

        A demand reservation comes with a lease. A speculative one evicts only experts less likely than
        itself, and takes nothing while a call waits for room.
        """
        with self.changed:
            self._check_open()
            if self._state[expert] != ABSENT or (is_speculative and self._starved):
                return None
            if not self._make_room(expert, is_speculative, streams):
                return None
            self._failures.pop(expert, None)
            slot = self._take_slot(expert.layer)
            self._slots[expert] = slot
            self._state[expert] = LOADING
            self._is_guess[expert] = is_speculative
            self._leases[expert] += not is_speculative
            return slot

    def can_reserve(self, expert: ExpertId, streams: int = UNLIMITED) -> bool:
        """Whether a demand reservation would find room now."""
        with self.changed:
            kind, need = self._kind[expert.layer], self._slot_bytes[expert.layer]
            return (
                self._state[expert] != ABSENT
                or self._has_room(kind, need)
                or any(slots for slots in self._free.values())
                or self._victim(expert, is_speculative=False, streams=streams) is not None
            )

    def publish(self, expert: ExpertId) -> None:
        """The bytes have arrived: the expert may be leased."""
        with self.changed:
            assert self._state[expert] == LOADING, f"{expert} published but not loading"
            self._state[expert] = RESIDENT
            self._settle()
            self.changed.notify_all()

    def abandon(self, expert: ExpertId, error: BaseException) -> None:
        """The load failed: the slot is free again. Who leased the expert finds `failure` and still releases it."""
        with self.changed:
            assert self._state[expert] == LOADING, f"{expert} abandoned but not loading"
            self._vacate(expert)
            self._failures[expert] = error
            self._settle()
            self.changed.notify_all()

    def failure(self, expert: ExpertId) -> BaseException | None:
        """Why the last load of an expert failed; None once it is being loaded again."""
        with self.changed:
            return self._failures.get(expert)

    def calm(self) -> None:
        """The call that found no room is over: guesses may take slots again."""
        with self.changed:
            self._starved = 0

    # the budget

    def resize(self, budget_bytes: int) -> None:
        """Change the budget; shrinking evicts the least likely unleased experts at once.

        Leased experts and loads under way stay until they are released or arrive, and go then. BudgetError for
        a budget that holds no expert of some layer.
        """
        with self.changed:
            if budget_bytes < max(self._slot_bytes):
                raise BudgetError(f"budget {budget_bytes}: one expert needs {max(self._slot_bytes)} bytes")
            self.budget_bytes = budget_bytes
            self._settle()
            self.changed.notify_all()

    def evict(self, expert: ExpertId) -> bool:
        """Free the slot of a resident expert that nobody leases; False if there is none."""
        with self.changed:
            if self._state[expert] != RESIDENT or self._leases[expert]:
                return False
            self._evict(expert)
            self.changed.notify_all()
            return True

    def reset_counters(self) -> None:
        """Start peaks and counts again from what is held now."""
        with self.changed:
            self.used_bytes_max = self.used_bytes
            self.evictions = self.wasted_loads = self.wasted_bytes = 0

    # views

    def is_absent(self, expert: ExpertId) -> bool:
        """Neither resident nor on its way (a hint: another thread may change it)."""
        return bool(self._state[expert] == ABSENT)

    def is_loading(self, expert: ExpertId) -> bool:
        """On its way (a hint: another thread may change it)."""
        return bool(self._state[expert] == LOADING)

    def absent(self, layer: int) -> np.ndarray:
        """Experts of a layer that are neither resident nor on their way, bool [experts] (a hint)."""
        return np.asarray(self._state[layer] == ABSENT)

    def resident(self) -> np.ndarray:
        """Copy of the resident map, bool [layers, experts]."""
        with self.changed:
            return self._state == RESIDENT

    def leased(self) -> int:
        """Number of leases now held."""
        with self.changed:
            return int(self._leases.sum())

    def close(self) -> None:
        """Free every slot; later calls raise ClosedError."""
        with self.changed:
            self._is_closed = True
            self._slots.clear()
            self._free.clear()
            self._failures.clear()
            self._state[:] = ABSENT
            self._leases[:] = 0
            self.used_bytes = 0
            self.changed.notify_all()

    # under the lock

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the runtime is closed; attach again to go on")

    def _grant(self, expert: ExpertId, granted: Granted, streams: int) -> None:
        if self._state[expert] == RESIDENT:
            granted.leases.append(self._lease(expert))
        elif self.hold(expert):
            granted.joined.append(expert)
        elif (slot := self.reserve(expert, is_speculative=False, streams=streams)) is not None:
            granted.to_load.append((expert, slot))
        else:
            granted.without_room.append(expert)

    def _take_back(self, granted: Granted, error: BaseException) -> None:
        for expert, _ in granted.to_load:
            self.abandon(expert, error)
            self.release(expert)
        self.release(*(lease.expert for lease in granted.leases), *granted.joined)

    def _lease(self, expert: ExpertId) -> Lease:
        self._take_lease(expert)
        slot = self._slots[expert]
        return Lease(expert, slot, slot.generation)

    def _take_lease(self, expert: ExpertId) -> None:
        _, leases, is_guess = self._rows[expert.layer]
        leases[expert.expert] += 1
        is_guess[expert.expert] = False  # somebody asked for it: no waste any more

    def _make_room(self, expert: ExpertId, is_speculative: bool, streams: int) -> bool:
        """Evict until a slot of the expert's layer fits. A free slot of the right size is already paid for."""
        kind, need = self._kind[expert.layer], self._slot_bytes[expert.layer]
        while not self._has_room(kind, need):
            if self._drop_free_slot(other_than=kind):
                continue
            victim = self._victim(expert, is_speculative, streams)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _victim(self, expert: ExpertId, is_speculative: bool, streams: int) -> ExpertId | None:
        """Who goes for `expert`, or None where nobody may."""
        victim = pick_victim(self._likelihood, self._evictable())
        if victim is None or may_displace(self._likelihood, expert, victim):
            return victim
        may_go = not is_speculative and may_stream(int(np.count_nonzero(self._leases)), streams)
        return victim if may_go else None

    def _has_room(self, kind: int, need: int) -> bool:
        if self.used_bytes > self.budget_bytes:
            return False
        return bool(self._free[kind]) or self.used_bytes + need <= self.budget_bytes

    def _evictable(self) -> np.ndarray:
        return (self._state == RESIDENT) & (self._leases == 0)

    def _settle(self) -> None:
        """Come down to a budget that was lowered, as far as leases and loads allow."""
        while self.used_bytes > self.budget_bytes and self._shrink_once():
            pass

    def _shrink_once(self) -> bool:
        if self._drop_free_slot(other_than=-1):
            return True
        victim = pick_victim(self._likelihood, self._evictable())
        if victim is None:
            return False
        self._evict(victim)
        return True

    def _drop_free_slot(self, other_than: int) -> bool:
        for kind, slots in self._free.items():
            if slots and (kind != other_than or self.used_bytes > self.budget_bytes):
                slots.pop()
                self.used_bytes -= self._kind_bytes[kind]
                return True
        return False

    def _take_slot(self, layer: int) -> Slot:
        free = self._free[self._kind[layer]]
        if free:
            return free.pop()
        try:
            slot = self._new_slot(layer)
        except (RuntimeError, MemoryError) as exc:
            raise BudgetError(
                f"no memory for an expert of {self._slot_bytes[layer]} bytes: lower the budget"
            ) from exc
        self.used_bytes += self._slot_bytes[layer]
        self.used_bytes_max = max(self.used_bytes_max, self.used_bytes)
        return slot

    def _evict(self, expert: ExpertId) -> None:
        """Weights are read-only: nothing is copied back."""
        self.wasted_loads += int(self._is_guess[expert])
        self.wasted_bytes += int(self._is_guess[expert]) * self._slot_bytes[expert.layer]
        self._vacate(expert)
        self.evictions += 1

    def _vacate(self, expert: ExpertId) -> None:
        slot = self._slots.pop(expert)
        slot.generation += 1
        self._state[expert] = ABSENT
        self._on_free(slot)
        self._free[self._kind[expert.layer]].append(slot)
