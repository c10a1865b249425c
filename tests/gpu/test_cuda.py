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

from coop.adapters.transformers import ExpertsModule, find_experts
from coop.checkpoint import open_checkpoint
from coop.devices import Device, open_device
from coop.execution import run_expert
from coop.ids import ExpertId
from coop.layout import resolve_layout
from coop.shards import read_checkpoint_tensors
from coop.store import ExpertStore, Slot
from coop.tiers import HostTier
from tests.fakes import MemoryDisk, serve
from tests.families import HIDDEN, build_family

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")]
ROWS = 5


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_on_the_device_give_the_same_bits_at_every_budget(
    family: str, dtype: torch.dtype, tmp_path: Path, device: Device
) -> None:
    model = build_family(tmp_path, family, dtype=dtype).to(device.torch_device)
    experts = find_experts(model)
    layout = resolve_layout(model.config, read_checkpoint_tensors(open_checkpoint(tmp_path).weights), dtype)
    calls = random_calls(len(experts), experts[0].num_experts, 60)
    rows = torch.randn(len(calls), ROWS, HIDDEN).to(device.torch_device, dtype)
    expected = resident_outputs(experts, calls, rows)
    slot_bytes = max(layer.slot_bytes for layer in layout.layers)
    for device_slots, host_slots in ((1, 4), (2, 5), (6, 12), (64, 64)):
        disk = ExpertStore(layout)
        tier = host_tier(disk, device, host_slots * slot_bytes)
        got = torch.zeros_like(expected)

        def kernel(call: int, expert: ExpertId, slot: Slot, out: torch.Tensor = got) -> None:
            place = out[call, calls[call].index(expert)]
            run_expert(experts[expert.layer].module, slot.weights, rows[call], place)

        with torch.no_grad():
            serve(device, tier, calls, device_slots * slot_bytes, kernel)
        assert torch.equal(got, expected), f"{device_slots} device slots, {host_slots} host slots"
        tier.close()


def resident_outputs(
    experts: list[ExpertsModule], calls: list[list[ExpertId]], rows: torch.Tensor
) -> torch.Tensor:
    """Outputs [calls, experts of a call, rows, hidden] of the model's own weights, which never move."""
    outputs = torch.zeros(len(calls), len(calls[0]), ROWS, HIDDEN, dtype=rows.dtype, device=rows.device)
    with torch.no_grad():
        for call, chosen in enumerate(calls):
            for place, (layer, expert) in enumerate(chosen):
                stacks = {name: getattr(experts[layer].module, name) for name in experts[layer].parameters}
                weights = {name: stack[expert] for name, stack in stacks.items()}
                run_expert(experts[layer].module, weights, rows[call], outputs[call, place])
    return outputs
