"""CoopCallback: changes no bit of a training run, and counts what an independent recount counts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from coop.errors import RecipeError
from coop.profile import Profile
from tests.train.recount import Recount
from tests.train.tiny import build_recipe
from train.data.load import load_data
from train.data.rows import to_dataset
from train.run import Options, run
from train.saving.checkpoint import METRICS_NAME
from train.schema import CoopSection, Recipe
from train.trainer import CoopTrainer, training_arguments
from train.tuning.model import load_model, load_tokenizer, make_trainable
from train.watching.callback import CoopCallback
from train.watching.progress import read_metrics

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
DROPOUT = ("tune.groups=[attention]", "tune.lora.dropout=0.2")
ACCUMULATED = ("train.grad_accumulation=3", "train.batch_size=1")
CHECKPOINTED = ("train.activation_checkpointing=true",)
OFFLOADED = ("model.experts_offload=true", "model.experts_budget=50%")
BF16 = ("model.dtype=bfloat16",)
FULL = ("tune.method=full", "tune.groups=[attention,experts,router,other]")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(recipe: Recipe, **options: Any) -> Path:
    run(recipe, Path("recipe.yaml"), Options(**options))
    return Path(recipe.output)


def losses(output: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in read_metrics(output / METRICS_NAME) if "loss" in r]


def weights(folder: Path) -> dict[str, Tensor]:
    path = folder / "adapter_model.safetensors"
    return load_file(path if path.is_file() else folder / "model.safetensors")


def random_states() -> list[Any]:
    state: Any = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), state[1].tolist(), state[2:]]


def assert_same_weights(mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert mine.keys() == other.keys()
    assert [name for name in mine if not torch.equal(mine[name], other[name])] == []


@pytest.mark.parametrize(
    "overrides",
    [
        DROPOUT,
        CHECKPOINTED,
        (*DROPOUT, *ACCUMULATED),
        (*BF16, *ACCUMULATED, *CHECKPOINTED),
        (*BF16, *FULL),
        OFFLOADED,
    ],
    ids=["dropout", "checkpointing", "accumulation", "bf16", "full", "offloaded"],
)
def test_losses_weights_and_random_state_are_bit_identical_with_and_without_the_callback(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    common = (*overrides, "train.steps=12", "checkpoint.every_steps=10", "eval.every_steps=7")
    watching = ("coop.warmup.at_start=true", "coop.warmup.at_end=true", "coop.profile.log_every_steps=2")
    watched = train(build_recipe(tmp_path, *common, *watching, f"output={tmp_path / 'with'}"))
    after_watched = random_states()
    plain = train(build_recipe(tmp_path, *common, f"output={tmp_path / 'out'}", "coop.profile.enabled=false"))
    assert len(losses(watched)) == 12
    assert losses(watched) == losses(plain)
    assert_same_weights(weights(watched), weights(plain))
    assert random_states() == after_watched
    profile = Profile.load(watched)
    assert np.isnan(profile.load_ms).all() != (overrides is OFFLOADED)
    assert profile.warmups >= 2 and not (plain / "coop_profile.safetensors").exists()


@pytest.mark.parametrize(
    "overrides",
    [(), CHECKPOINTED, ACCUMULATED, (*BF16, *ACCUMULATED, *CHECKPOINTED), FULL, (*OFFLOADED, *CHECKPOINTED)],
    ids=["padded", "checkpointing", "accumulation", "bf16", "full", "offloaded"],
)
def test_training_counts_equal_an_independent_recount(
    tmp_path: Path, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    recounts: list[Recount] = []

    def watched(model: Any, *args: Any) -> Any:
        trainable = make_trainable(model, *args)
        recounts.append(Recount(trainable))
        return trainable

    monkeypatch.setattr("train.loading.make_trainable", watched)
    recipe = build_recipe(tmp_path, *overrides)
    profile = Profile.load(train(recipe))
    assert recounts[0].passes == 6 * recipe.train.grad_accumulation
    np.testing.assert_array_equal(profile.train_prompt, recounts[0].prompt)
    np.testing.assert_array_equal(profile.train_answer, recounts[0].answer)
    assert (profile.train_answer.sum(axis=1) == profile.train_tokens_answer * 2).all()


def pack(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows end to end in one, positions beginning again with each, and no mask: a batch without padding."""
    joined = {name: [value for row in rows for value in row[name]] for name in ("input_ids", "labels")}
    joined["position_ids"] = [place for row in rows for place in range(len(row["input_ids"]))]
    return {name: torch.tensor([values]) for name, values in joined.items()}


