"""Output folders: nothing of the user's is deleted or mixed up, two runs never share one, names are those of coop."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coop.errors import RecipeError
from tests.train.tiny import build_recipe, write_recipe
from train.recipe import load_recipe
from train.run import Options, run
from train.saving.output import LOCK_NAME, is_own_name, locked
from train.saving.push import list_files
from train.schema import Recipe

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SHORT = ("train.steps=1", "checkpoint.every_steps=1", "eval.at_start=false")


def train(recipe: Recipe, recipe_path: Path = Path("recipe.yaml"), **options: Any) -> Path:
    run(recipe, recipe_path, Options(**options))
    return Path(recipe.output)


def test_folder_with_a_recipe_of_the_users_is_not_overwritten(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RecipeError, match="not of a coop run"):
        train(load_recipe(path, [f"output={tmp_path}", *SHORT]), path, is_overwriting=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_no_run_writes_is_named_and_nothing_is_deleted(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, *SHORT)
    output = train(recipe)
    (output / "thesis.tex").write_text("x")
    before = sorted(output.rglob("*"))
    with pytest.raises(RecipeError, match=r"--overwrite deletes nothing: thesis\.tex; move it away"):
        train(recipe, is_overwriting=True)
    assert sorted(output.rglob("*")) == before


def test_every_name_that_a_run_writes_is_known_and_can_be_overwritten(tmp_path: Path) -> None:
    keys = (
        "logging.wandb.mode=offline",
        "checkpoint.final=merged",
        "checkpoint.pack=int8",
        "eval.every_steps=1",
    )
    recipe = build_recipe(tmp_path, *SHORT, *keys)
    output = train(recipe)
    assert [path.name for path in output.iterdir() if not is_own_name(path.name)] == []
    assert not (output / LOCK_NAME).exists()
    train(build_recipe(tmp_path, *SHORT), is_overwriting=True)
    assert not (output / "merged").exists() and not (output / "wandb").exists()


def test_output_of_an_earlier_version_is_recognised(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, *SHORT)
    output = train(recipe)
    text = (output / "recipe.yaml").read_text()
    (output / "recipe.yaml").write_text(text.partition("\n")[2])
    train(recipe, is_overwriting=True)
    assert (output / "recipe.yaml").read_text() == text and text.startswith("# the recipe of a coop run")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("model/sub", "is inside model.path"),
        ("rows/out", "is inside a source of data"),
        ("run", "holds a source of data"),
        ("recipes", "holds the recipe"),
    ],
)
def test_output_around_or_inside_what_a_run_reads_is_refused(tmp_path: Path, place: str, words: str) -> None:
    path = write_recipe(tmp_path)
    (tmp_path / "rows").mkdir()
    shutil.copy(tmp_path / "train.jsonl", tmp_path / "rows")
    held_out = tmp_path / "eval.jsonl"
    if place == "run":
        output = train(build_recipe(tmp_path, *SHORT, f"output={tmp_path / place}"))
        held_out = output / "vocab.txt" / "eval.jsonl"
        held_out.parent.mkdir()
        shutil.copy(tmp_path / "eval.jsonl", held_out)
    if place == "recipes":
        output = train(build_recipe(tmp_path, *SHORT, f"output={tmp_path / place}"))
        path = Path(shutil.copy(path, output / "config.json"))
    keys = [f"output={tmp_path / place}", f"data.train={tmp_path / 'rows'}", f"data.eval={held_out}", *SHORT]
    with pytest.raises(RecipeError, match=words):
        train(load_recipe(path, keys), path, is_overwriting=place in ("run", "recipes"))
    assert held_out.is_file() and path.is_file()


def test_run_can_be_overwritten_by_its_own_recipe(tmp_path: Path) -> None:
    output = train(build_recipe(tmp_path, *SHORT))
    path = output / "recipe.yaml"
    before = path.read_bytes()
    assert train(load_recipe(path), path, is_overwriting=True) == output and path.read_bytes() == before


HOLDING = """
import sys, time
from pathlib import Path
from train.saving.output import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_second_run_on_one_output_is_refused_and_a_kill_lets_go(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, *SHORT)
    output = Path(recipe.output)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(output)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RecipeError, match=rf"process {holder.pid} is training into it now"):
            train(recipe)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert (output / LOCK_NAME).is_file()
    train(recipe)
    assert not (output / LOCK_NAME).exists()


def test_folder_that_was_made_for_a_run_that_is_refused_goes_again(tmp_path: Path) -> None:
    with locked(tmp_path / "out"):
        assert (tmp_path / "out" / LOCK_NAME).is_file()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["''", "' '", '"\\ud800"', '"a\\0b"', "~nobody-has-this-name/x"])
def test_output_that_no_folder_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match="output"):
        build_recipe(tmp_path, f"output={name}")


def test_home_folder_is_spelled_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build_recipe(tmp_path, "output=~/x").output == str(tmp_path / "x")


def test_upload_takes_nothing_that_a_run_did_not_write(tmp_path: Path) -> None:
    for name in (
        "my_token.json",
        "notes.txt",
        "wandb_run.json",
        "summary.json",
        "optimizer.pt",
        "tokenizer.json",
    ):
        (tmp_path / name).write_text("x")
    assert list(list_files(tmp_path)) == ["tokenizer.json"]
