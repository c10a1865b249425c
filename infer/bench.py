"""Measure coop, and what people use today, on the same weights under the same memory limits.

Owns the command line; promises that what was measured before an interruption is shown, that a baseline that
cannot run is named, and that figures are medians of fresh processes. Run as `python -m infer.bench decode`
or `coop bench decode`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coop.errors import CheckpointError, CoopError, RequestError
from coop.files import write_atomic
from coop.strategy import STRATEGIES, get_strategy
from infer.contest import Arm, Contest
from infer.limits import why_unlimited
from infer.lineup import (
    BASELINES,
    Shape,
    check_baselines,
    check_packs,
    line_up,
    num_experts,
    parse_memory_limit,
)
from infer.timing import Timing

if TYPE_CHECKING:
    from rich.console import Console

    from infer.lineup import Lineup

EXIT_NO_NUMBER, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130
STDOUT = Path("-")
PIPE_COLUMNS = 150
LEAST_PROFILED = 3
MAIN = {"decode": "tokens_per_s", "prefill": "ttft_ms", "profile-token": "tokens_per_s"}
DEFAULT_PROMPTS = {"decode": "16", "prefill": "32,128,512,2048", "profile-token": "16"}
DEFAULT_TOKENS = {"decode": 64, "prefill": 1, "profile-token": 64}
PICTURE_ENDINGS = (".png", ".jpg", ".pdf", ".svg")
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "numpy",
    "safetensors",
    "llama-cpp-python",
    "gguf",
    "coop-moe",
)
MAX_THREADS = 1024

EXAMPLES = """\
examples:
  python -m infer.bench decode --ckpt models/bench-moe --pack packs/bench-int4
  python -m infer.bench decode --ckpt models/bench-moe --baseline transformers,accelerate,llamacpp --plot bench.png
  python -m infer.bench prefill --ckpt models/bench-moe --prompt-tokens 32,512 --budget 100%,50% --json prefill.json
  python -m infer.bench profile-token --ckpt models/bench-moe --budget 50%
  python -m infer.bench decode --ckpt models/bench-moe --replay trace.npz --budget 50%,25%
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Everything the command line says, parsed once. Refuses, at birth, what cannot be meant."""

    task: str
    ckpt: Path
    packs: tuple[Path, ...]
    budgets: tuple[str, ...]
    baselines: tuple[str, ...]
    prompt_tokens: tuple[int, ...]
    tokens: int
    runs: int
    strategy: str
    threads: int
    memory_limit: str
    limit_seconds: float
    seed: int
    gguf_dir: Path | None
    replay: Path | None
    json_file: Path | None
    plot_file: Path | None

    def __post_init__(self) -> None:
        for folder in (self.ckpt, *self.packs):
            if not folder.is_dir():
                raise RequestError(f"{folder}: not a folder; pass a checkpoint or a pack")
        for name, value in (("--tokens", self.tokens), ("--runs", self.runs), ("--threads", self.threads)):
            if value < 1:
                raise RequestError(f"{name} {value}: pass 1 or more")
        if self.threads > MAX_THREADS:
            raise RequestError(f"--threads {self.threads}: pass {MAX_THREADS} or fewer")
        if not self.budgets or not self.prompt_tokens or min(self.prompt_tokens) < 1:
            raise RequestError("--budget and --prompt-tokens take one or more, such as 100%,50% and 32,128")
        if any(budget.strip().lower() == "auto" for budget in self.budgets):
            raise RequestError(
                "--budget auto depends on what is free: pass shares or sizes, such as 50% or 6GiB"
            )
        if not 0 < self.limit_seconds < 10**6:
            raise RequestError(f"--limit-seconds {self.limit_seconds}: pass seconds above 0, such as 300")
        if self.memory_limit not in ("auto", "none"):
            parse_memory_limit(self.memory_limit)
        check_baselines(self.baselines)
        get_strategy(self.strategy)
        if self.plot_file is not None and self.plot_file.suffix.lower() not in PICTURE_ENDINGS:
            raise RequestError(f"--plot {self.plot_file}: a picture must end in {', '.join(PICTURE_ENDINGS)}")
        if self.task == "profile-token":
            self._check_profile()
        if self.replay is not None and self.task != "decode":
            raise RequestError(f"--replay {self.replay}: only decode takes it, not {self.task}")
        if self.replay is not None and not self.replay.is_file():
            what = "not a file" if self.replay.exists() else "no such file"
            raise RequestError(f"--replay {self.replay}: {what}")
        for place in (self.json_file, self.plot_file):
            if place is not None and (place.is_dir() or not place.absolute().parent.is_dir()):
                raise RequestError(f"{place}: name a file in a folder that exists")

    def _check_profile(self) -> None:
        """RequestError for what profile-token, which looks at coop on one model alone, cannot take."""
        if self.baselines:
            raise RequestError("profile-token looks into coop alone: leave --baseline out")
        if self.packs:
            raise RequestError("profile-token takes one model: pass the pack as --ckpt, without --pack")
        if self.plot_file:
            raise RequestError("profile-token draws no picture: leave --plot out; --json keeps its numbers")
        if self.tokens < LEAST_PROFILED:
            raise RequestError(
                f"--tokens {self.tokens}: profile-token needs {LEAST_PROFILED} or more to see a token of its own"
            )

    @property
    def is_json_on_stdout(self) -> bool:
        """Whether standard output is for JSON alone."""
        return self.json_file == STDOUT

    @property
    def main(self) -> str:
        """The number that is compared."""
        return MAIN[self.task]


def build_parser() -> argparse.ArgumentParser:
    """The command line. `--arm FILE`, before any task, is how a comparison starts its own processes."""
    parser = argparse.ArgumentParser(
        prog="python -m infer.bench",
        description="Measure coop and baselines on the same weights under the same memory limits.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "task",
        choices=tuple(MAIN),
        help="tokens per second; time to the first token; or where a token's time goes, at the first --budget",
    )
    _add_subjects(parser.add_argument_group("what is measured"))
    _add_conditions(parser.add_argument_group("how"))
    out = parser.add_argument_group("what comes out")
    out.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write every row and the machine as JSON; - for stdout, alone",
    )
    out.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the rows")
    return parser


def _add_subjects(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ckpt", type=Path, required=True, metavar="DIR", help="a full model or a pack, not an adapter"
    )
    group.add_argument(
        "--pack", default="", metavar="DIR,DIR", help="packs of the same model, from coop.pack"
    )
    group.add_argument(
        "--baseline", default="", metavar="NAME,NAME", help=f"what to compare with: {', '.join(BASELINES)}"
    )
    group.add_argument(
        "--budget",
        default="100%,50%,25%",
        metavar="B,B",
        help="of the experts: 50%% or 6GiB (default: %(default)s)",
    )
    group.add_argument(
        "--strategy", default="Balanced", help=f"{', '.join(STRATEGIES)} (default: %(default)s)"
    )
    group.add_argument(
        "--replay", type=Path, metavar="TRACE.npz", help="route decode steps as this trace says (coop only)"
    )


def _add_conditions(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tokens", type=int, metavar="N", help="new tokens (default: 64 for decode, 1 for prefill)"
    )
    group.add_argument(
        "--prompt-tokens", metavar="N,N", help="(default: 16 for decode, 32,128,512,2048 for prefill)"
    )
    group.add_argument(
        "--runs", type=int, default=3, help="fresh processes for each arm (default: %(default)s)"
    )
    group.add_argument(
        "--threads", type=int, metavar="N", help="compute threads (default: one for each core)"
    )
    group.add_argument(
        "--memory-limit",
        default="auto",
        metavar="auto|none|SIZE",
        help="a size such as 900MB or 1.5GiB for every arm; "
        "auto: below 100%%, dense weights + budget + a quarter of that (at least 768 MiB) for the process; "
        "baselines get the same limits (default: auto)",
    )
    group.add_argument(
        "--limit-seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="a generation that takes longer is cut short, after 4 tokens at the least (default: %(default).0f)",
    )
    group.add_argument("--seed", type=int, default=0, help="of the token ids (default: 0)")
    group.add_argument(
        "--gguf-dir",
        type=Path,
        metavar="DIR",
        help="keep llama.cpp's files here (default: a temporary folder)",
    )


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Options from the command line. RequestError says what to type instead."""
    given = build_parser().parse_args(arguments)
    prompts = given.prompt_tokens or DEFAULT_PROMPTS[given.task]
    return Options(
        task=given.task,
        ckpt=given.ckpt,
        packs=tuple(Path(name) for name in _split(given.pack)),
        budgets=_split(given.budget),
        baselines=_split(given.baseline),
        prompt_tokens=_numbers(prompts),
        tokens=given.tokens if given.tokens is not None else DEFAULT_TOKENS[given.task],
        runs=given.runs,
        strategy=given.strategy,
        threads=given.threads if given.threads is not None else _cores(),
        memory_limit=given.memory_limit,
        limit_seconds=given.limit_seconds,
        seed=given.seed,
        gguf_dir=given.gguf_dir,
        replay=given.replay,
        json_file=given.json,
        plot_file=given.plot,
    )


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _split(text))
    except ValueError as exc:
        raise RequestError(f"--prompt-tokens {text}: pass whole numbers, such as 32,128") from exc


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(options: Options) -> int:
    """Measure, show, write. The exit code."""
    if options.task == "profile-token":
        return _profile_token(options)
    with tempfile.TemporaryDirectory(prefix="coop-gguf-") as temporary:
        gguf_dir = options.gguf_dir or Path(temporary)
        gguf_dir.mkdir(parents=True, exist_ok=True)
        lineup = _line_up(options, gguf_dir)
        is_interrupted = False
        contest = Contest(lineup.arms, options.runs, _say)
        try:
            failures = _prepare(lineup)
            for outcome in contest.outcomes:
                outcome.error = failures.get(outcome.arm.path, "")
            contest.run()
        except KeyboardInterrupt:
            is_interrupted = True
            _say("interrupted; this is what there is")
        _report(options, lineup, contest)
    if is_interrupted:
        return EXIT_INTERRUPTED
    has_number = any(outcome.found for outcome in contest.outcomes if outcome.arm.engine == "coop")
    return 0 if has_number else EXIT_NO_NUMBER