def train_packed(folder: Path, has_callback: bool) -> tuple[dict[str, Tensor], list[Any], Any, Recount]:
    recipe = build_recipe(folder, "train.steps=6", f"output={folder / str(has_callback)}")
    torch.manual_seed(0)
    model = make_trainable(load_model(recipe), recipe.tune, recipe.model.path)
    recount = Recount(model)
    tokenizer = load_tokenizer(recipe)
    rows = load_data(recipe.data, tokenizer, recipe.train.seed).train_rows
    settings = CoopSection.model_validate({"warmup": {"every_steps": 2, "row_counts": [1]}})
    coop = CoopCallback(model, tokenizer, settings) if has_callback else None
    trainer = CoopTrainer(
        coop=coop,
        deciding={},
        recipe=recipe,
        model=model,
        args=training_arguments(recipe, Path(recipe.output), 6),
        train_dataset=to_dataset(rows),
        processing_class=tokenizer,
        data_collator=pack,
    )
    trainer.train()
    profile = coop.build_profile(folder, 6, lambda tensor: tensor) if coop else None
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return trained, random_states(), profile, recount


def test_packed_batches_are_counted_exactly_and_trained_the_same(tmp_path: Path) -> None:
    watched, after_watched, profile, recount = train_packed(tmp_path, has_callback=True)
    plain, after_plain, _, _ = train_packed(tmp_path, has_callback=False)
    assert_same_weights(watched, plain)
    assert after_watched == after_plain
    np.testing.assert_array_equal(profile.train_prompt, recount.prompt)
    np.testing.assert_array_equal(profile.train_answer, recount.answer)
    # a row of n tokens has n - 1 steps from one token to the next, whatever lies beside it
    steps = profile.train_tokens_prompt + profile.train_tokens_answer - 6 * 2
    assert (profile.same_layer.sum(axis=(1, 2)) == steps * 2 * 2).all()


def test_two_processes_with_uneven_data_count_exactly_and_train_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m", "tests.train.two_processes"]
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    recipe = build_recipe(tmp_path)  # the model and the data, before two processes want to make them
    done = subprocess.run(
        [*command, str(tmp_path)], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts = [json.loads((tmp_path / f"recount-{rank}.json").read_text()) for rank in (0, 1)]
    assert [fact["world"] for fact in facts] == [2, 2]
    assert [fact["passes"] for fact in facts] == [10, 10]
    assert facts[0]["answer"] != facts[1]["answer"]
    profile = Profile.load(tmp_path / "with")
    for name in ("prompt", "answer"):
        summed = np.array(facts[0][name]) + np.array(facts[1][name])
        np.testing.assert_array_equal(getattr(profile, f"train_{name}"), summed)
    # seven rows for two processes of two: the last batch of each of the five epochs is filled up with a row that was
    # in the first, which is trained twice and so counted twice
    data = recipe.data.model_copy(update={"max_train_rows": 7})
    rows = load_data(data, load_tokenizer(recipe), recipe.train.seed).train_rows
    counted = profile.train_tokens_prompt + profile.train_tokens_answer
    once = 5 * sum(len(row.input_ids) for row in rows)
    assert once < counted <= once + 5 * max(len(row.input_ids) for row in rows)
    assert losses(tmp_path / "with") == losses(tmp_path / "out")
    assert_same_weights(weights(tmp_path / "with"), weights(tmp_path / "out"))


def test_layer_that_the_model_has_not_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, "coop.warmup.layers=[1,3]")
    with pytest.raises(RecipeError, match=r"there is no layer 3; the model has MoE layers 0 to 2"):
        train(recipe, is_dry=True)


def test_metrics_hold_the_scalars_of_experts_and_of_the_final_profile(tmp_path: Path) -> None:
    output = train(build_recipe(tmp_path, "coop.profile.log_every_steps=2", "coop.warmup.every_steps=0"))
    records = read_metrics(output / METRICS_NAME)
    experts = [record for record in records if "experts/busiest_over_mean" in record]
    assert [record["step"] for record in experts] == [2, 4, 6]
    names = {
        "experts/busiest_over_mean",
        "experts/load_entropy",
        "experts/dead",
        "experts/hottest_half_share",
    }
    assert names <= experts[1].keys() and {"experts/hit_rate_25", "experts/hit_rate_50"} <= experts[0].keys()
    assert all(
        1 <= r["experts/busiest_over_mean"] <= 8 and 0 < r["experts/load_entropy"] <= 1 for r in experts
    )
    final = records[-1]
    assert final["step"] == 6 and 0 < final["final/hit_rate_25"] <= final["final/hit_rate_50"] <= 1
