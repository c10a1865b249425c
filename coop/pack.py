"""Pack a checkpoint for coop: every expert one aligned read, its adapter merged, in 16, 8 or 4 bits.

Owns the command line: options in, a progress bar on stderr, a summary on stdout; promises one sentence and exit
code 2 for what it refuses, 1 for a pack that differs from its manifest. Run as `python -m coop.pack` or `coop pack`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coop.errors import CheckpointError, CoopError, RequestError
from coop.files import write_atomic

if TYPE_CHECKING:
    from rich.console import Console

    from coop.packs.format import Manifest
    from coop.packs.measure import Measurement
    from coop.packs.verify import Damage
    from coop.packs.writer import Packer

PROGRESS_SECONDS = 10.0  # between lines where standard error is no terminal
MAX_NAMES = 8
EXIT_DIFFERENT, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130
DTYPES = ("bf16", "int8", "int4")
ORDERS = ("model", "profile")
DEFAULT_EVAL_TOKENS = 4096
MAX_EVAL_TOKENS = 2**20

EXAMPLES = """\
examples:
  python -m coop.pack --ckpt runs/demo --out packs/demo
  python -m coop.pack --ckpt runs/demo --out packs/demo-int4 --dtype int4 --eval data/demo/eval.jsonl
  python -m coop.pack --ckpt packs/demo-int4 --verify
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Everything the command line says. Refuses, at birth, what cannot be meant."""

    ckpt: Path
    out: Path | None = None
    base: str | None = None
    dtype: str = "bf16"
    dense: str = "bf16"
    order: str = ""
    eval_file: Path | None = None
    eval_tokens: int = DEFAULT_EVAL_TOKENS
    is_verified: bool = False
    is_overwriting: bool = False
    json_file: str | None = None

    def __post_init__(self) -> None:
        if not self.ckpt.is_dir():
            raise RequestError(
                f"--ckpt {self.ckpt}: not a folder; pass one with config.json or adapter_config.json in it"
            )
        if self.out is None and not self.is_verified:
            raise RequestError("say where the pack goes with --out DIR, or check one with --verify")
        if self.out is None and (self.eval_file is not None or self.base is not None or self.is_overwriting):
            raise RequestError("--eval, --base and --overwrite belong to packing: pass --out DIR too")
        if self.eval_file is not None and not self.eval_file.is_file():
            raise RequestError(f"--eval {self.eval_file}: not a file; pass one with a JSON object a line")
        if not 2 <= self.eval_tokens <= MAX_EVAL_TOKENS:
            raise RequestError(f"--eval-tokens {self.eval_tokens}: pass a number from 2 to {MAX_EVAL_TOKENS}")
        if self.json_file not in (None, "-"):
            target = Path(str(self.json_file))
            if target.is_dir() or not target.parent.is_dir():
                raise RequestError(f"--json {target}: pass a file name in a folder that exists, or -")

    @property
    def folder(self) -> Path:
        """The pack: what is written, or what is checked."""
        return self.ckpt if self.out is None else self.out


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m coop.pack",
        description="Rewrite a checkpoint so that each expert is one aligned read, its adapter merged.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ckpt", type=Path, required=True, metavar="DIR", help="model or adapter to pack; pack to check")
    add("--out", type=Path, metavar="DIR", help="where the pack goes; must not exist")
    add("--base", metavar="DIR", help="base model of an adapter, if not the one its config names")
    add(
        "--dtype",
        choices=DTYPES,
        default="bf16",
        help="of expert weights; one scale for each 32 below bf16 (bf16)",
    )
    add(
        "--dense",
        choices=("bf16", "int8"),
        default="bf16",
        help="of linear layers that are no experts (bf16)",
    )
    add(
        "--order",
        choices=ORDERS,
        default="",
        help="experts of a layer on disk: as in the model, or hottest first (profile if there is one)",
    )
    add("--eval", type=Path, metavar="FILE.jsonl", help="measure perplexity of source and pack on this")
    add("--eval-tokens", type=int, default=DEFAULT_EVAL_TOKENS, metavar="N", help="of it, at most (4096)")
    add("--verify", action="store_true", help="read the pack and compare each expert with its digest")
    add("--overwrite", action="store_true", help="replace a pack at --out, and forget what was begun there")
    add("--json", metavar="FILE", help="write the report as JSON; - for standard output")
    return parser


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Options from the command line. RequestError for what cannot be meant."""
    args = build_parser().parse_args(arguments)
    return Options(
        ckpt=args.ckpt,
        out=args.out,
        base=args.base,
        dtype=args.dtype,
        dense=args.dense,
        order=args.order,
        eval_file=args.eval,
        eval_tokens=args.eval_tokens,
        is_verified=args.verify,
        is_overwriting=args.overwrite,
        json_file=args.json,
    )


