"""Experts computed in factored form: true gradients, PEFT's result, and the same bits however weights arrive."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coop.adapters.factored import Layer, LiveFactors, Routes, live_blocks, run_experts
from coop.adapters.offload import open_offloaded, plan_offload
from coop.adapters.training import ExpertTraining
from coop.adapters.transformers import find_experts
from coop.errors import BudgetError, CheckpointError, CoopError, RoutingError
from tests.families import FAMILIES, HIDDEN, build_family

pytestmark = pytest.mark.filterwarnings("ignore:.*target_parameters.*:UserWarning")
RANK = 4
TOKENS = 9


def with_adapters(model: Any, names: tuple[str, ...] | None = None) -> Any:
    """The PEFT model with random adapters on every expert parameter, or on `names`, and on query projections."""
    from peft import LoraConfig, get_peft_model

    targets = [
        f"{e.name}.{p}"
        for e in find_experts(model)
        for p in e.parameters
        if not p.endswith("_bias") and (names is None or p in names)
    ]
    model.set_experts_implementation("eager")  # grouped_mm knows no float64
    config = LoraConfig(
        r=RANK, lora_alpha=6, target_modules=["q_proj", "q_b_proj"], target_parameters=targets
    )
    wrapped = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return wrapped


def one_by_one(module: Any, is_reversed: bool = False) -> Any:
    """Lends the module's own weights an expert at a time."""

    def lend(routes: Routes) -> Any:
        blocks = list(live_blocks(dict(module._parameters), routes, False))
        yield from reversed(blocks) if is_reversed else blocks

    return lend


def batch(rows: int = 2, length: int = 12) -> Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(5))


