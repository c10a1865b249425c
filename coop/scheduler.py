"""Scheduler: runs one MoE layer call through the three layers, and is the only class that knows all three.

Owns residency, prefetcher, forecast, calendar and ring of one model; promises that the result of a call does
not depend on the budget, the strategy, the ring, or what happened to be resident. Called by the experts
function that transformers dispatches to, by experts that are modules of their own, and by training's warm-up.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from coop.adapters.transformers import ExpertsModule
from coop.calendar import Calendar
from coop.ctu import CTU, DECODE_ROWS
from coop.dataflow import Flow
from coop.demand import LOAD_DEADLINE_SECONDS, Demand, Waits
from coop.devices import Device, Memory
from coop.devices.cpu import CpuDevice
from coop.errors import ClosedError, CoopError, RoutingError
from coop.execution import run_decode, run_prefill, run_token, token_pairs
from coop.forecast import Forecast
from coop.ids import ExpertId
from coop.interrupts import Interrupts
from coop.policy import UNLIMITED, PriorityPolicy, unit_priority
from coop.prefetch import Prefetcher
from coop.pressure import PressureGuard
from coop.profile import Profile
from coop.residency import Lease, Residency
from coop.ring import RingBuffer
from coop.staging import Staging
from coop.store import ModuleStore, Slot, Store
from coop.strategy import Strategy, get_strategy
from coop.topology import hardware_fingerprint

POISON = 0xFF  # as bytes of a float of any width: NaN


@dataclass(slots=True)
class CallCounters:
    """Requests for experts, one for each distinct expert of each layer call, by phase; and time spent waiting."""

    hits_prefill: int = 0
    misses_prefill: int = 0
    hits_decode: int = 0
    misses_decode: int = 0
    calls: int = 0
    waits: Waits = field(default_factory=Waits)


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
        experts: the model's experts modules, for flags and activations, in layer order; empty where experts
            are modules of their own, which compute themselves.
        store: where weights come from.
        budget_bytes: most bytes of expert slots.
        strategy: a preset, adapted to the device's memory.
        ring_bytes: size of the output ring.
        loader_threads: demanded loads at once; 0 loads in the calling thread and never guesses.
        queue_depth: reads at once that the disk likes.
        guess_threads: speculative reads at once.
        has_prefetch: whether experts are loaded before they are asked for.
        profile: what training learned, or None.
        forecast: likelihoods that another tier shares, or None for one of its own.
        device: where experts are computed.
        guard: tells when guesses should stand back, or None.
        policy: a priority signal from outside, or None.
        poison: overwrite every slot that is given up with NaN, so that a read of it is seen (for tests).
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
        queue_depth: int = 1,
        guess_threads: int = 0,
        has_prefetch: bool = True,
        profile: Profile | None = None,
        forecast: Forecast | None = None,
        device: Device | None = None,
        guard: PressureGuard | None = None,
        policy: PriorityPolicy | None = None,
        poison: bool = False,
    ) -> None:
        self.geometry = store.geometry
        self.strategy = strategy
        self.is_prefill = True
        self.counters = CallCounters()
        self.calendar = Calendar(len(self.geometry))
        self.forecast = forecast or Forecast.of(self.geometry, strategy)
        if policy is not None:
            self.forecast.set_policy(policy)  # refused before a thread is started
        self._device = device or CpuDevice()
        self.residency = Residency(
            self.geometry,
            budget_bytes,
            store.new_slot,
            self.forecast.likelihood,
            *((self._poison,) if poison else ()),
        )
        self._experts = list(experts)
        self._store = store
        self.ring = RingBuffer(ring_bytes, self._device.torch_device)
        self.guard = guard
        self._has_prefetch = has_prefetch and loader_threads > 0
        self._call_lock = threading.RLock()  # an expert that is a module may hold another layer of experts
        self._is_closed = False
        self._call_ended: tuple[int, float] = (-1, 0.0)
        self._announced: Demand | None = None
        self._interrupts = Interrupts()
        self._queue_depth = queue_depth
        # those that load and as many that wait for their turn to compute
        self._streams = 2 * loader_threads or UNLIMITED
        self.staging = Staging(store.window_bytes, loader_threads)
        self._prefetcher = self._new_prefetcher(loader_threads, guess_threads if has_prefetch else 0)
        self._put_in_force(strategy)
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

    def _new_prefetcher(self, loader_threads: int, guess_threads: int) -> Prefetcher:
        return Prefetcher(
            self._store,
            self.residency,
            self.staging,
            demand_threads=loader_threads,
            guess_threads=guess_threads,
            on_load=self._record_load,
            is_pressed=self.guard.poll if self.guard is not None else lambda: False,
        )

    # what a user may turn while it runs

    def set_strategy(self, name: str) -> None:
        """Switch to another preset, in force from the next call. CoopError for an unknown name."""
        self._check_open()
        self._put_in_force(get_strategy(name).adapted(self._device.memory))

    def set_priority(self, policy: PriorityPolicy | None) -> None:
        """Let a signal from outside move eviction and prefetch, from now on; None ends it.

        Call it again when the signal has changed: every layer is asked anew, and what is now likeliest is
        loaded when nothing else is. CoopError for an answer that is not one finite number for each expert.
        """
        with self._call_lock:
            self.forecast.set_policy(policy)
            self._seed_residency()

    def resize(self, budget_bytes: int) -> None:
        """Lower or raise the budget, in force at once; leased experts go when they are released.

        BudgetError below one expert.
        """
        self._check_open()
        is_raised = budget_bytes > self.residency.budget_bytes
        self.residency.resize(budget_bytes)
        if is_raised:
            self._seed_residency()

    # the layer call

    def execute(
        self, layer: int, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """One MoE layer call.

        hidden [tokens, hidden], expert_ids int64 [tokens, k], weights [tokens, k] -> [tokens, hidden].
        Raises RoutingError, StoreError, PrefetchError, ClosedError; a failed call leaves no lease behind.
        """
        if hidden.requires_grad and torch.is_grad_enabled():
            raise CoopError("coop serves inference only, no gradient comes back: use torch.no_grad()")
        with _without_grad(), self._call_lock, self._interrupts.held():
            self._check_waiting()
            if hidden.shape[0] == 0:
                return torch.empty_like(hidden)
            self._begin_call(layer, hidden.shape[0])
            ids = expert_ids.cpu().numpy()  # the one synchronisation with a device
            if hidden.shape[0] == 1 and type(self._device) is CpuDevice:
                result = self._run_at_once(layer, hidden, ids[0], weights)
                if result is not None:
                    self._call_ended = (layer, time.perf_counter())
                    return result
            flow = Flow(
                layer, hidden, ids, weights, self.geometry[layer].num_experts, self.ring, self._launch
            )
            try:
                self._run_units(layer, flow, ids)
                result = flow.result(self._device.synchronize)
            finally:
                flow.close()
            self._call_ended = (layer, time.perf_counter())
            return result

    def stream(self, layer: int, expert_ids: np.ndarray) -> Generator[tuple[int, Mapping[str, torch.Tensor]]]:
        """Each distinct expert of int64 [tokens, k] once with its weights, as they arrive: for who computes itself.

        What is resident comes first. Weights are leased until the next is asked for; close the iterator when it
        is not run to its end. Raises RoutingError, StoreError, PrefetchError, ClosedError.
        """
        with self._call_lock, self._interrupts.held():
            self._check_waiting()
            distinct = self._distinct(layer, expert_ids)
            self._begin_call(layer, expert_ids.shape[0])
            self.forecast.observe(layer, expert_ids)
            with self._demand(distinct) as demand:
                demand.request()
                self._prefetch(layer, len(distinct), max(1, expert_ids.size // max(1, len(distinct))))
                left = len(distinct)
                while left:
                    for expert in demand.take_arrived():
                        yield expert.expert, demand.lease(expert).weights
                        demand.release(expert)
                        left -= 1
                    if left:
                        demand.wait()
                        demand.request()

    @contextmanager
    def lend(self, expert: ExpertId) -> Iterator[Mapping[str, torch.Tensor]]:
        """One expert's weights, resident while the block runs: for an expert that is a module of its own."""
        with self._call_lock:
            self._check_open()
            announced = self._announced
            if announced is not None and announced.covers(expert):
                self._await(announced, expert)
                lease = announced.hand_over(expert)  # the announcement may end while the block runs
                try:
                    yield lease.weights
                finally:
                    self.residency.release(expert)
                return
            self._begin_call(expert.layer, 1)
            self.forecast.observe(expert.layer, np.array([[expert.expert]]))
            with self._demand([expert]) as demand:
                demand.request()
                yield self._await(demand, expert).weights

    def announce(self, layer: int, expert_ids: np.ndarray) -> None:
        """Which experts a layer of modules is about to call, int64 [tokens, k]: what is missing is asked for now."""
        with self._call_lock:
            self._check_open()
            self.end_announcement()
            distinct = self._distinct(layer, expert_ids)
            if distinct:
                self._begin_call(layer, expert_ids.shape[0])
                self.forecast.observe(layer, expert_ids)
                self._announced = self._demand(distinct)
                self._announced.request()
                self._prefetch(layer, len(distinct), max(1, expert_ids.size // len(distinct)))

    def end_announcement(self) -> None:
        """Give back what was announced and not called."""
        with self._call_lock:
            if self._announced is not None:
                self._announced.close()
                self._announced = None

    @torch.no_grad()
    def warmup(
        self,
        row_counts: Sequence[int] = (1, 8, 64),
        repeats: int = 3,
        max_seconds: float = 5.0,
        experts: Sequence[ExpertId] | None = None,
    ) -> WarmupReport:
        """Run one virtual CTU for every expert and row count, and keep the fastest of `repeats` each.

        Rows are ones, so no random state is touched. Stops at `max_seconds`, whole experts only. `experts` in
        that order, or all of them.
        """
        began = time.perf_counter()
        width = max(layer.num_experts for layer in self.geometry)
        compute_ms = np.full((len(self.geometry), width, len(row_counts)), np.nan, dtype=np.float32)
        done = 0
        for expert in self._all_experts() if experts is None else experts:
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
            self.end_announcement()
            self.residency.close()
            self._store.close()
            self.staging.close()
            self._device.close()

    # the parts of a call, in order

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the runtime is closed; attach again to go on")

    def _check_waiting(self) -> None:
        self._check_open()
        self._interrupts.check()

    def _distinct(self, layer: int, expert_ids: np.ndarray) -> list[ExpertId]:
        """The experts of a call, rising, each once. RoutingError for one that the layer has not."""
        distinct = np.unique(expert_ids)
        if distinct.size and (distinct[0] < 0 or distinct[-1] >= self.geometry[layer].num_experts):
            raise RoutingError(f"layer {layer}: the router chose expert {distinct[-1]}")
        return [ExpertId(layer, expert) for expert in distinct.tolist()]

    def _begin_call(self, layer: int, tokens: int) -> None:
        self.counters.calls += 1
        last, ended = self._call_ended
        if last == layer - 1 and not self.is_prefill:
            self.calendar.record_between(last, time.perf_counter() - ended)
        if layer == 0 and self.is_prefill and tokens > 1:
            self.forecast.begin_prompt(tokens, [geometry.top_k for geometry in self.geometry])

    def _run_units(self, layer: int, flow: Flow, ids: np.ndarray) -> None:
        """L3 lease, L3 prefetch, L1 run: ready units first, the others as their weights arrive."""
        self.forecast.observe(layer, ids)
        slices = Counter(unit.expert for unit in flow.units)  # left to run, by expert
        with self._demand(list(slices)) as demand:
            demand.request()
            self._prefetch(layer, len(slices), flow.units[0].rows)
            ready: list[CTU] = []
            while slices:
                arrived = set(demand.take_arrived())
                ready += [unit for unit in flow.units if unit.expert in arrived]
                batch = self._pick(ready, flow, demand)
                if not batch:
                    demand.wait(for_ring=bool(ready))
                    demand.request()
                    continue
                self._run(batch, flow, [demand.lease(unit.expert) for unit in batch])
                slices.subtract(unit.expert for unit in batch)
                ended = [expert for expert in {unit.expert for unit in batch} if not slices[expert]]
                for expert in ended:
                    del slices[expert]
                demand.release(*ended)
                demand.request()

    def _run_at_once(
        self, layer: int, hidden: torch.Tensor, chosen: np.ndarray, weights: torch.Tensor
    ) -> torch.Tensor | None:
        """One token whose experts are all resident, as most are: one lease, one kernel; None where it is another case.

        hidden [1, hidden], chosen int64 [k], weights [1, k]. The bits are those of the long way.
        """
        order = chosen.argsort(kind="stable")
        ids: list[int] = chosen[order].tolist()
        is_plain = ids[0] >= 0 and ids[-1] < self.geometry[layer].num_experts
        if not is_plain or len(set(ids)) < len(ids):
            return None  # to be refused there, or an expert that is chosen twice
        experts = [ExpertId(layer, expert) for expert in ids]
        slots = self.residency.lease_all(experts)
        if not slots:
            return None
        try:
            pairs = token_pairs(self._experts[layer].module, slots, hidden, weights)
            if not pairs:
                return None
            self._count(len(experts), 0)
            self.forecast.observe(layer, chosen[None])
            self._prefetch(layer, len(experts), 1)
            began = time.perf_counter()
            result = run_token(pairs, hidden, weights, order)
            seconds = (time.perf_counter() - began) / len(experts)
            self.calendar.record_compute(layer, 1, seconds, len(experts))
        finally:
            self.residency.release(*experts)
        return result

    def _demand(self, experts: Sequence[ExpertId]) -> Demand:
        """L3: hits are leased at once, so that making room for a miss cannot evict them."""
        demand = Demand(
            experts,
            self.residency,
            self._prefetcher,
            self._store.disk_order,
            self.counters.waits,
            self._streams if self.is_prefill else UNLIMITED,
            self._check_waiting,
        )
        self._count(demand.hits, demand.misses)
        return demand

    def _count(self, hits: int, misses: int) -> None:
        if self.is_prefill:
            self.counters.hits_prefill += hits
            self.counters.misses_prefill += misses
        else:
            self.counters.hits_decode += hits
            self.counters.misses_decode += misses

    def _prefetch(self, layer: int, experts: int, rows: int) -> None:
        """L3: name the experts that the next layer will likely want, as many as the gap before it can hide."""
        if not self._has_prefetch or self.strategy.prefetch_experts == 0:
            return
        upcoming = self.forecast.upcoming(layer)
        if upcoming:
            self._prefetcher.wish(self._known_ahead(layer, upcoming))
            return
        following = (layer + 1) % len(self.geometry)
        absent = self.residency.absent(following)
        if not absent.any():
            return
        is_streaming = self.is_prefill and following > 0
        count = self._guesses(layer, following, experts, rows, is_streaming)
        ranked = [int(e) for e in self.forecast.rank(following) if absent[e]]
        inside = self.geometry[following].num_experts
        guesses = [ExpertId(following, e) for e in ranked if e < inside][:count]
        if is_streaming:
            guesses.sort(key=self._store.disk_order)
        self._prefetcher.wish(guesses)

    def _known_ahead(self, layer: int, upcoming: Sequence[tuple[int, np.ndarray]]) -> list[ExpertId]:
        """What the next layers will use and is not here, in their order; at most as much as two layers hold."""
        most, found = 2 * self.geometry[layer].num_experts, list[ExpertId]()
        for following, wanted in upcoming:
            missing = wanted & self.residency.absent(following)
            inside = np.flatnonzero(missing[: self.geometry[following].num_experts])
            found += sorted((ExpertId(following, int(e)) for e in inside), key=self._store.disk_order)
            if len(found) >= most:
                break
        return found[:most]

    def _guesses(self, layer: int, following: int, experts: int, rows: int, is_streaming: bool) -> int:
        """How many experts fit the gap. A prompt wants about as many of the next layer as of this: it begins now."""
        limit, geometry = self.strategy.prefetch_experts, self.geometry[following]
        if is_streaming:
            return max(limit, min(experts, self._streams))
        gap_ms = self.strategy.gap_factor * self.calendar.gap_ms(layer, experts, rows)
        return min(limit, self.calendar.loads_that_fit(gap_ms, geometry.slot_bytes))

    def _pick(self, ready: list[CTU], flow: Flow, demand: Demand) -> list[CTU]:
        """L1: which ready units run next, taken out of `ready`; none where waiting is better.

        A compact call runs all there is at once. Above the strategy's fill of the ring only the unit that the
        sum waits for may run, if it is here or on its way: the others' outputs would find no room.
        """
        if flow.is_compact:
            batch = list(ready)
            ready.clear()
            return batch
        if self.ring.fill >= self.strategy.ring_fill:
            head = flow.head
            if head in ready:
                ready.remove(head)
                return [head]
            if demand.is_coming(head.expert):
                return []
        if not ready:
            return []
        for unit in ready:
            ms = self.calendar.compute_ms(unit.expert.layer, unit.rows)
            unit.priority = unit_priority(unit.rows, ms, demand.is_short)
        best = max(ready, key=lambda unit: (unit.priority, -unit.index))
        ready.remove(best)
        return [best]

    def _run(self, batch: Sequence[CTU], flow: Flow, leases: Sequence[Lease]) -> None:
        """L1: units whose weights are here, each into its segment of the ring, and into the sum when it is its turn."""
        began = time.perf_counter()
        module = self._experts[batch[0].expert.layer].module
        slots = [lease.memory for lease in leases]
        if flow.is_compact:
            spans = [edge for unit in batch for edge in (unit.start, unit.stop)]
            outs = flow.outputs
            self._launch_reading(
                leases, lambda: run_decode(module, slots, spans, flow.hidden, flow.tokens, outs)
            )
        else:
            unit, out = batch[0], flow.output(batch[0])
            tokens = flow.tokens[unit.start : unit.stop]
            if unit.rows <= DECODE_ROWS:
                self._launch_reading(
                    leases, lambda: run_decode(module, slots, (0, unit.rows), flow.hidden, tokens, out)
                )
            else:
                rows = flow.rows(unit)
                self._launch_reading(leases, lambda: run_prefill(module, slots[0].weights, rows, out))
        seconds = (time.perf_counter() - began) / len(batch)
        if self._device.memory is Memory.HOST:  # elsewhere this was the time to launch
            self.calendar.record_compute(batch[0].expert.layer, batch[0].rows, seconds, len(batch))
        if not flow.is_compact:
            flow.add(batch[0])

    def _launch_reading(self, leases: Sequence[Lease], work: Any) -> None:
        self._device.launch(work, [lease.slot.buffer for lease in leases])
        fence = self._device.record()
        for lease in leases:
            lease.slot.last_read = fence

    def _launch(self, work: Any) -> None:
        self._device.launch(work, [])

    def _await(self, demand: Demand, expert: ExpertId) -> Lease:
        """The lease of one of a demand's experts, whatever was announced beside it and fills the budget."""
        while not demand.has(expert):
            if expert not in demand.take_arrived():
                announced = self._announced
                if not demand.put_first(expert) and announced is not None:
                    # nobody else would: its caller is the one that waits
                    announced.give_way(also_coming=announced is not demand)
                if not demand.has(expert):
                    demand.wait()
                demand.request()
        return demand.lease(expert)

    # around calls

    def _put_in_force(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.forecast.set_strategy(strategy)
        self._prefetcher.set_guessing(strategy.guesses_in_flight, strategy.guess_beside_demand)
        if strategy.prefetch_experts == 0:
            self._prefetcher.wish([])
            self._prefetcher.seed([])

    def _seed(self, profile: Profile) -> None:
        """Start the forecast, the timings and the loading from what training learned."""
        self.forecast.seed(profile)
        if profile.fingerprint == hardware_fingerprint():
            for index, rows in enumerate(profile.row_counts.tolist()):
                for layer in range(len(self.geometry)):
                    measured = profile.compute_ms[layer, :, index]
                    if np.isfinite(measured).any():
                        self.calendar.seed_compute(layer, rows, float(np.nanmedian(measured)))
        self._seed_residency()

    def _seed_residency(self) -> None:
        """Load the likeliest experts up to the seeded share of the budget, in disk order: one sweep over the file."""
        if not self._has_prefetch or self.strategy.seed_share == 0:
            return
        left = int(self.residency.budget_bytes * self.strategy.seed_share)
        chosen = []
        for layer, expert in self.forecast.hottest():
            if expert >= self.geometry[layer].num_experts:
                continue  # layers may differ in width, the forecast is as wide as the widest
            left -= self.geometry[layer].slot_bytes
            if left < 0:
                break
            chosen.append(ExpertId(layer, expert))
        self._prefetcher.seed(sorted(chosen, key=self._store.disk_order))

    def _record_load(self, expert: ExpertId, nbytes: int, seconds: float, read_seconds: float) -> None:
        self.calendar.record_load(expert.layer, nbytes, seconds, read_seconds)
        self.staging.set_depth(self.calendar.staging_depth(self._queue_depth) or self.staging.depth_max)
        if self.guard is not None:
            self.guard.note_load(nbytes, seconds)

    def _poison(self, slot: Slot) -> None:
        """Fill a slot that is given up with NaN, behind its last reader and before its next writer."""
        if slot.nbytes:
            bytes_of_nan = self._device.new_staging(slot.nbytes).fill_(POISON)
            slot.last_read = self._device.copy(bytes_of_nan, slot.buffer, slot.last_read)

    def _all_experts(self) -> list[ExpertId]:
        return [
            ExpertId(layer, expert)
            for layer, geometry in enumerate(self.geometry)
            for expert in range(geometry.num_experts)
        ]

    def _time_expert(
        self, expert: ExpertId, row_counts: Sequence[int], repeats: int, compute_ms: np.ndarray
    ) -> None:
        module = self._experts[expert.layer].module
        with self._call_lock, self._demand([expert]) as demand:
            demand.request()
            lease = self._await(demand, expert)
            weight = lease.weights.get("down_proj_scale", lease.weights["down_proj"])
            like = {"dtype": weight.dtype, "device": weight.device}
            width = _row_width(module, lease.weights)
            for index, count in enumerate(row_counts):
                rows = torch.ones(count, width, **like)  # type: ignore[call-overload]
                out = torch.empty(count, width, **like)  # type: ignore[call-overload]
                best = min(self._time_once(module, lease, rows, out) for _ in range(max(1, repeats)))
                compute_ms[expert.layer, expert.expert, index] = best * 1e3
                self.calendar.record_compute(expert.layer, count, best)

    def _time_once(self, module: Any, lease: Lease, rows: torch.Tensor, out: torch.Tensor) -> float:
        weights = lease.weights
        began = time.perf_counter()
        if rows.shape[0] <= DECODE_ROWS:
            tokens = np.arange(len(rows))
            self._launch_reading(
                [lease], lambda: run_decode(module, [lease.memory], (0, len(rows)), rows, tokens, out)
            )
        else:
            self._launch_reading([lease], lambda: run_prefill(module, weights, rows, out))
        self._device.synchronize()
        if out.device.type != "cpu":
            torch.accelerator.synchronize(out.device)  # a launched kernel is not a finished one
        return time.perf_counter() - began


def _without_grad() -> AbstractContextManager[Any]:
    """No gradients inside; nothing to do where a caller has seen to it."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def _row_width(experts: Any, weights: Mapping[str, torch.Tensor]) -> int:
    """Columns of the rows that go into an expert and come out of it; quantised weights are output-major."""
    is_input_major = experts.is_transposed and "down_proj_scale" not in weights
    return weights["down_proj"].shape[1 if is_input_major else 0]