def run(options: Options) -> int:
    """Pack, measure, verify, and report; the exit code."""
    began = time.monotonic()
    report: dict[str, Any] = {"pack": str(options.folder)}
    lines = [f"{options.folder}: a pack"] if options.out is None else _pack(options, report)
    code = _verify(options, report, lines) if options.is_verified else 0
    report["seconds"] = time.monotonic() - began
    lines.append(f"  took {report['seconds']:.1f} s")
    if options.out is not None and not code:
        lines.append(
            f'next: coop generate --ckpt {shlex.quote(str(options.out))} --budget 50% --prompt "..."'
        )
    print("\n".join(lines), file=sys.stderr if options.json_file == "-" else sys.stdout, flush=True)
    _write_report(options, report)
    return code


def _pack(options: Options, report: dict[str, Any]) -> list[str]:
    from coop.packs.writer import Packer, PackRequest, facts_of

    assert options.out is not None
    request = PackRequest(
        ckpt=options.ckpt,
        out=options.out,
        base=options.base,
        kind=options.dtype,
        dense=options.dense,
        order=options.order,
        is_overwriting=options.is_overwriting,
    )
    with Packer.open(request) as packer:
        texts = _texts(options, packer)
        target = packer.target()
        with packer.journal() as journal:
            with _progress("packing", target.nbytes, is_bytes=True) as advance:
                manifest = packer.write(journal, target, advance)
            measured = _measure(options, texts, journal.folder) if texts else ()
            if measured:
                manifest = _keep_measured(manifest, measured, journal.folder)
            journal.publish()
        report |= {
            "ckpt": str(options.ckpt),
            "profile": packer.profile_status,
            "resumed_experts": packer.num_resumed,
            **facts_of(manifest),
        }
        return _summary(options, packer, manifest) + _measured_lines(packer, measured)


def _texts(options: Options, packer: Packer) -> list[list[int]]:
    """What to measure on, read before anything is written."""
    if options.eval_file is None:
        return []
    from coop.packs.measure import read_texts

    return read_texts(options.eval_file, packer.checkpoint.tokenizer, options.eval_tokens)


def _measure(options: Options, texts: list[list[int]], folder: Path) -> tuple[Measurement, Measurement]:
    """Perplexity and speed of source and pack."""
    from coop.packs.measure import measure_model

    with _progress("measuring", 2 * sum(map(len, texts)), is_bytes=False) as advance:
        source = measure_model(options.ckpt, options.base, texts, advance)
        return source, measure_model(folder, None, texts, advance)


def _keep_measured(manifest: Manifest, measured: tuple[Measurement, Measurement], folder: Path) -> Manifest:
    """The manifest in `folder` with what was measured."""
    from coop.packs.format import PACK_MANIFEST, with_measured

    source, pack = measured
    manifest = with_measured(
        manifest,
        tokens=source.tokens,
        perplexity=(source.perplexity, pack.perplexity),
        tokens_per_s=(source.tokens_per_s, pack.tokens_per_s),
    )
    write_atomic(folder / PACK_MANIFEST, manifest.to_json())
    return manifest


def _summary(options: Options, packer: Packer, manifest: Manifest) -> list[str]:
    from coop.plan import format_bytes

    measured = manifest.measured
    before, after = measured.expert_bytes
    count = sum(layer.num_experts for layer in manifest.layers)
    lines = [
        f"packed {manifest.source} as {manifest.dtype}: {options.out}",
        f"  {count} experts in {len(manifest.layers)} layers, {manifest.expert_files} file(s); "
        f"{packer.num_resumed} were there already",
        f"  experts {format_bytes(before)} -> {format_bytes(after)} ({after / before:.0%})",
        f"  order of the {manifest.order}; profile of the source: {packer.profile_status}",
    ]
    source_type = str(packer.source_dtype).removeprefix("torch.")
    if source_type != "bfloat16":
        lines.append(f"  weights were cast from {source_type} to bfloat16, experts too where not quantised")
    if manifest.dense != "bf16":
        lines.append(
            f"  linear layers beside the experts will be rounded to {manifest.dense} when it is loaded"
        )
    if measured.relative_rms:
        lines.append(f"  quantisation error {measured.relative_rms:.2%} of the weights, root mean square")
    return lines


