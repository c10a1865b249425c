"""Generate text from a checkpoint with only part of its experts in memory.

Owns the command line: options in, streamed text on stdout, plan and summary on stderr; promises one
sentence and exit code 2 for whatever it refuses. Run as `python -m infer.generate` or `coop generate`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coop.errors import CheckpointError, CoopError
from coop.files import write_atomic
from coop.strategy import STRATEGIES

if TYPE_CHECKING:
    from infer.engine import Generation, Runtime, Sampling

EXIT_DIFFERENT, EXIT_REFUSED, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141
MAX_PROMPT_BYTES = 16 * 2**20
DEFAULT_NEW_TOKENS = 256
MAX_THREADS = 1024
DEFAULT_CONTEXT = 4096

EXAMPLES = """\
examples:
  python -m infer.generate --ckpt runs/demo --budget 50% --prompt "What does textwrap.dedent do?"
  python -m infer.generate --ckpt runs/demo --budget 2GiB --strategy SpeedFirst --prompt-file question.txt
  git diff | python -m infer.generate --ckpt runs/demo --system "Describe this change." --json answer.json
  python -m infer.generate --ckpt runs/demo --budget 50% --prompt "Hello" --verify
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Everything the command line says, parsed once. Refuses, at birth, what cannot be meant."""

    ckpt: Path
    prompt: str
    base: str | None = None
    budget: str = "auto"
    strategy: str = "Balanced"
    system: str = ""
    is_raw: bool = False
    max_new_tokens: int = DEFAULT_NEW_TOKENS
    temperature: float = 0.0
    top_p: float | None = None
    seed: int | None = None
    dtype: str = "auto"
    max_context: int = DEFAULT_CONTEXT
    threads: int | None = None
    json_file: str | None = None
    is_verified: bool = False
    has_profile: bool = True
    has_prefetch: bool = True
    has_guard: bool = True
    device: str = "cpu"
    is_quiet: bool = False

    def __post_init__(self) -> None:
        for complaint in (
            _complaint_about_files(self),
            _complaint_about_text(self),
            _complaint_about_numbers(self),
        ):
            if complaint:
                raise CoopError(complaint)

    @property
    def is_json_on_stdout(self) -> bool:
        return self.json_file == "-"

    def sampling(self) -> Sampling:
        """How to pick tokens; the seed is 0 unless given, so that every run can be repeated."""
        from infer.engine import Sampling

        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed or 0,
        )


def _complaint_about_files(options: Options) -> str:
    if not options.ckpt.is_dir():
        return (
            f"--ckpt {options.ckpt}: not a folder; pass one with config.json or adapter_config.json in it, "
            "such as --ckpt runs/demo (bash scripts/demo.sh makes it)"
        )
    if options.json_file and not options.is_json_on_stdout:
        target = Path(options.json_file)
        if target.is_dir() or not target.parent.is_dir():
            return f"--json {target}: cannot be written; pass a file name in a folder that exists, or -"
    return ""


def _complaint_about_text(options: Options) -> str:
    if not options.prompt.strip():
        return "the prompt is empty; pass --prompt TEXT, --prompt-file FILE, or text on standard input"
    try:
        (options.prompt + options.system).encode()
    except UnicodeEncodeError:
        return "the prompt is not valid UTF-8; convert it first, for example with iconv -t utf-8"
    if options.system and options.is_raw:
        return "--system goes into the chat template and --raw switches that off; leave out one of them"
    return ""


def _complaint_about_numbers(options: Options) -> str:
    for flag, value in (
        ("--max-new-tokens", options.max_new_tokens),
        ("--max-context", options.max_context),
        ("--threads", options.threads),
    ):
        if value is not None and value < 1:
            return f"{flag} {value}: pass 1 or more"
    if options.threads is not None and options.threads > MAX_THREADS:
        return f"--threads {options.threads}: pass {MAX_THREADS} or fewer"
    if not (math.isfinite(options.temperature) and options.temperature >= 0):
        return f"--temperature {options.temperature}: pass 0 (greedy) or a number above it, such as 0.7"
    if options.top_p is not None and not 0 < options.top_p <= 1:
        return f"--top-p {options.top_p}: pass a share above 0 and up to 1, such as 0.9"
    if options.seed is not None and not 0 <= options.seed < 2**63:
        return f"--seed {options.seed}: pass a number from 0 to 2^63 - 1"
    if options.temperature == 0:
        for flag, is_given in (("--top-p", options.top_p is not None), ("--seed", options.seed is not None)):
            if is_given:
                return f"{flag} does nothing at temperature 0; add --temperature 0.7 or leave {flag} out"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What `--json` writes; NaN where there is no such number (null in the file)."""

    text: str
    prompt_tokens: int
    new_tokens: int
    ttft_ms: float
    tokens_per_s: float
    token_ms_p50: float
    token_ms_p99: float
    hit_rate_prefill: float
    hit_rate_decode: float
    bytes_read: int
    bytes_speculative: int
    bytes_wasted: int
    wait_ms: dict[str, float]
    budget_bytes: int
    resident_bytes_max: int
    rss_max_bytes: int
    profile: str
    strategy: str

    @classmethod
    def of(cls, generation: Generation, runtime: Runtime, strategy: str) -> Report:
        from infer.timing import peak_rss_bytes

        stats = runtime.stats()
        return cls(
            text=generation.text,
            prompt_tokens=generation.prompt_tokens,
            new_tokens=len(generation.token_ids),
            **dataclasses.asdict(generation.timing),
            hit_rate_prefill=stats.hit_rate_prefill,
            hit_rate_decode=stats.hit_rate_decode,
            bytes_read=stats.bytes_read,
            bytes_speculative=stats.bytes_speculative,
            bytes_wasted=stats.bytes_wasted,
            wait_ms={cause: seconds * 1e3 for cause, seconds in stats.waits.items()},
            budget_bytes=stats.budget_bytes,
            resident_bytes_max=stats.resident_bytes_max,
            rss_max_bytes=peak_rss_bytes(),
            profile=runtime.profile_status,
            strategy=strategy,
        )

    def to_json(self) -> str:
        """Strict JSON, one object, keys in the order of the fields."""
        values = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in dataclasses.asdict(self).items()
        }
        return json.dumps(values, ensure_ascii=False, allow_nan=False, indent=2) + "\n"

    def summary(self) -> str:
        """The closing lines for a person."""
        from coop.plan import format_bytes

        return "\n".join(
            (
                f"{self.new_tokens} tokens at {_number(self.tokens_per_s, '.1f')} tokens/s, "
                f"first token after {_number(self.ttft_ms, '.0f')} ms "
                f"(prompt {self.prompt_tokens} tokens), strategy {self.strategy}",
                f"experts: hits {_number(self.hit_rate_prefill, '.1%')} in prefill, "
                f"{_number(self.hit_rate_decode, '.1%')} in decode; {format_bytes(self.bytes_read)} read, "
                f"{format_bytes(self.bytes_speculative)} of it on guesses, {format_bytes(self.bytes_wasted)} "
                f"in vain",
                f"peak {format_bytes(self.resident_bytes_max)} of a budget of {format_bytes(self.budget_bytes)}; "
                f"waited {sum(self.wait_ms.values()):.0f} ms{_causes(self.wait_ms)}",
                f"profile {self.profile}; process peak {format_bytes(self.rss_max_bytes)}",
            )
        )


