"""LoRA adapters served unmerged from disk: the same bits as PEFT's own merge, at every budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import coop
from coop.errors import CheckpointError
from tests.exact.test_families import all_logits, assert_same_bits
from tests.families import build_family

pytestmark = pytest.mark.filterwarnings("ignore:.*target_parameters.*:UserWarning")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "v_proj"]


def save_adapter(model: Any, folder: Path, **settings: Any) -> Any:
    """Wrap, give every factor a value that matters, save; returns the PEFT model."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, bias="none", **settings))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    wrapped.save_pretrained(folder)
    return wrapped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_an_adapter_on_attention_and_experts_equals_the_merged_model(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = build_family(tmp_path / "base", family, dtype)
    attention = ["kv_a_proj_with_mqa"] if family == "deepseek_v3" else ATTENTION
    wrapped = save_adapter(model, tmp_path / "adapter", target_modules=attention, target_parameters=EXPERTS)
    before = all_logits(build_family(tmp_path / "again", family, dtype), 1, 30, 0 + 1)
    merged = wrapped.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    with coop.attach(tmp_path / "merged", budget="100%") as runtime:
        expected = all_logits(runtime.model, 1, 30, 8)
        dense = {name: p.clone() for name, p in runtime.model.named_parameters()}
    assert not torch.equal(expected[0], before[0])
    with coop.attach(tmp_path / "adapter", budget="100%") as runtime:
        assert all(torch.equal(dense[name], p) for name, p in runtime.model.named_parameters())
        resident = all_logits(runtime.model, 1, 30, 8)
        assert _same_slots(runtime, tmp_path / "merged")
    error, scale = (expected[0] - resident[0]).abs().max(), expected[0].abs().max()
    assert error <= (32 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps * scale
    with coop.attach(tmp_path / "adapter", budget="30%") as runtime:
        assert_same_bits(resident, all_logits(runtime.model, 1, 30, 8), "adapter at 30%")


def _same_slots(runtime: Any, merged: Path) -> bool:
    """Every expert as merged on load, bit for bit against the merged folder's own."""
    with coop.attach(merged, budget="100%") as other:
        ours, theirs = runtime.scheduler._store, other.scheduler._store
        for expert in runtime.scheduler._all_experts():
            left, right = ours.new_slot(expert.layer), theirs.new_slot(expert.layer)
            ours.load(expert, left)
            theirs.load(expert, right)
            if not all(torch.equal(left.weights[n], right.weights[n]) for n in left.weights):
                return False
    return True


def test_an_adapter_on_one_expert_parameter_finds_the_right_one(tmp_path: Path) -> None:
    model = build_family(tmp_path / "base", "mixtral")
    only = ["mlp.experts.gate_up_proj"]
    wrapped = save_adapter(model, tmp_path / "adapter", target_modules=[], target_parameters=only)
    expected = all_logits(wrapped.merge_and_unload(), 1, 20, 2)
    with coop.attach(tmp_path / "adapter", budget="40%") as runtime:
        got = all_logits(runtime.model, 1, 20, 2)
    assert (expected[0] - got[0]).abs().max() < 1e-4


def test_a_rank_stabilised_adapter_is_scaled_as_peft_scales_it(tmp_path: Path) -> None:
    model = build_family(tmp_path / "base", "mixtral")
    wrapped = save_adapter(
        model, tmp_path / "adapter", target_modules=ATTENTION, target_parameters=EXPERTS, use_rslora=True
    )
    expected = all_logits(wrapped.merge_and_unload(), 1, 20, 2)
    with coop.attach(tmp_path / "adapter", budget="40%") as runtime:
        got = all_logits(runtime.model, 1, 20, 2)
    assert (expected[0] - got[0]).abs().max() < 1e-4


def test_the_base_can_be_named_and_a_missing_one_says_what_to_type(tmp_path: Path) -> None:
    model = build_family(tmp_path / "base", "mixtral")
    save_adapter(model, tmp_path / "adapter", target_modules=ATTENTION, target_parameters=EXPERTS)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="--base DIR"):
        coop.attach(tmp_path / "adapter")
    coop.attach(tmp_path / "adapter", base=tmp_path / "moved", budget="50%").close()


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    model = build_family(tmp_path / "base", "mixtral", num_local_experts=6)
    save_adapter(model, tmp_path / "adapter", target_modules=ATTENTION, target_parameters=EXPERTS)
    build_family(tmp_path / "other", "mixtral")
    with pytest.raises(CheckpointError, match="do not fit 8 experts"):
        coop.attach(tmp_path / "adapter", base=tmp_path / "other")


@pytest.mark.filterwarnings(
    "ignore:The following .*_pattern keys:RuntimeWarning"
)  # PEFT applies them all the same
def test_patterns_of_rank_and_alpha_are_read_as_peft_reads_them(tmp_path: Path) -> None:
    model = build_family(tmp_path / "base", "mixtral")
    patterns = {
        "rank_pattern": {r"layers\.0\.mlp\.experts\.down_proj": 2},
        "alpha_pattern": {".*experts.*": 64},
    }
    wrapped = save_adapter(
        model, tmp_path / "adapter", target_modules=ATTENTION, target_parameters=EXPERTS, **patterns
    )
    expected = all_logits(wrapped.merge_and_unload(), 1, 20, 2)
    with coop.attach(tmp_path / "adapter", budget="40%") as runtime:
        got = all_logits(runtime.model, 1, 20, 2)
    assert (expected[0] - got[0]).abs().max() < 1e-4
