"""Scheduler: runs one MoE layer call through the three layers, and is the only class that knows all three.

Owns residency, prefetcher, forecast, calendar and ring of one model; promises that the result of a call does
not depend on the budget, the strategy, or what happened to be resident. Called by the experts function that
transformers dispatches to, and by training's warm-up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from coop.adapters.transformers import ExpertsModule
from coop.calendar import Calendar
from coop.ctu import CTU
from coop.dataflow import Gathered, combine, gather
from coop.errors import ClosedError, CoopError, PrefetchError
from coop.execution import run_expert
from coop.forecast import Forecast
from coop.ids import ExpertId
from coop.prefetch import Prefetcher
from coop.profile import Profile
from coop.residency import Residency
from coop.ring import RingBuffer
from coop.store import ModuleStore, Slot, Store
from coop.strategy import Strategy, get_strategy
from coop.topology import hardware_fingerprint

LOAD_DEADLINE_SECONDS = 120.0  # no disk in use takes this long for one expert
ALIVE_CHECK_SECONDS = 1.0


@dataclass(slots=True)
class CallCounters:
    """Requests for experts, one for each distinct expert of each layer call, by phase; and time spent waiting."""

    hits_prefill: int = 0
    misses_prefill: int = 0
    hits_decode: int = 0
    misses_decode: int = 0
    calls: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What a warm-up measured.

    compute_ms float32 [layers, experts, row_counts], NaN where the time limit was reached first.
    """

    row_counts: tuple[int, ...]
    compute_ms: np.ndarray
    seconds: float
    experts_done: int


