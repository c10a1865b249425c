"""Recorder: sees every token once, changes nothing, and goes without a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from coop.adapters.recorder import Recorder, token_kinds
from coop.adapters.transformers import find_experts
from coop.errors import CheckpointError
from coop.hotmap import HotMap, RoutedBatch
from tests.families import FAMILIES, build_family


def inputs_of(padding: str, tokens: int = 12) -> dict[str, Tensor]:
    """Two rows, the second with four padding tokens, the last five of each answers."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (2, tokens), generator=generator)
    mask = torch.ones_like(ids)
    labels = ids.clone()
    labels[0, :-5] = -100
    real = slice(0, tokens - 4) if padding == "right" else slice(4, tokens)
    mask[1] = 0
    mask[1, real] = 1
    labels[1] = -100
    labels[1, real.stop - 5 : real.stop] = ids[1, real.stop - 5 : real.stop]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def with_lora(model: Any) -> Any:
    targets = [f"{e.name}.{p}" for e in find_experts(model) for p in e.parameters if not p.endswith("_bias")]
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=targets))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_results_are_the_same_bit_for_bit_while_watched(tmp_path: Path, family: str) -> None:
    model = build_family(tmp_path, family)
    inputs = inputs_of("right")
    before = model.get_experts_implementation()
    expected = model(**inputs).logits
    batches: list[RoutedBatch] = []
    with Recorder(model, batches.append) as recorder:
        watched = model(**inputs).logits
    assert torch.equal(watched, expected)
    assert batches[0].indices.shape == (len(recorder.experts), 24, recorder.experts[0].top_k)
    assert model.get_experts_implementation() == before
    model(**inputs)
    assert len(batches) == 1


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("has_lora", [False, True])
def test_the_implementation_in_force_goes_on_computing(
    tmp_path: Path, implementation: str, has_lora: bool
) -> None:
    model = build_family(tmp_path, "mixtral")
    model.set_experts_implementation(implementation)
    model = with_lora(model) if has_lora else model
    inputs = inputs_of("left")
    expected = model(**inputs).loss
    with Recorder(model, lambda batch: None):
        assert torch.equal(model(**inputs).loss, expected)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_is_not_counted_and_answers_are_told_from_prompts(tmp_path: Path, padding: str) -> None:
    model = build_family(tmp_path, "qwen3_moe")
    inputs = inputs_of(padding)
    hotmap = HotMap(3, 8, 2)
    seen: list[Tensor] = []
    experts = find_experts(model)
    hooks = [e.module.register_forward_pre_hook(lambda m, args: seen.append(args[1])) for e in experts]
    with Recorder(model, hotmap.record):
        model(**inputs)
    for hook in hooks:
        hook.remove()
    counts = hotmap.read()
    answer = (inputs["labels"] != -100).flatten()
    real = inputs["attention_mask"].bool().flatten()
    for layer, indices in enumerate(seen):
        for mine, mask in ((counts.answer, answer), (counts.prompt, real & ~answer)):
            np.testing.assert_array_equal(
                mine[layer], np.bincount(indices[mask].flatten().numpy(), minlength=8)
            )
    assert (counts.tokens_prompt, counts.tokens_answer) == (10, 10)


def test_recomputation_of_activation_checkpointing_is_not_counted(tmp_path: Path) -> None:
    model = with_lora(build_family(tmp_path, "mixtral")).train()
    inputs = inputs_of("right")
    counts = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        hotmap, calls = HotMap(3, 8, 2), []
        with Recorder(model, hotmap.record) as recorder:
            see = recorder.see
            recorder.see = lambda layer, index, see=see, calls=calls: (calls.append(layer), see(layer, index))  # type: ignore[method-assign]
            model(**inputs).loss.backward()
        counts.append(hotmap.read())
        assert len(calls) == (6 if is_checkpointed else 3)
    np.testing.assert_array_equal(counts[0].answer, counts[1].answer)
    np.testing.assert_array_equal(counts[0].prompt, counts[1].prompt)
    assert counts[1].prompt.sum() == 10 * 2 * 3


def test_positions_that_start_again_begin_a_new_sequence() -> None:
    ids = torch.arange(6).reshape(1, 6)
    kinds, follows = token_kinds({"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])})
    assert kinds.tolist() == [1] * 6
    assert follows.tolist() == [False, True, True, False, True, True]


def test_pass_that_fails_half_way_is_not_reported(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    inputs = inputs_of("right")
    batches: list[RoutedBatch] = []
    with Recorder(model, batches.append):

        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        hook = find_experts(model)[1].module.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(**inputs)
        hook.remove()
        model(**inputs)
    assert len(batches) == 1


def test_layer_that_does_not_call_the_hook_is_an_error_on_the_first_pass(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    module = find_experts(model)[2].module
    module.forward = lambda hidden, index, weights: hidden
    with (
        Recorder(model, lambda batch: None),
        pytest.raises(CheckpointError, match="2 of 3 mixture-of-experts layers reported all 24 tokens"),
    ):
        model(**inputs_of("right"))


def test_random_state_is_not_touched(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    hotmap = HotMap(3, 8, 2)
    state = torch.get_rng_state()
    with Recorder(model, hotmap.record):
        model(**inputs_of("right"))
    assert torch.equal(torch.get_rng_state(), state)
