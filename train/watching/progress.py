"""Progress: what a run shows while it trains, and the metrics file that the report reads.

Owns the clock of training steps and metrics.jsonl; promises one line of output for each log step (one live line on
a terminal) and tokens/s over training steps only. Trainer calls it, on the main process.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coop.errors import CoopError, SaveError
from coop.files import write_atomic
from train.saving.checkpoint import describe_newest, saving


def say(console: Console, line: str) -> None:
    """Print a line as it is."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON; a number that is not finite is null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Metrics:
    """metrics.jsonl: one object a line, appended as the run goes.

    Args:
        path: the file; records after `resume_step`, and of a result, are dropped: they are about to be made again.
        follower: gets every record that is appended, after it was written.
        is_patient: records that the disk has no room for wait for the next one instead of stopping the run.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int = 0,
        follower: Callable[[dict[str, Any]], None] = lambda record: None,
        is_patient: bool = False,
    ) -> None:
        kept = [r for r in read_metrics(path) if _is_before(r, resume_step)] if resume_step else []
        self.records: list[dict[str, Any]] = kept
        self._path, self._follower, self._is_patient = path, follower, is_patient
        self._unwritten = ""
        with saving(path.parent, path):
            if kept:
                write_atomic(path, "".join(to_json(record) + "\n" for record in kept).encode())
            else:
                path.write_text("")

    def append(self, record: dict[str, Any]) -> None:
        """Add one record and write it through."""
        self.records.append(record)
        self._unwritten += to_json(record) + "\n"
        size = self._path.stat().st_size
        try:
            with saving(self._path.parent, self._path), self._path.open("a") as file:
                file.write(self._unwritten)
        except SaveError:
            os.truncate(self._path, size)  # half a line would hide all that follow
            if not self._is_patient:
                raise
        else:
            self._unwritten = ""
        self._follower(record)


def _is_before(record: dict[str, Any], step: int) -> bool:
    return record["step"] <= step and not any(name.startswith("final/") for name in record)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole records of a metrics file; a last line that was cut short is left out."""
    records = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        records.append(record)
    return records


class ProgressCallback(TrainerCallback):
    """Shows loss, tokens/s and time left, records them, and stops a run that has diverged with a CoopError.

    Args:
        console: where to show it; a live line if it is a terminal, else one plain line for each record.
        metrics: where to record it.
    """

    def __init__(self, console: Console, metrics: Metrics) -> None:
        self._console, self._metrics = console, metrics
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._began_step = 0.0
        self._seconds = 0.0  # in training steps since the last record
        self._tokens_before = 0
        self.step_seconds = 0.0
        self.train_tokens = 0
        self.steps_done = 0

    @property
    def tokens_per_s(self) -> float:
        """Real tokens a second over all training steps so far."""
        return self.train_tokens / self.step_seconds if self.step_seconds else float("nan")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the live line."""
        if self._console.is_terminal:
            columns = (
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._bar.start()
            self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self._began_step = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop the clock."""
        seconds = time.perf_counter() - self._began_step
        self._seconds += seconds
        self.step_seconds += seconds
        self.steps_done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show and record a training loss or an eval loss."""
        logs = logs or {}
        refuse_divergence(logs, state.global_step, args)
        if "eval_loss" in logs:
            self._metrics.append({"step": state.global_step, "eval_loss": logs["eval_loss"]})
            self.say(f"step {state.global_step}: eval loss {logs['eval_loss']:.4f}")
        elif "loss" in logs:
            self._record_loss(state, logs)

    def _record_loss(self, state: TrainerState, logs: dict[str, float]) -> None:
        tokens = int(logs["num_tokens"]) - self._tokens_before
        self._tokens_before = int(logs["num_tokens"])
        self.train_tokens = int(logs["num_tokens"])
        speed = tokens / self._seconds if self._seconds else float("nan")
        self._seconds = 0.0
        names = ("loss", "learning_rate", "grad_norm", "mean_token_accuracy", "aux_loss")
        record = {name: logs[name] for name in names if name in logs}
        self._metrics.append({"step": state.global_step, **record, "tokens_per_s": round(speed, 2)})
        text = f"loss {logs['loss']:.4f}  {speed:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        else:
            self.say(f"step {state.global_step}/{state.max_steps}  {text}  {self._time_left(state)} left")

    def _time_left(self, state: TrainerState) -> str:
        seconds = round((state.max_steps - state.global_step) * self.step_seconds / max(1, self.steps_done))
        return f"{seconds // 60}:{seconds % 60:02d}"

    def say(self, line: str) -> None:
        """Print a line above the live one."""
        say(self._console, line)

    def close(self) -> None:
        """Close the live line; safe to call again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the live line."""
        self.close()


def refuse_divergence(logs: dict[str, float], step: int, args: TrainingArguments) -> None:
    """Raise CoopError, saying what to do, if a loss or a gradient norm is not a finite number."""
    names = [
        name for name in ("loss", "eval_loss", "grad_norm") if not math.isfinite(float(logs.get(name, 0.0)))
    ]
    if not names:
        return
    facts = " and ".join(f"{name} is {float(logs[name])}" for name in names)
    if step == 0:
        raise CoopError(f"before training, {facts}: the model or the data give no finite loss")
    raise CoopError(
        f"step {step}: {facts}: the training has diverged, nothing was written as its result; lower "
        f"train.learning_rate (it is {args.learning_rate:g}) and start anew with --overwrite; "
        f"{describe_newest(Path(args.output_dir))}"
    )
