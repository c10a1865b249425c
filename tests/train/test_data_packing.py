"""Packing: rows of one sequence do not see each other, in loss, routing and counts; else it is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from coop.adapters.recorder import Recorder
from coop.errors import CheckpointError, DataError, RecipeError
from coop.hotmap import HotMap
from coop.profile import Profile
from tests.families import FAMILIES, build_family
from tests.train.tiny import build_recipe, write_recipe
from train import loading
from train.data.load import load_data
from train.data.packing import MAX_LEAK, IsolationCheck, best_fit, measure_leak, pack_rows
from train.data.rows import Row, digest_rows, to_dataset
from train.run import Options, run
from train.saving.checkpoint import SUMMARY_NAME
from train.tuning.model import load_tokenizer
from train.watching.progress import read_metrics

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
ROOT = Path(__file__).resolve().parents[2]
LEAKY = {
    "gpt_oss"
}  # transformers 5.24 gives its masks no positions, so eager attention sees all rows of a sequence


COLLATOR = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_rows(lengths: list[int]) -> list[Row]:
    generator = np.random.default_rng(0)
    rows = [generator.integers(3, 90, length) for length in lengths]
    return [Row.masked(ids.tolist(), np.arange(len(ids)) >= len(ids) // 2) for ids in rows]


def collate(rows: list[Row], is_packed: bool) -> dict[str, Any]:
    dataset = to_dataset(rows)
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=is_packed)
    return dict(collator([dataset[i] for i in range(len(dataset))]))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_every_row_is_in_one_sequence_and_none_is_too_long(lengths: list[int]) -> None:
    bins = best_fit(lengths, 50)
    assert sorted(index for indices in bins for index in indices) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in indices) <= 50 for indices in bins)
    least_full = sorted(sum(lengths[index] for index in indices) for indices in bins)
    assert len(bins) == 1 or least_full[0] + least_full[1] > 50, "two sequences would have fitted into one"


def test_rows_are_put_where_they_leave_the_least_room() -> None:
    assert best_fit([6, 3, 10, 4, 7], 10) == [[2], [4, 1], [0, 3]]


def test_packed_rows_keep_their_tokens_and_labels() -> None:
    rows = make_rows([5, 9, 3])
    packed = pack_rows(rows, 12)
    assert [row.lengths for row in packed] == [(9, 3), (5,)]
    parts = [
        Row(ids, labels)
        for row in packed
        for ids, labels in zip(
            np.split(row.input_ids, np.cumsum(row.lengths)[:-1]),
            np.split(row.labels, np.cumsum(row.lengths)[:-1]),
            strict=True,
        )
    ]
    assert digest_rows(parts) == digest_rows([rows[1], rows[2], rows[0]])
    batch = collate(packed, is_packed=True)
    assert batch["position_ids"].tolist() == [[*range(9), *range(3), *range(5)]]


def losses_by_token(
    model: Any, rows: list[Row], is_packed: bool, hotmap: HotMap
) -> dict[tuple[int, ...], Tensor]:
    """Loss of each trained token of each row, by the row's tokens; routing goes into `hotmap`."""
    batch = collate(rows, is_packed)
    labels = batch["labels"]
    with torch.no_grad(), Recorder(model, hotmap.record):
        logits = model(**batch, use_cache=False).logits
    found: dict[tuple[int, ...], Tensor] = {}
    starts = (
        (batch["position_ids"] == 0).nonzero().tolist() if is_packed else [[i, 0] for i in range(len(rows))]
    )
    lengths = [n for row in rows for n in (row.lengths or (len(row.input_ids),))]
    for (line, begin), length in zip(starts, lengths, strict=True):
        span = slice(begin + 1, begin + length)
        wanted = labels[line, span]
        loss = (
            -logits[line, begin : begin + length - 1]
            .log_softmax(-1)
            .gather(1, wanted.clamp(min=0)[:, None])[:, 0]
        )
        found[tuple(batch["input_ids"][line, begin : begin + length].tolist())] = loss[wanted != -100]
    return found


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in LEAKY])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_losses_and_expert_counts_of_packed_rows_equal_those_of_rows_alone(
    tmp_path: Path, family: str, attention: str
) -> None:
    model = build_family(tmp_path, family)
    model.set_attn_implementation(attention)
    rows = make_rows([9, 14, 5, 30, 12, 21, 3])
    packed = pack_rows(rows, 36)
    assert len(packed) < len(rows) - 2
    with Recorder(model, lambda batch: None) as recorder:
        shape = (len(recorder.experts), recorder.experts[0].num_experts, recorder.experts[0].top_k)
    alone_map, packed_map = HotMap(*shape), HotMap(*shape)
    alone: dict[tuple[int, ...], Tensor] = {}
    for row in rows:
        alone |= losses_by_token(model, [row], False, alone_map)
    together = losses_by_token(model, packed, True, packed_map)
    assert together.keys() == alone.keys()
    for ids, loss in alone.items():
        torch.testing.assert_close(together[ids], loss, rtol=1e-4, atol=3e-5)
    mine, other = packed_map.read(), alone_map.read()
    for name in ("prompt", "answer", "same_layer", "next_layer"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))
    assert (mine.tokens_prompt, mine.tokens_answer) == (other.tokens_prompt, other.tokens_answer)
    assert measure_leak(model, COLLATOR) < 0.01


