"""Measure the I/O pressure guard against a real competitor: a process that reads the same disk in bursts.

Owns that process, which ends when its standard input closes; promises that cases alternate, that every run
has a time limit, and that the tokens of all runs are compared. Run by hand:
`python scripts/measure_pressure.py --ckpt DIR --budget 50% --json FILE`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

READ_BYTES = 2**20  # what a copy or a backup asks for at once
SCRATCH_BYTES = 2**30  # more than a disk's own cache
CHILD_EXIT_SECONDS = 10.0
PROMPT = "Explain step by step how a list is sorted in Python, and show the code of two different ways."


@dataclass(frozen=True, slots=True)
class Run:
    """One generation: what was set, what each token took, and what was read meanwhile."""

    has_guard: bool
    is_busy: bool
    token_ids: list[int]
    token_ms: list[float]
    bytes_read: int
    speculative_bytes: int
    times_pressed: int
    seconds_pressed: float
    competitor_bytes_per_s: float


# the competitor


def compete(files: Sequence[Path], threads: int, burst_seconds: float, pause_seconds: float) -> None:
    """Read `files` in bursts, past the page cache where the system can, until standard input closes."""
    is_over = threading.Event()
    totals = [0] * threads
    began = time.monotonic()

    def work(index: int) -> None:
        for fd, offset in _blocks(files, index, threads):
            into_cycle = (time.monotonic() - began) % (burst_seconds + pause_seconds)
            if into_cycle > burst_seconds:
                is_over.wait(burst_seconds + pause_seconds - into_cycle)
            if is_over.is_set():
                return
            totals[index] += os.preadv(fd, [windows[index]], offset)

    windows = [mmap.mmap(-1, READ_BYTES) for _ in range(threads)]
    workers = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(threads)]
    for worker in workers:
        worker.start()
    sys.stdin.read()
    is_over.set()
    print(json.dumps({"bytes": sum(totals), "seconds": time.monotonic() - began}), flush=True)


def _blocks(files: Sequence[Path], index: int, threads: int) -> Iterator[tuple[int, int]]:
    """(descriptor, offset) of whole blocks of the files, again and again; each thread has its share of them."""
    opened = [
        (os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0)), path.stat().st_size) for path in files
    ]
    blocks = [(fd, start) for fd, size in opened for start in range(0, size - READ_BYTES + 1, READ_BYTES)]
    while True:
        yield from blocks[index::threads]


@contextlib.contextmanager
def competitor(files: Sequence[Path], args: argparse.Namespace, result: dict[str, float]) -> Iterator[None]:
    """A child that competes while the block runs; afterwards `result` holds what it read."""
    command = [sys.executable, str(Path(__file__).resolve()), "--ckpt", str(args.ckpt), "--compete"]
    command += [str(path) for path in files]
    for name in ("threads", "burst-seconds", "pause-seconds"):
        command += [f"--{name}", str(getattr(args, name.replace("-", "_")))]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield
        output, _ = child.communicate(timeout=CHILD_EXIT_SECONDS)
        result.update(json.loads(output))
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def files_to_read(args: argparse.Namespace) -> Iterator[list[Path]]:
    """The checkpoint's own weights, or a scratch file that is removed afterwards."""
    if not args.scratch:
        yield sorted(args.ckpt.glob("*.safetensors"))
        return
    with tempfile.NamedTemporaryFile(dir=args.scratch, prefix="pressure-") as file:
        block = os.urandom(READ_BYTES)
        for _ in range(SCRATCH_BYTES // READ_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        yield [Path(file.name)]


# one run


def run_once(args: argparse.Namespace, files: Sequence[Path], has_guard: bool, is_busy: bool) -> Run:
    """Attach, generate greedily beside the competitor, and close."""
    import coop
    from infer.engine import TimedStreamer, encode, load_tokenizer

    competed = {"bytes": 0.0, "seconds": 1.0}
    with coop.attach(args.ckpt, budget=args.budget, strategy=args.strategy, guard=has_guard) as runtime:
        tokenizer = load_tokenizer(runtime.tokenizer_source)
        inputs = encode(tokenizer, args.prompt, "", is_raw=False)
        streamer = TimedStreamer(tokenizer, lambda text: None)
        with competitor(files, args, competed) if is_busy else contextlib.nullcontext():
            runtime.model.generate(
                **inputs,
                max_new_tokens=args.tokens,
                min_new_tokens=args.tokens,
                max_time=args.max_seconds,
                do_sample=False,
                streamer=streamer,
            )
        guard = runtime.scheduler.guard
        times = streamer.token_times_s
        return Run(
            has_guard=has_guard,
            is_busy=is_busy,
            token_ids=streamer.token_ids,
            token_ms=[(after - before) * 1e3 for before, after in pairwise(times)],
            bytes_read=runtime.scheduler.loads["bytes_read"],
            speculative_bytes=speculative_bytes(runtime.scheduler.loads),
            times_pressed=guard.times_pressed if guard else 0,
            seconds_pressed=guard.seconds_pressed if guard else 0.0,
            competitor_bytes_per_s=competed["bytes"] / competed["seconds"],
        )


def speculative_bytes(loads: dict[str, int]) -> int:
    """Bytes read on a guess: all experts of the models measured here are of one size."""
    loaded = loads["speculative_loads"] + loads["demand_loads"]
    return loads["bytes_read"] * loads["speculative_loads"] // max(1, loaded)


def measure(args: argparse.Namespace) -> list[Run]:
    """All runs; the order of a round's cases is turned round each time."""
    cases = [(True, True), (False, True)]
    if args.with_quiet:
        cases += [(True, False), (False, False)]
    runs = []
    with files_to_read(args) as files:
        if sum(path.stat().st_size for path in files) < args.threads * READ_BYTES:
            raise SystemExit(
                f"{args.ckpt} is too small to read for long; pass --scratch DIR on the same disk"
            )
        for turn in range(args.pairs):
            for has_guard, is_busy in cases if turn % 2 == 0 else reversed(cases):
                runs.append(run_once(args, files, has_guard, is_busy))
                print(f"run {len(runs)} of {args.pairs * len(cases)} is done", file=sys.stderr)
    return runs


# the table


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row for each case: percentiles over the tokens of all its runs, means of the rest."""
    import numpy as np

    rows = []
    for is_busy in (True, False):
        for has_guard in (True, False):
            some = [run for run in runs if (run.has_guard, run.is_busy) == (has_guard, is_busy)]
            token_ms = np.array([ms for run in some for ms in run.token_ms])
            if not token_ms.size:
                continue
            p50, p99 = np.percentile(token_ms, [50, 99])
            rows.append(
                {
                    "disk": "busy" if is_busy else "quiet",
                    "guard": "on" if has_guard else "off",
                    "runs": len(some),
                    "tokens": int(token_ms.size),
                    "token_ms_p50": float(p50),
                    "token_ms_p99": float(p99),
                    "tokens_per_s": float(1e3 / token_ms.mean()),
                    "speculative_mb": float(np.mean([run.speculative_bytes for run in some])) / 1e6,
                    "read_mb": float(np.mean([run.bytes_read for run in some])) / 1e6,
                    "times_pressed": float(np.mean([run.times_pressed for run in some])),
                    "seconds_pressed": float(np.mean([run.seconds_pressed for run in some])),
                    "competitor_mb_per_s": float(np.mean([run.competitor_bytes_per_s for run in some])) / 1e6,
                }
            )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    names = list(rows[0])
    cells = [[f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for line in [names, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def have_same_tokens(runs: Sequence[Run]) -> bool:
    """Whether all runs agree as far as each went: a time limit may have cut one short."""
    shortest = min(len(run.token_ids) for run in runs)
    return len({tuple(run.token_ids[:shortest]) for run in runs}) == 1


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; numbers that make no sense are refused."""
    parser = argparse.ArgumentParser(
        description="Tokens with the I/O pressure guard and without, beside a reader."
    )
    add = parser.add_argument
    add("--ckpt", type=Path, required=True, metavar="DIR", help="the model")
    add("--budget", default="50%", help="memory for experts (default: %(default)s)")
    add("--strategy", default="SpeedFirst", help="the one that guesses most (default: %(default)s)")
    add("--tokens", type=int, default=96, help="new tokens in each run (default: %(default)s)")
    add("--pairs", type=int, default=3, help="runs of each case (default: %(default)s)")
    add("--max-seconds", type=float, default=60.0, help="limit of one generation (default: %(default)s)")
    add("--prompt", default=PROMPT, help="what to answer")
    add("--with-quiet", action="store_true", help="also run both cases without the competitor")
    add("--threads", type=int, default=8, help="the competitor's reads at a time (default: %(default)s)")
    add("--burst-seconds", type=float, default=2.0, help="it reads so long (default: %(default)s)")
    add("--pause-seconds", type=float, default=1.0, help="and then rests (default: %(default)s)")
    add(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="it reads a file of 1 GiB made here, not the model's files",
    )
    add("--json", type=Path, metavar="FILE", help="write rows and runs here")
    add("--compete", type=Path, nargs="+", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if min(args.tokens - 1, args.pairs, args.threads) < 1 or min(args.burst_seconds, args.max_seconds) <= 0:
        parser.error("--pairs and --threads are at least 1, --tokens at least 2, times above 0")
    if args.pause_seconds < 0:
        parser.error("--pause-seconds is not negative")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 where two runs gave different tokens."""
    args = parse_arguments(argv)
    if args.compete:
        compete(args.compete, args.threads, args.burst_seconds, args.pause_seconds)
        return 0
    load_before = os.getloadavg()[0]
    runs = measure(args)
    rows = summarise(runs)
    is_same = have_same_tokens(runs)
    show(rows)
    print(f"tokens of all runs: {'the same' if is_same else 'DIFFERENT'}; load before {load_before:.2f}")
    if args.json:
        table = {
            "rows": rows,
            "same_tokens": is_same,
            "load_before": load_before,
            "runs": list(map(asdict, runs)),
        }
        args.json.write_text(json.dumps(table) + "\n", encoding="utf-8")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
