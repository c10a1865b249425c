"""Settings: what a recipe says of optimiser, precision and evaluation is in force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from coop.profile import Profile
from tests.train.test_training import train, train_until_killed
from tests.train.tiny import build_recipe, build_tokenizer, read_losses
from train.data.load import load_data
from train.saving.checkpoint import METRICS_NAME
from train.trainer import CoopTrainer
from train.watching.progress import read_metrics

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
QUICK = ("coop.profile.enabled=false", "checkpoint.every_steps=0", "eval.at_start=false")
UNCHANGED = ("train.learning_rate=1e-30", "eval.every_steps=1", "train.steps=9", "coop.profile.enabled=false")


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [("adamw_torch", "AdamW"), ("adamw_torch_fused", "AdamW"), ("adafactor", "Adafactor")],
)
def test_optimiser_of_the_recipe_makes_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, name: str
) -> None:
    made: list[Any] = []
    original = CoopTrainer.create_optimizer

    def create(self: Any, *args: Any) -> Any:
        made.append(original(self, *args))
        return made[-1]

    monkeypatch.setattr(CoopTrainer, "create_optimizer", create)
    betas = () if optimizer == "adafactor" else ("train.betas=[0.8, 0.95]",)
    train(build_recipe(tmp_path, *QUICK, f"train.optimizer={optimizer}", "train.weight_decay=0.125", *betas))
    assert type(made[0]).__name__ == name
    settings = made[0].param_groups[0]
    assert settings["weight_decay"] == 0.125
    if betas:
        assert settings["betas"] == (0.8, 0.95) and bool(settings["fused"]) == (
            optimizer == "adamw_torch_fused"
        )


def test_warm_up_below_one_is_a_share_of_the_steps(tmp_path: Path) -> None:
    common = (*QUICK, "train.schedule=constant_with_warmup", "train.steps=8")
    share = train(build_recipe(tmp_path, *common, "train.warmup_steps=0.5"))
    steps = train(build_recipe(tmp_path, *common, "train.warmup_steps=4", f"output={tmp_path / 'steps'}"))
    none = train(build_recipe(tmp_path, *common, f"output={tmp_path / 'none'}"))
    rates = [[record["learning_rate"] for record in read_losses(output)] for output in (share, steps, none)]
    assert rates[0] == rates[1] != rates[2]


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32_weights(tmp_path: Path) -> None:
    full = (*QUICK, "tune.method=full", "tune.groups=[attention, experts]")
    mixed = train(build_recipe(tmp_path, *full, "train.mixed_precision=bf16"))
    plain = train(build_recipe(tmp_path, *full, f"output={tmp_path / 'plain'}"))
    assert {weight.dtype for weight in load_file(mixed / "model.safetensors").values()} == {torch.float32}
    first = [read_losses(output)[0]["loss"] for output in (mixed, plain)]
    assert first[0] != first[1] and first[0] == pytest.approx(first[1], rel=0.02)


def test_eval_before_training_can_be_left_out(tmp_path: Path) -> None:
    output = train(build_recipe(tmp_path, *QUICK))
    assert [r["step"] for r in read_metrics(output / METRICS_NAME) if "eval_loss" in r] == [6]


def test_eval_loss_is_the_mean_over_held_out_tokens_whatever_the_batch(tmp_path: Path) -> None:
    common = (
        "coop.profile.enabled=false",
        "checkpoint.every_steps=0",
        "train.steps=1",
        "moe.aux_loss_coef=0",
    )
    losses = []
    for size in (1, 2, 3, 4, 6):
        recipe = build_recipe(tmp_path, *common, f"eval.batch_size={size}", f"output={tmp_path / str(size)}")
        losses += [r["eval_loss"] for r in read_metrics(train(recipe) / METRICS_NAME) if "eval_loss" in r][:1]
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-6)


@pytest.mark.parametrize(("epochs", "steps"), [("10", 20), ("1.5", 3), ("0.3", 1)])
def test_epochs_are_whole_passes_though_the_last_step_of_each_is_short(
    tmp_path: Path, epochs: str, steps: int
) -> None:
    batches = ("train.batch_size=1", "train.grad_accumulation=23", "train.learning_rate=1e-5")
    recipe = build_recipe(
        tmp_path, "train.steps=null", f"train.epochs={epochs}", *batches, "eval.at_start=false"
    )
    output = train(recipe)
    assert read_losses(output)[-1]["step"] == steps
    if epochs == "10":
        profile, rows = (
            Profile.load(output / "checkpoint-20"),
            load_data(recipe.data, build_tokenizer(), 0).train_rows,
        )
        used = profile.train_tokens_prompt + profile.train_tokens_answer
        assert used == 10 * sum(len(row.input_ids) for row in rows)


def test_run_without_a_new_lowest_loss_stops_and_a_resumed_one_stops_at_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = (*UNCHANGED, "eval.patience=4", "eval.at_start=false")
    whole = train(build_recipe(tmp_path, *patient, f"output={tmp_path / 'whole'}"))
    last = read_losses(whole)[-1]["step"]
    assert last < 9
    recipe = build_recipe(tmp_path, *patient)
    train_until_killed(recipe, 3, monkeypatch)
    assert read_losses(train(recipe, resume=Path()))[-1]["step"] == last
    assert (
        read_losses(train(build_recipe(tmp_path, *UNCHANGED, f"output={tmp_path / 'all'}")))[-1]["step"] == 9
    )
