"""Checkpoints: killed at any moment, on a full disk, stopped by a signal, resumed bit for bit, the best kept."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coop.errors import CheckpointError, CoopError, SaveError
from coop.interrupts import Interrupts
from tests.train.killing import same_weights
from tests.train.tiny import build_recipe, write_recipe
from train.run import Options, run
from train.saving import base, checkpoint
from train.saving.durable import STAGING_NAME, check_room, recover
from train.schema import Recipe
from train.stopping import Stop, Stopped
from train.trainer import CoopTrainer, check_loaded
from train.watching.progress import Metrics, read_metrics

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "train" / "finetune.py")
FULL = ("tune.method=full", "tune.lora={}", "tune.groups=[attention,experts,other]")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(recipe: Recipe, **options: Any) -> Path:
    run(recipe, Path("recipe.yaml"), Options(**options))
    return Path(recipe.output)


def records(output: Path) -> list[tuple[Any, ...]]:
    """What was measured at each step, without the speeds."""
    names = ("step", "loss", "eval_loss", "learning_rate", "grad_norm", "mean_token_accuracy")
    return [tuple(r.get(n) for n in names) for r in read_metrics(output / checkpoint.METRICS_NAME)]


def steps_of(output: Path) -> list[str]:
    return sorted(path.name for path in output.glob("checkpoint-*"))


class Died(Exception):
    """Stands for a kill."""


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Do `action` when the step after `step` begins."""
    original = CoopTrainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step:
            action()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(CoopTrainer, "training_step", training_step)


def die_at(step: int, recipe: Recipe) -> Path:
    """Train, and die when step `step` is done."""

    def die() -> None:
        raise Died

    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, die)
        with pytest.raises(Died):
            train(recipe)
    return Path(recipe.output)


# killed


def killed_runs(folder: Path, number: int, *overrides: str) -> list[dict[str, Any]]:
    write_recipe(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = ["-m", "tests.train.killing", str(folder), str(number), "7", "train.steps=4", *overrides]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line[0] == "{"]


@pytest.mark.parametrize(
    ("number", "overrides"),
    [
        (3, ("coop.warmup.every_steps=0",)),
        pytest.param(20, (), marks=pytest.mark.slow),
        pytest.param(20, FULL, marks=pytest.mark.slow),
    ],
)
def test_kill_at_any_moment_of_saving_loses_no_checkpoint_and_changes_no_bit(
    tmp_path: Path, number: int, overrides: tuple[str, ...]
) -> None:
    early, *runs = killed_runs(tmp_path, number, *overrides)
    assert early["signal"] == signal.SIGKILL and early["visible"] == [] and early["status"] == 2
    assert "no whole checkpoint to resume from; start anew with --overwrite" in early["shown"]
    assert len(runs) == number
    for killed in runs:
        assert killed["signal"] == signal.SIGKILL and killed["visible"] and killed["damaged"] == [], killed
        assert killed["is_same"] and killed["left"] == [], killed
        newest = killed["visible"][0]
        is_promoted = "put in its place" in killed["shown"]
        assert killed["finished"] or is_promoted or f"{newest} at step" in killed["shown"], killed["shown"]


def test_checkpoint_that_was_whole_when_its_move_was_cut_off_takes_its_place(tmp_path: Path) -> None:
    output = train(build_recipe(tmp_path))
    (output / STAGING_NAME).mkdir()
    (output / "checkpoint-6").rename(output / STAGING_NAME / "checkpoint-6")
    (output / ".metrics.jsonl.abc.tmp").write_text("half")
    assert len(recover(output)) == 1 and recover(output) == []
    assert steps_of(output) == ["checkpoint-4", "checkpoint-6"]
    assert [path.name for path in output.iterdir() if path.name.startswith(".")] == []


def test_folder_that_holds_only_what_a_kill_left_counts_as_empty(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path)
    Path(recipe.output).mkdir()
    (Path(recipe.output) / ".recipe.yaml.abc.tmp").write_text("half")
    assert steps_of(train(recipe)) == ["checkpoint-4", "checkpoint-6"]