def _causes(wait_ms: dict[str, float]) -> str:
    """Where the waiting came from, largest first; nothing below a millisecond."""
    names = {
        "load": "for reads",
        "guess": "for guesses under way",
        "room": "for room",
        "ring": "for the ring",
    }
    found = sorted(((ms, names[cause]) for cause, ms in wait_ms.items() if ms >= 1), reverse=True)
    return ": " + ", ".join(f"{ms:.0f} {name}" for ms, name in found) if found else ""


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "n/a"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A finished run: its report and what to tell the shell."""

    report: Report
    exit_code: int


def run(options: Options) -> Outcome:
    """Open the checkpoint, generate once, report, and verify if asked. CoopError if it cannot be run."""
    from infer import engine

    _settle_libraries(options.threads)
    with _open_runtime(options) as runtime:
        _say(options, str(runtime.plan.render()))
        tokenizer = engine.load_tokenizer(runtime.tokenizer_source)
        inputs = engine.encode(tokenizer, options.prompt, options.system, options.is_raw)
        engine.check_length(
            runtime.model, inputs["input_ids"].shape[1], options.max_new_tokens, options.max_context
        )
        generation = engine.generate(
            runtime.model,
            tokenizer,
            inputs,
            options.sampling(),
            _discard if options.is_json_on_stdout else _print_now,
            keep_logits=options.is_verified,
        )
        report = Report.of(generation, runtime, options.strategy)
    _say(options, report.summary())
    _write_report(options, report)
    if generation.is_interrupted:
        print("interrupted; this is what there was", file=sys.stderr)
        return Outcome(report=report, exit_code=EXIT_INTERRUPTED)
    exit_code = _verify(options, generation, inputs) if options.is_verified else 0
    return Outcome(report=report, exit_code=exit_code)


def _open_runtime(options: Options, **changes: Any) -> Any:
    import coop

    arguments: dict[str, Any] = {
        "budget": options.budget,
        "strategy": options.strategy,
        "profile": options.has_profile,
        "prefetch": options.has_prefetch,
        "base": options.base,
        "dtype": options.dtype,
        "max_context": options.max_context,
        "device": options.device,
        "guard": options.has_guard,
        "say": lambda line: _say(options, line),
    }
    return coop.attach(options.ckpt, **(arguments | changes))


def _verify(options: Options, generation: Generation, inputs: dict[str, Any]) -> int:
    """Run the same again with every expert resident and nothing guessed; 0 if tokens and logits agree."""
    from infer import engine

    with _open_runtime(options, budget="100%", prefetch=False, profile=False) as runtime:
        tokenizer = engine.load_tokenizer(runtime.tokenizer_source)
        resident = engine.generate(
            runtime.model, tokenizer, inputs, options.sampling(), _discard, keep_logits=True
        )
    if resident.is_interrupted:
        print("verify: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    difference = engine.first_difference(generation, resident)
    if difference:
        print(f"verify: NOT identical to the run with every expert resident: {difference}", file=sys.stderr)
        return EXIT_DIFFERENT
    print(f"verify: {len(generation.token_ids)} tokens, logits identical bit for bit", file=sys.stderr)
    return 0


def _settle_libraries(threads: int | None) -> None:
    """Before the first model: as many threads as asked, and errors only from transformers."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings(
        "ignore", category=FutureWarning
    )  # one library's note to another, not to the user
    if threads is not None:
        torch.set_num_threads(threads)


