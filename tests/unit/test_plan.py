"""Plan and budget: one dial, refused with the smallest that runs."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coop
from coop import topology
from coop.ctu import SLICE_ROWS
from coop.devices import Memory
from coop.errors import BudgetError
from coop.plan import Plan, format_bytes, format_seconds, parse_budget
from coop.store import LayerGeometry
from coop.strategy import ADAPTATIONS, STRATEGIES, Strategy, get_strategy
from coop.topology import Disk, Origin, Rate, Topology
from tests.families import build_family
from tests.unit.profiles import build_profile

MIB, GIB = 2**20, 2**30
GEOMETRY = (LayerGeometry(8, 2, 3 * MIB, 0), LayerGeometry(16, 4, 2 * MIB, 1))  # 24 + 32 MiB; top-k 6 and 8
RATES = (1.0 * GIB, 1.5 * GIB, 2.0 * GIB, 2.01 * GIB)
FREE = 10 * GIB


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1024", 1024),
        ("6GiB", 6 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("500MB", 500_000_000),
        ("2mib", 2 * 2**20),
        ("50%", 500),
        ("12.5%", 125),
        ("100%", 1000),
        ("auto", 777),
        (4096, 4096),
    ],
)
def test_budgets_are_read_as_people_write_them(text: str | int, nbytes: int) -> None:
    assert parse_budget(text, expert_bytes=1000, auto_bytes=777) == nbytes


@pytest.mark.parametrize(
    "text", ["", "-1", "nan", "inf", "1e9", "6XB", "GiB", "50 %%", "101%", "0x10", "6 Gi B"]
)
def test_other_budgets_are_refused_with_the_forms_that_work(text: str) -> None:
    with pytest.raises(BudgetError, match="budget"):
        parse_budget(text, expert_bytes=1000, auto_bytes=777)


@given(st.text(max_size=30))
def test_no_text_makes_the_budget_parser_fail_otherwise(text: str) -> None:
    with contextlib.suppress(BudgetError):
        assert parse_budget(text, 1000, 777) >= 0


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (2**20, "1.0 MiB"), (3 * 2**29, "1.5 GiB")]
)
def test_bytes_are_shown_in_the_unit_that_fits(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_a_budget_below_top_k_is_refused_with_the_smallest_that_runs_and_that_one_runs(
    tmp_path: Path,
) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="100%") as runtime:
        smallest = runtime.plan.smallest_bytes
    with pytest.raises(BudgetError, match=rf"layer 0 needs 2 x .*the smallest that runs is {smallest} bytes"):
        coop.attach(tmp_path, budget=smallest - 1)
    with coop.attach(tmp_path, budget=smallest) as runtime:
        runtime.model(input_ids=torch.arange(3, 50)[None])
        assert runtime.stats().resident_bytes_max <= smallest
        assert "below the experts of one token" in " ".join(runtime.plan.warnings)


def test_a_bare_small_number_is_taken_for_a_forgotten_percent_sign(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with pytest.raises(BudgetError, match=r"did you mean 50%\?"):
        coop.attach(tmp_path, budget="50")


def test_a_live_model_keeps_its_weights_when_the_budget_is_refused(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    with pytest.raises(BudgetError):
        coop.attach(model, tmp_path, budget=1)
    assert model(input_ids=torch.arange(3, 9)[None]).logits.isfinite().all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_puts_its_own_numbers_in_force(strategy: str, tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="auto", strategy=strategy) as runtime:
        assert runtime.scheduler.strategy is STRATEGIES[strategy]
        assert strategy in runtime.plan.render()
        runtime.model(input_ids=torch.arange(3, 50)[None])
        assert runtime.scheduler.wait_idle(5)
        guesses = runtime.scheduler.loads["speculative_loads"]
    assert (guesses == 0) == (STRATEGIES[strategy].prefetch_experts == 0)


def test_without_prefetch_nothing_is_read_that_was_not_asked_for(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="100%", prefetch=False) as runtime:
        runtime.model(input_ids=torch.arange(3, 50)[None])
        assert runtime.scheduler.wait_idle(5)
        assert runtime.scheduler.loads["speculative_loads"] == 0
        assert "prefetch off" in runtime.plan.render()


def test_a_prompt_fetches_each_expert_at_most_once_for_each_layer(tmp_path: Path) -> None:
    build_family(tmp_path, "qwen3_moe")
    for budget in ("20%", "50%"):
        with coop.attach(tmp_path, budget=budget, prefetch=False) as runtime:
            runtime.model(input_ids=torch.randint(3, 96, (1, 200)), use_cache=False)
            stats, loads = runtime.stats(), runtime.scheduler.loads
        assert loads["demand_loads"] == stats.misses_prefill <= 3 * 8


def machine(free_bytes: int = FREE, **changes: Any) -> Topology:
    """A made-up machine with a disk that is fastest at a queue depth of 4."""
    known = {
        "processor": "made up",
        "cores": 2,
        "threads": 2,
        "memory_available_bytes": free_bytes,
        "ram": Rate(30.0 * GIB, Origin.CACHED),
        "disk": Disk(rates=RATES, origin=Origin.MEASURED, read_bytes=MIB, is_direct=True),
    }
    return Topology(**(known | changes))


def plan_for(budget: str | int, strategy: str = "Balanced", **changes: Any) -> Plan:
    """A plan of the made-up model on the made-up machine."""
    given = {
        "geometry": GEOMETRY,
        "topology": machine(),
        "strategy": STRATEGIES[strategy],
        "profile": None,
        "dense_bytes": 700 * MIB,
        "kv_cache_bytes": 100 * MIB,
        "max_context": 4096,
        "row_bytes": 2048,
        "window_bytes": MIB,
        "adapter_bytes": 5 * MIB,
    }
    return Plan.derive(budget, **(given | changes))


def test_auto_is_what_is_free_less_everything_that_is_still_to_come() -> None:
    room = 200 * MIB
    geometry = (LayerGeometry(64, 2, 3 * MIB, 0), LayerGeometry(64, 2, 13 * MIB, 1))
    ring, staging = 2 * 64 * 2048, (4 + 2 + 3) * MIB
    ring = max(ring, 256 * 2048)  # one slice
    taken = 100 * MIB + ring + staging + 3 * MIB
    plan = plan_for(
        "auto",
        geometry=geometry,
        topology=machine(taken + 256 * MIB + room),
        pending_adapter_bytes=3 * MIB,
    )
    assert plan.ring_bytes == ring and plan.staging_bytes == staging
    assert plan.room.margin_bytes == 256 * MIB
    assert plan.budget_bytes == int(room * 0.7)
    assert plan.total_bytes == taken + int(room * 0.7)
    assert (
        "auto: 568.5 MiB free - 100.0 MiB KV cache - 512.0 KiB ring - 9.0 MiB staging - 3.0 MiB adapter "
        "- 256.0 MiB margin = 200.0 MiB, of which Balanced takes up to 70%, and no more than all experts: "
        "140.0 MiB" in plan.render()
    )
    assert "auto:" not in plan_for("50%").render()


def test_on_a_large_machine_auto_leaves_a_share_of_what_is_free() -> None:
    geometry = (LayerGeometry(1000, 2, GIB, 0),)
    plan = plan_for("AUTO ", geometry=geometry, topology=machine(100 * GIB), window_bytes=0, kv_cache_bytes=0)
    assert plan.room.margin_bytes == 5 * GIB
    assert plan.budget_bytes == int((95 * GIB - plan.ring_bytes) * 0.7)
    assert plan_for("auto").budget_bytes == plan_for("auto").expert_bytes  # and takes no more than there is


def test_auto_counts_the_limit_of_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "max").write_text(str(900 * MIB))
    (tmp_path / "current").write_text(str(500 * MIB))
    monkeypatch.setattr(topology, "_cgroup_files", lambda: [(tmp_path / "max", tmp_path / "current")])
    plan = plan_for("auto", topology=topology.measure([]))
    assert plan.room.free_bytes == 400 * MIB
    left_bytes = (400 - 256 - 100) * MIB - plan.ring_bytes - plan.staging_bytes
    assert plan.budget_bytes == int(left_bytes * 0.7)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kv_cache_bytes", [0, 100 * MIB, 20 * GIB])
def test_auto_without_room_says_what_is_free_and_what_is_needed_and_that_much_runs(
    strategy: str, kv_cache_bytes: int
) -> None:
    with pytest.raises(
        BudgetError, match=r"budget auto: 260.0 MiB free .*leaves .*layer 1 needs 4 x"
    ) as refused:
        plan_for("auto", strategy, topology=machine(260 * MIB), kv_cache_bytes=kv_cache_bytes)
    found = re.search(r"takes (\d+) bytes .*the smallest that runs is (\d+) bytes", str(refused.value))
    assert found is not None
    needed, smallest = int(found.group(1)), int(found.group(2))
    plan = plan_for("auto", strategy, topology=machine(needed), kv_cache_bytes=kv_cache_bytes)
    assert smallest <= plan.budget_bytes <= smallest + 8
    with pytest.raises(BudgetError):
        plan_for("auto", strategy, topology=machine(needed - 32), kv_cache_bytes=kv_cache_bytes)
    assert plan_for(smallest, strategy, topology=machine(260 * MIB)).budget_bytes == smallest


def test_every_number_of_the_plan_is_shown() -> None:
    for memory in Memory:
        plan = plan_for(
            "50%",
            "SpeedFirst",
            memory=memory,
            profile=build_profile(),
            topology=machine(device_available_bytes=FREE, link=Rate(24.0 * GIB, Origin.MEASURED)),
        )
        shown = plan.render()
        for field in dataclasses.fields(Plan):
            value = getattr(plan, field.name)
            if field.name == "host_tier_bytes" and memory is not Memory.DEVICE:
                assert value == 0
            elif field.name.endswith("_bytes"):
                assert format_bytes(value) in shown, field.name
            elif field.name.endswith("_seconds"):
                assert format_seconds(value) in shown, field.name
            elif isinstance(value, int) and not isinstance(value, bool):
                assert re.search(rf"(?<![\d.]){value}(?![\d.])", shown), field.name
        for rate in (f"{format_bytes(2 * GIB)}/s (measured)", f"{format_bytes(30 * GIB)}/s (cached)"):
            assert rate in shown
        assert ("24.0 GiB/s (measured)" in shown) == (memory is Memory.DEVICE)
        assert f"SpeedFirst on {memory}" in shown and "warning" not in shown


def test_loader_threads_are_the_queue_depth_and_two_that_place_and_guesses_come_on_top() -> None:
    for depth, loaders in ((1, 3), (2, 4), (4, 6), (8, 10)):
        rates = tuple(1e9 if d < depth else 2e9 for d in (1, 2, 4, 8))
        disk = Disk(rates=rates, origin=Origin.MEASURED)
        plan = plan_for("50%", "SpeedFirst", topology=machine(disk=disk))
        assert (plan.loader_threads, plan.guess_threads) == (loaders, 3)
        assert (plan.staging_segments, plan.staging_bytes) == (loaders + 3, (loaders + 3) * MIB)
    plan = plan_for("50%", "SpeedFirst", has_prefetch=False)
    assert (plan.guess_threads, plan.staging_segments) == (0, 6)


def test_reading_times_come_from_the_disk_and_the_stored_size() -> None:
    plan = plan_for("50%")
    assert plan.expert_seconds == pytest.approx(3 * MIB / RATES[0])
    assert plan.cycle_seconds == pytest.approx(14 * MIB / RATES[2])
    half = plan_for("50%", stored_bytes=plan.expert_bytes // 2)
    assert half.cycle_seconds == pytest.approx(plan.cycle_seconds / 2)


def test_what_was_not_measured_is_said_to_be_so_and_the_default_depth_is_used() -> None:
    plan = plan_for("50%", topology=machine(disk=Disk(read_bytes=MIB), ram=Rate()))
    assert plan.loader_threads == 6 and plan.expert_seconds == plan.cycle_seconds == 0.0
    assert (
        "disk not measured in buffered reads of 1.0 MiB at queue depth 4, RAM not measured" in plan.render()
    )
    assert "takes" not in plan.render().splitlines()[-1]


def test_the_ring_holds_a_slice_at_least_and_what_the_profile_saw() -> None:
    assert plan_for("50%", row_bytes=300).ring_bytes == SLICE_ROWS * 320
    assert plan_for("50%", row_bytes=2**20).ring_bytes == SLICE_ROWS * 2**20
    profile = build_profile()
    seen = int(profile.rows[:, 1].max())
    wide = plan_for("50%", row_bytes=2**13, profile=profile).ring_bytes
    assert wide == max(2 * seen * 16 * 2**13, SLICE_ROWS * 2**13)


def test_a_context_that_cannot_fit_is_warned_of() -> None:
    tight = machine(GIB)
    shown = plan_for("50%", topology=tight, kv_cache_bytes=2 * GIB, max_context=131072).render()
    assert "warning: the KV cache of 131072 tokens (2.0 GiB) does not fit in the 986.5 MiB" in shown
    shown = plan_for("100%", topology=machine(130 * MIB), kv_cache_bytes=MIB).render()
    assert "warning" not in shown
    shown = plan_for("100%", topology=machine(50 * MIB), kv_cache_bytes=0).render()
    assert "warning: the plan takes 65.5 MiB and 50.0 MiB are free" in shown


def test_a_device_pays_for_its_slots_and_the_host_for_what_stands_behind_them() -> None:
    geometry = (LayerGeometry(64, 2, GIB, 0),)
    here = machine(40 * GIB, device_available_bytes=20 * GIB)
    plan = plan_for("auto", geometry=geometry, memory=Memory.DEVICE, topology=here)
    assert plan.budget_bytes == int((19 * GIB - 100 * MIB - plan.ring_bytes) * 0.7)
    assert plan.host_tier_bytes == int((38 * GIB - plan.staging_bytes) * 0.5)
    everything = plan_for("100%", memory=Memory.DEVICE, topology=here)
    assert everything.host_tier_bytes == 0  # nothing is left to stand behind
    assert plan_for("50%", topology=here).host_tier_bytes == 0
    shared = plan_for("auto", geometry=geometry, memory=Memory.UNIFIED, topology=here)
    assert shared.room.free_bytes == 20 * GIB
    assert shared.budget_bytes == int(shared.room.left_bytes * 0.7 * 0.75)


@pytest.mark.parametrize("memory", Memory)
@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_is_a_valid_frozen_set_of_numbers_on_each_machine(name: str, memory: Memory) -> None:
    strategy = get_strategy(name).adapted(memory)
    assert strategy.name == name and strategy.why
    for field in dataclasses.fields(Strategy):
        value = getattr(strategy, field.name)
        assert isinstance(value, str) or 0 <= value < 1000
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(strategy, field.name, value)
    shares = (strategy.seed_share, strategy.transition_weight, strategy.host_share)
    assert all(0 <= share <= 1 for share in shares)
    assert 0 < strategy.auto_share <= 0.9 and 0 < strategy.ring_fill < 1 and strategy.half_life_tokens > 0
    assert (strategy.guesses_in_flight == 0) == (strategy.prefetch_experts == 0) == (strategy.gap_factor == 0)
    assert get_strategy(name) is STRATEGIES[name]  # the preset itself is as it was


@pytest.mark.parametrize("memory", Memory)
def test_speed_is_at_least_as_eager_as_balance_and_balance_as_memory(memory: Memory) -> None:
    speed, balance, thrift = (
        get_strategy(n).adapted(memory) for n in ("SpeedFirst", "Balanced", "MemoryFirst")
    )
    for name in (
        "seed_share",
        "prefetch_experts",
        "gap_factor",
        "guesses_in_flight",
        "guess_beside_demand",
        "ring_fill",
        "auto_share",
        "host_share",
    ):
        assert getattr(speed, name) >= getattr(balance, name) >= getattr(thrift, name), name


def test_strategies_adapt_to_what_lies_behind_the_slots() -> None:
    assert set(ADAPTATIONS) == {memory.name for memory in Memory}
    for preset in STRATEGIES.values():
        assert preset.adapted(Memory.HOST) is preset
        assert preset.adapted(Memory.DEVICE).prefetch_experts == 2 * preset.prefetch_experts
        assert preset.adapted(Memory.UNIFIED).auto_share == 0.75 * preset.auto_share


def test_a_strategy_that_guesses_nothing_says_so() -> None:
    assert "no prefetch" in plan_for("50%", "MemoryFirst").render()
    assert "up to 0" not in plan_for("50%", "MemoryFirst").render()


@given(
    free=st.integers(0, 2**42),
    device=st.integers(0, 2**40),
    kv=st.integers(0, 2**36),
    window=st.integers(0, 2**28),
    pending=st.integers(0, 2**30),
    slots=st.lists(st.integers(1, 2**30), min_size=1, max_size=4),
    rates=st.lists(st.floats(1e5, 1e13), max_size=4),
    memory=st.sampled_from(Memory),
    strategy=st.sampled_from(sorted(STRATEGIES)),
)
def test_what_auto_plans_never_exceeds_what_is_free(
    free: int,
    device: int,
    kv: int,
    window: int,
    pending: int,
    slots: list[int],
    rates: list[float],
    memory: Memory,
    strategy: str,
) -> None:
    here = machine(free, device_available_bytes=device, disk=Disk(rates=tuple(rates), origin=Origin.MEASURED))
    geometry = tuple(LayerGeometry(32, 4, nbytes, i) for i, nbytes in enumerate(slots))
    given = {"geometry": geometry, "topology": here, "memory": memory, "kv_cache_bytes": kv}
    try:
        plan = plan_for("auto", strategy, window_bytes=window, pending_adapter_bytes=pending, **given)
    except BudgetError:
        return
    front = {Memory.HOST: free, Memory.DEVICE: device, Memory.UNIFIED: min(free, device)}[memory]
    still_to_come = plan.budget_bytes + kv + plan.ring_bytes
    if memory is Memory.DEVICE:
        assert not plan.host_tier_bytes or plan.host_tier_bytes + plan.staging_bytes + pending <= free
    else:
        still_to_come += plan.staging_bytes + pending
    assert still_to_come == plan.total_bytes <= front
    assert not any("free" in sentence for sentence in plan.warnings)
    assert plan.smallest_bytes <= plan.budget_bytes <= plan.expert_bytes