def _profile_token(options: Options) -> int:
    """In this process: the clocks stand inside the engine."""
    from infer import arms, token_profile

    template = _template(options, _config(options.ckpt))
    arm = dataclasses.replace(template, budget=options.budgets[0], replay="")
    with arms.open_coop(arm) as engine:
        profile = token_profile.TokenProfile(engine.runtime.scheduler)
        forever_s = math.inf
        engine.run(*arms.token_ids(arm, arms.WARM_PROMPT, arms.WARM_TOKENS, is_warm_up=True), forever_s)
        profile.begin()
        started_s, times_s = engine.run(*arms.token_ids(arm, arm.prompt_tokens[0], arm.new_tokens), forever_s)
    table_ms = profile.table_ms()
    rate = Timing.of(started_s, times_s).tokens_per_s
    _console(options).print(token_profile.render(table_ms, rate))
    _write_json(options, {"parts": token_profile.PARTS, "layers_ms": table_ms.tolist(), "tokens_per_s": rate})
    return 0


def _console(options: Options) -> Console:
    """Where tables go: as wide as the terminal, or wide enough for a table where there is none."""
    from rich.console import Console

    stream = sys.stderr if options.is_json_on_stdout else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PIPE_COLUMNS, markup=False)


def _write_json(options: Options, document: dict[str, Any]) -> None:
    """To the file or to standard output, where --json asks for it."""
    if options.json_file is None:
        return
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    if options.is_json_on_stdout:
        print(text, end="", flush=True)
    else:
        write_atomic(options.json_file, text.encode())
        _say(f"numbers: {options.json_file}")


