"""Exactness over families: the same bits at every budget, and transformers' own result within rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import coop
from tests.families import FAMILIES, build_family

PROMPT_TOKENS, NEW_TOKENS = 200, 32


def prompts(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids and a mask that pads row i on the left by 7 * i tokens."""
    ids = torch.randint(3, 96, (rows, tokens), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    for row in range(rows):
        ids[row, : 7 * row], mask[row, : 7 * row] = 0, 0
    return ids, mask


def all_logits(model: Any, rows: int, tokens: int, new_tokens: int) -> tuple[torch.Tensor, ...]:
    """Logits of every prompt position, then of every decode step."""
    ids, mask = (tensor.to(model.device) for tensor in prompts(rows, tokens))
    with torch.no_grad():
        prompt = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        steps = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return (prompt, *steps.logits)


def assert_same_bits(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...], what: str) -> None:
    assert len(left) == len(right)
    for step, (a, b) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(a, b), f"{what}: step {step} differs by {(a - b).abs().max()}"


def float64_logits(folder: Path) -> torch.Tensor:
    """What the prompt's logits would be without rounding, [1, tokens, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    ids, mask = prompts(1, PROMPT_TOKENS)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return logits


def assert_as_close_to_float64(ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """Token by token, coop's logits are no further from the unrounded ones than plain transformers' are.

    The largest distance says nothing: a rounding can flip a router's choice, and what follows is another model's.
    """
    roundings = torch.finfo(plain.dtype).eps * float(exact.abs().max())
    for share in (0.5, 0.9):
        distance, allowed = (
            float((logits - exact).abs().amax(-1).quantile(share)) / roundings for logits in (ours, plain)
        )
        assert distance <= 1.25 * allowed + 1, (
            f"at {share:.0%} of tokens: {distance:.1f}, plain {allowed:.1f}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_same_bits_at_every_budget_with_and_without_prefetch(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    reference = build_family(tmp_path, family, dtype)
    plain = all_logits(reference, 1, PROMPT_TOKENS, 1)
    with coop.attach(tmp_path, budget="100%") as runtime:
        smallest = runtime.plan.smallest_bytes
        resident = all_logits(runtime.model, 1, PROMPT_TOKENS, NEW_TOKENS)
    assert_as_close_to_float64(resident[0], plain[0], float64_logits(tmp_path))
    for budget in (smallest, "25%", "50%"):
        for has_prefetch in (True, False):
            with coop.attach(tmp_path, budget=budget, prefetch=has_prefetch) as runtime:
                got = all_logits(runtime.model, 1, PROMPT_TOKENS, NEW_TOKENS)
                stats = runtime.stats()
            assert_same_bits(resident, got, f"{family} at {budget}, prefetch {has_prefetch}")
            assert stats.resident_bytes_max <= stats.budget_bytes
            assert stats.misses_prefill > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_left_padded_batch_has_the_same_bits_at_every_budget(family: str, tmp_path: Path) -> None:
    build_family(tmp_path, family)
    with coop.attach(tmp_path, budget="100%") as runtime:
        smallest = runtime.plan.smallest_bytes
        resident = all_logits(runtime.model, 3, 40, 8)
    for budget in (smallest, "25%", "50%"):
        with coop.attach(tmp_path, budget=budget) as runtime:
            assert_same_bits(resident, all_logits(runtime.model, 3, 40, 8), f"{family} at {budget}")


def test_experts_are_never_materialised_as_stacks(tmp_path: Path) -> None:
    build_family(tmp_path, "qwen3_moe")
    with coop.attach(tmp_path, budget="50%") as runtime:
        names = [name for name, _ in runtime.model.named_parameters()]
    assert names
    assert not [name for name in names if "experts" in name]


def test_an_expert_split_over_shards_is_read_whole(tmp_path: Path) -> None:
    reference = build_family(tmp_path, "mixtral", shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    plain = all_logits(reference, 1, 20, 4)
    with coop.attach(tmp_path, budget="30%") as runtime:
        got = all_logits(runtime.model, 1, 20, 4)
    assert (plain[0] - got[0]).abs().max() < 1e-4


def test_a_checkpoint_saved_fused_reads_like_one_saved_per_expert(tmp_path: Path) -> None:
    reference = build_family(tmp_path / "hub", "qwen3_moe")
    reference.save_pretrained(tmp_path / "fused", save_original_format=False)
    with (
        coop.attach(tmp_path / "hub", budget="40%") as hub,
        coop.attach(tmp_path / "fused", budget="40%") as fused,
    ):
        # dense weights lie at other offsets in the other file, and with them the last bit of their products
        pairs = zip(all_logits(hub.model, 1, 20, 4), all_logits(fused.model, 1, 20, 4), strict=True)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


def test_two_models_interleaved_in_one_process_keep_their_own_experts(tmp_path: Path) -> None:
    build_family(tmp_path / "a", "qwen3_moe")
    build_family(tmp_path / "b", "qwen3_moe", num_experts_per_tok=3)
    with coop.attach(tmp_path / "a", budget="100%") as a, coop.attach(tmp_path / "b", budget="100%") as b:
        alone = all_logits(a.model, 1, 20, 4), all_logits(b.model, 1, 20, 4)
    with coop.attach(tmp_path / "a", budget="30%") as a, coop.attach(tmp_path / "b", budget="40%") as b:
        for _ in range(2):
            assert_same_bits(alone[0], all_logits(a.model, 1, 20, 4), "a")
            assert_same_bits(alone[1], all_logits(b.model, 1, 20, 4), "b")


def test_a_live_model_is_attached_in_place_and_its_generate_just_works(tmp_path: Path) -> None:
    reference = build_family(tmp_path, "olmoe")
    plain = all_logits(reference, 1, 20, 4)
    with coop.attach(reference, tmp_path, budget="40%") as runtime:
        assert runtime.model is reference
        got = all_logits(reference, 1, 20, 4)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(plain, got, strict=True))


@pytest.mark.parametrize("strategy", ["SpeedFirst", "Balanced", "MemoryFirst"])
def test_strategies_change_no_bit_even_switched_while_running(strategy: str, tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="100%") as runtime:
        resident = all_logits(runtime.model, 1, 30, 8)
    with coop.attach(tmp_path, budget="30%", strategy=strategy) as runtime:
        assert_same_bits(resident, all_logits(runtime.model, 1, 30, 8), strategy)
        runtime.scheduler.set_strategy("SpeedFirst")
        runtime.scheduler.residency.resize(runtime.plan.smallest_bytes)
        assert_same_bits(resident, all_logits(runtime.model, 1, 30, 8), "after the switch")
        assert runtime.scheduler.residency.used_bytes <= runtime.plan.smallest_bytes