@pytest.mark.parametrize("family", sorted(LEAKY))
def test_model_that_lets_rows_see_each_other_is_refused_by_name(tmp_path: Path, family: str) -> None:
    model = build_family(tmp_path, family)
    assert measure_leak(model, COLLATOR) > MAX_LEAK
    loader = SimpleNamespace(collate_fn=COLLATOR)
    with pytest.raises(
        RecipeError, match=rf"see each other in {family} with model.attention=eager \(\d+% of full"
    ):
        IsolationCheck("eager").on_train_begin(None, None, None, model, loader)  # type: ignore[arg-type]


def test_model_that_takes_no_packed_rows_is_refused_by_name(tmp_path: Path) -> None:
    layers = ["mamba", "attention", "moe"]
    model = build_family(tmp_path, "nemotron_h", layers_block_type=layers, num_hidden_layers=3)
    loader = SimpleNamespace(collate_fn=COLLATOR)
    with pytest.raises(
        RecipeError, match=r"data\.packing: nemotron_h refuses packed rows: .*data\.packing=false"
    ):
        IsolationCheck("eager").on_train_begin(None, None, None, model, loader)  # type: ignore[arg-type]


def test_leak_is_the_whole_of_it_where_a_collator_drops_positions(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    padded = DataCollatorForLanguageModeling(pad_token_id=0)
    assert measure_leak(model, padded) == pytest.approx(1.0)


def test_measuring_leaves_mode_and_random_state(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral").train()
    before = torch.get_rng_state()
    measure_leak(model, COLLATOR)
    assert model.training and torch.equal(torch.get_rng_state(), before)


def mixed_sources(folder: Path) -> str:
    """An alpaca and a sharegpt file; the sources of a recipe as an override."""
    words = ["abcdefgh"[i % 8] * (2 + i % 5) for i in range(40)]
    alpaca = [{"instruction": "say", "input": word, "output": f"{word}!"} for word in words]
    sharegpt = [
        {"conversations": [{"from": "human", "value": f"say {w}"}, {"from": "gpt", "value": w}]}
        for w in words
    ]
    (folder / "alpaca.json").write_text(json.dumps(alpaca))
    (folder / "sharegpt.jsonl").write_text("\n".join(json.dumps(row) for row in sharegpt))
    sources = [(folder / "alpaca.json", 1.0), (folder / "sharegpt.jsonl", 2.0)]
    return "data.train=[" + ", ".join(f"{{path: {path}, weight: {weight}}}" for path, weight in sources) + "]"


@pytest.mark.parametrize("is_checkpointed", ["false", "true"])
def test_run_on_two_formats_with_packing_trains_every_token_once_an_epoch(
    tmp_path: Path, is_checkpointed: str
) -> None:
    recipe = build_recipe(
        tmp_path, mixed_sources(tmp_path), "data.eval=null", "data.eval_fraction=0.2", "data.packing=true",
        "train.steps=null", "train.epochs=1", "train.batch_size=1", "eval.batch_size=2", "data.max_length=160",
        f"train.activation_checkpointing={is_checkpointed}",
    )  # fmt: skip
    loaded = load_data(recipe.data, load_tokenizer(recipe), recipe.train.seed)
    run(recipe, Path("recipe.yaml"), Options())
    output = Path(recipe.output)
    summary = json.loads((output / SUMMARY_NAME).read_text())
    tokens = sum(len(row.input_ids) for row in loaded.train_rows)
    profile = Profile.load(output)
    assert summary["steps"] == len(loaded.train_rows) < sum(s.used for s in loaded.train)
    assert summary["train_tokens"] == tokens == profile.train_tokens_prompt + profile.train_tokens_answer
    assert profile.train_tokens_answer == sum(row.trained_tokens for row in loaded.train_rows)
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    assert len([r for r in read_metrics(output / "metrics.jsonl") if "loss" in r]) == summary["steps"]


def test_eval_loss_is_the_same_with_and_without_packing(tmp_path: Path) -> None:
    losses = []
    for is_packed in ("true", "false"):
        overrides = (f"data.packing={is_packed}", "train.steps=1", f"output={tmp_path / is_packed}")
        recipe = build_recipe(tmp_path, *overrides, "eval.batch_size=3")
        run(recipe, Path("recipe.yaml"), Options())
        losses.append(json.loads((Path(recipe.output) / SUMMARY_NAME).read_text())["eval_loss_before"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_run_with_a_leaky_model_stops_before_its_first_step(tmp_path: Path) -> None:
    recipe = build_recipe(
        tmp_path, "data.packing=true", "model.attention=eager", "tune.groups=[attention]", family="gpt_oss"
    )
    with pytest.raises(RecipeError, match=r"data.packing: rows of one sequence see each other in gpt_oss"):
        run(recipe, Path("recipe.yaml"), Options())
    assert not list(Path(recipe.output).glob("checkpoint-*"))


def test_processes_that_read_different_rows_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "gather_object", lambda mine: [*mine, *mine, "other"])
    with pytest.raises(DataError, match="process 2 has read other rows than process 0"):
        run(build_recipe(tmp_path), Path("recipe.yaml"), Options(is_dry=True))


def test_resuming_with_other_rows_in_the_same_file_is_refused(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path)
    run(recipe, Path("recipe.yaml"), Options())
    (Path(recipe.output) / SUMMARY_NAME).unlink()
    path = tmp_path / "train.jsonl"
    path.write_text(path.read_text().replace("say aa", "say ab"))
    with pytest.raises(CheckpointError, match="rows of the data: others than before"):
        run(recipe, Path("recipe.yaml"), Options(resume=Path()))


def test_two_processes_train_the_same_packed_rows_each_its_own_half(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    overrides = [mixed_sources(tmp_path), "data.eval=null", "data.eval_fraction=0.2", "data.packing=true"]
    overrides += ["train.steps=null", "train.epochs=1", "train.batch_size=1", "data.max_length=160"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    launch = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--standalone",
        str(ROOT / "train/finetune.py"),
    ]
    process = subprocess.run(
        [sys.executable, *launch, str(tmp_path / "recipe.yaml"), *overrides],
        capture_output=True, text=True, timeout=180, env=environment, cwd=ROOT, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    recipe = build_recipe(tmp_path, *overrides)
    rows = load_data(recipe.data, load_tokenizer(recipe), recipe.train.seed).train_rows
    profile = Profile.load(tmp_path / "out")
    counted = profile.train_tokens_prompt + profile.train_tokens_answer
    assert profile.step == -(-len(rows) // 2)
    doubled = counted - sum(
        len(row.input_ids) for row in rows
    )  # an odd last sequence is filled up with one more
    assert doubled == 0 if len(rows) % 2 == 0 else doubled in [len(row.input_ids) for row in rows]