def _line_up(options: Options, gguf_dir: Path) -> Lineup:
    memory_limit, reason = options.memory_limit, ""
    if memory_limit != "none":
        reason = why_unlimited()
    if reason:
        _say(f"no memory limit is set for any arm: {reason}")
        memory_limit = "none"
    config = _config(options.ckpt)
    template = _template(options, config)
    _check_replay(options, config)
    folders = (options.ckpt, *options.packs)
    if options.packs:
        check_packs({folder: Shape.of(folder, _config(folder)) for folder in folders})
    return line_up(
        template, folders, options.budgets, options.baselines, memory_limit, config.model_type, gguf_dir
    )


def _template(options: Options, config: Any) -> Arm:
    """What all arms share. RequestError for more tokens than the model can see."""
    template = Arm(
        engine="coop",
        path=str(options.ckpt),
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.tokens,
        strategy=options.strategy,
        threads=options.threads,
        seed=options.seed,
        vocabulary=config.vocab_size,
        context=getattr(config, "max_position_embeddings", 2**31),
        limit_seconds=options.limit_seconds,
        replay=str(options.replay) if options.replay else "",
    )
    longest = max(options.prompt_tokens) + options.tokens
    if longest > template.context:
        raise RequestError(f"{longest} tokens are more than the {template.context} that this model can see")
    return template


