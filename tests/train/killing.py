"""Runs that are killed with SIGKILL at the n-th thing they do to a file, and resumed: `python -m tests.train.killing`.

Owns nothing; promises that a moment is the same in every run, because it is a count, and that a file that a library
writes outside of Python is killed half written. One warmed process forks a child for each run. Called by
test_checkpoint.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors.torch import load_file

from coop.errors import CheckpointError, CoopError
from train.recipe import load_recipe
from train.run import Options, run
from train.saving.checkpoint import METRICS_NAME, SUMMARY_NAME, list_checkpoints, read_mark
from train.watching.progress import read_metrics

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.rename": 0, "os.mkdir": 0, "os.chmod": 0, "os.remove": 0, "os.rmdir": 0, "open": 0}


class Moments:
    """Counts what is done to files below `output`; the process ends at number `last`, if there is one."""

    def __init__(self, output: Path, last: int) -> None:
        self.count = 0
        self.first_publish = 0
        self._output, self._last = str(output), last
        sys.addaudithook(self._hear)
        self._wrap(os, "fsync", lambda args: None)
        self._wrap(torch, "save", self._half_of_torch)
        self._wrap(safetensors.torch, "serialize_file", self._half_of_safetensors)

    def pass_one(self) -> None:
        """One more moment; the last one is never survived."""
        self.count += 1
        if self.count == self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in CHANGES or not str(args[0]).startswith(self._output):
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & WRITING):
            return
        if event == "os.rename" and str(args[1]).endswith("/checkpoint-1") and not self.first_publish:
            self.first_publish = self.count + 1
        self.pass_one()

    def _wrap(self, owner: Any, name: str, write_half: Callable[[tuple[Any, ...]], None]) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.pass_one()
            if self.count + 1 == self._last:
                write_half(args)
            self.pass_one()
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    def _half_of_torch(self, args: tuple[Any, ...]) -> None:
        whole = io.BytesIO()
        torch.serialization.save(args[0], whole)
        self._write(args[1], whole.getvalue())

    def _half_of_safetensors(self, args: tuple[Any, ...]) -> None:
        whole = safetensors.serialize(args[0], None)
        self._write(Path(args[1]).parent / ".tmpAbCdEf", whole)

    def _write(self, path: str | Path, whole: bytes) -> None:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(number, whole[: len(whole) // 2])


def in_child(log: Path, action: Callable[[], None]) -> int:
    """The wait status of a forked process that does `action`, what it prints going to `log`."""
    child = os.fork()
    if child == 0:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            try:
                action()
                os._exit(0)
            except CoopError as exc:
                print(f"error: {exc}", flush=True)
                os._exit(2)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    return os.waitpid(child, 0)[1]


class Scene:
    """A folder with a recipe whose runs are killed."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        self._folder, self._overrides = folder, overrides
        self.whole = self._start("whole", 0, "checkpoint.keep=100")[0]

    def _start(
        self, name: str, last: int, *overrides: str, is_resumed: bool = False
    ) -> tuple[Path, int, str]:
        """Train in a child; the output, the status, and what it showed."""
        output, log = self._folder / name, self._folder / f"{name}.log"

        def train() -> None:
            moments = Moments(output, last)
            keys = [f"output={output}", "checkpoint.every_steps=1", *self._overrides, *overrides]
            recipe = load_recipe(self._folder / "recipe.yaml", keys)
            run(recipe, self._folder / "recipe.yaml", Options(resume=Path() if is_resumed else None))
            print(f"moments {moments.first_publish} {moments.count}", flush=True)

        status = in_child(log, train)
        return output, status, log.read_text()

    def count(self) -> tuple[int, int]:
        """The moment of the first checkpoint's appearance, and how many moments a run has."""
        shown = self._start("counted", 0)[2]
        first, total = shown.split("moments ")[1].split()
        return int(first), int(total)

    def kill(self, moment: int) -> dict[str, Any]:
        """What became of a run that was killed at `moment` and resumed."""
        output, status, _ = self._start(f"kill{moment}", moment)
        visible = list_checkpoints(output) if output.is_dir() else []
        report = {
            "moment": moment,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            "visible": [path.name for path in visible],
            "damaged": [path.name for path in visible if not self._is_as_uninterrupted(path)],
            "finished": (output / SUMMARY_NAME).exists(),
        }
        _, status, shown = self._start(f"kill{moment}", 0, is_resumed=True)
        report |= {"status": os.waitstatus_to_exitcode(status), "shown": shown}
        report["is_same"] = self._is_same_result(output)
        report["left"] = [path.name for path in output.iterdir() if path.name.startswith(".")]
        return report

    def _is_as_uninterrupted(self, folder: Path) -> bool:
        try:
            read_mark(folder)
        except CheckpointError:
            return False
        return same_weights(folder, self.whole / folder.name)

    def _is_same_result(self, output: Path) -> bool:
        mine, other = (
            [(r["step"], r.get("loss"), r.get("eval_loss")) for r in read_metrics(place / METRICS_NAME)]
            for place in (output, self.whole)
        )
        return mine == other and bool(mine) and same_weights(output, self.whole)


def same_weights(mine: Path, other: Path) -> bool:
    """Whether two folders hold the same weights, bit for bit."""
    name = "adapter_model.safetensors" if (other / "adapter_config.json").exists() else "model.safetensors"
    if not (mine / name).exists():
        return False
    a, b = load_file(mine / name), load_file(other / name)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def main(folder: str, number: str, seed: str, *overrides: str) -> None:
    """Print one JSON line for a moment before there is any checkpoint, and for each of `number` moments after."""
    torch.set_num_threads(1)
    scene = Scene(Path(folder), list(overrides))
    first, total = scene.count()
    moments = random.Random(int(seed)).sample(range(first + 1, total + 1), int(number))
    for moment in [first // 2, *sorted(moments)]:
        print(json.dumps(scene.kill(moment)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
