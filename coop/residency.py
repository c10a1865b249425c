"""Residency: who is where, in bytes, with leases.

Owns every slot and the byte account; promises that the bytes of all slots never exceed the budget, that a
leased expert is never evicted, and that no expert is loaded twice at once. Called by the scheduler (leases)
and by the prefetcher's threads (reserve, publish). Its one lock is never held over I/O or compute.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np

from coop.errors import BudgetError, ClosedError
from coop.ids import ExpertId
from coop.policy import may_displace, pick_victim
from coop.store import LayerGeometry, Slot


class State(IntEnum):
    """Where an expert is."""

    ABSENT = 0
    LOADING = 1
    RESIDENT = 2


class Residency:
    """Slots for experts under a byte budget.

    Args:
        geometry: experts, slot bytes and slot kind of each layer.
        budget_bytes: the most that all slots together may take.
        new_slot: allocates a slot for a layer.
        likelihood: float64 [layers, experts], read when a victim is needed; owned by the forecast.
    """

    def __init__(
        self,
        geometry: Sequence[LayerGeometry],
        budget_bytes: int,
        new_slot: Callable[[int], Slot],
        likelihood: np.ndarray,
    ) -> None:
        shape = (len(geometry), max(layer.num_experts for layer in geometry))
        self.changed = threading.Condition()
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.used_bytes_max = 0
        self.evictions = 0
        self._slot_bytes = tuple(layer.slot_bytes for layer in geometry)
        self._kind = tuple(layer.kind for layer in geometry)
        self._kind_bytes = {layer.kind: layer.slot_bytes for layer in geometry}
        self._new_slot = new_slot
        self._likelihood = likelihood
        self._state = np.zeros(shape, dtype=np.int8)
        self._leases = np.zeros(shape, dtype=np.int32)
        self._slots: dict[ExpertId, Slot] = {}
        self._free: defaultdict[int, list[Slot]] = defaultdict(list)  # by kind
        self._failures: dict[ExpertId, BaseException] = {}
        self._is_closed = False

    def lease(self, expert: ExpertId) -> Slot | None:
        """Lease a resident expert, or None if it is not resident. Pair with `release`."""
        with self.changed:
            self._check_open()
            if self._state[expert] != State.RESIDENT:
                return None
            self._leases[expert] += 1
            return self._slots[expert]

    def hold(self, expert: ExpertId) -> bool:
        """Lease an expert whose load is under way, so that it stays once it has arrived; False if none is."""
        with self.changed:
            if self._state[expert] != State.LOADING:
                return False
            self._leases[expert] += 1
            return True

    def held(self, expert: ExpertId) -> Slot | None:
        """The slot of a held expert once its bytes have arrived, else None."""
        with self.changed:
            return self._slots[expert] if self._state[expert] == State.RESIDENT else None

    def release(self, expert: ExpertId) -> None:
        """Give back one lease."""
        with self.changed:
            assert self._leases[expert] > 0, f"{expert} released more often than leased"
            self._leases[expert] -= 1
            self._settle()
            self.changed.notify_all()

    def reserve(self, expert: ExpertId, is_speculative: bool) -> Slot | None:
        """A slot to load `expert` into, marked LOADING, or None if it is not absent or no room can be made.

        A demand reservation comes with a lease. A speculative one evicts only experts less likely than itself.
        """
        with self.changed:
            self._check_open()
            if self._state[expert] != State.ABSENT:
                return None
            if not self._make_room(expert, is_speculative):
                return None
            self._failures.pop(expert, None)
            slot = self._take_slot(expert.layer)
            self._slots[expert] = slot
            self._state[expert] = State.LOADING
            self._leases[expert] += not is_speculative
            return slot

    def can_reserve(self, expert: ExpertId) -> bool:
        """Whether a demand reservation would find room now."""
        with self.changed:
            kind, need = self._kind[expert.layer], self._slot_bytes[expert.layer]
            return (
                self._state[expert] != State.ABSENT
                or self._has_room(kind, need)
                or bool(self._evictable().any())
                or any(slots for slots in self._free.values())
            )

    def publish(self, expert: ExpertId) -> None:
        """The bytes have arrived: the expert may be leased."""
        with self.changed:
            assert self._state[expert] == State.LOADING, f"{expert} published but not loading"
            self._state[expert] = State.RESIDENT
            self._settle()
            self.changed.notify_all()

    def abandon(self, expert: ExpertId, error: BaseException) -> None:
        """The load failed: the slot is free again. Who leased the expert finds `failure` and still releases it."""
        with self.changed:
            assert self._state[expert] == State.LOADING, f"{expert} abandoned but not loading"
            self._vacate(expert)
            self._failures[expert] = error
            self._settle()
            self.changed.notify_all()

    def failure(self, expert: ExpertId) -> BaseException | None:
        """Why the last load of an expert failed; None once it is being loaded again."""
        with self.changed:
            return self._failures.get(expert)

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

    def reset_peak(self) -> None:
        """Start `used_bytes_max` again from what is held now."""
        with self.changed:
            self.used_bytes_max = self.used_bytes

    def is_absent(self, expert: ExpertId) -> bool:
        """Neither resident nor on its way (a hint: another thread may change it)."""
        return bool(self._state[expert] == State.ABSENT)

    def resident(self) -> np.ndarray:
        """Copy of the resident map, bool [layers, experts]."""
        with self.changed:
            return self._state == State.RESIDENT

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
            self._state[:] = State.ABSENT
            self._leases[:] = 0
            self.used_bytes = 0
            self.changed.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the runtime is closed; attach again to go on")

    def _make_room(self, expert: ExpertId, is_speculative: bool) -> bool:
        """Evict until a slot of the expert's layer fits. A free slot of the right size is already paid for."""
        kind, need = self._kind[expert.layer], self._slot_bytes[expert.layer]
        while not self._has_room(kind, need):
            if self._drop_free_slot(other_than=kind):
                continue
            victim = pick_victim(self._likelihood, self._evictable())
            if victim is None:
                return False
            if is_speculative and not may_displace(self._likelihood, expert, victim):
                return False
            self._evict(victim)
        return True

    def _has_room(self, kind: int, need: int) -> bool:
        if self.used_bytes > self.budget_bytes:
            return False
        return bool(self._free[kind]) or self.used_bytes + need <= self.budget_bytes

    def _evictable(self) -> np.ndarray:
        return (self._state == State.RESIDENT) & (self._leases == 0)

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
        self._vacate(expert)
        self.evictions += 1

    def _vacate(self, expert: ExpertId) -> None:
        slot = self._slots.pop(expert)
        self._state[expert] = State.ABSENT
        self._free[self._kind[expert.layer]].append(slot)
