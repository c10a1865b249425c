"""Load balancing: the loss that is in force is shown, and its gradient reaches what should learn from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from coop.errors import CheckpointError, RecipeError
from tests.families import FAMILIES
from tests.train.test_training import train
from tests.train.tiny import build_recipe, read_losses
from train.trainer import CoopTrainer
from train.tuning.balance import has_aux_loss
from train.tuning.model import load_config, load_skeleton

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
WITH = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe", "phimoe", "qwen2_moe")
WITHOUT = ("deepseek_v2", "deepseek_v3", "glm4_moe", "nemotron_h")
ONE_STEP = (
    "train.steps=1",
    "train.max_grad_norm=1e9",
    "checkpoint.every_steps=0",
    "coop.profile.enabled=false",
)
ROUTER = ("tune.method=full", "tune.groups=[attention,experts,router]")
CHECKPOINTED = "train.activation_checkpointing=true"


class Gradients(TrainerCallback):
    """Keeps the gradients of the step."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.found = {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> Gradients:
    keeper, original = Gradients(), CoopTrainer.__init__

    def init(self: Any, **options: Any) -> None:
        original(self, **options)
        self.add_callback(keeper)

    monkeypatch.setattr(CoopTrainer, "__init__", init)
    return keeper


def attention(family: str) -> str:
    return "eager" if family == "gpt_oss" else "sdpa"


def one_step(folder: Path, family: str, keeper: Gradients, *overrides: str) -> dict[str, Tensor]:
    common = (*ONE_STEP, "eval.at_start=false", f"model.attention={attention(family)}")
    recipe = build_recipe(folder, *common, *overrides, family=family)
    train(recipe, is_overwriting=(folder / "out" / "metrics.jsonl").exists())
    return keeper.found


def differing(mine: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    assert mine.keys() == other.keys()
    return {name for name in mine if not torch.allclose(mine[name], other[name], rtol=1e-4, atol=1e-7)}


def test_every_family_is_known_to_have_a_loss_in_its_code_or_not(tmp_path: Path) -> None:
    assert set(WITH) | set(WITHOUT) == set(FAMILIES)
    for family in FAMILIES:
        recipe = build_recipe(tmp_path / family, f"model.attention={attention(family)}", family=family)
        assert has_aux_loss(load_skeleton(recipe)) == (family in WITH)


@pytest.mark.parametrize("family", WITH)
def test_gradient_of_the_loss_reaches_every_trained_router(
    tmp_path: Path, family: str, gradients: Gradients
) -> None:
    off = one_step(tmp_path, family, gradients, *ROUTER, "moe.aux_loss_coef=0")
    on = one_step(tmp_path, family, gradients, *ROUTER, "moe.aux_loss_coef=1")
    again = one_step(tmp_path, family, gradients, *ROUTER, "moe.aux_loss_coef=1", CHECKPOINTED)
    routers = {name for name in on if name.endswith((".gate.weight", ".router.weight"))}
    assert len(routers) == 3 and routers <= differing(on, off)
    assert differing(on, again) == set()


@pytest.mark.parametrize("family", WITH)
def test_gradient_of_the_loss_passes_a_frozen_router_to_earlier_adapters(
    tmp_path: Path, family: str, gradients: Gradients
) -> None:
    off = one_step(tmp_path, family, gradients, "moe.aux_loss_coef=0")
    on = one_step(tmp_path, family, gradients, "moe.aux_loss_coef=1")
    again = one_step(tmp_path, family, gradients, "moe.aux_loss_coef=1", CHECKPOINTED)
    assert not any(".gate." in name or ".router." in name for name in on)
    moved = differing(on, off)
    for layer in range(3):  # what comes after the last router gets no gradient from it: its experts
        assert any(f".layers.{layer}." in name and ".self_attn." in name for name in moved)
    experts = {name for name in moved if ".experts." in name}
    assert any(".layers.0." in name for name in experts)
    assert not any(".layers.2." in name for name in experts)
    assert differing(on, again) == set()


@pytest.mark.parametrize("family", WITHOUT)
def test_coefficient_that_no_code_would_apply_is_refused(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = build_recipe(tmp_path, "moe.aux_loss_coef=0.01", family=family)
    with pytest.raises(
        RecipeError, match=r"moe\.aux_loss_coef: the code of \w+ForCausalLM has no load-balancing"
    ):
        train(recipe, is_dry=True)
    train(build_recipe(tmp_path, family=family), is_dry=True)
    assert "load-balancing loss: off (the model's code has none)" in capsys.readouterr().out


def test_stray_keys_of_a_config_turn_no_loss_on(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, "train.steps=1", family="deepseek_v2")
    path = tmp_path / "model" / "config.json"
    stray = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    path.write_text(json.dumps(json.loads(path.read_text()) | stray))
    assert all("aux_loss" not in record for record in read_losses(train(recipe)))


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        ((), "coefficient 0.001 (the model's config); the router is frozen"),
        (
            ("moe.aux_loss_coef=0.02", "tune.groups=[router]"),
            "coefficient 0.02 (moe.aux_loss_coef); it moves",
        ),
        (("moe.aux_loss_coef=0",), "load-balancing loss: off (moe.aux_loss_coef)"),
    ],
)
def test_loss_in_force_is_shown_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], shown: str
) -> None:
    output = train(build_recipe(tmp_path, "train.steps=1", *overrides))
    assert shown in capsys.readouterr().out
    assert any("aux_loss" in record for record in read_losses(output)) == ("off" not in shown)


def test_implementation_of_attention_that_a_family_lacks_is_refused_by_a_dry_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="GptOssForCausalLM does not support sdpa; set it to eager"):
        train(build_recipe(tmp_path, family="gpt_oss"), is_dry=True)


def test_model_whose_config_lacks_a_name_that_trl_reads_is_trained_and_loads_again(tmp_path: Path) -> None:
    full = ("tune.method=full", "tune.groups=[router]", "train.steps=1")
    output = train(build_recipe(tmp_path, *full, family="granitemoe"))
    config = load_config(build_recipe(tmp_path, f"model.path={output}", family="granitemoe"))
    assert config.num_local_experts == 8 and not config.output_router_logits
