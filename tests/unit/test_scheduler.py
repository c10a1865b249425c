"""Scheduler and its parts: data flow, ring, forecast, calendar, loader threads, warm-up."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import coop
from coop.adapters.transformers import find_experts
from coop.calendar import Calendar
from coop.dataflow import Flow
from coop.errors import BudgetError, ClosedError, CoopError, PrefetchError, RoutingError, StoreError
from coop.forecast import Forecast
from coop.ids import ExpertId
from coop.policy import unit_priority
from coop.ring import CACHE_LINE, RingBuffer, Segment
from coop.scheduler import Scheduler
from coop.staging import Staging
from coop.strategy import get_strategy
from tests.families import build_family

IDS = torch.arange(3, 43)[None]


# data flow


def ring() -> RingBuffer:
    return RingBuffer(2**16)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 99), st.randoms())
@settings(deadline=None)
def test_the_sum_undoes_the_gathering_in_whatever_order_units_end(
    tokens: int, top_k: int, seed: int, random: Any
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 8, generator=generator)
    ids = torch.stack([torch.randperm(6, generator=generator)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k, generator=generator)
    results = []
    for capacity in (2**16, 1):
        buffer = RingBuffer(capacity)
        flow = Flow(0, hidden, ids.numpy(), weights, 6, buffer)
        assert sum(unit.rows for unit in flow.units) == tokens * top_k
        for unit in random.sample(flow.units, len(flow.units)):
            flow.output(unit).copy_(flow.rows(unit))
            flow.add(unit)
        results.append(flow.result())
        flow.close()
        assert buffer.used_bytes == 0
    assert torch.equal(*results)
    assert torch.allclose(results[0], hidden * weights.sum(1, keepdim=True), atol=1e-5)


@pytest.mark.parametrize("bad", [-1, 6, 2**40])
def test_an_expert_outside_the_layer_is_refused_before_any_index(bad: int) -> None:
    with pytest.raises(RoutingError, match=f"layer 3: the router chose expert {bad} of 6"):
        Flow(3, torch.zeros(1, 8), np.array([[0, bad]]), torch.ones(1, 2), 6, ring())


def test_long_units_are_sliced_by_their_row_count_alone() -> None:
    hidden, ids = torch.randn(700, 8), np.zeros((700, 1), dtype=np.int64)
    flow = Flow(0, hidden, ids, torch.ones(700, 1), 6, ring())
    assert [(unit.start, unit.stop) for unit in flow.units] == [(0, 256), (256, 512), (512, 700)]
    assert [unit.index for unit in flow.units] == [0, 1, 2]


def test_an_expert_chosen_twice_by_one_token_is_summed_twice(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    scheduler = Scheduler.for_modules(find_experts(model))
    hidden, half = torch.randn(1, 32), torch.tensor([[0.5, 0.5]])
    twice = scheduler.execute(0, hidden, torch.tensor([[3, 3]]), half)
    once = scheduler.execute(0, hidden, torch.tensor([[3]]), torch.tensor([[1.0]]))
    assert torch.allclose(twice, once, atol=1e-6)


def test_a_call_without_tokens_returns_none(tmp_path: Path) -> None:
    scheduler = Scheduler.for_modules(find_experts(build_family(tmp_path, "mixtral")))
    empty = torch.zeros(0, 2, dtype=torch.int64)
    assert scheduler.execute(0, torch.zeros(0, 32), empty, empty.float()).shape == (0, 32)


# ring


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(0, 9)), max_size=60))
@settings(deadline=None)
def test_ring_segments_begin_on_a_cache_line_and_never_overlap_given_back_in_any_order(
    steps: list[tuple[int, int, int]],
) -> None:
    ring = RingBuffer(2000)
    live: list[tuple[Segment, torch.Tensor, float]] = []
    for number, (rows, width, which) in enumerate(steps):
        if which < len(live):
            ring.pop(live.pop(which)[0])
        segment, memory = ring.push(rows, width, torch.float32)
        assert memory.shape == (rows, width)
        assert all(row.data_ptr() % CACHE_LINE == 0 for row in memory)
        live.append((segment, memory.fill_(number), float(number)))
        inside = [s for s, _, _ in live if s.start >= 0]
        assert ring.used_bytes == sum(s.nbytes for s in inside) <= ring.capacity_bytes
        assert all(s.start + s.nbytes <= ring.capacity_bytes for s in inside)
    assert all((memory == mark).all() for _, memory, mark in live)


def test_a_segment_larger_than_the_ring_is_served_and_counted() -> None:
    ring = RingBuffer(128)
    segment, memory = ring.push(100, 100, torch.float32)
    assert memory.shape == (100, 100)
    assert ring.overflows == 1
    assert ring.fill == 0.0
    ring.pop(segment)


# forecast and calendar


def test_the_forecast_prefers_what_was_used_lately_and_sums_to_top_k() -> None:
    forecast = Forecast(1, 4, get_strategy("Balanced"))
    for _ in range(400):
        forecast.observe(0, np.array([[0, 1]]))
    assert forecast.likelihood.sum() == pytest.approx(2.0, abs=1e-3)
    for _ in range(20):
        forecast.observe(0, np.array([[2, 3]]))
    assert forecast.likelihood[0, 0] > 0.3
    for _ in range(40):
        forecast.observe(0, np.array([[2, 3]]))
    assert set(forecast.rank(0)[:2]) == {2, 3}


def test_a_prompt_in_one_call_teaches_the_same_as_its_tokens_one_by_one() -> None:
    tokens = np.random.default_rng(0).integers(0, 6, (50, 2))
    # a token that chooses an expert twice counts it once when it is alone, as no router does
    distinct = tokens[tokens[:, 0] != tokens[:, 1]]
    whole, single = (Forecast(1, 6, get_strategy("Balanced")) for _ in range(2))
    whole.observe(0, distinct)
    for token in distinct:
        single.observe(0, token[None])
    assert np.allclose(whole.likelihood, single.likelihood)


def test_the_calendar_follows_a_change_of_speed_and_tells_the_gap() -> None:
    calendar = Calendar(2)
    for _ in range(50):
        calendar.record_compute(0, 1, 0.001)
        calendar.record_between(0, 0.002)
        calendar.record_load(0, 1000, 0.005)
    assert calendar.gap_ms(0, 2, 1) == pytest.approx(4.0)
    assert calendar.load_ms(2000) == pytest.approx(10.0)
    for _ in range(60):
        calendar.record_load(0, 1000, 0.001)
    assert calendar.load_ms(1000) == pytest.approx(1.0, rel=0.05)
    assert calendar.table()[0]["compute_ms_rows_1"] == pytest.approx(1.0)


def test_staging_is_as_deep_as_keeps_the_disk_busy_while_others_place() -> None:
    calendar = Calendar(1)
    assert calendar.staging_depth(4) == 0
    for _ in range(50):
        calendar.record_load(0, 1000, 0.008, 0.004)  # half of a load is reading
    assert calendar.staging_depth(1) == 2
    assert calendar.staging_depth(4) == 8


def test_a_demand_never_waits_for_a_window_that_a_guess_holds_and_the_depth_is_kept() -> None:
    staging = Staging(4096, demands=2)
    with staging.window(True), staging.window(True), staging.window(False):
        staging.set_depth(1)
        taken = threading.Event()

        def load() -> None:
            with staging.window(False):
                taken.set()

        second = threading.Thread(target=load)
        second.start()
        assert not taken.wait(0.05)  # one demanded load at a time now
        staging.set_depth(99)
        assert staging.depth == 2
        assert taken.wait(5)
        second.join(5)
    assert staging.windows == 4


# loader threads


def test_an_error_in_a_loader_thread_reaches_the_call_that_waits_and_the_next_call_works(
    tmp_path: Path,
) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="30%", prefetch=False) as runtime:
        store, real = runtime.scheduler._store, runtime.scheduler._store.load
        expected = runtime.model(input_ids=IDS).logits

        def broken(expert: ExpertId, slot: Any, window: Any = None) -> int:
            raise StoreError("shard", "w1", "is gone")

        store.load = broken  # type: ignore[method-assign]
        with pytest.raises(StoreError, match="is gone"):
            runtime.model(input_ids=IDS)
        assert runtime.scheduler.wait_idle(5)
        assert runtime.scheduler.residency.leased() == 0
        store.load = real  # type: ignore[method-assign]
        assert torch.equal(expected, runtime.model(input_ids=IDS).logits)


def test_loaders_compute_alone_and_leave_the_threads_of_everybody_else_as_they_were(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with coop.attach(tmp_path, budget="30%") as runtime:
            seen, real = [], runtime.scheduler._store.load

            def note(expert: ExpertId, slot: Any, window: Any = None) -> int:
                seen.append(torch.get_num_threads())
                return real(expert, slot, window)

            runtime.scheduler._store.load = note  # type: ignore[method-assign]
            runtime.model(input_ids=IDS)
            later: list[int] = []
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join(10)
            assert set(seen) == {1}
            assert torch.get_num_threads() == 2 and later == [2]
    finally:
        torch.set_num_threads(before)


def test_a_demand_is_served_while_every_guess_hangs(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="100%") as runtime:
        expected = runtime.model(input_ids=IDS).logits
    with coop.attach(tmp_path, budget="100%", strategy="SpeedFirst") as runtime:
        scheduler, release, hanging = runtime.scheduler, threading.Event(), threading.Semaphore(0)
        real = scheduler._store.load

        def load(expert: ExpertId, slot: Any, window: Any = None) -> int:
            if threading.current_thread().name.startswith("coop-guess"):
                hanging.release()
                assert release.wait(60)
            return real(expert, slot, window)

        scheduler._store.load = load  # type: ignore[method-assign]
        scheduler._prefetcher.seed([ExpertId(2, e) for e in range(scheduler.strategy.guesses_in_flight)])
        for _ in range(scheduler.strategy.guesses_in_flight):
            assert hanging.acquire(timeout=10)
        # layers 0 and 1 are served by demands alone; layer 2 joins the guesses, which then end
        layer_two = []
        handle = runtime.model.model.layers[2].register_forward_pre_hook(
            lambda *_: (layer_two.append(scheduler.loads["demand_loads"]), release.set())[1]
        )
        assert torch.equal(expected, runtime.model(input_ids=IDS).logits)
        handle.remove()
        assert 8 < layer_two[0] <= 16


def test_a_prompt_streams_the_next_layer_in_while_this_one_computes(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="100%") as runtime:
        scheduler, begun = runtime.scheduler, threading.Event()
        real_load, real_add = scheduler._store.load, Flow.result

        def load(expert: ExpertId, slot: Any, window: Any = None) -> int:
            if expert.layer == 1:
                begun.set()
            return real_load(expert, slot, window)

        def result(flow: Flow, *args: Any) -> torch.Tensor:
            assert begun.wait(10)  # layer 0 is not over, and the stream of layer 1 has begun
            return real_add(flow, *args)

        scheduler._store.load = load  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Flow, "result", result)
            runtime.model(input_ids=IDS)
        assert runtime.stats().bytes_speculative > 0


@pytest.mark.parametrize(("budget", "share"), [("30%", 0.88), ("50%", 0.94), ("70%", 0.98)])
def test_a_long_prompt_leaves_behind_what_decoding_will_want(
    budget: str, share: float, tmp_path: Path
) -> None:
    build_family(tmp_path, "mixtral", num_local_experts=32, num_experts_per_tok=4, num_hidden_layers=6)
    with coop.attach(tmp_path, budget=budget) as runtime:
        runtime.model(input_ids=torch.randint(3, 96, (1, 300), generator=torch.Generator().manual_seed(0)))
        scheduler = runtime.scheduler
        assert scheduler.wait_idle(10)
        resident, likelihood = scheduler.residency.resident(), scheduler.forecast.likelihood
        best = np.sort(likelihood, axis=None)[::-1][: int(resident.sum())].sum()
        # the few that were streamed last may still be there in place of something likelier
        assert likelihood[resident].sum() >= share * best


def test_guesses_fill_the_measured_gap_and_no_more(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="50%", prefetch=False) as runtime:
        scheduler = runtime.scheduler
        nbytes = scheduler.geometry[1].slot_bytes
        scheduler.calendar = Calendar(3)
        scheduler.calendar.record_load(0, nbytes, 0.002)
        scheduler.calendar.record_between(0, 0.003)
        scheduler.calendar.record_compute(0, 1, 0.001)
        counts = {}
        for name in ("SpeedFirst", "Balanced", "MemoryFirst"):
            scheduler.set_strategy(name)
            counts[name] = scheduler._guesses(0, 1, experts=2, rows=1, is_streaming=False)
        # the gap is 3 ms + 2 x 1 ms, a load 2 ms; SpeedFirst may use it four times over, up to its limit
        assert counts == {"SpeedFirst": 8, "Balanced": 2, "MemoryFirst": 0}


def test_above_the_rings_fill_only_the_unit_that_the_sum_waits_for_may_run(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    scheduler = Scheduler.for_modules(find_experts(build_family(tmp_path, "mixtral")))
    scheduler.ring = RingBuffer(20 * 128)  # two units of ten rows
    hidden, ids = torch.randn(40, 32), np.repeat(np.arange(4), 10)[:, None]
    flow = Flow(0, hidden, ids, torch.ones(40, 1), 8, scheduler.ring)
    first, second, third, fourth = flow.units

    class Coming:
        is_short = False
        head_comes = True

        def is_coming(self, expert: ExpertId) -> bool:
            return self.head_comes and expert == first.expert

    demand: Any = Coming()
    assert scheduler._pick([third, fourth], flow, demand) in ([third], [fourth])
    for unit in (third, fourth):
        flow.output(unit)
    assert scheduler.ring.fill >= scheduler.strategy.ring_fill
    assert scheduler._pick([second], flow, demand) == []  # better wait for the first
    assert scheduler._pick([second, first], flow, demand) == [first]
    demand.head_comes = False  # it found no room: running the second is what frees some
    assert scheduler._pick([second], flow, demand) == [second]
    flow.close()


def test_the_longest_unit_runs_first_and_the_shortest_while_memory_is_short() -> None:
    assert unit_priority(9, 0.0, False) > unit_priority(8, 0.0, False)
    assert unit_priority(1, 3.0, False) > unit_priority(1, 2.0, False)
    assert unit_priority(1, 2.0, True) > unit_priority(1, 3.0, True)


def test_a_foreign_exception_in_a_loader_is_wrapped_with_the_expert(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="30%", prefetch=False) as runtime:

        def broken(expert: ExpertId, slot: Any, window: Any = None) -> int:
            raise ValueError("bits")

        runtime.scheduler._store.load = broken  # type: ignore[method-assign]
        with pytest.raises(PrefetchError, match=r"loading ExpertId.* failed: bits"):
            runtime.model(input_ids=IDS)


def test_a_failed_guess_is_counted_and_changes_no_token(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="100%") as runtime:
        expected = runtime.model(input_ids=IDS).logits
    with coop.attach(tmp_path, budget="100%") as runtime:
        real = runtime.scheduler._store.load
        failed: set[ExpertId] = set()

        def flaky(expert: ExpertId, slot: Any, window: Any = None) -> int:
            if (
                threading.current_thread().name.startswith("coop")
                and expert.layer == 2
                and expert not in failed
            ):
                failed.add(expert)
                raise OSError("transient")
            return real(expert, slot)

        runtime.scheduler._store.load = flaky  # type: ignore[method-assign]
        runtime.scheduler._prefetcher.seed([ExpertId(2, e) for e in range(8)])
        assert runtime.scheduler.wait_idle(5)
        assert runtime.scheduler.loads["speculative_failed"] == 8
        assert torch.equal(expected, runtime.model(input_ids=IDS).logits)


def test_closing_does_not_wait_for_a_read_that_hangs(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    runtime = coop.attach(tmp_path, budget="100%")
    release = threading.Event()

    def hangs(expert: ExpertId, slot: Any, window: Any = None) -> int:
        release.wait(30)
        return 0

    runtime.scheduler._store.load = hangs  # type: ignore[method-assign]
    runtime.scheduler._prefetcher.seed([ExpertId(0, 0)])
    time.sleep(0.05)
    began = time.monotonic()
    runtime.close()
    assert time.monotonic() - began < 10
    release.set()


def test_an_interrupt_between_reserving_and_loading_leaves_nothing_behind(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="30%", prefetch=False) as runtime:
        expected = runtime.model(input_ids=IDS).logits
        prefetcher, real = runtime.scheduler._prefetcher, runtime.scheduler._prefetcher.demand

        def interrupted(batch: Any) -> None:
            raise KeyboardInterrupt

        prefetcher.demand = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            runtime.model(input_ids=IDS)
        prefetcher.demand = real  # type: ignore[method-assign]
        assert runtime.scheduler.residency.leased() == 0
        assert torch.equal(expected, runtime.model(input_ids=IDS).logits)


@pytest.mark.parametrize("place", ["reserve", "_evict", "_take_slot", "release", "publish"])
def test_ctrl_c_at_any_moment_of_a_call_leaves_the_books_straight(place: str, tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="30%", prefetch=False) as runtime:
        expected = runtime.model(input_ids=IDS).logits
        residency: Any = runtime.scheduler.residency
        real, calls = getattr(residency, place), iter(range(100_000))

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == 3:
                signal.raise_signal(signal.SIGINT)  # delivered to the main thread, which runs the call
            return real(*args, **kwargs)

        setattr(residency, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            runtime.model(input_ids=IDS)
        setattr(residency, place, real)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert runtime.scheduler.wait_idle(10)
        assert residency.leased() == 0
        assert torch.equal(expected, runtime.model(input_ids=IDS).logits)


def test_ctrl_c_ends_a_call_that_waits_for_the_disk(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="30%", prefetch=False) as runtime:
        release, real, loads = threading.Event(), runtime.scheduler._store.load, iter(range(100_000))

        def hangs(expert: ExpertId, slot: Any, window: Any = None) -> int:
            if next(loads) == 0:
                signal.raise_signal(signal.SIGINT)
            assert release.wait(30)
            return real(expert, slot, window)

        runtime.scheduler._store.load = hangs  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            runtime.model(input_ids=IDS)
        release.set()
        assert runtime.scheduler.wait_idle(10)
        assert runtime.scheduler.residency.leased() == 0


def test_a_gradient_is_refused_and_so_is_saving_what_lacks_its_experts(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="30%") as runtime:
        embedded = torch.randn(1, 5, 32, requires_grad=True)
        with pytest.raises(CoopError, match="inference only"):
            runtime.model(inputs_embeds=embedded)
        with torch.no_grad():
            assert runtime.model(inputs_embeds=embedded).logits.isfinite().all()
        with pytest.raises(CoopError, match="saving it would lose them"):
            runtime.model.save_pretrained(tmp_path / "copy")


def test_what_is_refused_leaves_a_live_model_as_it_was(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")

    class Bad:
        def adjust(self, layer: int, likelihood: Any) -> Any:
            return likelihood[:1]

    with pytest.raises(CoopError, match="priority policy"):
        coop.attach(model, tmp_path, budget="30%", policy=Bad())
    assert model(input_ids=IDS).logits.isfinite().all()
    coop.attach(model, tmp_path, budget="30%").close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"strategy": []},
        {"dtype": 3},
        {"max_context": "8"},
        {"max_context": True},
        {"device": None},
        {"say": 3},
    ],
    ids=str,
)
def test_an_argument_of_the_wrong_type_is_named(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CoopError, match=f"attach: {next(iter(wrong))}="):
        coop.attach(tmp_path, **wrong)


def test_closing_ends_a_call_that_waits_in_another_thread(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    runtime = coop.attach(tmp_path, budget="30%", prefetch=False)
    started, release = threading.Event(), threading.Event()
    ended: list[BaseException] = []

    def hangs(expert: ExpertId, slot: Any, window: Any = None) -> int:
        started.set()
        release.wait(30)
        return 0

    def call() -> None:
        try:
            runtime.model(input_ids=IDS)
        except ClosedError as exc:
            ended.append(exc)

    runtime.scheduler._store.load = hangs  # type: ignore[method-assign]
    caller = threading.Thread(target=call)
    caller.start()
    assert started.wait(10)
    runtime.close()
    caller.join(10)
    release.set()
    assert len(ended) == 1


def test_memory_that_cannot_be_had_is_a_refused_guess_and_a_named_demand(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="100%") as runtime:
        residency = runtime.scheduler.residency

        def none_left(layer: int) -> Any:
            raise RuntimeError("cannot allocate memory")

        real, residency._new_slot = residency._new_slot, none_left
        with pytest.raises(BudgetError, match="lower the budget"):
            runtime.model(input_ids=IDS)
        assert runtime.scheduler.wait_idle(5)
        assert residency.used_bytes == 0
        residency._new_slot = real
        assert runtime.model(input_ids=IDS).logits.isfinite().all()


def test_a_budget_below_one_expert_is_refused_while_running_too(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="50%") as runtime, pytest.raises(BudgetError, match="one expert needs"):
        runtime.scheduler.residency.resize(100)


def test_embeddings_in_place_of_ids_are_prefill_too(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="50%", prefetch=False) as runtime:
        runtime.scheduler.is_prefill = False
        runtime.model(inputs_embeds=torch.randn(1, 20, 32))
        assert runtime.stats().misses_prefill > 0
        assert runtime.stats().misses_decode == 0


def test_a_closed_runtime_refuses_to_run_and_closes_twice_in_peace(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    before = set(threading.enumerate())
    runtime = coop.attach(tmp_path, budget="100%")
    runtime.close()
    runtime.close()
    assert not set(threading.enumerate()) - before
    with pytest.raises(ClosedError, match="attach again"):
        runtime.model(input_ids=IDS)


# warm-up


def test_the_warm_up_times_every_expert_and_touches_no_random_state(tmp_path: Path) -> None:
    for family in ("mixtral", "gpt_oss", "nemotron_h"):
        model = build_family(tmp_path / family, family)
        before = torch.get_rng_state()
        report = Scheduler.for_modules(find_experts(model)).warmup(row_counts=(1, 4), repeats=1)
        assert torch.equal(before, torch.get_rng_state())
        layers = len(find_experts(model))
        assert report.compute_ms.shape == (layers, 8, 2)
        assert (report.compute_ms > 0).all()
        assert report.experts_done == layers * 8


def test_a_warm_up_out_of_time_leaves_the_rest_unmeasured(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    report = Scheduler.for_modules(find_experts(model)).warmup(row_counts=(1,), repeats=1, max_seconds=0.0)
    assert report.experts_done == 0
    assert np.isnan(report.compute_ms).all()


def test_the_warm_up_runs_through_the_disk_runtime_within_its_budget(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="20%") as runtime:
        report = runtime.scheduler.warmup(row_counts=(1,), repeats=1)
        assert report.experts_done == 24
        assert runtime.stats().resident_bytes_max <= runtime.plan.budget_bytes
        assert runtime.scheduler.residency.leased() == 0
