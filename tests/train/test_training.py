"""Training: neutral under the callback, exact in its counts, exact when resumed, and masked as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from coop.errors import CheckpointError, CoopError, RecipeError
from coop.profile import Profile, adapter_digest
from tests.train.tiny import build_recipe
from train.data.load import load_data
from train.data.rows import to_dataset
from train.run import Options, run
from train.saving.checkpoint import METRICS_NAME, SUMMARY_NAME
from train.schema import Recipe
from train.trainer import CoopTrainer, training_arguments
from train.tuning.model import load_model, load_tokenizer
from train.watching.progress import read_metrics, to_json

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
DROPOUT = ("tune.groups=[attention]", "tune.lora.dropout=0.2")


def train(recipe: Recipe, **options: Any) -> Path:
    run(recipe, Path("recipe.yaml"), Options(**options))
    return Path(recipe.output)


def losses(output: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in read_metrics(output / METRICS_NAME) if "loss" in r]


def adapter(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def assert_same_weights(mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert mine.keys() == other.keys()
    assert [name for name in mine if not torch.equal(mine[name], other[name])] == []


def test_dropout_is_really_on_in_the_test_of_neutrality(tmp_path: Path) -> None:
    seeds = [
        train(build_recipe(tmp_path, *DROPOUT, f"output={tmp_path / str(p)}", f"tune.lora.dropout={p}"))
        for p in (0.2, 0.0)
    ]
    assert losses(seeds[0]) != losses(seeds[1])


def test_final_profile_is_of_a_pass_of_held_out_rows_through_the_final_weights(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path)
    output = train(recipe)
    profile, middle = Profile.load(output), Profile.load(output / "checkpoint-4")
    rows = load_data(recipe.data, load_tokenizer(recipe), 0).eval_rows[:4]
    assert profile.is_refreshed and not middle.is_refreshed
    assert profile.tokens_answer == sum(label != -100 for row in rows for label in row.labels)
    assert profile.tokens_prompt + profile.tokens_answer == sum(len(row.input_ids) for row in rows)
    assert profile.identity.adapter_digest == adapter_digest(output)
    assert middle.identity.adapter_digest == adapter_digest(output / "checkpoint-4")
    np.testing.assert_array_equal(middle.hot_answer, middle.train_answer)
    assert profile.train_tokens_answer > middle.train_tokens_answer


def test_every_file_of_a_checkpoint_follows_the_umask(tmp_path: Path) -> None:
    output = train(build_recipe(tmp_path))
    for folder in (output, output / "checkpoint-6"):
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir() if path.is_file()}
        assert modes["adapter_model.safetensors"] == 0o644 and set(modes.values()) == {0o644}


def test_base_model_is_named_in_the_adapter_as_the_recipe_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    output = train(build_recipe(tmp_path, "model.path=model"))
    assert json.loads((output / "adapter_config.json").read_text())["base_model_name_or_path"] == "model"


class StopAt(Exception):
    """Stands for a kill."""


def train_until_killed(recipe: Recipe, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, and die after `step` steps."""
    original = CoopTrainer.training_step

    def step_or_die(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step:
            raise StopAt
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(CoopTrainer, "training_step", step_or_die)
        with pytest.raises(StopAt):
            train(recipe)


FULL = ("tune.method=full", "tune.groups=[attention,experts,other]")


@pytest.mark.parametrize("overrides", [DROPOUT, (), FULL, ("tune.groups=[experts,router]",)])
def test_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(build_recipe(tmp_path, *overrides, f"output={tmp_path / 'whole'}"))
    recipe = build_recipe(tmp_path, *overrides)
    train_until_killed(recipe, 5, monkeypatch)
    output = train(recipe, resume=Path())
    assert losses(output) == losses(whole) and len(losses(whole)) == 6
    name = "model.safetensors" if overrides == FULL else "adapter_model.safetensors"
    assert_same_weights(load_file(output / name), load_file(whole / name))
    mine, other = Profile.load(output), Profile.load(whole)
    for counts in ("train_prompt", "train_answer", "same_layer", "next_layer", "hot_answer"):
        np.testing.assert_array_equal(getattr(mine, counts), getattr(other, counts))
    np.testing.assert_allclose(mine.recent_answer, other.recent_answer, rtol=1e-6)


def test_incomplete_checkpoint_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = build_recipe(tmp_path)
    train_until_killed(recipe, 5, monkeypatch)
    newest = Path(recipe.output) / "checkpoint-4" / "optimizer.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    output = train(recipe, resume=Path())
    assert [step for step, _ in losses(output)] == [1, 2, 3, 4, 5, 6]


def test_resuming_with_another_recipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_until_killed(build_recipe(tmp_path), 3, monkeypatch)
    with pytest.raises(CheckpointError, match=r"train\.learning_rate: 0\.01 -> 0\.5"):
        train(build_recipe(tmp_path, "train.learning_rate=0.5"), resume=Path())


def test_output_that_would_be_lost_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = build_recipe(tmp_path)
    with pytest.raises(RecipeError, match="nothing to resume"):
        train(recipe, resume=Path())
    train_until_killed(recipe, 3, monkeypatch)
    with pytest.raises(RecipeError, match="unfinished run; add --resume to go on"):
        train(recipe)
    train(recipe, is_overwriting=True)
    with pytest.raises(RecipeError, match="finished run; add --overwrite"):
        train(recipe)
    with pytest.raises(RecipeError, match="not of a coop run"):
        train(build_recipe(tmp_path, f"output={tmp_path / 'model'}"), is_overwriting=True)


def test_loss_ignores_prompt_tokens(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path)
    tokenizer = load_tokenizer(recipe)
    rows = load_data(recipe.data, tokenizer, 0).train_rows[:2]
    model = load_model(recipe)
    trainer = CoopTrainer(
        coop=None,
        deciding={},
        recipe=recipe,
        model=model,
        args=training_arguments(recipe, tmp_path / "out", 1),
        train_dataset=to_dataset(rows),
        processing_class=tokenizer,
    )
    model.eval()
    batch = next(iter(trainer.get_train_dataloader()))
    labels = batch["labels"].clone()
    with torch.no_grad():
        loss = trainer.compute_loss(model, dict(batch))
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    picked = logits[:, :-1].log_softmax(-1).gather(2, labels[:, 1:].clamp(min=0).unsqueeze(2)).squeeze(2)
    trained = labels[:, 1:] != -100
    auxiliary = trainer.router_aux_loss_coef * trainer._metrics["eval"]["aux_loss"][0]
    torch.testing.assert_close(loss - auxiliary, -(picked * trained).sum() / trained.sum())
    assert int(trained.sum()) == sum(label != -100 for row in rows for label in row.labels)


def test_result_has_everything_and_improves_on_what_it_learns(tmp_path: Path) -> None:
    output = train(build_recipe(tmp_path, "train.steps=30", "logging.wandb.mode=offline"))
    names = {path.name for path in output.iterdir()}
    assert names >= {"adapter_config.json", "tokenizer.json", "coop_profile.safetensors", "metrics.jsonl"}
    assert names >= {"report.png", "recipe.yaml", "README.md", SUMMARY_NAME, "wandb"}
    summary = json.loads((output / SUMMARY_NAME).read_text())
    assert summary["eval_loss_after"] < summary["eval_loss_before"] - 0.5
    assert summary["steps"] == 30 and summary["train_tokens"] > 0


def test_auxiliary_flag_of_training_is_not_left_in_a_saved_config(tmp_path: Path) -> None:
    output = train(build_recipe(tmp_path, *FULL, "moe.aux_loss_coef=0.01"))
    assert "aux_loss" in read_metrics(output / METRICS_NAME)[1]
    assert not json.loads((output / "config.json").read_text()).get("output_router_logits", False)


@pytest.mark.parametrize("every", [1, 100])
def test_run_that_diverges_is_stopped_without_a_result(tmp_path: Path, every: int) -> None:
    recipe = build_recipe(
        tmp_path,
        "train.learning_rate=1e30",
        "train.warmup_steps=2",
        "train.schedule=constant_with_warmup",
        "checkpoint.every_steps=1",
        f"logging.every_steps={every}",
    )
    with pytest.raises(CoopError, match=r"diverged.*lower train\.learning_rate .* whole checkpoint"):
        train(recipe)
    output = Path(recipe.output)
    assert not (output / SUMMARY_NAME).exists() and not (output / "adapter_config.json").exists()
    assert "NaN" not in (output / METRICS_NAME).read_text()


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    assert (
        to_json({"a": [float("nan"), 1.0], "b": {"c": float("-inf")}})
        == '{"a": [null, 1.0], "b": {"c": null}}'
    )


def test_result_holds_no_pickle(tmp_path: Path) -> None:
    output = train(build_recipe(tmp_path))
    endings = {path.suffix for path in output.iterdir() if path.is_file()}
    assert endings <= {".safetensors", ".json", ".jsonl", ".jinja", ".yaml", ".md", ".png", ".html"}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_full_disk_names_the_last_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(self: Any, folder: str) -> None:
        if folder.endswith("checkpoint-4"):
            raise error

    monkeypatch.setattr(CoopTrainer, "_save_rng_state", fail)
    reason = error.args[-1]
    with pytest.raises(CoopError, match=rf"checkpoint-4: cannot be saved: {reason}; .*checkpoint-2$"):
        train(build_recipe(tmp_path))


@pytest.mark.parametrize("below", ["", "x/y"])
def test_output_that_cannot_be_a_folder_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"output: .*file is not a folder"):
        train(build_recipe(tmp_path, f"output={tmp_path / 'file' / below}"), is_dry=True)


def test_kept_checkpoints_are_the_newest(tmp_path: Path) -> None:
    output = train(build_recipe(tmp_path, "checkpoint.keep=1"))
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-6"]


def test_dry_run_checks_everything_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = build_recipe(tmp_path)
    output = train(recipe, is_dry=True)
    assert not output.exists()
    shown = capsys.readouterr().out
    assert "3 MoE layers x 8 experts, top-2" in shown and "plan: 6 steps" in shown
    with pytest.raises(RecipeError, match="shared_experts matches nothing in MixtralForCausalLM"):
        train(build_recipe(tmp_path, "tune.groups=[shared_experts]"), is_dry=True)