def step(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and the gradients of everything that is trained."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_finite_differences(family: str, tmp_path: Path) -> None:
    entry = find_experts(build_family(tmp_path, family, torch.float64))[-1]
    module, generator = entry.module, torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3

    layer = Layer(module, one_by_one(module))
    ids = torch.stack([torch.randperm(entry.num_experts, generator=generator)[:2] for _ in range(TOKENS)])
    inputs: list[Any] = [random(TOKENS, HIDDEN), random(TOKENS, 2).abs()]
    for name in layer.names:
        _, first, second = module._parameters[name].shape
        into, out = (first, second) if layer.is_transposed else (second, first)
        inputs += [random(RANK * entry.num_experts, into), random(out, RANK * entry.num_experts)]
    inputs = [tensor.requires_grad_() for tensor in inputs]

    def run(hidden: Tensor, weights: Tensor, *factors: Tensor) -> Tensor:
        pairs = [LiveFactors(factors[0], factors[1], 2.0), LiveFactors(factors[2], factors[3], 0.5)]
        return run_experts(layer, hidden, ids, weights, pairs)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_those_of_peft(family: str, tmp_path: Path) -> None:
    model = build_family(tmp_path, family, torch.float64)
    peft, ours = with_adapters(copy.deepcopy(model)), with_adapters(model)
    ExpertTraining(ours)
    (expected_loss, expected), (loss, gradients) = step(peft, batch()), step(ours, batch())
    # nemotron_h computes parts in float32 whatever its weights are
    tolerance = 1e-5 if loss.dtype == torch.float32 else 1e-9
    assert (loss - expected_loss).abs() <= tolerance * expected_loss.abs()
    assert set(gradients) == set(expected)
    assert any(".experts" in name for name in gradients)
    for name, gradient in expected.items():
        error = (gradient - gradients[name]).abs().max()
        assert error <= tolerance * gradient.abs().max() + 1e-15, name


@pytest.mark.parametrize("names", [("gate_up_proj",), ("down_proj",), ()], ids=["first", "second", "none"])
def test_a_product_without_an_adapter_is_the_frozen_one(names: tuple[str, ...], tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral", torch.float64)
    peft, ours = with_adapters(copy.deepcopy(model), names), with_adapters(model, names)
    ExpertTraining(ours)
    (expected_loss, expected), (loss, gradients) = step(peft, batch()), step(ours, batch())
    assert (loss - expected_loss).abs() <= 1e-12
    assert set(expected) == set(gradients)
    for name, gradient in expected.items():
        assert (gradient - gradients[name]).abs().max() <= 1e-9 * gradient.abs().max() + 1e-15, name


def test_bfloat16_is_as_near_to_float64_as_peft_is(tmp_path: Path) -> None:
    exact = with_adapters(build_family(tmp_path, "qwen3_moe", torch.bfloat16).to(torch.float64))
    model = build_family(tmp_path / "again", "qwen3_moe", torch.bfloat16)
    peft, ours = with_adapters(copy.deepcopy(model)), with_adapters(model)
    ExpertTraining(ours)
    _, truth = step(exact, batch())
    errors = []
    for candidate in (peft, ours):
        _, gradients = step(candidate, batch())
        names = [n for n in truth if ".experts" in n]
        errors.append(sum(float((gradients[n].double() - truth[n]).norm() / truth[n].norm()) for n in names))
    assert errors[1] <= 1.1 * errors[0]


def test_activation_checkpointing_changes_no_bit(tmp_path: Path) -> None:
    ours = with_adapters(build_family(tmp_path, "qwen3_moe"))
    ExpertTraining(ours)
    ours.train()
    loss, gradients = step(ours, batch())
    ours.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
    ours.enable_input_require_grads()
    again, same = step(ours, batch())
    assert torch.equal(loss, again) and all(torch.equal(gradients[n], same[n]) for n in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_experts_one_by_one_in_any_order_have_the_bits_of_all_together(
    family: str, is_reversed: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    ours = with_adapters(build_family(tmp_path, family, dtype))
    training = ExpertTraining(ours)
    loss, gradients = step(ours, batch())
    for entry in training.experts:
        entry.module.__dict__["coop_training"].layer.lend = one_by_one(entry.module, is_reversed)
    again, same = step(ours, batch())
    assert torch.equal(loss, again) and all(torch.equal(gradients[n], same[n]) for n in gradients)


def test_adapters_are_saved_as_peft_saves_them_and_load_back(tmp_path: Path) -> None:
    from peft import PeftModel

    model = build_family(tmp_path / "base", "mixtral")
    ours = with_adapters(copy.deepcopy(model))
    ExpertTraining(ours)
    expected = ours(input_ids=batch()).logits
    ours.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")
    assert (loaded(input_ids=batch()).logits - expected).abs().max() < 1e-4
    merged = ours.merge_and_unload()
    assert (merged(input_ids=batch()).logits - expected).abs().max() < 1e-4


def test_a_disabled_adapter_leaves_the_base_model(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral", torch.float64)
    model.set_experts_implementation("eager")
    expected = model(input_ids=batch()).logits
    ours = with_adapters(model)
    ExpertTraining(ours)
    adapted = ours(input_ids=batch()).logits
    with ours.disable_adapter():
        plain = ours(input_ids=batch()).logits
    assert (plain - expected).abs().max() < 1e-10
    assert (adapted - expected).abs().max() > 1e-3


def test_a_router_that_chooses_an_unknown_expert_is_refused(tmp_path: Path) -> None:
    module = find_experts(build_family(tmp_path, "mixtral"))[0].module
    layer = Layer(module, one_by_one(module))
    with pytest.raises(RoutingError, match="8 of 8"):
        run_experts(layer, torch.zeros(1, HIDDEN), torch.tensor([[0, 8]]), torch.ones(1, 2), [None, None])


def test_experts_behind_a_norm_are_refused_before_anything_is_changed(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    find_experts(model)[1].module.has_post_expert_norm = True
    before = model.get_experts_implementation()
    with pytest.raises(CheckpointError, match="grouped_mm"):
        ExpertTraining(model)
    assert model.get_experts_implementation() == before


def test_kept_for_backward_grows_with_rows_and_not_with_experts(tmp_path: Path) -> None:
    kept = []
    for experts in (8, 32):
        model = build_family(tmp_path / str(experts), "mixtral", num_local_experts=experts)
        module = find_experts(model)[0].module
        layer = Layer(module, one_by_one(module))
        saved: list[int] = []

        def note(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
            ids = torch.arange(TOKENS * 2).reshape(TOKENS, 2) % experts
            run_experts(layer, hidden, ids, torch.ones(TOKENS, 2), [None, None])
        kept.append(sum(saved))
    assert kept[0] == kept[1] > 0


def all_steps(model: Any, count: int = 3) -> list[Tensor]:
    """Losses and gradients of a few optimiser steps, so that later ones depend on earlier ones."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    seen: list[Tensor] = []
    for index in range(count):
        loss, gradients = step(model, batch(2, 10 + index))
        optimizer.step()
        seen += [loss, *gradients.values()]
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_offloaded_experts_train_with_the_bits_of_resident_ones(family: str, tmp_path: Path) -> None:
    model = build_family(tmp_path, family)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # MKL's bits depend on where in a mapped file a weight begins
    resident = with_adapters(model)
    ExpertTraining(resident)
    expected = all_steps(resident)
    smallest = plan_offload(tmp_path, budget="50%", dtype=torch.float32).smallest_bytes
    for budget in ("100%", "50%", f"{smallest}B"):
        with open_offloaded(tmp_path, budget=budget, dtype=torch.float32, poison=True) as opened:
            ours = with_adapters(opened.model)
            ExpertTraining(ours, opened.scheduler)
            got = all_steps(ours)
            assert len(got) == len(expected) and all(map(torch.equal, got, expected)), budget
            residency = opened.scheduler.residency
            assert residency.used_bytes_max <= opened.plan.budget_bytes and residency.leased() == 0


def test_what_stands_for_offloaded_experts_takes_no_memory_and_is_nan(tmp_path: Path) -> None:
    build_family(tmp_path, "qwen3_moe")
    with open_offloaded(tmp_path, budget="50%", dtype=torch.float32) as opened:
        for entry in find_experts(opened.model):
            for name in entry.parameters:
                weight = entry.module._parameters[name]
                assert weight is not None and weight.untyped_storage().nbytes() == 4
                assert weight.isnan().all() and not weight.requires_grad


def test_a_budget_below_one_expert_and_an_adapter_are_refused(tmp_path: Path) -> None:
    model = build_family(tmp_path / "base", "mixtral")
    with pytest.raises(BudgetError, match="smallest"):
        open_offloaded(tmp_path / "base", budget="100B", dtype=torch.float32)
    with_adapters(model).save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="is an adapter"):
        plan_offload(tmp_path / "adapter", budget="50%", dtype=torch.float32)


def test_activation_checkpointing_over_offloaded_experts_changes_no_bit(tmp_path: Path) -> None:
    build_family(tmp_path, "qwen3_moe")
    with open_offloaded(tmp_path, budget="40%", dtype=torch.float32, poison=True) as opened:
        ours = with_adapters(opened.model)
        ExpertTraining(ours, opened.scheduler)
        ours.train()
        loss, gradients = step(ours, batch())
        ours.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
        ours.enable_input_require_grads()
        again, same = step(ours, batch())
    assert torch.equal(loss, again) and all(torch.equal(gradients[n], same[n]) for n in gradients)


def test_a_failed_read_in_backward_ends_the_step_and_leaves_no_lease(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with open_offloaded(tmp_path, budget="14%", dtype=torch.float32) as opened:
        ours = with_adapters(opened.model)
        ExpertTraining(ours, opened.scheduler)
        loss = ours(input_ids=batch(), labels=batch(), use_cache=False).loss
        for path in opened.scheduler._store.paths:
            path.write_bytes(b"")
        with pytest.raises(CoopError):
            loss.backward()
        assert opened.scheduler.residency.leased() == 0


def test_a_stream_that_is_closed_halfway_gives_everything_back(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with open_offloaded(tmp_path, budget="50%", dtype=torch.float32) as opened:
        stream = opened.scheduler.stream(0, np.arange(8).reshape(4, 2))
        expert, weights = next(stream)
        assert weights["down_proj"].isfinite().all() and 0 <= expert < 8
        stream.close()
        assert opened.scheduler.wait_idle() and opened.scheduler.residency.leased() == 0
        assert sorted(e for e, _ in opened.scheduler.stream(0, np.arange(8).reshape(4, 2))) == list(range(8))
        with pytest.raises(RoutingError, match="expert 9"):
            next(opened.scheduler.stream(0, np.array([[0, 9]])))


def test_a_copy_of_the_model_computes_with_its_own_weights(tmp_path: Path) -> None:
    ours = with_adapters(build_family(tmp_path, "mixtral"))
    ExpertTraining(ours)
    copied = copy.deepcopy(ours)
    expected = copied(input_ids=batch()).logits
    with torch.no_grad():
        for entry in find_experts(ours):
            entry.module.down_proj.mul_(2.0)  # type: ignore[operator]
    assert torch.equal(copied(input_ids=batch()).logits, expected)
    assert not torch.equal(ours(input_ids=batch()).logits, expected)


def test_merging_into_experts_on_disk_and_training_frozen_weights_are_refused(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    with open_offloaded(tmp_path, budget="50%", dtype=torch.float32) as opened:
        ours = with_adapters(opened.model)
        ExpertTraining(ours, opened.scheduler)
        with pytest.raises(CoopError, match="the experts are on disk"):
            ours.merge_adapter()
    live = with_adapters(model)
    training = ExpertTraining(live)
    training.experts[0].module.requires_grad_(True)
    with pytest.raises(CoopError, match="coop trains adapters of experts"):
        live(input_ids=batch())
