"""Training whole runs with coop's experts: offloaded ones give the losses of resident ones, and resume exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import coop
from coop.adapters.transformers import find_experts
from coop.errors import CheckpointError, RecipeError
from tests.train.test_training import adapter, assert_same_weights, losses, train, train_until_killed
from tests.train.tiny import build_recipe, write_recipe
from train.tuning.model import expert_backend, load_skeleton

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
OFFLOAD = ("model.experts_offload=true", "model.experts_budget=30%")


@pytest.fixture(autouse=True)
def _threads() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.activation_checkpointing=true",),
        ("train.grad_accumulation=2",),
        ("tune.groups=[attention]",),
        ("tune.groups=[attention,experts,router]",),
        ("model.dtype=bfloat16",),
        ("train.mixed_precision=bf16",),
    ],
    ids=lambda o: o[0] if o else "default",
)
def test_an_offloaded_run_equals_the_resident_one(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    resident = train(
        build_recipe(tmp_path, *overrides, "model.experts=coop", f"output={tmp_path / 'resident'}")
    )
    offloaded = train(build_recipe(tmp_path, *overrides, *OFFLOAD))
    assert losses(offloaded) == losses(resident) and len(losses(resident)) == 6
    assert_same_weights(adapter(offloaded), adapter(resident))


def test_losses_are_those_of_peft_up_to_rounding(tmp_path: Path) -> None:
    peft = train(build_recipe(tmp_path, "model.experts=grouped_mm", f"output={tmp_path / 'peft'}"))
    ours = train(build_recipe(tmp_path, "model.experts=coop"))
    for (step, mine), (_, theirs) in zip(losses(ours), losses(peft), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4), step


def test_an_offloaded_run_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(build_recipe(tmp_path, *OFFLOAD, f"output={tmp_path / 'whole'}"))
    recipe = build_recipe(tmp_path, *OFFLOAD)
    train_until_killed(recipe, 5, monkeypatch)
    output = train(recipe, resume=Path())
    assert losses(output) == losses(whole)
    assert_same_weights(adapter(output), adapter(whole))


def test_the_result_of_an_offloaded_run_is_served_with_its_profile(tmp_path: Path) -> None:
    output = train(build_recipe(tmp_path, *OFFLOAD))
    with coop.attach(output, budget="50%") as runtime:
        assert runtime.profile_status.startswith("used")
        logits = runtime.model(torch.arange(3, 20)[None]).logits
    assert logits.isfinite().all()
    assert not any("experts.gate_up" in name for name in load_file(output / "adapter_model.safetensors"))


@pytest.mark.parametrize(
    ("overrides", "backend"),
    [
        ((), "coop"),
        (("tune.groups=[attention]",), "grouped_mm"),
        (("tune.method=full",), "grouped_mm"),
        (("tune.groups=[attention]", "model.experts_offload=true"), "coop"),
        (("model.experts=eager",), "eager"),
    ],
)
def test_auto_means_coop_for_frozen_experts_with_adapters(
    tmp_path: Path, overrides: tuple[str, ...], backend: str
) -> None:
    recipe = build_recipe(tmp_path, *overrides)
    model = load_skeleton(recipe)
    assert expert_backend(recipe, model) == backend
    for entry in find_experts(model):
        entry.module.has_post_expert_norm = True
    if not overrides:
        assert expert_backend(recipe, model) == "grouped_mm"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model.experts_offload=true", "tune.method=full"), "needs tune.method=lora"),
        (("model.experts_offload=true", "model.experts=eager"), "must be auto or coop"),
        (("model.experts=coop", "tune.method=full"), "use auto with tune.method=full"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build_recipe(tmp_path, *overrides)


def test_offload_from_an_adapter_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    output = train(build_recipe(tmp_path))
    write_recipe(tmp_path)
    with pytest.raises(CheckpointError, match="adapter"):
        train(build_recipe(tmp_path, *OFFLOAD, f"model.path={output}", f"output={tmp_path / 'next'}"))


@pytest.mark.parametrize("overrides", [("model.experts=coop",), OFFLOAD])
def test_weights_spread_over_processes_are_refused_by_name(
    tmp_path: Path, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    recipe = build_recipe(tmp_path, *overrides)
    with pytest.raises(RecipeError, match="FSDP spreads weights over processes"):
        expert_backend(recipe, load_skeleton(recipe))
    plain = build_recipe(tmp_path)
    assert expert_backend(plain, load_skeleton(plain)) == "grouped_mm"