def _write_report(options: Options, report: Report) -> None:
    if options.is_json_on_stdout:
        _print_now(report.to_json())
    elif options.json_file:
        target = Path(options.json_file)
        try:
            write_atomic(target, report.to_json().encode())
        except OSError as exc:
            raise CoopError(f"--json {target}: {exc.strerror or exc}") from exc


def _print_now(text: str) -> None:
    print(text, end="", flush=True)


def _discard(text: str) -> None:
    """Where text goes that nobody asked to see."""


def _say(options: Options, text: str) -> None:
    if not options.is_quiet:
        print(text, file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    """The command line, in groups, examples last."""
    parser = argparse.ArgumentParser(
        prog="python -m infer.generate",
        description="Generate text from a mixture-of-experts checkpoint with part of its experts in memory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for add_group in (_add_model, _add_prompt, _add_picking, _add_memory, _add_output):
        add_group(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--ckpt", metavar="DIR", required=True, help="checkpoint: a model folder or an adapter folder"
    )
    group.add_argument(
        "--base", metavar="DIR", help="base model of an adapter, if its config names another place"
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="type to compute in (default: as stored)",
    )
    group.add_argument(
        "--device", metavar="NAME", default="cpu", help="where to compute: cpu (default), cuda, cuda:1, mps"
    )


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt (standard input if neither is given)")
    which = group.add_mutually_exclusive_group()
    which.add_argument("--prompt", metavar="TEXT", help="the prompt itself")
    which.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 file with the prompt")
    group.add_argument("--system", metavar="TEXT", default="", help="system text for the chat template")
    group.add_argument("--raw", action="store_true", help="no chat template: the model continues the text")


def _add_picking(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("picking tokens")
    group.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=int,
        default=DEFAULT_NEW_TOKENS,
        help=f"stop after N tokens (default {DEFAULT_NEW_TOKENS})",
    )
    group.add_argument(
        "--temperature", metavar="T", type=float, default=0.0, help="0 is greedy (default); above 0 samples"
    )
    group.add_argument(
        "--top-p", metavar="P", type=float, help="sample from the likeliest share P (default 1)"
    )
    group.add_argument("--seed", metavar="S", type=int, help="seed of the sampling (default 0)")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory and speed (never changes the tokens)")
    group.add_argument(
        "--budget",
        metavar="BYTES",
        default="auto",
        help="memory for experts: 2GiB, 50%% of them, or auto (default)",
    )
    group.add_argument(
        "--strategy",
        choices=tuple(STRATEGIES),
        default="Balanced",
        help="how eagerly to use it (default Balanced)",
    )
    group.add_argument(
        "--max-context",
        metavar="N",
        type=int,
        default=DEFAULT_CONTEXT,
        help=f"tokens of context to plan for (default {DEFAULT_CONTEXT})",
    )
    group.add_argument("--threads", metavar="N", type=int, help="compute threads (default: torch decides)")
    group.add_argument(
        "--no-profile", action="store_true", help="start cold, as if training had learned nothing"
    )
    group.add_argument("--no-prefetch", action="store_true", help="load experts only when they are asked for")
    group.add_argument(
        "--no-guard", action="store_true", help="go on guessing while other programs use the disk"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output (text on stdout, all else on stderr)")
    group.add_argument(
        "--json", metavar="FILE", help="write text and measurements as JSON; - for stdout, alone"
    )
    group.add_argument(
        "--verify", action="store_true", help="repeat with all experts resident; exit 1 unless bit-identical"
    )
    group.add_argument("--quiet", action="store_true", help="no plan, no summary")


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Options from the command line, prompt read. CoopError says what to type instead."""
    given = build_parser().parse_args(arguments)
    return Options(
        ckpt=Path(given.ckpt),
        prompt=_read_prompt(given.prompt, given.prompt_file),
        base=given.base,
        budget=given.budget,
        strategy=given.strategy,
        system=given.system,
        is_raw=given.raw,
        max_new_tokens=given.max_new_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        seed=given.seed,
        dtype=given.dtype,
        max_context=given.max_context,
        threads=given.threads,
        json_file=given.json,
        is_verified=given.verify,
        has_profile=not given.no_profile,
        has_prefetch=not given.no_prefetch,
        has_guard=not given.no_guard,
        device=given.device,
        is_quiet=given.quiet,
    )


def _read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        return _decode_prompt(prompt_file, lambda: _read_bounded(Path(prompt_file)))
    if sys.stdin.isatty():
        print("type the prompt, then Ctrl-D on a line of its own", file=sys.stderr)
    return _decode_prompt("standard input", lambda: sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1))


def _read_bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_PROMPT_BYTES + 1)


def _decode_prompt(name: str, read: Callable[[], bytes]) -> str:
    try:
        data = read()
        if len(data) > MAX_PROMPT_BYTES:
            raise CoopError(f"{name}: more than {MAX_PROMPT_BYTES} bytes of prompt; shorten it")
        return data.decode("utf-8")
    except OSError as exc:
        raise CoopError(f"--prompt-file {name}: {exc.strerror or exc}; pass a file that can be read") from exc
    except UnicodeDecodeError as exc:
        raise CoopError(f"{name}: byte {exc.start} is not UTF-8; convert the prompt to UTF-8 first") from exc


def _settle_process() -> None:
    """Before anything heavy is imported: no network for a local folder, and UTF-8 out whatever the locale."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # HF_HUB_OFFLINE=0 lets an adapter's base be downloaded
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")


def _detach_stdout() -> None:
    """Give the flush at exit somewhere to go when whoever read stdout has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 verify differs, 2 refused, 130 interrupted, 141 whoever read stdout left."""
    try:
        options = parse_options(arguments)
        _settle_process()
        return run(options).exit_code
    except CoopError as exc:
        kind = "checkpoint" if isinstance(exc, CheckpointError) else "error"
        print(f"{kind}: {exc}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _detach_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as exc:  # standard output may lead to a full disk
        print(f"error: {exc.strerror or exc}", file=sys.stderr)
        _detach_stdout()
        return EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main())
