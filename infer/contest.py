"""A contest: the arms of a comparison, each in a process of its own, in alternating order.

Owns the processes and their memory groups; promises that none outlives the contest, however it ends, and that
an arm that is killed, fails or hangs becomes a reason in its result and nothing more. Called by `infer.bench`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infer.limits import MemoryGroup, memory_group
from infer.pagecache import drop, weight_files

LOAD_SECONDS = 600  # for an arm to load its model, or to write a file, before it must be measuring
KILL_SECONDS = 30.0
LAST_WORDS = 300  # characters of what a failed arm said last


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One thing to measure: an engine, a folder or file, a budget and a limit.

    engine: coop, transformers, accelerate, llamacpp, or gguf (writes `path` from `source`). memory_bytes: the
    limit of its memory group, 0 for none. limit_seconds: for each generation. scratch: a folder for the engine's
    own files. label: how dtype is shown.
    """

    engine: str
    path: str
    dtype: str = "bf16"
    source: str = ""
    budget: str = ""
    budget_fraction: float = 1.0
    memory_bytes: int = 0
    prompt_tokens: tuple[int, ...] = (16,)
    new_tokens: int = 64
    strategy: str = "Balanced"
    threads: int = 1
    seed: int = 0
    vocabulary: int = 1
    context: int = 4096
    limit_seconds: float = 300.0
    replay: str = ""
    scratch: str = ""

    @property
    def title(self) -> str:
        """As a person reads it: coop bf16 50% in 2.2 GB."""
        budget = f" {self.budget}" if self.budget else ""
        limit = f" in {self.memory_bytes / 1e9:.2f} GB" if self.memory_bytes else ""
        return f"{self.engine} {self.dtype}{budget}{limit}"

    def to_json(self) -> str:
        """For the process that measures it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Arm:
        """What `to_json` gave."""
        fields = json.loads(text)
        return cls(**(fields | {"prompt_tokens": tuple(fields["prompt_tokens"])}))


@dataclass(slots=True)
class Outcome:
    """What the runs of one arm gave: what each found, or why there is no more."""

    arm: Arm
    found: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


def alternating(count: int, runs: int) -> Iterator[tuple[int, int]]:
    """(run, arm) for every measurement: forwards, backwards, forwards, so that no arm is always the first."""
    for run in range(runs):
        for arm in range(count) if run % 2 == 0 else reversed(range(count)):
            yield run, arm


def arm_command(specification: Path) -> list[str]:
    """The command that measures the arm in `specification`."""
    return [sys.executable, "-m", "infer.bench", "--arm", str(specification)]


class Contest:
    """Runs arms and keeps what they found, also when it is interrupted."""

    def __init__(
        self,
        arms: Sequence[Arm],
        runs: int,
        say: Callable[[str], None] = lambda line: None,
        command: Callable[[Path], list[str]] = arm_command,
    ) -> None:
        self.outcomes = [Outcome(arm) for arm in arms]
        self._runs, self._say, self._command = runs, say, command
        self._seconds: dict[int, float] = {}

    def run(self) -> None:
        """Measure every arm `runs` times; an arm that failed once is not tried again."""
        schedule = list(alternating(len(self.outcomes), self._runs))
        for done, (run, index) in enumerate(schedule):
            outcome = self.outcomes[index]
            if outcome.error:
                continue
            left = self._left_seconds([place for _, place in schedule[done:]])
            self._say(f"run {run + 1} of {self._runs}, {outcome.arm.title}{left}")
            started_s = time.monotonic()
            found = measure(outcome.arm, self._command)
            self._seconds[index] = time.monotonic() - started_s
            if found.get("error"):
                outcome.error = str(found["error"])
                self._say(f"  {outcome.error}")
            else:
                outcome.found.append(found)

    def _left_seconds(self, waiting: Sequence[int]) -> str:
        """How long what waits will take, as far as arms have been timed."""
        known = [self._seconds[i] for i in waiting if i in self._seconds and not self.outcomes[i].error]
        if not self._seconds:
            return ""
        mean = sum(self._seconds.values()) / len(self._seconds)
        unknown = sum(i not in self._seconds for i in waiting)
        return f"; about {max(1, round((sum(known) + unknown * mean) / 60))} min left"


def measure(arm: Arm, command: Callable[[Path], list[str]] = arm_command) -> dict[str, Any]:
    """One run of one arm in a fresh process: what it found, or `error`. LimitError where it cannot be limited."""
    drop(weight_files(Path(arm.path)) if Path(arm.path).exists() else [])
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coop-bench-")))
        specification = work / "arm.json"
        specification.write_text(Arm.to_json(_with_scratch(arm, work)))
        log = stack.enter_context((work / "log").open("w+b"))
        group = stack.enter_context(memory_group(arm.memory_bytes)) if arm.memory_bytes else None
        line = command(specification)
        process = stack.enter_context(_started(group.launcher(line) if group else line, log, arm.threads))
        try:
            code = process.wait(timeout=_patience_seconds(arm))
        except subprocess.TimeoutExpired:
            return {"error": f"gave no answer within {_patience_seconds(arm):.0f} s"}
        peak = {"group_peak_bytes": group.peak_bytes if group else None}
        return _found(specification.with_suffix(".result.json"), code, arm, group, log) | peak


def _with_scratch(arm: Arm, work: Path) -> Arm:
    scratch = work / "scratch"
    scratch.mkdir()
    return Arm(**(asdict(arm) | {"scratch": str(scratch)}))


def _patience_seconds(arm: Arm) -> float:
    """For one process: to load, then twice the limit for the warm-up and for each prompt."""
    return LOAD_SECONDS + 2 * arm.limit_seconds * (len(arm.prompt_tokens) + 1)


@contextlib.contextmanager
def _started(command: list[str], log: Any, threads: int) -> Iterator[subprocess.Popen[bytes]]:
    """The process, in a session of its own; killed with its children when the block ends."""
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SECONDS)


def _found(result: Path, code: int, arm: Arm, group: MemoryGroup | None, log: Any) -> dict[str, Any]:
    if code == 0 and result.is_file():
        return dict(json.loads(result.read_text()))
    if group is not None and group.kills:
        return {"error": f"killed: more than {arm.memory_bytes / 1e9:.2f} GB of memory"}
    if code < 0:
        return {"error": f"killed by signal {-code}"}
    log.seek(0)
    words = log.read().decode(errors="replace").strip().splitlines() or ["no last words"]
    return {"error": f"failed with exit code {code}: {words[-1][-LAST_WORDS:]}"}
