"""Exactness of packs: the bits of the checkpoint in bf16, the same bits at every budget, errors within the format."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import coop
from coop import store as store_module
from coop.adapters.attach import load_config, open_store
from coop.adapters.transformers import build_on_meta, find_experts
from coop.checkpoint import open_checkpoint
from coop.errors import CheckpointError, CoopError
from coop.ids import ExpertId
from coop.profile import PROFILE_NAME, Profile
from coop.quantise import dequantise
from tests.exact.test_adapters import ATTENTION, EXPERTS, save_adapter
from tests.exact.test_families import all_logits, assert_same_bits
from tests.families import FAMILIES, build_family
from tests.packs import pack

pytestmark = pytest.mark.filterwarnings("ignore:.*target_parameters.*:UserWarning")
PROMPT_TOKENS, NEW_TOKENS = 40, 6


def logits_at(folder: Path, budget: str | int, **options: Any) -> tuple[torch.Tensor, ...]:
    with coop.attach(folder, budget=budget, poison=True, **options) as runtime:
        got = all_logits(runtime.model, 1, PROMPT_TOKENS, NEW_TOKENS)
        assert runtime.stats().resident_bytes_max <= runtime.plan.budget_bytes
    return got


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_in_bf16_has_the_checkpoint_s_bits_at_every_budget(family: str, tmp_path: Path) -> None:
    build_family(tmp_path / "plain", family, torch.bfloat16)
    pack(tmp_path / "plain", tmp_path / "pack")
    plain = logits_at(tmp_path / "plain", "100%")
    with coop.attach(tmp_path / "pack", budget="100%") as runtime:
        smallest = runtime.plan.smallest_bytes
        assert runtime.scheduler.staging.window_bytes == 0  # nothing is staged
    for budget in ("100%", "50%", "25%", smallest):
        assert_same_bits(plain, logits_at(tmp_path / "pack", budget), f"{family} at {budget}")


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_pack_has_the_same_bits_at_every_budget(family: str, kind: str, tmp_path: Path) -> None:
    build_family(tmp_path / "plain", family)
    pack(tmp_path / "plain", tmp_path / "pack", kind)
    with coop.attach(tmp_path / "pack", budget="100%") as runtime:
        smallest = runtime.plan.smallest_bytes
        resident = all_logits(runtime.model, 1, PROMPT_TOKENS, NEW_TOKENS)
    for budget in ("50%", smallest):
        assert_same_bits(resident, logits_at(tmp_path / "pack", budget), f"{family} at {budget}")


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_weight_is_within_half_a_step_of_the_original(
    family: str, kind: str, tmp_path: Path
) -> None:
    """Against the float32 source, in float64; a code at the end of its range may stand for a weight beyond it."""
    build_family(tmp_path / "plain", family)
    pack(tmp_path / "plain", tmp_path / "pack", kind)
    config = load_config(tmp_path / "plain")
    source = open_store(open_checkpoint(tmp_path / "plain"), config, torch.float32)
    packed = open_store(open_checkpoint(tmp_path / "pack"), config, torch.bfloat16)
    for entry in find_experts(build_on_meta(config)):
        expert = ExpertId(entry.layer, entry.num_experts - 1)
        left, right = source.new_slot(entry.layer), packed.new_slot(entry.layer)
        source.load(expert, left)
        packed.load(expert, right)
        for name, original in left.weights.items():
            if name.endswith("_bias"):
                assert torch.equal(right.weights[name], original.bfloat16())
                continue
            wanted = (original.t() if entry.module.is_transposed else original).double()
            codes, scales = right.weights[name], right.weights[f"{name}_scale"]
            got = dequantise(codes, scales, wanted.shape[1], torch.float32).double()
            steps = scales.double().abs().repeat_interleave(32, 1)[:, : wanted.shape[1]]
            is_inner = got.abs() < (126.5 if kind == "int8" else 6.5) * steps
            assert ((got - wanted).abs() <= 0.5001 * steps)[is_inner].all()
            relative = ((got - wanted).square().sum() / wanted.square().sum()).sqrt()
            assert relative < (0.01 if kind == "int8" else 0.11)
    source.close()
    packed.close()


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_an_expert_s_output_is_that_of_its_restored_weights(family: str, kind: str, tmp_path: Path) -> None:
    """Computed by coop from codes, against float64 products of what the codes stand for."""
    from coop.execution import run_prefill

    build_family(tmp_path / "plain", family)
    pack(tmp_path / "plain", tmp_path / "pack", kind)
    config = load_config(tmp_path / "pack")
    packed = open_store(open_checkpoint(tmp_path / "pack"), config, torch.bfloat16)
    slot = packed.new_slot(0)
    packed.load(ExpertId(0, 3), slot)
    module: Any = find_experts(build_on_meta(config))[0].module
    rows = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.empty_like(rows)
    run_prefill(module, slot.weights, rows, out)

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        scales = slot.weights[f"{name}_scale"]
        weight = dequantise(slot.weights[name], scales, x.shape[1], torch.float32).double()
        bias = slot.weights.get(f"{name}_bias")
        return x @ weight.t() + (bias.double() if bias is not None else 0)

    if module.has_gate:
        activated = module._apply_gate(project(rows.double(), "gate_up_proj"))
    else:
        activated = module.act_fn(project(rows.double(), "up_proj"))
    wanted = project(activated, "down_proj")
    assert (out.double() - wanted).abs().max() <= 0.02 * wanted.abs().max()
    packed.close()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_pack_of_an_adapter_equals_the_attached_adapter_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = build_family(tmp_path / "base", family, torch.bfloat16)
    save_adapter(model, tmp_path / "adapter", target_modules=ATTENTION, target_parameters=EXPERTS)
    pack(tmp_path / "adapter", tmp_path / "pack")
    expected = logits_at(tmp_path / "adapter", "100%")
    assert_same_bits(expected, logits_at(tmp_path / "pack", "30%"), family)
    shutil.rmtree(tmp_path / "base")  # a pack needs nothing else
    assert_same_bits(expected, logits_at(tmp_path / "pack", "100%"), family)


def test_a_float32_source_is_cast_as_attach_casts_it(tmp_path: Path) -> None:
    build_family(tmp_path / "plain", "qwen3_moe")
    pack(tmp_path / "plain", tmp_path / "pack")
    expected = logits_at(tmp_path / "plain", "100%", dtype="bfloat16")
    assert_same_bits(expected, logits_at(tmp_path / "pack", "30%"), "cast")


def test_a_pack_in_bf16_is_served_in_float32_through_staging(tmp_path: Path) -> None:
    build_family(tmp_path / "plain", "qwen3_moe", torch.bfloat16)
    pack(tmp_path / "plain", tmp_path / "pack")
    expected = logits_at(tmp_path / "plain", "100%", dtype="float32")
    assert_same_bits(expected, logits_at(tmp_path / "pack", "30%", dtype="float32"), "float32")


def test_a_pack_of_a_pack_in_bf16_is_the_same_pack(tmp_path: Path) -> None:
    build_family(tmp_path / "plain", "qwen3_moe", torch.bfloat16)
    first = pack(tmp_path / "plain", tmp_path / "one")
    second = pack(tmp_path / "one", tmp_path / "two")
    assert first.layers == second.layers and first.dense_sha256 == second.dense_sha256
    assert pack(tmp_path / "one", tmp_path / "three", "int8").dtype == "int8"
    with pytest.raises(CheckpointError, match="is a pack of int8, whose weights are rounded already"):
        pack(tmp_path / "three", tmp_path / "four")


def test_a_live_model_is_served_from_a_pack_in_bf16_and_not_from_a_quantised_one(tmp_path: Path) -> None:
    model = build_family(tmp_path / "plain", "olmoe", torch.bfloat16)
    pack(tmp_path / "plain", tmp_path / "pack")
    pack(tmp_path / "plain", tmp_path / "int4", "int4")
    expected = logits_at(tmp_path / "plain", "100%")
    with pytest.raises(CoopError, match="is a quantised pack: attach it by its path"):
        coop.attach(model, tmp_path / "int4", budget="40%")
    with coop.attach(model, tmp_path / "pack", budget="40%"):
        assert_same_bits(expected, all_logits(model, 1, PROMPT_TOKENS, NEW_TOKENS), "live")


def test_experts_are_read_straight_into_their_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_family(tmp_path / "plain", "mixtral", torch.bfloat16)
    pack(tmp_path / "plain", tmp_path / "pack")
    reads: list[tuple[int, int]] = []
    read = store_module.DirectFile._read_into

    def counted(self: Any, memory: memoryview, offset: int) -> int:
        reads.append((torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), offset))
        return read(self, memory, offset)

    monkeypatch.setattr(store_module.DirectFile, "_read_into", counted)
    monkeypatch.setattr(store_module, "_place", lambda *_: pytest.fail("a piece was copied"))
    store = open_store(open_checkpoint(tmp_path / "pack"), load_config(tmp_path / "pack"), torch.bfloat16)
    slots = [store.new_slot(1) for _ in range(8)]
    for expert, slot in enumerate(slots):
        store.load(ExpertId(1, expert), slot)
    assert [address for address, _ in reads] == [slot.buffer.data_ptr() for slot in slots]
    assert all(address % 4096 == 0 == offset % 4096 for address, offset in reads)
    store.close()


def test_a_profile_goes_with_its_pack_and_puts_the_hottest_expert_first(tmp_path: Path) -> None:
    from tests.unit.test_pack import with_profile

    build_family(tmp_path / "plain", "mixtral", torch.bfloat16)
    with_profile(tmp_path / "plain", hottest=5)
    manifest = pack(tmp_path / "plain", tmp_path / "pack")
    assert manifest.order == "profile"
    with coop.attach(tmp_path / "pack", budget="30%") as runtime:
        assert runtime.profile_status.startswith("used")
        layout = runtime.scheduler._store.layout
    for layer in layout.layers:
        offsets = [extent.offset for extent in layer.extents]
        assert offsets.index(min(offsets)) == 5
    firsts = [min(extent.offset for extent in layer.extents) for layer in layout.layers]
    assert firsts == sorted(firsts)
    assert Profile.load(tmp_path / "pack" / PROFILE_NAME).identity.adapter_digest == ""
    assert_same_bits(logits_at(tmp_path / "plain", "100%"), logits_at(tmp_path / "pack", "30%"), "profile")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_rounded_dense_part_is_close_and_the_same_at_every_budget(family: str, tmp_path: Path) -> None:
    over = {"head_dim": 16} if "head_dim" in FAMILIES[family] else {}
    build_family(tmp_path / "model", family, torch.bfloat16, **over)
    for dense in ("bf16", "int8"):
        pack(tmp_path / "model", tmp_path / dense, dense=dense)
    with coop.attach(tmp_path / "bf16", budget="100%") as runtime:
        plain, plain_bytes = all_logits(runtime.model, 1, 20, 6), runtime.plan.dense_bytes
    with coop.attach(tmp_path / "int8", budget="100%") as runtime:
        rounded, rounded_bytes = all_logits(runtime.model, 1, 20, 6), runtime.plan.dense_bytes
    assert rounded_bytes < plain_bytes
    assert not torch.equal(plain[0], rounded[0])
    median = (plain[0] - rounded[0]).abs().amax(-1).median()
    assert median < 0.2 * plain[0].abs().max()
    with coop.attach(tmp_path / "int8", budget="30%") as runtime:
        assert_same_bits(rounded, all_logits(runtime.model, 1, 20, 6), f"{family}, rounded dense part")