def test_small_file_with_other_bytes_makes_a_checkpoint_damaged(tmp_path: Path) -> None:
    folder = die_at(5, build_recipe(tmp_path)) / "checkpoint-4"
    data = bytearray((folder / "scheduler.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "scheduler.pt").write_bytes(bytes(data))
    point = checkpoint.find_resume_point(folder.parent, None, {}, is_forced=True)
    assert point.step == 2 and "scheduler.pt: its bytes are not those" in point.skipped[0]


def test_mark_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    checkpoint.mark_complete(tmp_path, 1, {})
    mark = json.loads((tmp_path / checkpoint.MARK_NAME).read_text())
    (tmp_path / checkpoint.MARK_NAME).write_text(json.dumps({**mark, "files": {"../x": 1}}))
    with pytest.raises(CheckpointError, match="names a file outside the checkpoint"):
        checkpoint.read_mark(tmp_path)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_and_folders_of_a_checkpoint_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = train(build_recipe(tmp_path, "train.steps=2")) / "checkpoint-2"
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~umask}


# a full disk


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From step 3 on no file may grow beyond 20 kB, until step 5."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    narrow = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # noqa: E731
    at_step(monkeypatch, 3, narrow)
    at_step(monkeypatch, 5, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small_files")
def test_checkpoint_that_cannot_be_written_stops_the_run_and_names_the_last_whole_one(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path)
    with pytest.raises(
        SaveError, match=r"checkpoint-4: cannot be saved: .*; the last whole checkpoint is .*-2$"
    ):
        train(recipe)
    output = Path(recipe.output)
    assert steps_of(output) == ["checkpoint-2"] and not (output / STAGING_NAME).exists()


@pytest.mark.usefixtures("small_files")
def test_checkpoint_that_cannot_be_written_is_left_out_if_the_recipe_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(build_recipe(tmp_path, f"output={tmp_path / 'whole'}", "train.steps=3"))
    assert steps_of(whole) == ["checkpoint-2", "checkpoint-3"]
    output = train(build_recipe(tmp_path, "checkpoint.on_failure=continue"))
    assert steps_of(output) == ["checkpoint-2", "checkpoint-6"]
    assert capsys.readouterr().out.count("training goes on, the next checkpoint is the next try") == 1
    assert [record[0] for record in records(output)] == [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        6,
        6,
    ]  # its loss, its eval loss, its profile


@pytest.mark.parametrize("knows_free_space", [True, False])
def test_real_disk_that_fills_up_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows_free_space: bool
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        if not knows_free_space:
            monkeypatch.setattr("train.trainer.check_room", lambda *_: None)
        ballast = disk / "ballast"
        leaving = iter([200_000])
        at_step(monkeypatch, 2, lambda: fill(ballast, next(leaving, None)))
        recipe = build_recipe(tmp_path, f"output={disk / 'out'}")
        reason = (
            "no space for a checkpoint"
            if knows_free_space
            else "checkpoint-4: cannot be saved: No space left"
        )
        with pytest.raises(SaveError, match=reason):
            train(recipe)
        assert steps_of(disk / "out") == ["checkpoint-2"]
        ballast.unlink()
        output = train(recipe, resume=Path())
        assert [record[0] for record in records(output)] == [
            0,
            1,
            2,
            3,
            4,
            5,
            6,
            6,
            6,
        ]  # its loss, its eval loss, its profile
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


FAILING = """
import os, sys
from train.finetune import main
from train.trainer import CoopTrainer

original = CoopTrainer._save_rng_state

def save(self, folder):
    if os.environ["RANK"] == "1" and folder.endswith("checkpoint-2"):
        raise OSError(28, "No space left on device")
    original(self, folder)

CoopTrainer._save_rng_state = save
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_processes_fail_together_when_one_of_them_cannot_write(tmp_path: Path, on_failure: str) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "failing.py").write_text(FAILING)
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    keys = ["train.steps=4", "train.batch_size=1", f"checkpoint.on_failure={on_failure}"]
    process = start(*launch, str(tmp_path / "failing.py"), str(recipe), *keys, path=str(ROOT))
    shown = process.communicate(timeout=120)[0]
    assert not (tmp_path / "out" / STAGING_NAME).exists()
    if on_failure == "stop":
        assert process.returncode == 1 and steps_of(tmp_path / "out") == []
        assert "cannot be saved: No space left on device; there is no whole checkpoint" in shown
    else:
        assert process.returncode == 0 and steps_of(tmp_path / "out") == ["checkpoint-4"], shown
        assert "another process of this run says why; training goes on" in shown


def fill(path: Path, leaving: int | None) -> None:
    """Take all space of the disk but `leaving` bytes, or nothing."""
    if leaving is not None:
        path.write_bytes(bytes(shutil.disk_usage(path.parent).free - leaving))


def test_room_is_checked_against_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1199 * 1000))
    check_room(tmp_path, 1199 * 1000)
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "weights").write_bytes(bytes(10**6))
    with pytest.raises(SaveError, match=r"make room, or lower checkpoint\.keep"):
        check_room(tmp_path, 0)


def test_metrics_that_found_no_room_are_written_with_the_next(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, is_patient=True)
    metrics.append({"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (14, limits[1]))
    try:
        metrics.append({"step": 2})
        assert read_metrics(path) == [{"step": 1}] and path.read_text().endswith("}\n")
        with pytest.raises(SaveError):
            Metrics.append(strict := Metrics(tmp_path / "strict.jsonl"), {"step": 123456789})
        assert strict.records
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    metrics.append({"step": 3})
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]


# resumed


@pytest.mark.parametrize(
    ("overrides", "step"),
    [
        (("train.grad_accumulation=3", "logging.every_steps=2", "train.steps=9"), 5),  # epochs end at 4 and 8
        ((*FULL, "train.grad_accumulation=2", "train.weight_decay=0.1", "train.steps=8"), 7),
        (("tune.groups=[attention]", "tune.lora.dropout=0.2", "eval.every_steps=3", "train.steps=14"), 13),
        (("train.steps=null", "train.epochs=1.5", "logging.every_steps=5", "data.max_train_rows=9"), 5),
    ],
)
def test_resumed_run_has_the_losses_and_weights_of_the_uninterrupted_one(
    tmp_path: Path, overrides: tuple[str, ...], step: int
) -> None:
    whole = train(build_recipe(tmp_path, *overrides, f"output={tmp_path / 'whole'}"))
    recipe = build_recipe(tmp_path, *overrides)
    die_at(step, recipe)
    output = train(recipe, resume=Path())
    assert records(output) == records(whole)
    assert same_weights(output, whole)


def test_run_that_had_done_its_last_step_is_finished_without_another(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, "train.steps=4")  # in the middle of an epoch
    whole = train(recipe)
    before = records(whole)
    (whole / checkpoint.SUMMARY_NAME).unlink()
    (whole / "adapter_model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    assert records(train(recipe, resume=Path())) == before
    (tmp_path / "adapter_config.json").write_text("{}")
    assert same_weights(whole, tmp_path)


def test_checkpoint_interval_can_change_on_resume(tmp_path: Path) -> None:
    output = die_at(3, build_recipe(tmp_path))
    train(build_recipe(tmp_path, "checkpoint.every_steps=3", "checkpoint.keep=9"), resume=Path())
    assert steps_of(output) == ["checkpoint-2", "checkpoint-3", "checkpoint-6"]


def test_change_of_recipe_or_data_is_named_and_can_be_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    die_at(3, build_recipe(tmp_path))
    changed = build_recipe(tmp_path, "train.learning_rate=0.5", "tune.lora.alpha=16", "checkpoint.keep=1")
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write((tmp_path / "eval.jsonl").read_text())
    with pytest.raises(CheckpointError) as refusal:
        train(changed, resume=Path())
    shown = str(refusal.value)
    assert "train.learning_rate: 0.01 -> 0.5\n" in shown and "tune.lora.alpha: 8 -> 16\n" in shown
    assert "rows of the data: others than before; a file" in shown
    assert "checkpoint.keep" not in shown and "--force" in shown
    train(changed, resume=Path(), is_forced=True)
    assert "forced, though train.learning_rate: 0.01 -> 0.5" in capsys.readouterr().out


def test_change_of_the_number_of_processes_is_refused(tmp_path: Path) -> None:
    output = die_at(3, build_recipe(tmp_path))
    facts = checkpoint.read_mark(output / "checkpoint-2")["deciding"]
    with pytest.raises(CheckpointError, match="processes: 1 -> 2"):
        checkpoint.find_resume_point(output, None, {**facts, "processes": 2})


def test_weights_that_were_not_taken_over_are_noticed(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    from safetensors.torch import save_file

    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    check_loaded(model, tmp_path)
    torch.nn.init.zeros_(model.bias)
    with pytest.raises(CheckpointError, match="bias was not taken over by the model"):
        check_loaded(model, tmp_path)
    save_file({"weight": model.weight.detach()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds nothing for bias, which is trained"):
        check_loaded(model, tmp_path)


def test_run_whose_patience_was_used_up_is_finished_without_another_step(tmp_path: Path) -> None:
    patient = ("eval.every_steps=2", "eval.patience=1", "train.learning_rate=0.5", "train.steps=12")
    recipe = build_recipe(tmp_path, *patient)
    output = train(recipe)
    last = json.loads((output / checkpoint.SUMMARY_NAME).read_text())["steps"]
    assert last < 12
    before = records(output)
    (output / checkpoint.SUMMARY_NAME).unlink()
    train(recipe, resume=Path())
    assert json.loads((output / checkpoint.SUMMARY_NAME).read_text())["steps"] == last
    assert records(output) == before


def test_other_base_model_is_named_and_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    recipe = build_recipe(tmp_path)
    die_at(3, recipe)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["lm_head.weight"][0] += 1
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r'files of the base model: others than before: \["model\.safetensors"\]'
    ):
        train(recipe, resume=Path())


def test_base_too_large_to_read_whole_is_known_by_its_edges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "WHOLE_BYTES", 10)
    monkeypatch.setattr(base, "EDGE_BYTES", 16)
    path = tmp_path / "model.safetensors"
    data = (100).to_bytes(8, "little") + bytes(300)  # 8 and 100 of header, then weights
    seen = []
    for place in (None, 107, 299, 150):
        changed = bytearray(data)
        if place is not None:
            changed[place] = 1
        path.write_bytes(changed)
        seen.append(base.identify_base(str(tmp_path), None)["model.safetensors"])
    assert len(set(seen)) == 3 and seen[0] == seen[3]  # the middle of a large file is not read


def test_any_file_with_other_bytes_makes_a_checkpoint_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(3 * 2**20))
    checkpoint.mark_complete(folder, 3, {})
    checkpoint.read_mark(folder)
    (folder / "weights").write_bytes(bytes(2**20) + b"x" + bytes(2 * 2**20 - 1))
    with pytest.raises(CheckpointError, match="weights: its bytes are not those"):
        checkpoint.read_mark(folder)


def test_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    checkpoint.mark_complete(tmp_path / "checkpoint-3", 3, {})
    (tmp_path / "checkpoint-3").rename(tmp_path / "checkpoint-5")
    with pytest.raises(CheckpointError, match="its mark is of step 3, not of this folder"):
        checkpoint.read_mark(tmp_path / "checkpoint-5")


def test_forced_values_of_the_optimizer_are_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    die_at(3, build_recipe(tmp_path, "train.schedule=constant_with_warmup"))
    changed = (
        "train.learning_rate=0.5",
        "train.weight_decay=0.9",
        "train.betas=[0.1,0.2]",
        "train.schedule=linear",
    )
    seen: list[dict[str, Any]] = []
    original = CoopTrainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(dict(self.optimizer.param_groups[0]))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(CoopTrainer, "training_step", training_step)
    train(build_recipe(tmp_path, *changed), resume=Path(), is_forced=True)
    assert [group["lr"] for group in seen] == pytest.approx([0.5 * (6 - step) / 6 for step in range(2, 6)])
    assert all(group["weight_decay"] == 0.9 and tuple(group["betas"]) == (0.1, 0.2) for group in seen)


def test_selection_of_experts_cannot_be_forced(tmp_path: Path) -> None:
    die_at(3, build_recipe(tmp_path, "tune.experts.select=list", "tune.experts.list=['*:0-1']"))
    changed = build_recipe(tmp_path, "tune.experts.select=list", "tune.experts.list=['*:2-3']")
    with pytest.raises(CheckpointError, match=r"--force cannot change .*\n  tune\.experts\.list"):
        train(changed, resume=Path(), is_forced=True)


def test_profile_that_is_turned_on_by_a_resumed_run_counts_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    die_at(3, build_recipe(tmp_path, "coop.profile.enabled=false"))
    output = train(build_recipe(tmp_path), resume=Path())
    assert "has no expert profile: counting begins at step 2" in capsys.readouterr().out
    assert (output / "coop_profile.safetensors").is_file()


def test_measuring_changes_no_step(tmp_path: Path) -> None:
    dropping = ("tune.groups=[attention]", "tune.lora.dropout=0.3", "coop.profile.refresh_rows=0")
    measured = []
    for keys in (
        ("eval.at_start=false",),
        ("eval.at_start=true", "eval.every_steps=2"),
        ("eval.every_steps=1",),
    ):
        output = train(build_recipe(tmp_path, *dropping, *keys, f"output={tmp_path / str(len(measured))}"))
        measured.append([(r[0], r[1]) for r in records(output) if r[1] is not None])
    assert measured[0] == measured[1] == measured[2] and len(measured[0]) == 6


# the best


@pytest.mark.parametrize("overrides", [(), FULL])
def test_best_checkpoint_is_kept_and_becomes_the_result(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    write_recipe(tmp_path)  # what is held out gets worse with every step
    row = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "QWXYZ" * 9}]}
    (tmp_path / "eval.jsonl").write_text(json.dumps(row) + "\n")
    hostile = ("train.learning_rate=0.1", "train.schedule=constant_with_warmup")
    keys = ("checkpoint.keep_best=true", "checkpoint.keep=1", "eval.every_steps=1", "train.steps=8")
    recipe = build_recipe(tmp_path, *overrides, *hostile, *keys, "checkpoint.every_steps=1")
    output = train(recipe)
    losses = {r[0]: r[2] for r in records(output) if r[2] is not None and r[0]}
    best = min(losses, key=lambda step: losses[step])
    assert best < 8, losses
    assert steps_of(output) == [f"checkpoint-{best}", "checkpoint-8"]
    summary = json.loads((output / checkpoint.SUMMARY_NAME).read_text())
    assert summary["best_step"] == best and summary["eval_loss_after"] == losses[best]
    again = train(build_recipe(tmp_path, *overrides, *hostile, f"output={tmp_path / 'x'}", "train.steps=8"))
    assert not same_weights(output, again)
    if not overrides:
        assert same_weights(output, output / f"checkpoint-{best}")
    else:
        from transformers import AutoModelForCausalLM

        mine, other = (
            AutoModelForCausalLM.from_pretrained(place, dtype="float32").state_dict()
            for place in (output, output / f"checkpoint-{best}")
        )
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_best_needs_an_eval_loss_at_every_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CoopError, match=r"keep_best: needs eval\.every_steps"):
        build_recipe(tmp_path, "checkpoint.keep_best=true")
    with pytest.raises(CoopError, match=r"must be a multiple of eval\.every_steps"):
        build_recipe(tmp_path, "checkpoint.keep_best=true", "eval.every_steps=3")


# stopped


def start(*command: str, path: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def read_until(process: subprocess.Popen[str], beginning: str) -> str:
    """What a process shows until a line begins so."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(beginning):
            break
    return "".join(lines)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_a_checkpoint_at_the_end_of_the_step(tmp_path: Path, number: int, status: int) -> None:
    recipe = write_recipe(tmp_path)
    process = start(SCRIPT, str(recipe), "train.steps=100000", "checkpoint.every_steps=0")
    shown = read_until(process, "step 3/")
    process.send_signal(number)
    shown += process.communicate(timeout=60)[0]
    assert process.returncode == status, shown
    assert "stopping after this step, with a checkpoint" in shown and "Traceback" not in shown
    (saved,) = (tmp_path / "out").glob("checkpoint-*")
    assert f"the last whole checkpoint is {saved}; go on with:" in shown
    assert f"train/finetune.py {tmp_path / 'out' / 'recipe.yaml'} --resume" in shown
    assert f"stopped by {signal.Signals(number).name}" in shown


@pytest.mark.slow
def test_signal_that_reaches_one_process_of_two_stops_both_and_both_resume_exactly(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", SCRIPT, str(recipe)]
    keys = ["train.steps=14", "checkpoint.every_steps=0", "train.batch_size=1"]
    slow = [f"output={tmp_path / 'out'}", "checkpoint.every_steps=1"]
    whole = start(*launch, *keys, f"output={tmp_path / 'whole'}")
    process = start(*launch, *keys, *slow)
    shown = read_until(process, "step 2/")
    os.kill(rank_one(process.pid), signal.SIGTERM)
    shown += process.communicate(timeout=120)[0]
    assert process.returncode == 1 and "stopped by SIGTERM" in shown, shown
    assert "the last whole checkpoint is" in shown
    resumed = start(*launch, *keys, *slow, "--resume")
    shown = resumed.communicate(timeout=120)[0]
    assert resumed.returncode == 0 and "resuming from" in shown, shown
    assert whole.wait(timeout=120) == 0
    assert records(tmp_path / "out") == records(tmp_path / "whole")
    assert same_weights(tmp_path / "out", tmp_path / "whole")


def rank_one(launcher: int) -> int:
    """The process of the second rank that torchrun started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return next(
        int(child) for child in children if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes()
    )


def test_run_that_is_stopped_before_its_first_checkpoint_says_to_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise Stopped(signal.SIGINT)

    at_step(monkeypatch, 1, interrupt)
    with pytest.raises(Stopped):
        train(build_recipe(tmp_path))
    assert "there is no whole checkpoint; go on with: " in (shown := capsys.readouterr().out)
    assert "recipe.yaml --overwrite" in shown


def test_first_signal_waits_for_the_step_and_a_second_does_not() -> None:
    clock = iter([10.0, 10.5, 11.6])
    stop = Stop(lambda: next(clock))
    heard = []

    def receive(*signals: int) -> None:
        with stop, stop.waiting():
            for number in signals:
                signal.raise_signal(number)
                heard.append(stop.number)

    with pytest.raises(Stopped) as stopped:  # the second SIGTERM is the echo of a launcher
        receive(signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT)
    assert heard == [signal.SIGTERM, signal.SIGTERM] and stopped.value.status == 130


def test_ctrl_c_inside_a_layer_of_served_experts_waits_for_the_end_of_the_step() -> None:
    stop, interrupts, passed = Stop(), Interrupts(), []

    def layer() -> None:
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            interrupts.check()
            passed.append(stop.number)

    def step() -> None:
        with stop, stop.waiting():
            layer()

    with pytest.raises(Stopped):
        step()
    assert passed == [signal.SIGINT]


def test_signal_outside_of_training_stops_at_once_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped, Stop():
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.status == 143 and signal.getsignal(signal.SIGTERM) is before
