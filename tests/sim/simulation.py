"""The simulation: whole models of coop's runtime under seeded load, faults and interference, every promise checked.

Owns what a seed means (machine, model, workload) and the checks after each call and whenever time moves. Promises that
a failure names its seed and its last steps, and that a seed gives the same steps again. Run by the tests, or as
`python -m tests.sim.simulation --seed N --trace` for one seed, `--seeds FROM TO` for many.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from coop import kernels
from coop.adapters.transformers import ExpertsModule
from coop.errors import BudgetError, ClosedError, PrefetchError, StoreError
from coop.forecast import Forecast
from coop.ids import ExpertId
from coop.policy import UNLIMITED
from coop.pressure import PressureGuard
from coop.residency import LOADING, RESIDENT
from coop.scheduler import Scheduler
from coop.strategy import STRATEGIES, get_strategy
from coop.tiers import HostTier
from tests.sim.parts import HIDDEN, PLENTY, SimCpu, SimDevice, SimDisk, Spindle, TinyExperts
from tests.sim.world import SimThread, SimulationFailure, World
from tests.unit.profiles import build_profile

CALL_SECONDS_MAX = 60.0  # virtual; no call of these sizes takes a tenth of it where nothing hangs
CLOSE_SECONDS_MAX = 10.0  # loaders and copier have two seconds each
POISON = 0xFF


class RandomPolicy:
    """A priority signal that changes its mind at every layer."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def adjust(self, layer: int, likelihood: np.ndarray) -> np.ndarray:
        return likelihood * self._random.random(likelihood.shape) * 2


class Router:
    """Skewed, sticky routing: a token keeps its neighbour's experts more often than not."""

    def __init__(self, seed: int, counts: list[int], top_k: int) -> None:
        self._random = np.random.default_rng(seed)
        self._top_k = top_k
        self._stay = self._random.random() * 0.9
        self._share = [self._random.permutation(1.0 / np.arange(1, count + 1) ** 1.2) for count in counts]
        self._last = [self._draw(layer) for layer in range(len(counts))]

    def route(self, layer: int, tokens: int) -> np.ndarray:
        """int64 [tokens, top_k]."""
        rows = []
        for _ in range(tokens):
            if self._random.random() > self._stay:
                self._last[layer] = self._draw(layer)
            rows.append(self._last[layer])
        return np.stack(rows)

    def _draw(self, layer: int) -> np.ndarray:
        share = self._share[layer]
        return self._random.choice(share.size, self._top_k, replace=False, p=share / share.sum())