def _config(folder: Path) -> Any:
    from coop.adapters.attach import load_config

    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is an adapter: pass a full checkpoint, or a pack that was made of it"
        )
    return load_config(folder)


def _check_replay(options: Options, config: Any) -> None:
    """Refuse a trace that does not fit before anything is measured; say how it is laid on the model."""
    if options.replay is None:
        return
    from infer.replay import Trace

    trace = Trace.load(options.replay)
    experts = num_experts(config)
    trace.check(experts)
    _say("replay: " + trace.describe(config.num_hidden_layers, experts, config.num_experts_per_tok))


def _prepare(lineup: Lineup) -> dict[str, str]:
    """Write what arms need; the reason by file for what could not be written."""
    contest = Contest(lineup.preparations, 1, lambda line: _say("write " + line.partition(", ")[2]))
    contest.run()
    return {outcome.arm.path: outcome.error for outcome in contest.outcomes if outcome.error}


def _report(options: Options, lineup: Lineup, contest: Contest) -> None:
    from infer import bench_report

    rows = bench_report.rows_of(contest.outcomes, lineup.absent, options.main)
    facts = [found["facts"] for outcome in contest.outcomes for found in outcome.found]
    machine = _machine(options, next((f for f in facts if "hardware" in f), {}))
    title = f"{options.task}: {options.ckpt.resolve().name}, {options.threads} threads"
    console = _console(options)
    bench_report.show(console, rows, options.main)
    if options.runs == 1:
        console.print("one run: no spread")
    _write_json(options, {"task": options.task, "machine": machine, "rows": rows})
    if options.plot_file is not None:
        bench_report.plot(rows, options.plot_file, options.main, title)
        _say(f"picture: {options.plot_file}")
    else:
        _say("next: the same with --plot bench.png draws it")


def _machine(options: Options, facts: dict[str, Any]) -> dict[str, Any]:
    import psutil

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "hardware": facts.get("hardware"),
        "cores": _cores(),
        "threads": options.threads,
        "ram_bytes": psutil.virtual_memory().total,
        "disk_bytes_per_second": facts.get("disk_bytes_per_second"),
        "system": platform.platform(),
        "versions": versions,
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done (also with absent baselines), 1 no arm of coop gave a number, 2 refused, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["--arm"]:
            from infer import arms

            return arms.main(Path(given[1]))
        options = parse_options(given)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        signal.signal(signal.SIGTERM, _interrupt)  # so that processes and groups go with this one
        return run(options)
    except CoopError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as exc:
        print(f"error: {exc.filename or 'output'}: {exc.strerror or exc}", file=sys.stderr)
        return EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main())