class Scheduler:
    """Serves the experts of one model from a store.

    Args:
        experts: the model's experts modules, for flags and activations, in layer order.
        store: where weights come from.
        budget_bytes: most bytes of expert slots.
        strategy: a preset.
        ring_bytes: size of the output ring.
        loader_threads: 0 loads in the calling thread and never guesses.
        has_prefetch: whether experts are loaded before they are asked for.
        profile: what training learned, or None.
    """

    def __init__(
        self,
        experts: Sequence[ExpertsModule],
        store: Store,
        *,
        budget_bytes: int,
        strategy: Strategy,
        ring_bytes: int,
        loader_threads: int,
        has_prefetch: bool = True,
        profile: Profile | None = None,
    ) -> None:
        self.geometry = store.geometry
        self.strategy = strategy
        self.is_prefill = True
        self.counters = CallCounters()
        self.calendar = Calendar(len(self.geometry))
        width = max(layer.num_experts for layer in self.geometry)
        self.forecast = Forecast(len(self.geometry), width, strategy)
        self.residency = Residency(self.geometry, budget_bytes, store.new_slot, self.forecast.likelihood)
        self._experts = list(experts)
        self._store = store
        self._ring = RingBuffer(ring_bytes)
        self._has_prefetch = has_prefetch and loader_threads > 0
        self._call_lock = threading.Lock()
        self._is_closed = False
        self._call_ended: tuple[int, float] = (-1, 0.0)
        self._prefetcher = Prefetcher(store, self.residency, loader_threads, self._record_load)
        if profile is not None:
            self._seed(profile)

    @classmethod
    def for_modules(cls, experts: Sequence[ExpertsModule]) -> Scheduler:
        """A scheduler over a live model's own weights: everything resident, nothing copied, no threads."""
        store = ModuleStore(experts)
        budget = sum(layer.slot_bytes * layer.num_experts for layer in store.geometry)
        return cls(
            experts,
            store,
            budget_bytes=budget,
            strategy=get_strategy("Balanced"),
            ring_bytes=2**16,
            loader_threads=0,
        )

    def set_strategy(self, name: str) -> None:
        """Switch to another preset, in force from the next call. CoopError for an unknown name."""
        self.strategy = get_strategy(name)
        self.forecast.set_strategy(self.strategy)
        if self.strategy.prefetch_experts == 0:
            self._prefetcher.wish([])
            self._prefetcher.seed([])

    @torch.no_grad()
    def execute(
        self, layer: int, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """One MoE layer call.

        hidden [tokens, hidden], expert_ids int64 [tokens, k], weights [tokens, k] -> [tokens, hidden].
        Raises RoutingError, StoreError, PrefetchError, ClosedError; a failed call leaves no lease behind.
        """
        with self._call_lock:
            self._check_open()
            self._begin_call(layer)
            if hidden.shape[0] == 0:
                return torch.empty_like(hidden)
            ids = expert_ids.numpy()
            gathered = gather(layer, hidden, ids, self.geometry[layer].num_experts)
            outputs = self._ring.push(gathered.rows.shape[0], hidden.shape[1], hidden.dtype)
            try:
                self._run_units(layer, gathered, outputs, ids)
                result = combine(outputs, gathered, weights, hidden.dtype)
            finally:
                self._ring.pop()
            self._call_ended = (layer, time.perf_counter())
            return result

    @torch.no_grad()
    def warmup(
        self, row_counts: Sequence[int] = (1, 8, 64), repeats: int = 3, max_seconds: float = 5.0
    ) -> WarmupReport:
        """Run one virtual CTU for every expert and row count, and keep the fastest of `repeats` each.

        Rows are ones, so no random state is touched. Stops at `max_seconds`, whole experts only.
        """
        began = time.perf_counter()
        width = max(layer.num_experts for layer in self.geometry)
        compute_ms = np.full((len(self.geometry), width, len(row_counts)), np.nan, dtype=np.float32)
        done = 0
        for expert in self._all_experts():
            if time.perf_counter() - began > max_seconds:
                break
            self._time_expert(expert, row_counts, repeats, compute_ms)
            done += 1
        return WarmupReport(tuple(row_counts), compute_ms, time.perf_counter() - began, done)

    def wait_idle(self, seconds: float = LOAD_DEADLINE_SECONDS) -> bool:
        """Wait until nothing is being loaded; False if that takes longer."""
        return self._prefetcher.wait_idle(seconds)

    @property
    def loads(self) -> dict[str, int]:
        """Bytes read and loads by cause."""
        counters = self._prefetcher.counters
        return {name: getattr(counters, name) for name in counters.__slots__}

    def close(self) -> None:
        """Stop the threads, free the slots, close the files. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True  # a call that waits for a load sees it and gives up
        with self.residency.changed:
            self.residency.changed.notify_all()
        self._prefetcher.close()
        with self._call_lock:
            self.residency.close()
            self._store.close()

    # the parts of a call, in order

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the runtime is closed; attach again to go on")

    def _begin_call(self, layer: int) -> None:
        self.counters.calls += 1
        last, ended = self._call_ended
        if last == layer - 1 and not self.is_prefill:
            self.calendar.record_between(last, time.perf_counter() - ended)

    def _run_units(self, layer: int, gathered: Gathered, outputs: torch.Tensor, ids: np.ndarray) -> None:
        """L3 lease, L3 prefetch, L1 run: ready units first, the others as their weights arrive."""
        self.forecast.observe(layer, ids)
        ready, waiting = self._lease(gathered.units)
        leased = {unit.expert for unit in ready}
        try:
            pending = self._request(waiting, leased)
            self._prefetch(layer, gathered)
            while ready or leased or pending:
                for unit in sorted(ready, key=lambda u: -u.priority):
                    self._run(unit, gathered, outputs)
                    self.residency.release(unit.expert)
                    leased.discard(unit.expert)
                pending = self._request(pending, leased)
                ready = self._await(waiting, leased, pending)
        finally:
            for expert in leased:
                self.residency.release(expert)

    def _lease(self, units: Sequence[CTU]) -> tuple[list[CTU], list[CTU]]:
        """Hits are leased at once, so that making room for a miss cannot evict them."""
        ready: list[CTU] = []
        waiting: list[CTU] = []
        for unit in units:
            (ready if self.residency.lease(unit.expert) else waiting).append(unit)
        if self.is_prefill:
            self.counters.hits_prefill += len(ready)
            self.counters.misses_prefill += len(waiting)
        else:
            self.counters.hits_decode += len(ready)
            self.counters.misses_decode += len(waiting)
        return ready, waiting

    def _request(self, units: Sequence[CTU], leased: set[ExpertId]) -> list[CTU]:
        """Ask for weights in disk order; returns the units for which there is no room yet."""
        without_room = []
        for unit in sorted(units, key=lambda u: self._store.disk_order(u.expert)):
            if self.residency.hold(unit.expert) or self.residency.lease(unit.expert):
                leased.add(unit.expert)  # a guess brought it, or is bringing it
                continue
            slot = self.residency.reserve(unit.expert, is_speculative=False)
            if slot is None:
                without_room.append(unit)
                continue
            leased.add(unit.expert)
            self._demand(unit.expert, slot)
        return without_room

    def _demand(self, expert: ExpertId, slot: Slot) -> None:
        """Hand a reservation to the loaders; whatever comes between, even Ctrl-C, must not leave it behind."""
        try:
            self._prefetcher.demand(expert, slot)
        except BaseException as exc:
            self.residency.abandon(expert, exc)
            raise

    def _prefetch(self, layer: int, gathered: Gathered) -> None:
        """L3: name the experts that the next layer will likely want, as many as the gap before it can hide."""
        if not self._has_prefetch:
            return
        following = (layer + 1) % len(self.geometry)
        count = self._guesses(layer, following, gathered)
        ranked = self.forecast.rank(following)[: self.geometry[following].num_experts]
        absent = (ExpertId(following, int(e)) for e in ranked)
        guesses = [expert for expert in absent if self.residency.is_absent(expert)][:count]
        if self.is_prefill:
            guesses.sort(key=self._store.disk_order)
        self._prefetcher.wish(guesses)

    def _guesses(self, layer: int, following: int, gathered: Gathered) -> int:
        """How many experts fit the gap. A prompt wants nearly all of the next layer: there, guess the limit."""
        limit = self.strategy.prefetch_experts
        if limit == 0:
            return 0
        if self.is_prefill:
            return max(limit, min(self.geometry[following].num_experts, gathered.rows.shape[0]))
        load_ms = self.calendar.load_ms(self.geometry[following].slot_bytes)
        if load_ms == 0.0:
            return limit
        gap_ms = self.calendar.gap_ms(layer, len(gathered.units), gathered.units[0].rows)
        return min(limit, int(self.strategy.gap_factor * gap_ms / load_ms))

    def _run(self, unit: CTU, gathered: Gathered, outputs: torch.Tensor) -> None:
        """L1: one expert's rows into its segment of the ring."""
        slot = self.residency.held(unit.expert)
        assert slot is not None, f"{unit.expert} run without its weights"
        began = time.perf_counter()
        self._compute(unit, slot, gathered.rows[unit.start : unit.stop], outputs[unit.start : unit.stop])
        self.calendar.record_compute(unit.expert.layer, unit.rows, time.perf_counter() - began)

    def _compute(self, unit: CTU, slot: Slot, rows: torch.Tensor, out: torch.Tensor) -> None:
        run_expert(self._module(unit.expert.layer), slot.weights, rows, out)

    def _await(self, waiting: Sequence[CTU], leased: set[ExpertId], pending: Sequence[CTU]) -> list[CTU]:
        """Units of this call whose weights have arrived; waits for at least one while any is on its way."""
        outstanding = [unit for unit in waiting if unit.expert in leased]
        if not outstanding and not pending:
            return []
        began = time.perf_counter()
        deadline = began + LOAD_DEADLINE_SECONDS
        with self.residency.changed:
            while True:
                ready = [unit for unit in outstanding if self.residency.held(unit.expert)]
                if ready:
                    break
                self._check_open()
                self._raise_load_errors(outstanding)
                if pending and self._has_room_for(pending):
                    break
                if time.perf_counter() > deadline:
                    raise PrefetchError(
                        f"{(outstanding or pending)[0].expert} did not arrive in {LOAD_DEADLINE_SECONDS:.0f} s"
                    )
                self.residency.changed.wait(ALIVE_CHECK_SECONDS)
                self._prefetcher.check_alive()
        self.counters.wait_seconds += time.perf_counter() - began
        return ready

    def _has_room_for(self, pending: Sequence[CTU]) -> bool:
        return any(self.residency.can_reserve(unit.expert) for unit in pending)

    def _raise_load_errors(self, outstanding: Sequence[CTU]) -> None:
        """A loader's exception belongs to the call that waits for its expert."""
        for unit in outstanding:
            error = self.residency.failure(unit.expert)
            if error is None:
                continue
            if isinstance(error, CoopError):
                raise error
            raise PrefetchError(f"loading {unit.expert} failed: {error}") from error

    # around calls

    def _seed(self, profile: Profile) -> None:
        """Start the forecast, the timings and the loading from what training learned."""
        self.forecast.seed(profile)
        if profile.fingerprint == hardware_fingerprint():
            for index, rows in enumerate(profile.row_counts.tolist()):
                for layer in range(len(self.geometry)):
                    measured = profile.compute_ms[layer, :, index]
                    if np.isfinite(measured).any():
                        self.calendar.seed_compute(layer, rows, float(np.nanmedian(measured)))
        if self._has_prefetch and self.strategy.seed_share > 0:
            self._prefetcher.seed(self._hottest_that_fit())

    def _hottest_that_fit(self) -> list[ExpertId]:
        """The likeliest experts up to the seeded share of the budget, in disk order: one sweep over the file."""
        left = int(self.residency.budget_bytes * self.strategy.seed_share)
        chosen = []
        for layer, expert in self.forecast.hottest():
            left -= self.geometry[layer].slot_bytes
            if left < 0:
                break
            chosen.append(ExpertId(layer, expert))
        return sorted(chosen, key=self._store.disk_order)

    def _record_load(self, expert: ExpertId, nbytes: int, seconds: float) -> None:
        self.calendar.record_load(nbytes, seconds)

    def _all_experts(self) -> list[ExpertId]:
        return [
            ExpertId(layer, expert)
            for layer, geometry in enumerate(self.geometry)
            for expert in range(geometry.num_experts)
        ]

    def _time_expert(
        self, expert: ExpertId, row_counts: Sequence[int], repeats: int, compute_ms: np.ndarray
    ) -> None:
        slot = self._lease_now(expert)
        module, weight = self._module(expert.layer), slot.weights["down_proj"]
        like = {"dtype": weight.dtype, "device": weight.device}
        try:
            for index, count in enumerate(row_counts):
                rows = torch.ones(count, _input_width(module, slot), **like)  # type: ignore[call-overload]
                out = torch.empty(count, _output_width(module, slot), **like)  # type: ignore[call-overload]
                best = self._fastest(CTU(expert, 0, count, 0.0), slot, rows, out, repeats)
                compute_ms[expert.layer, expert.expert, index] = best * 1e3
                self.calendar.record_compute(expert.layer, count, best)
        finally:
            self.residency.release(expert)

    def _fastest(self, unit: CTU, slot: Slot, rows: torch.Tensor, out: torch.Tensor, repeats: int) -> float:
        """Seconds of the fastest of `repeats` runs."""
        best = float("inf")
        for _ in range(max(1, repeats)):
            began = time.perf_counter()
            self._compute(unit, slot, rows, out)
            if out.device.type != "cpu":
                torch.accelerator.synchronize(out.device)  # a launched kernel is not a finished one
            best = min(best, time.perf_counter() - began)
        return best

    def _lease_now(self, expert: ExpertId) -> Slot:
        unit = CTU(expert, 0, 0, 0.0)
        slot = self.residency.lease(expert)
        if slot is None:
            leased: set[ExpertId] = set()
            pending = self._request([unit], leased)
            self._await([unit], leased, pending)
            slot = self.residency.held(expert)
        assert slot is not None, f"{expert} cannot be leased"
        return slot

    def _module(self, layer: int) -> Any:
        return self._experts[layer].module


def _input_width(experts: Any, slot: Slot) -> int:
    weight = slot.weights["gate_up_proj" if experts.has_gate else "up_proj"]
    return weight.shape[0] if experts.is_transposed else weight.shape[1]


def _output_width(experts: Any, slot: Slot) -> int:
    weight = slot.weights["down_proj"]
    return weight.shape[1] if experts.is_transposed else weight.shape[0]
