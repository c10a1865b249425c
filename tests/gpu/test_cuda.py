"""A real GPU: experts that travel disk, pinned memory, device give the bits of experts that never moved.

Skipped without CUDA; the contract itself is tested in tests/unit/test_devices.py, there too on the GPU. Run by
scripts/device_check.sh.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import coop
from coop.devices import Device, open_device
from coop.ids import ExpertId
from coop.store import Slot
from coop.tiers import HostTier
from tests.exact.test_families import all_logits, assert_same_bits
from tests.fakes import MemoryDisk, serve
from tests.families import build_family

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")]


@pytest.fixture
def device() -> Iterator[Device]:
    opened = open_device("cuda")
    yield opened
    opened.close()


def host_tier(disk: Any, device: Device, budget_bytes: int) -> HostTier:
    shape = (len(disk.geometry), max(layer.num_experts for layer in disk.geometry))
    likelihood = np.random.default_rng(0).random(shape)
    return HostTier(disk, device, budget_bytes=budget_bytes, loader_threads=4, likelihood=likelihood)


def random_calls(num_layers: int, num_experts: int, count: int) -> list[list[ExpertId]]:
    random = np.random.default_rng(1)
    return [
        [ExpertId(call % num_layers, int(e)) for e in random.choice(num_experts, 4, replace=False)]
        for call in range(count)
    ]


def test_staging_is_pinned_and_slots_are_on_the_device(device: Device) -> None:
    assert device.new_staging(12_345).is_pinned()
    assert device.new_slot(12_345).device == device.torch_device


def test_slots_and_staging_are_reused_behind_slow_kernels_and_every_sum_is_right(device: Device) -> None:
    disk = MemoryDisk()
    tier = host_tier(disk, device, 4 * 6144)
    calls = random_calls(2, 8, 200)
    sums = torch.zeros(len(calls), 8, dtype=torch.int64, device=device.torch_device)

    def kernel(call: int, expert: ExpertId, slot: Slot) -> None:
        torch.cuda._sleep(1_000_000)
        sums[call, expert.expert] = slot.weights["words"].sum(dtype=torch.int64)

    residency = serve(device, tier, calls, 3 * 6144, kernel)
    assert residency.evictions > 100
    got = sums.cpu()
    for call, experts in enumerate(calls):
        for expert in experts:
            want = disk.content(expert).view(torch.int32).sum(dtype=torch.int64)
            assert got[call, expert.expert] == want, (call, expert)
    tier.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_a_model_on_the_device_gives_the_same_bits_at_every_budget(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    build_family(tmp_path, family, dtype)
    with coop.attach(tmp_path, budget="100%", device="cuda") as runtime:
        assert "GPU + host + disk" in runtime.plan.render()
        resident = all_logits(runtime.model, 2, 60, 8)
        smallest = runtime.plan.smallest_bytes
    assert resident[0].isfinite().all()
    for strategy, budget in (("SpeedFirst", smallest), ("Balanced", "25%"), ("MemoryFirst", "50%")):
        with coop.attach(tmp_path, budget=budget, device="cuda", strategy=strategy, poison=True) as runtime:
            assert_same_bits(resident, all_logits(runtime.model, 2, 60, 8), f"{family} at {budget}")
            assert runtime.stats().resident_bytes_max <= runtime.plan.budget_bytes
