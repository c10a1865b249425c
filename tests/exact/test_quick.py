"""Decode steps through the classes that stand in front of a model's own: the same results, or the model's own way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import coop
from coop import kernels
from coop.adapters.attention import QuickAttention, QuickLayer
from coop.adapters.linear import QuickLinear, QuickWeight, RoundedLinear
from tests.exact.test_families import assert_same_bits
from tests.families import build_family

pytestmark = pytest.mark.skipif(kernels.load()[0] is None, reason=f"no kernels: {kernels.load()[1]}")
# heads of 16: the kernels take no narrower ones
WIDE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 16},
    "mixtral": {"head_dim": 16},
    "olmoe": {"hidden_size": 64},
    "glm4_moe": {"head_dim": 16},
    "phimoe": {"head_dim": 16, "hidden_size": 64},
    "qwen2_moe": {"hidden_size": 64},
    "gpt_oss": {"head_dim": 16},
}
WHOLLY_QUICK = {"qwen3_moe", "mixtral", "olmoe"}  # elsewhere torch computes some of a decode step
# several, because a rounding that flips a router's choice moves every later step of its sequence
SEQUENCES = [torch.randint(3, 96, (1, 24), generator=torch.Generator().manual_seed(s)) for s in range(5)]
TOKENS = SEQUENCES[0]


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@torch.no_grad()
def forced(model: Any, ids: torch.Tensor = TOKENS, prompt: int = 8) -> tuple[torch.Tensor, ...]:
    """Logits of every step when the tokens are given: a prompt, then one at a time."""
    cache = DynamicCache(config=model.config)
    steps = [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]
    return tuple(model(input_ids=step, past_key_values=cache, use_cache=True).logits[:, -1] for step in steps)


def count(model: Any, kind: type) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", WIDE)
def test_decode_steps_are_as_close_to_float64_as_plain_transformers_are(
    family: str, dtype: torch.dtype, tmp_path: Path, threads: Any
) -> None:
    threads(1)  # torch's own products, such as a prompt's, may depend on their number
    model = build_family(tmp_path, family, dtype, **WIDE[family])
    plain = [step for ids in SEQUENCES for step in forced(model, ids)]
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    exact = [step for ids in SEQUENCES for step in forced(model, ids)]
    with coop.attach(tmp_path, budget="100%") as runtime:
        ours = forced(runtime.model)
        all_ours = [step for ids in SEQUENCES for step in forced(runtime.model, ids)]
        assert (count(runtime.model, QuickAttention) > 0) == (family != "gpt_oss")
        assert count(runtime.model, QuickLinear) > 0
    distance, allowed = (
        torch.stack([(a - b).abs().max().double() for a, b in zip(got, exact, strict=True)]).median()
        for got in (all_ours, plain)
    )
    assert distance <= 1.25 * allowed + torch.finfo(dtype).eps * float(torch.stack(exact).abs().max())
    for budget in ("25%", "50%"):
        for thread_count in (1, 3) if family in WHOLLY_QUICK else (1,):
            threads(thread_count)
            with coop.attach(tmp_path, budget=budget) as runtime:
                assert_same_bits(ours, forced(runtime.model), f"{family} at {budget}, {thread_count} threads")


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_what_is_no_plain_step_goes_the_model_s_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks, watched modules, gradients and wide batches: the same numbers, none of them from the kernels."""
    build_family(tmp_path, "qwen3_moe", head_dim=16)
    calls = []
    real = kernels.Kernels.attention_begin
    monkeypatch.setattr(
        kernels.Kernels,
        "attention_begin",
        lambda *given: calls.append(1) or real(*given),  # type: ignore[func-returns-value]
    )
    with coop.attach(tmp_path, budget="100%") as runtime:
        model = runtime.model
        assert count(model, QuickLayer) == 3
        calls.clear()  # those of the trials
        alone = forced(model)
        quick, _ = len(calls), calls.clear()
        assert quick == 3 * (TOKENS.shape[1] - 8)
        wide = forced(model, TOKENS.repeat(kernels.MOST_ROWS + 1, 1))
        assert not calls
        padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), TOKENS[:, :-3]], dim=1)
        model.generate(
            torch.cat([TOKENS, padded]),
            attention_mask=torch.cat([torch.ones_like(padded), (padded > 0).long()]),
            max_new_tokens=3,
            do_sample=False,
        )
        assert not calls
        heard = []
        handle = model.model.layers[0].self_attn.register_forward_hook(lambda *given: heard.append(given))
        assert all(torch.equal(a, b) for a, b in zip(alone, forced(model), strict=True))
        handle.remove()
        assert len(heard) == TOKENS.shape[1] - 8 + 1
    assert all(torch.allclose(a[0], b[0], atol=1e-3) for a, b in zip(wide, alone, strict=True))


def test_inputs_of_another_width_are_refused_as_the_plain_layer_refuses_them() -> None:
    """The kernels would read past the row, and answer."""
    plain = torch.nn.Linear(16, 8).requires_grad_(False)
    with pytest.raises(RuntimeError) as expected:
        plain(torch.ones(1, 17))
    rounded = RoundedLinear(plain)
    plain.__class__ = QuickLinear
    weight = QuickWeight(plain.weight.detach(), requires_grad=False)
    with torch.no_grad():
        for call in (plain, rounded, lambda x: torch.nn.functional.linear(x, weight)):
            assert call(torch.ones(1, 16)).shape == (1, 8)
            for width in (15, 17, 64):
                with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                    call(torch.ones(1, width))
    assert "shapes cannot be multiplied" in str(expected.value)
