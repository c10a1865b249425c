"""Tracking: nothing that W&B does or fails to do stops a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from train.schema import WandbSection
from train.watching.progress import Metrics, read_metrics
from train.watching.tracking import MAX_KEYS, RUN_NAME, STEP, Tracking

ROOT = Path(__file__).resolve().parents[2]


class FakeRun:
    """A W&B run that can be told to fail."""

    def __init__(self, folder: Path, is_failing: bool = False) -> None:
        self.dir, self.url, self.id = str(folder / "run" / "files"), "https://example.org/run", "abc123"
        self.logged: list[dict[str, Any]] = []
        self.artifacts: list[Any] = []
        self.is_finished = False
        self._is_failing = is_failing

    def define_metric(self, name: str, step_metric: str = "") -> None:
        pass

    def log(self, values: dict[str, Any]) -> None:
        if self._is_failing:
            raise ConnectionError("the service is gone")
        self.logged.append(values)

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts.append(artifact)

    def finish(self) -> None:
        self.is_finished = True


def open_tracking(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str, runs: dict[str, Any], **keys: Any
) -> tuple[Tracking, list[str], list[dict[str, Any]]]:
    """Tracking over a fake W&B; `runs` maps a mode to its run, or to the error that opening it raises."""
    asked: list[dict[str, Any]] = []

    def init(*, mode: str, **options: Any) -> Any:
        asked.append(options)
        if isinstance(runs[mode], BaseException):
            raise runs[mode]
        return runs[mode]

    fake = SimpleNamespace(init=init, Settings=lambda **_: None, Image=lambda image: image.size)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    said: list[str] = []
    settings = WandbSection.model_validate({"mode": mode, **keys})
    return Tracking(settings, folder, {}, said.append), said, asked


def test_records_of_the_metrics_file_are_logged_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(tmp_path)
    tracking, said, _ = open_tracking(tmp_path, monkeypatch, "online", {"online": run})
    metrics = Metrics(tmp_path / "metrics.jsonl", follower=tracking.log_record)
    metrics.append({"step": 7, "loss": 1.5})
    metrics.append({"step": 7, "eval_loss": 2.5})
    metrics.append({"step": 8, "experts/dead": 3.0})
    tracking.close()
    assert run.logged == [
        {"train/loss": 1.5, STEP: 7},
        {"eval/loss": 2.5, STEP: 7},
        {"experts/dead": 3.0, STEP: 8},
    ]
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [7, 7, 8]
    assert run.is_finished and said == [] and tracking.place == run.url


def test_online_falls_back_to_offline_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"online": RuntimeError("No API key configured\nmore"), "offline": FakeRun(tmp_path)}
    tracking, said, _ = open_tracking(tmp_path, monkeypatch, "online", runs)
    assert said == ["W&B cannot track this run (online): No API key configured"]
    assert tracking.is_open and tracking.place == str(tmp_path / "run")


def test_offline_that_fails_leaves_the_run_untracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking, said, _ = open_tracking(tmp_path, monkeypatch, "offline", {"offline": OSError("disk full")})
    tracking.log_record({"step": 1, "a": 1})
    tracking.close()
    assert said == ["W&B cannot track this run (offline): disk full"] and not tracking.is_open


def test_failure_in_the_middle_is_said_once_and_the_metrics_file_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking, said, _ = open_tracking(
        tmp_path, monkeypatch, "offline", {"offline": FakeRun(tmp_path, is_failing=True)}
    )
    metrics = Metrics(tmp_path / "metrics.jsonl", follower=tracking.log_record)
    for step in range(3):
        metrics.append({"step": step, "loss": 1.0})
    tracking.log_images({"report": b""}, 3)
    tracking.log_profile(tmp_path / "profile", 3)
    assert said == ["W&B stopped tracking this run: the service is gone"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_disabled_never_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking, said, asked = open_tracking(tmp_path, monkeypatch, "disabled", {})
    tracking.log_record({"step": 1, "a": 1})
    assert not tracking.is_open and said == [] and tracking.place == "" and asked == []
    assert not (tmp_path / RUN_NAME).exists()


def test_resumed_run_goes_on_under_the_same_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"group": "ablation", "tags": ["a", "b"]}
    _, _, first = open_tracking(tmp_path, monkeypatch, "offline", {"offline": FakeRun(tmp_path)}, **keys)
    assert first[0]["id"] is None and first[0]["resume"] is None
    assert (first[0]["group"], first[0]["tags"]) == ("ablation", ["a", "b"])
    assert json.loads((tmp_path / RUN_NAME).read_text()) == {"id": "abc123"}
    _, said, second = open_tracking(tmp_path, monkeypatch, "offline", {"offline": FakeRun(tmp_path)})
    assert (second[0]["id"], second[0]["resume"]) == ("abc123", "allow") and said == []


@pytest.mark.parametrize("content", ['{"id": "../x"}', "[]", "{", '{"id": 7}', '{"id": "' + "a" * 99 + '"}'])
def test_run_id_that_is_none_is_said_and_the_run_goes_untracked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    (tmp_path / RUN_NAME).write_text(content)
    tracking, said, asked = open_tracking(tmp_path, monkeypatch, "offline", {"offline": FakeRun(tmp_path)})
    assert not tracking.is_open and asked == [] and len(said) == 1 and "cannot track this run" in said[0]


def test_names_beyond_the_limit_are_left_out_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(tmp_path)
    tracking, said, _ = open_tracking(tmp_path, monkeypatch, "offline", {"offline": run})
    for step in (1, 2):
        tracking.log_record({"step": step, **{f"a/{i:03d}": i for i in range(MAX_KEYS + 5)}})
    tracking.log_record({"step": 3, "loss": 1.0})
    assert [len(values) for values in run.logged] == [MAX_KEYS + 1] * 2
    assert said == [f"W&B gets no more than {MAX_KEYS} names: a/256 and others are left out"]


def test_real_wandb_offline_takes_scalars_pictures_the_profile_and_a_resumed_run(tmp_path: Path) -> None:
    script = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from tests.unit.profiles import build_profile
from train.watching.pictures import run_pictures
from train.schema import WandbSection
from train.watching.tracking import Tracking
folder, said = Path(sys.argv[1]), []
profile = build_profile()
path = profile.save(folder)
for step in (5, 3):
    tracking = Tracking(WandbSection(tags=["x"], group="g"), folder, {"a": 1}, said.append)
    tracking.log_record({"step": step, "loss": 1.0})
    tracking.log_images(run_pictures([{"step": 1, "loss": 2.0}], profile), step)
    tracking.log_profile(path, step)
    assert tracking.is_open
    tracking.close()
assert said == [], said
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2 and len({run.name.rpartition("-")[2] for run in runs}) == 1
    pictures = {path.name.rpartition("_")[0].rpartition("_")[0] for path in runs[0].rglob("*.png")}
    assert pictures == {"report", "losses", "heatmap", "balance", "timings"}
