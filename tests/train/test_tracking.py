"""Tracking: nothing that W&B does or fails to do stops a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from train.schema import WandbSection
from train.tracking import Tracking


class FakeRun:
    """A W&B run that can be told to fail."""

    def __init__(self, folder: Path, is_failing: bool = False) -> None:
        self.dir, self.url = str(folder / "run" / "files"), "https://example.org/run"
        self.logged: list[dict[str, Any]] = []
        self.is_finished = False
        self._is_failing = is_failing

    def log(self, values: dict[str, Any], step: int) -> None:
        if self._is_failing:
            raise ConnectionError("the service is gone")
        self.logged.append({**values, "step": step})

    def finish(self) -> None:
        self.is_finished = True


def open_tracking(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str, runs: dict[str, Any]
) -> tuple[Tracking, list[str]]:
    """Tracking over a fake W&B; `runs` maps a mode to its run, or to the error that opening it raises."""

    def init(*, mode: str, **_: Any) -> Any:
        if isinstance(runs[mode], BaseException):
            raise runs[mode]
        return runs[mode]

    fake = SimpleNamespace(init=init, Settings=lambda **_: None, Image=lambda path: path)
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    said: list[str] = []
    settings = WandbSection.model_validate({"mode": mode})
    return Tracking(settings, folder, {}, said.append), said


def test_losses_are_logged_under_train_and_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(tmp_path)
    tracking, said = open_tracking(tmp_path, monkeypatch, "online", {"online": run})
    state: Any = SimpleNamespace(global_step=7)
    tracking.on_log(None, state, None, {"loss": 1.5})  # type: ignore[arg-type]
    tracking.on_log(None, state, None, {"eval_loss": 2.5})  # type: ignore[arg-type]
    tracking.close()
    assert run.logged == [{"train/loss": 1.5, "step": 7}, {"eval/loss": 2.5, "step": 7}]
    assert run.is_finished and said == [] and tracking.place == run.url


def test_online_falls_back_to_offline_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"online": RuntimeError("No API key configured\nmore"), "offline": FakeRun(tmp_path)}
    tracking, said = open_tracking(tmp_path, monkeypatch, "online", runs)
    assert said == ["W&B cannot track this run (online): No API key configured"]
    assert tracking.is_open and tracking.place == str(tmp_path / "run")


def test_offline_that_fails_leaves_the_run_untracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking, said = open_tracking(tmp_path, monkeypatch, "offline", {"offline": OSError("disk full")})
    tracking.log({"a": 1}, 1)
    tracking.close()
    assert said == ["W&B cannot track this run (offline): disk full"] and not tracking.is_open


def test_failure_in_the_middle_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking, said = open_tracking(
        tmp_path, monkeypatch, "offline", {"offline": FakeRun(tmp_path, is_failing=True)}
    )
    for step in range(3):
        tracking.log({"a": 1}, step)
    tracking.log_image("report", tmp_path / "report.png", 3)
    assert said == ["W&B stopped tracking this run: the service is gone"]


def test_disabled_never_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking, said = open_tracking(tmp_path, monkeypatch, "disabled", {})
    tracking.log({"a": 1}, 1)
    assert not tracking.is_open and said == [] and tracking.place == ""
