"""The training command as a user starts it: exit statuses, messages, and a launch of two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coop.profile import Profile
from tests.train.tiny import write_recipe
from train.finetune import main, parse_arguments, share_of_cores

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "train" / "finetune.py")


def start(*command: str, cwd: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": ""}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_script_runs_from_any_folder_and_says_what_comes_next(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    process = start(SCRIPT, str(recipe), "train.steps=2", cwd=tmp_path)
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 0, shown
    assert "eval loss" in shown and f"python -m infer.generate --ckpt {tmp_path / 'out'}" in shown
    assert (tmp_path / "out" / "coop_profile.safetensors").is_file()


def test_two_processes_count_every_token_once(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", SCRIPT]
    process = start(
        *launch, str(recipe), "train.steps=null", "train.epochs=1", "train.batch_size=1", cwd=ROOT
    )
    shown, _ = process.communicate(timeout=180)
    assert process.returncode == 0, shown
    assert "2 processes" in shown and "train.jsonl: 24 rows, 930 tokens" in shown
    profile = Profile.load(tmp_path / "out")
    assert profile.step == 12
    assert profile.train_tokens_prompt + profile.train_tokens_answer == 930


def test_bad_recipe_exits_with_2_and_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path)
    assert main([str(recipe), "train.stepz=3"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "did you mean `train.steps`" in message


def test_config_is_printed_with_overrides_applied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_recipe(tmp_path)), "--print-config", "train.steps=7"]) == 0
    assert "steps: 7\n" in capsys.readouterr().out


def test_options_and_overrides_may_come_in_any_order() -> None:
    args = parse_arguments(["a.yaml", "x=1", "--dry-run", "y=2"])
    assert args.overrides == ["x=1", "y=2"] and args.dry_run
    args = parse_arguments(["a.yaml", "--resume", "x=1"])
    assert args.overrides == ["x=1"] and args.resume == ""
    assert parse_arguments(["a.yaml", "--resume", "out/checkpoint-2"]).resume == "out/checkpoint-2"


def test_resume_before_the_recipe_does_not_take_it_for_a_checkpoint(tmp_path: Path) -> None:
    args = parse_arguments(["--resume", "new.yaml", "x=1"])
    assert (args.recipe, args.resume, args.overrides) == (Path("new.yaml"), "", ["x=1"])
    recipe = write_recipe(tmp_path).rename(tmp_path / "recipe")
    args = parse_arguments(["--resume", str(recipe), "--force"])
    assert (args.recipe, args.resume, args.overrides) == (recipe, "", []) and args.force
    args = parse_arguments(["--resume", "x=1", "a.yaml"])
    assert (args.recipe, args.resume, args.overrides) == (Path("a.yaml"), "", ["x=1"])
    args = parse_arguments(["--resume", str(tmp_path), "a.yaml"])
    assert (args.recipe, args.resume) == (Path("a.yaml"), str(tmp_path))


@pytest.mark.parametrize(
    ("words", "message"),
    [(["x=1"], "say which RECIPE"), (["a.yaml", "--force"], "--force belongs to --resume")],
)
def test_command_that_cannot_be_meant_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(words)
    assert message in capsys.readouterr().err


def test_help_tells_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_arguments(["--help"])
    shown = capsys.readouterr().out
    for line in ("0    the result", "2    something", "130  stopped by Ctrl-C", "143  stopped by SIGTERM"):
        assert line in shown


def test_resume_and_overwrite_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["a.yaml", "--resume", "--overwrite"])
    assert "exclude each other" in capsys.readouterr().err


def test_processes_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert share_of_cores() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert share_of_cores() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert share_of_cores() == 1
