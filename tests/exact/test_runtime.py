"""Exactness of the runtime: strategies, ring sizes, budgets that change, adapters, an asynchronous device, poison."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import coop
from coop.adapters.attach import Runtime
from coop.ring import RingBuffer
from tests.exact.test_adapters import ATTENTION, EXPERTS, save_adapter
from tests.exact.test_families import all_logits, assert_same_bits, prompts
from tests.fakes import FakeDevice
from tests.families import FAMILIES, build_family

WAYS = {  # strategy, bytes of the ring: one line, a few outputs, everything
    "eager, ring of one line": ("SpeedFirst", 64),
    "balanced, ring of a few outputs": ("Balanced", 2048),
    "frugal, ring of everything": ("MemoryFirst", 2**20),
}


@contextmanager
def running(
    folder: Path, budget: str | int, strategy: str = "Balanced", ring_bytes: int = 2**16, **how: Any
) -> Iterator[Runtime]:
    """A poisoned runtime with a ring of that size: what is read after it was freed is NaN."""
    with coop.attach(folder, budget=budget, strategy=strategy, poison=True, **how) as runtime:
        scheduler = runtime.scheduler
        scheduler.ring = RingBuffer(ring_bytes, scheduler.ring._block.device)
        yield runtime
        assert scheduler.residency.leased() == 0
        assert scheduler.ring.used_bytes == 0


def generate_while(runtime: Runtime, turn: Any) -> tuple[torch.Tensor, ...]:
    """Logits of greedy steps after a prompt, with `turn(step)` called between the forwards."""
    ids, mask = prompts(1, 60)
    steps = iter(range(9))

    def between(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        turn(next(steps))
        return scores

    output = runtime.model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=9,
        min_new_tokens=9,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        logits_processor=[between],
    )
    return tuple(output.logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_same_bits_over_strategies_rings_and_budgets_with_freed_slots_poisoned(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    build_family(tmp_path, family, dtype)
    with coop.attach(tmp_path, budget="100%") as runtime:
        smallest = runtime.plan.smallest_bytes
        resident = all_logits(runtime.model, 2, 60, 8)
        assert resident[0].isfinite().all()
    for (way, (strategy, ring_bytes)), budget in zip(WAYS.items(), (smallest, "25%", "50%"), strict=True):
        with running(tmp_path, budget, strategy, ring_bytes) as runtime:
            assert_same_bits(resident, all_logits(runtime.model, 2, 60, 8), f"{family}: {way} at {budget}")
            assert runtime.stats().resident_bytes_max <= runtime.plan.budget_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_that_moves_while_tokens_come_changes_no_bit_and_holds(family: str, tmp_path: Path) -> None:
    build_family(tmp_path, family)
    with coop.attach(tmp_path, budget="100%") as runtime:
        resident = generate_while(runtime, lambda step: None)
        smallest = runtime.plan.smallest_bytes
    budgets = ["100%", smallest, "50%", "25%", "80%", smallest, "100%", "30%", "60%"]
    strategies = ["SpeedFirst", "MemoryFirst", "Balanced"]

    with running(tmp_path, "40%") as runtime:

        def turn(step: int) -> None:
            runtime.scheduler.set_strategy(strategies[step % 3])
            runtime.set_budget(budgets[step])
            residency = runtime.scheduler.residency
            assert runtime.scheduler.wait_idle(30)  # a guess under way may hold what was just taken away
            assert residency.used_bytes <= residency.budget_bytes == runtime.plan.budget_bytes

        assert_same_bits(resident, generate_while(runtime, turn), family)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_asynchronous_device_that_delays_at_random_gives_the_same_bits(
    family: str, tmp_path: Path
) -> None:
    build_family(tmp_path, family)
    with coop.attach(tmp_path, budget="100%") as runtime:
        resident = all_logits(runtime.model, 2, 30, 4)
        smallest = runtime.plan.smallest_bytes
    for seed, budget in enumerate((smallest, "40%")):
        with running(tmp_path, budget, "SpeedFirst", 2048, device=FakeDevice(seed)) as runtime:
            assert "GPU + host + disk" in runtime.plan.render()
            assert_same_bits(resident, all_logits(runtime.model, 2, 30, 4), f"{family} at {budget}")


@pytest.mark.filterwarnings("ignore:.*target_parameters.*:UserWarning")
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_an_unmerged_adapter_gives_the_same_bits_over_strategies_and_rings(
    family: str, tmp_path: Path
) -> None:
    model = build_family(tmp_path / "base", family)
    save_adapter(model, tmp_path / "adapter", target_modules=ATTENTION, target_parameters=EXPERTS)
    with coop.attach(tmp_path / "adapter", budget="100%") as runtime:
        resident = all_logits(runtime.model, 1, 60, 6)
    for (way, (strategy, ring_bytes)), budget in zip(WAYS.items(), ("15%", "30%", "60%"), strict=True):
        with running(tmp_path / "adapter", budget, strategy, ring_bytes) as runtime:
            assert_same_bits(resident, all_logits(runtime.model, 1, 60, 6), way)
    with running(tmp_path / "adapter", "30%", device=FakeDevice(1)) as runtime:
        assert_same_bits(resident, all_logits(runtime.model, 1, 60, 6), "on a device")


def test_two_models_interleaved_step_by_step_and_in_two_threads_keep_their_own_experts(
    tmp_path: Path,
) -> None:
    for name, top_k in (("a", 2), ("b", 3)):
        build_family(tmp_path / name, "qwen3_moe", num_experts_per_tok=top_k)
    alone = {}
    for name in "ab":
        with coop.attach(tmp_path / name, budget="100%") as runtime:
            alone[name] = generate_while(runtime, lambda step: None)
    with running(tmp_path / "a", "30%") as a, running(tmp_path / "b", "40%", "SpeedFirst", 64) as b:
        nested: list[tuple[torch.Tensor, ...]] = []

        def run_b_once(step: int) -> None:
            if step == 4:
                nested.append(generate_while(b, lambda inner: None))

        assert_same_bits(alone["a"], generate_while(a, run_b_once), "a around b")
        assert_same_bits(alone["b"], nested[0], "b within a")
        found: dict[str, tuple[torch.Tensor, ...]] = {}

        def work(name: str, runtime: Runtime) -> None:
            found[name] = generate_while(runtime, lambda step: None)

        threads = [threading.Thread(target=work, args=pair) for pair in (("a", a), ("b", b))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for name in "ab":
            assert_same_bits(alone[name], found[name], f"{name} in a thread")


def test_poison_shows_what_is_read_after_it_was_freed(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with running(tmp_path, "100%", prefetch=False) as runtime:
        runtime.model(input_ids=prompts(1, 30)[0])
        residency = runtime.scheduler.residency
        lease = residency.held(next(iter(residency._slots)))
        assert lease is not None
        weights = lease.weights
        assert residency.evict(lease.expert)
        assert all(weight.isnan().all() for weight in weights.values())
        with pytest.raises(AssertionError, match="given away"):
            _ = lease.weights