class Model:
    """One scheduler with its disk, its workload, and the checks on it.

    Args:
        world, spindle: where it runs, and whose bandwidth it shares.
        seed: of everything else.
    """

    def __init__(self, world: World, spindle: Spindle, seed: int) -> None:
        self.world, self.spindle, self.seed = world, spindle, seed
        self.random = rng = random.Random(f"model {seed}")
        self._build_disk(rng)
        total = sum(layer.slot_bytes * layer.num_experts for layer in self.disk.geometry)
        self.smallest = max(layer.slot_bytes for layer in self.disk.geometry)
        self.total_bytes = total
        self.has_modules = rng.random() < 0.2  # its experts are modules of their own, some inside others
        self.smallest *= 1 + self.has_modules
        self.loaders = rng.choice([0, 1, 1, 2, 3, 4])
        self.strategy = rng.choice(list(STRATEGIES))
        self.is_tiered = rng.random() < 0.35
        self.is_closing = self.had_no_memory = self.is_mended = False
        self.is_shared = rng.random() < 0.15  # two threads call it at once
        self._sleeping: list[Any] = []  # demands whose call waits
        self._left_behind: set[ExpertId] = set()
        self._yet_to_come: set[ExpertId] = set()
        self._build_scheduler(rng)
        self._watch()

    def _build_disk(self, rng: random.Random) -> None:
        layers = rng.randint(2, 4)
        module = TinyExperts(has_gate=rng.random() < 0.7, is_transposed=rng.random() < 0.3)
        self.modules = [module] * layers
        self.is_uniform = rng.random() < 0.5
        count = rng.choice([6, 8, 12, 16])
        self.counts = [count if self.is_uniform else rng.choice([6, 8, 12, 16]) for _ in range(layers)]
        self.top_k = rng.randint(1, 3)
        widths = [rng.choice([4, 6]) for _ in range(layers)]
        self.disk = SimDisk(
            self.world, self.spindle, self.modules, self.counts, widths, self.top_k, self.seed
        )

    def _build_scheduler(self, rng: random.Random) -> None:
        strategy = get_strategy(self.strategy)
        forecast = Forecast(len(self.counts), max(self.counts), strategy)
        guessers = rng.randint(0, 3)
        self.device = SimDevice(self.world, self.seed) if self.is_tiered else SimCpu(self.world, self.seed)
        store: Any = self.disk
        if self.is_tiered:
            threads = max(1, self.loaders + guessers)
            budget = rng.randint(threads * self.smallest, threads * self.smallest + self.total_bytes)
            store = HostTier(
                self.disk,
                self.device,
                budget_bytes=budget,
                loader_threads=threads,
                likelihood=forecast.likelihood,
            )
            store.host._on_free = lambda slot: slot.buffer.fill_(POISON)
        self.tier = store if self.is_tiered else None
        has_profile = self.is_uniform and rng.random() < 0.5
        profile = build_profile(
            layers=len(self.counts), experts=self.counts[0], top_k=self.top_k, seed=self.seed
        )
        self.scheduler = Scheduler(
            [
                ExpertsModule(f"layer{i}", m, n, self.top_k, i)  # type: ignore[arg-type]
                for i, (m, n) in enumerate(zip(self.modules, self.counts, strict=True))
            ],
            store,
            budget_bytes=self.random_budget(rng),
            strategy=strategy.adapted(self.device.memory),
            ring_bytes=rng.choice([64, 256, 1024, 8192]),
            loader_threads=self.loaders,
            queue_depth=rng.choice([1, 2, 4]),
            guess_threads=guessers,
            has_prefetch=rng.random() < 0.85,
            profile=profile if has_profile else None,
            forecast=forecast,
            device=self.device,
            guard=self._guard() if rng.random() < 0.4 else None,
            policy=RandomPolicy(self.seed) if rng.random() < 0.2 else None,
            # the poison is a copy behind the last reader: it would hide a load that does not wait for that reader
            poison=not self.is_tiered or self.random.random() < 0.5,
        )

    def _guard(self) -> PressureGuard:
        return PressureGuard(
            self.spindle.sample,
            bandwidth_bytes_per_s=self.spindle.bytes_per_s,
            clock=lambda: self.world.now,
        )

    def random_budget(self, rng: random.Random) -> int:
        """Most often small: room for a few experts."""
        share = rng.random() ** 2
        return int(self.smallest + share * (self.total_bytes - self.smallest) * rng.choice([0.3, 1.0]))

    # watching

    def _watch(self) -> None:
        """Stand beside the places where a promise could be broken unseen."""
        residency, candidate = self.scheduler.residency, []
        self._watch_victims(residency, candidate)
        if self.tier is not None:
            self._watch_victims(self.tier.host, [])
        make_demand = self.scheduler._demand

        def watched_demand(experts: Any) -> Any:
            demand = make_demand(experts)
            wait = demand.wait

            def watched_wait(for_ring: bool = False) -> None:
                self._sleeping.append(demand)
                try:
                    wait(for_ring)
                finally:
                    self._sleeping.remove(demand)

            demand.wait = watched_wait  # type: ignore[method-assign]
            return demand

        self.scheduler._demand = watched_demand  # type: ignore[method-assign]
        self.world.at_rest.append(self._check_at_rest)

    def _watch_victims(self, residency: Any, candidate: list[Any]) -> None:
        world, make_room, evict = self.world, residency._make_room, residency._evict

        def watched_make_room(expert: ExpertId, is_speculative: bool, streams: int) -> bool:
            candidate[:] = [expert] if is_speculative else []
            is_made = make_room(expert, is_speculative, streams)
            candidate.clear()
            return is_made

        def watched_evict(expert: ExpertId) -> None:
            world.check(not residency._leases[expert], f"{expert} is evicted while it is leased")
            world.check(residency._state[expert] == RESIDENT, f"{expert} is evicted, not resident")
            if candidate:
                likelihood = residency._likelihood
                is_rarer = likelihood[expert] < likelihood[candidate[0]]
                world.check(bool(is_rarer), f"a guess of {candidate[0]} evicts {expert}, as likely as itself")
            evict(expert)

        residency._make_room, residency._evict = watched_make_room, watched_evict

    def _check_at_rest(self) -> None:
        """No thread runs: what should happen next is under way, and the account is right."""
        self._check_account(self.scheduler.residency)
        if self.tier is not None:
            self._check_account(self.tier.host)
        if self.is_closing:
            return
        prefetcher: Any = self.scheduler._prefetcher
        is_idle = bool(prefetcher._demanding.waiting)
        assert not (prefetcher._demands and is_idle), "a demanded read waits while a loader sleeps"
        asleep, reading = len(prefetcher._guessing.waiting), len(prefetcher._guessed)
        if asleep and prefetcher._may_guess():
            wanted = len(prefetcher._wishes) + len(prefetcher._seeds)
            startable = min(wanted, prefetcher._guesses_at_once - reading)
            awake = prefetcher._guess_threads - reading - asleep
            assert startable <= awake, f"{startable} guesses may begin, {awake} threads are awake for them"
        staging: Any = self.scheduler.staging
        has_window = staging._demanding < staging.depth
        assert not (has_window and staging._changed.waiting), "a window is free and a load waits for it"
        self._check_callers()

    def _check_account(self, residency: Any) -> None:
        if residency.changed._lock._owner is not None:
            return  # somebody waits in the middle of a change: only a device's poison does
        slot_bytes = residency._slot_bytes
        held = sum(slot_bytes[e.layer] for e in residency._slots)
        free = sum(len(s) * residency._kind_bytes[k] for k, s in residency._free.items())
        assert residency.used_bytes == held + free, f"{residency.used_bytes} bytes used, {held} + {free} held"
        pinned = sum(
            slot_bytes[e.layer]
            for e in residency._slots
            if residency._leases[e] or residency._state[e] == LOADING
        )
        limit = max(residency.budget_bytes, pinned)
        assert residency.used_bytes <= limit, f"{residency.used_bytes} bytes used, {limit} allowed"

    def _check_callers(self) -> None:
        """A call that sleeps has nothing that it could go on with."""
        residency: Any = self.scheduler.residency
        if not residency.changed.waiting:
            return
        for demand in self._sleeping:
            for expert in demand._coming:
                is_here = residency._state[expert] == RESIDENT or expert in residency._failures
                assert not is_here, f"{expert} has arrived and its call was not woken"
            for expert in demand._pending:
                kind, need = residency._kind[expert.layer], residency._slot_bytes[expert.layer]
                streams = UNLIMITED if expert == demand._urgent else demand._streams
                victim = residency._victim(expert, is_speculative=False, streams=streams)
                has_room = residency._has_room(kind, need) or victim is not None
                assert not has_room, f"{expert} has room and its call was not woken"

    # the workload

    def drive(self, driver: int) -> None:
        """A caller's thread: prompts, each with decode steps behind it, until done or closed."""
        rng = random.Random(f"driver {self.seed} {driver}")
        router = Router(self.seed * 7 + driver, self.counts, self.top_k)
        generator = torch.Generator().manual_seed(self.seed * 31 + driver)
        try:
            for _ in range(rng.randint(1, 3)):
                self._step(
                    rng, router, generator, rng.choice([1, 5, 24, 24, 60, 60, 60, 300]), is_prefill=True
                )
                batch = rng.choice([1, 1, 1, 4])
                for _ in range(rng.randint(2, 7)):
                    self._step(rng, router, generator, batch, is_prefill=False)
        except ClosedError:
            self.world.check(self.is_closing, "closed without being asked to")

    def _step(
        self, rng: random.Random, router: Router, generator: torch.Generator, tokens: int, is_prefill: bool
    ) -> None:
        """One pass through the layers."""
        if not self.is_shared:
            self.scheduler.is_prefill = is_prefill
        hidden = torch.randn(tokens, HIDDEN, generator=generator)
        for layer in range(len(self.counts)):
            self._sleep(10 ** rng.uniform(-4.5, -2.5))
            ids = router.route(layer, tokens)
            weights = torch.rand(tokens, self.top_k, generator=generator)
            hidden = self._reliable_call(rng, layer, hidden, ids, weights)
            hidden = hidden / hidden.norm(dim=1, keepdim=True).clamp_min(1e-6)

    def _reliable_call(
        self, rng: random.Random, layer: int, hidden: torch.Tensor, ids: np.ndarray, weights: torch.Tensor
    ) -> torch.Tensor:
        """A call; one that fails has a reason, and the next one works once the reason is gone."""
        expected = self.reference(layer, hidden, ids, weights)
        call = self._call_modules if self.has_modules else self._call
        faults, began = self.disk.faults, len(self.disk.log)
        self.had_no_memory = faults.slots_left < PLENTY // 2
        try:
            call(rng, layer, hidden, ids, weights, expected)
        except ClosedError:
            raise
        except (StoreError, PrefetchError, BudgetError, OSError) as exc:
            self._check_reason(exc, layer, ids, began)
            faults.error_share, faults.slots_left, self.is_mended = 0.0, PLENTY, True
            asked = {ExpertId(layer, e) for e in np.unique(ids).tolist()}
            if not faults.broken & (set(self.disk.weights) if self.has_modules else asked):
                call(rng, layer, hidden, ids, weights, expected)
        return expected

    def _check_reason(self, exc: BaseException, layer: int, ids: np.ndarray, began: int) -> None:
        if self.is_shared:
            return
        asked = {ExpertId(layer, e) for e in np.unique(ids).tolist()}
        if self.has_modules:
            asked = set(self.disk.weights)  # one that was not announced may have failed
        has_bad_read = any(not r.is_good and r.ended >= 0 and r.expert in asked for r in self.disk.log)
        is_starved = isinstance(exc, BudgetError) and self.had_no_memory
        self.world.check(has_bad_read or is_starved, f"a call failed without a fault: {exc!r}")

    def _call(
        self,
        rng: random.Random,
        layer: int,
        hidden: torch.Tensor,
        ids: np.ndarray,
        weights: torch.Tensor,
        expected: torch.Tensor,
    ) -> None:
        with self._checked_call(layer, ids):
            result = self.scheduler.execute(layer, hidden, torch.from_numpy(ids), weights)
        self.world.check(torch.equal(result, expected), f"layer {layer}: the result has other bits")

    def _call_modules(
        self,
        rng: random.Random,
        layer: int,
        hidden: torch.Tensor,
        ids: np.ndarray,
        weights: torch.Tensor,
        expected: torch.Tensor,
    ) -> None:
        """A layer whose experts are modules: announced, then lent one by one, some not at all, some unannounced."""
        experts = [ExpertId(layer, e) for e in np.unique(ids).tolist()]
        try:
            if rng.random() < 0.9:
                self.scheduler.announce(layer, ids)
            for expert in rng.sample(experts, rng.randint(0, len(experts))):
                if rng.random() < 0.2:  # one that was not announced
                    self._borrow(rng, ExpertId(layer - 1, rng.randrange(self.counts[layer - 1])))
                self._borrow(rng, expert)
        except BaseException:
            if not self.world.is_over:
                self.scheduler.end_announcement()
            raise
        if rng.random() < 0.9:
            self.scheduler.end_announcement()

    def _borrow(self, rng: random.Random, expert: ExpertId, is_inner: bool = False) -> None:
        expert = ExpertId(expert.layer % len(self.counts), expert.expert)
        with self.scheduler.lend(expert) as lent:
            self._sleep(10 ** rng.uniform(-5, -3))
            if not is_inner and rng.random() < 0.2:
                inner = (expert.layer + 1) % len(self.counts)
                if rng.random() < 0.7:
                    self.scheduler.announce(inner, np.array([[0, 1], [2, 1]]))
                self._borrow(rng, ExpertId(inner, rng.randrange(3)), is_inner=True)
            same = all(torch.equal(lent[n], w) for n, w in self.disk.weights[expert].items())
            self.world.check(same, f"{expert} was lent with other bits")

    @contextmanager
    def _checked_call(self, layer: int, ids: np.ndarray) -> Iterator[None]:
        """What one call may read, how long it may take, and what it leaves behind."""
        scheduler, task, log = self.scheduler, self.world.current, self.disk.log
        asked = Counter(ExpertId(layer, e) for e in np.unique(ids).tolist())
        first, began = len(log), self.world.now
        waits, seconds = scheduler.counters.waits.total, dict(task.seconds)
        counted = self._requests()
        try:
            yield
        except BaseException:
            self._left_behind |= set(asked)  # what a failed call had asked for still comes
            begun = {read.expert for read in log[first:]}
            self._yet_to_come |= {e for e in asked if scheduler.residency.is_loading(e)} - begun
            if not self.is_shared and not self.world.is_over:
                self.world.check(scheduler.residency.leased() == 0, "a failed call left a lease")
                self._check_calm()
            raise
        if self.is_shared:
            return
        check = self.world.check
        check(scheduler.residency.leased() == 0, "a call left a lease")
        self._check_calm()
        check(self._requests() - counted == len(asked), "hits and misses are not the distinct experts")
        came: set[ExpertId] = set()
        late = {e for e in self._yet_to_come if any(r.expert == e for r in log[first:])}
        self._yet_to_come -= late
        for read in (r for r in log[first:] if r.is_good):
            if read.expert in late:  # begun after this call, asked for by one that failed
                late.discard(read.expert)
                continue
            if read.is_guess:  # begun before the call asked, or for one that it has left
                continue
            check(read.expert not in came, f"{read.expert} is read again for the same call")
            came.add(read.expert)
        demanded = {r.expert for r in log[first:] if not r.is_guess}
        allowed = {*asked, *self._left_behind}
        check(demanded <= allowed, f"demanded without being asked for: {demanded - allowed}")
        spent = {kind: task.seconds[kind] - seconds[kind] for kind in seconds}
        slack = spent["lock"] + spent["stall"] + 1e-9
        lost = scheduler.counters.waits.total - waits
        if self.loaders:
            check(abs(lost - spent["wait"]) <= slack, f"{lost} s counted as waits, {spent} s were lost")
        limit = 1e6 if self.disk.faults.hanging else CALL_SECONDS_MAX
        check(self.world.now - began < limit, f"a call took {self.world.now - began:.1f} s")

    def _check_calm(self) -> None:
        starved: int = self.scheduler.residency._starved
        self.world.check(starved == 0, "the call is over and guesses still stand back for it")

    def _requests(self) -> int:
        c = self.scheduler.counters
        return c.hits_prefill + c.misses_prefill + c.hits_decode + c.misses_decode

    def reference(
        self, layer: int, hidden: torch.Tensor, ids: np.ndarray, weights: torch.Tensor
    ) -> torch.Tensor:
        """The layer with everything resident, written without any of the code under test: experts ascending."""
        module, total = self.modules[layer], torch.zeros(hidden.shape, dtype=torch.float32)
        for expert in range(self.counts[layer]):
            tokens, places = np.nonzero(ids == expert)
            for start in range(0, tokens.size, 256):
                token = torch.from_numpy(tokens[start : start + 256])
                share = weights[token, torch.from_numpy(places[start : start + 256])].unsqueeze(1)
                out = self._compute(module, self.disk.weights[ExpertId(layer, expert)], hidden[token])
                total.index_add_(0, token, out * share)
        return total

    @staticmethod
    def _compute(module: TinyExperts, weights: dict[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        up, down = weights["gate_up_proj" if module.has_gate else "up_proj"], weights["down_proj"]
        if not module.is_transposed:
            up, down = up.t(), down.t()
        inner = torch.mm(rows, up)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        return torch.mm(inner, down).add_(weights["down_proj_bias"])

    def _sleep(self, seconds: float) -> None:
        self.world.block("sleep", self.world.now + seconds, "sleep")

    # the end

    def check_counters(self) -> None:
        """The counters are those of the disk's own log."""
        world, loads, good = self.world, self.scheduler.loads, [r for r in self.disk.log if r.is_good]
        nbytes = sum(r.nbytes for r in good)
        world.check(loads["bytes_read"] == nbytes, f"{loads['bytes_read']} bytes counted, {nbytes} read")
        guessed = sum(r.nbytes for r in good if r.is_guess)
        world.check(loads["bytes_speculative"] == guessed, f"{loads['bytes_speculative']} guessed, {guessed}")
        residency = self.scheduler.residency
        world.check(residency.wasted_loads <= loads["speculative_loads"], "more waste than guesses")
        if not self.is_tiered:
            count = loads["demand_loads"] + loads["speculative_loads"]
            world.check(count == len(good), f"{count} loads counted, {len(good)} read")
            world.check(
                residency.wasted_bytes <= loads["bytes_speculative"], "more bytes wasted than guessed"
            )

    def close(self) -> None:
        """Close as a user does, within the deadline."""
        self.is_closing = True
        began = self.world.now
        self.scheduler.close()
        self.scheduler.close()
        seconds = self.world.now - began
        limit = 130.0 if self.disk.faults.hanging else CLOSE_SECONDS_MAX + CALL_SECONDS_MAX
        self.world.check(seconds <= limit, f"closing took {seconds:.1f} s")


class Simulation:
    """One seed: machine, models, interference."""

    def __init__(self, seed: int, keep_all: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(f"simulation {seed}")
        self.world = World(seed, keep_all)
        self.models: list[Model] = []
        self._is_done = False

    def run(self) -> World:
        """Run the seed to its end; SimulationFailure with the seed and the last steps."""
        try:
            # torch alone, whose bits the reference has
            with patch.object(kernels, "load", lambda: (None, "simulated")):
                self.world.run(self._work)
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt):
                raise
            steps = "\n".join(list(self.world.trace)[-60:])
            raise SimulationFailure(
                f"seed {self.seed}: {type(exc).__name__}: {exc}\n{steps}\n"
                f"again: python -m tests.sim.simulation --seed {self.seed} --trace"
            ) from exc
        return self.world

    def _work(self) -> None:
        world, rng = self.world, self.random
        spindle = Spindle(world, bytes_per_s=10 ** rng.uniform(5.0, 6.5))
        for index in range(2 if rng.random() < 0.25 else 1):
            self.models.append(Model(world, spindle, self.seed * 2 + index))
        self._plan_faults()
        drivers = [
            self._thread(f"driver-{m}-{d}", lambda model=model, d=d: model.drive(d))
            for m, model in enumerate(self.models)
            for d in range(2 if model.is_shared else 1)
        ]
        interference = self._thread("interference", self._interfere)
        for thread in drivers:
            thread.join()
        self._is_done = True
        interference.join()
        self._finish()

    def _thread(self, name: str, work: Callable[[], None]) -> SimThread:
        thread = SimThread(self.world, target=work, name=name)
        thread.start()
        return thread

    def _plan_faults(self) -> None:
        for model in self.models:
            faults, rng = model.disk.faults, model.random
            faults.error_share = rng.choice([0.0, 0.0, 0.0, 0.03, 0.2])
            faults.slow_share = rng.choice([0.0, 0.05])
            if rng.random() < 0.15:
                faults.broken.add(ExpertId(rng.randrange(len(model.counts)), 0))

    def _interfere(self) -> None:
        """Everything that others may do to a running model, at random times."""
        rng, world = self.random, self.world
        pace = rng.choice([0.002, 0.01, 0.05])
        has_close = rng.random() < 0.2
        for _ in range(rng.randint(0, 30)):
            world.block("sleep", world.now + rng.expovariate(1 / pace), "sleep")
            if self._is_done:
                return
            model = rng.choice(self.models)
            if has_close and rng.random() < 0.08:
                self._close_early(model)
            elif not model.is_closing:
                self._disturb(model, rng)

    def _close_early(self, model: Model) -> None:
        if self.random.random() < 0.3 and model.loaders:  # without loaders the caller itself would hang
            model.disk.faults.hanging.update(model.disk.weights)
        self.world.note("closes early")
        model.close()

    def _disturb(self, model: Model, rng: random.Random) -> None:
        scheduler, faults = model.scheduler, model.disk.faults
        kind = rng.choice(
            ["resize", "resize", "strategy", "policy", "foreign", "hang", "memory", "seed", "idle"]
        )
        self.world.note(f"interferes: {kind}")
        if kind == "resize":
            scheduler.resize(model.random_budget(rng))
        elif kind == "strategy":
            scheduler.set_strategy(rng.choice(list(STRATEGIES)))
        elif kind == "policy":
            scheduler.set_priority(rng.choice([None, RandomPolicy(rng.randrange(99))]))
        elif kind == "foreign":
            model.spindle.set_foreign(rng.choice([0.0, 0.0, 0.5, 0.9]))
        elif kind == "hang":
            faults.hanging.add(ExpertId(0, rng.randrange(model.counts[0])))
            self.world.block("sleep", self.world.now + 8.0, "sleep")
            faults.hanging.clear()
        elif kind == "memory" and not model.is_mended:
            faults.slots_left = rng.randint(0, 4)
            model.had_no_memory = True
        elif kind == "seed":
            scheduler._seed_residency()
        elif kind == "idle":
            scheduler.wait_idle(rng.choice([0.0, 0.01, 1.0]))

    def _finish(self) -> None:
        world = self.world
        for model in self.models:
            if model.is_closing:
                continue
            model.disk.faults.hanging.clear()
            model.spindle.set_foreign(0.0)
            if model.has_modules:
                model.scheduler.end_announcement()
            world.check(model.scheduler.wait_idle(100.0), "loads never end")
            world.check(model.scheduler.residency.leased() == 0, "a lease is left")
            model.check_counters()
        for model in self.models:
            model.close()
            model.disk.faults.hanging.clear()
        world.block("sleep", world.now + 20.0, "sleep")  # what hung at close has ended by now


def run_seed(seed: int, keep_all: bool = False) -> World:
    """Run one seed to its end."""
    return Simulation(seed, keep_all).run()


def main(arguments: list[str]) -> int:
    """One seed or a range of them; 1 if any failed."""
    parser = argparse.ArgumentParser(description="Run seeds of the simulation.")
    parser.add_argument("--seed", type=int, default=-1)
    parser.add_argument("--trace", action="store_true", help="print every step")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 100), metavar=("FROM", "TO"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    failed, began = 0, time.perf_counter()
    for seed in [options.seed] if options.seed >= 0 else range(*options.seeds):
        simulation = Simulation(seed, options.trace)
        try:
            simulation.run()
        except SimulationFailure as exc:
            failed += 1
            lines = str(exc).splitlines()
            print("\n".join(lines if options.seed >= 0 else lines[:2]))
        if options.trace:
            print("\n".join(simulation.world.trace))
    print(f"{failed} failed, {time.perf_counter() - began:.1f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