def _measured_lines(packer: Packer, measured: tuple[Measurement, Measurement] | tuple[()]) -> list[str]:
    from coop.plan import format_bytes

    if not measured:
        return []
    source, pack = measured
    change = pack.perplexity / source.perplexity - 1
    lines = [
        f"  perplexity over {pack.tokens} tokens {source.perplexity:.4f} -> {pack.perplexity:.4f} ({change:+.2%})"
    ]
    speed = f"{pack.tokens_per_s:.1f} tokens/s with {format_bytes(pack.budget_bytes)} of experts resident"
    if packer.checkpoint.adapter:  # no fair comparison
        speed += "; the source's speed is left out, as it merges its adapter at each load"
    else:
        before = format_bytes(source.budget_bytes)
        speed = f"{source.tokens_per_s:.1f} tokens/s with {before} of experts resident -> {speed}"
    return [*lines, f"  decoding {speed}; a rough figure of a few tokens"]


def _verify(options: Options, report: dict[str, Any], lines: list[str]) -> int:
    from coop.packs.format import read_manifest
    from coop.packs.verify import find_damage
    from coop.packs.writer import facts_of

    manifest = read_manifest(options.folder)
    count = sum(layer.num_experts for layer in manifest.layers)
    with _progress("verifying", manifest.measured.expert_bytes[1], is_bytes=True) as advance:
        damage = find_damage(options.folder, advance)
    report |= {**facts_of(manifest), "differing": damage.names}
    if damage.names:
        lines += _damage_lines(damage, count)
        return EXIT_DIFFERENT
    lines.append(
        f"  verified: {count} experts and {len(manifest.dense_sha256)} dense file(s) as they were written"
    )
    return 0


def _damage_lines(damage: Damage, count: int) -> list[str]:
    """One line for each kind of damage, and what to do."""
    kinds = (
        (damage.experts, "expert", f" of {count}"),
        (damage.expert_files, "file", " of experts"),
        (damage.files, "file", " beside the experts"),
    )
    lines = []
    for names, noun, what in kinds:
        if names:
            ending, verb = ("", "is") if len(names) == 1 else ("s", "are")
            more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            listed = ", ".join(names[:MAX_NAMES]) + more
            lines.append(f"  {len(names)} {noun}{ending}{what} {verb} damaged: {listed}")
    return [*lines, "  pack it again with --overwrite, or copy it again from where it is whole"]


@contextmanager
def _progress(what: str, total: int, is_bytes: bool) -> Iterator[Any]:
    """A bar on stderr with rate and estimate, or a line now and then; yields what takes the steps."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with _bar(console, what, total, is_bytes) as advance:
            yield advance
    else:
        yield _line_by_line(what, total, is_bytes)


def _line_by_line(what: str, total: int, is_bytes: bool) -> Callable[[int], None]:
    """Takes the steps, and prints a line every ten seconds."""
    from coop.plan import format_bytes

    show = format_bytes if is_bytes else str
    done, said_at = 0, time.monotonic()

    def advance(step: int) -> None:
        nonlocal done, said_at
        done += step
        if time.monotonic() - said_at >= PROGRESS_SECONDS:
            said_at = time.monotonic()
            print(f"{what}: {show(done)} of {show(total)} ({done / total:.0%})", file=sys.stderr, flush=True)

    return advance


@contextmanager
def _bar(console: Console, what: str, total: int, is_bytes: bool) -> Iterator[Any]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = (
        (DownloadColumn(binary_units=True), TransferSpeedColumn()) if is_bytes else (MofNCompleteColumn(),)
    )
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda step: bar.advance(task, step)


def _write_report(options: Options, report: dict[str, Any]) -> None:
    if options.json_file is None:
        return
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    if options.json_file == "-":
        print(text, end="", flush=True)
    else:
        write_atomic(Path(options.json_file), text.encode())


def _where_it_stands(options: Options | None) -> str:
    """What an interrupted run has left, and what the same command would do now."""
    from coop.packs.journal import hidden_folder

    if options is None or options.out is None:
        return ""
    if not hidden_folder(options.out).exists():
        return "" if options.out.exists() else ": nothing was written yet"
    if not options.is_overwriting:
        return ": the same command goes on where this one stopped"
    if options.out.exists():
        return ": the same command begins anew"
    return ": the same command without --overwrite goes on where this one stopped"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the pack differs from its manifest, 2 refused, 130 interrupted."""
    options = None
    try:
        options = parse_options(arguments)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return run(options)
    except CoopError as exc:
        kind = "checkpoint" if isinstance(exc, CheckpointError) else "error"
        print(f"{kind}: {exc}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print(f"interrupted{_where_it_stands(options)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as exc:
        print(f"error: {exc.filename or 'output'}: {exc.strerror or exc}", file=sys.stderr)
        return EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main())
