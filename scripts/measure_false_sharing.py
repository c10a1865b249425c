"""Measure what the ring's alignment is for: two threads write their own segments, on lines of their own or on one line.

Owns no state; promises that layouts alternate, that the medians printed are of all rounds, and that every write
was checked. Run by hand: `python scripts/measure_false_sharing.py --json FILE --plot FILE`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LAYOUTS = ("ring", "packed")
THREADS = (1, 2)
SEGMENT_DOUBLES = 2  # 16 bytes: four packed segments share a line of 64
WRITES_PER_CALL = 1_000_000  # about 4 ms of one native loop, in which the interpreter lock is free
QUIET_SHARE = 0.9  # less of the elapsed time on a processor, and two threads were not two
WAIT_SECONDS = 60.0  # a hundred times what a measurement takes


def ring_segments(count: int) -> list[torch.Tensor]:
    """Neighbours as the ring hands them out; the one place that knows its calls."""
    import torch

    from coop.ring import RingBuffer

    ring = RingBuffer(4096)
    return [ring.push(1, SEGMENT_DOUBLES, torch.float64)[1].view(-1) for _ in range(count)]


def packed_segments(count: int) -> list[torch.Tensor]:
    """Neighbours without alignment, all on one cache line."""
    import torch

    from coop.ring import CACHE_LINE

    assert count * SEGMENT_DOUBLES * 8 <= CACHE_LINE
    block = torch.empty(2 * CACHE_LINE // 8, dtype=torch.float64)
    block = block[-block.data_ptr() % CACHE_LINE // 8 :]
    return [block[i * SEGMENT_DOUBLES : (i + 1) * SEGMENT_DOUBLES] for i in range(count)]


def write_seconds(segments: Sequence[torch.Tensor], calls: int) -> tuple[float, float]:
    """Time for one thread per segment to add to the segment's first number `calls` x WRITES_PER_CALL times.

    Returns (processor time of a thread, share of the elapsed time in which it had a processor). Processor time
    counts the wait for a cache line and leaves out the wait for a processor that others use. `index_add_` with
    one repeated index is a loop of reads and writes of one address, in which the interpreter lock is free.
    """
    import torch

    indices = torch.zeros(WRITES_PER_CALL, dtype=torch.int64)
    ones = torch.ones(WRITES_PER_CALL, dtype=torch.float64)
    start = threading.Barrier(len(segments) + 1)
    busy_seconds: list[float] = []

    def work(segment: torch.Tensor) -> None:
        target = segment[:1].zero_()
        start.wait(WAIT_SECONDS)
        began = time.thread_time()
        for _ in range(calls):
            target.index_add_(0, indices, ones)
        busy_seconds.append(time.thread_time() - began)

    threads = [threading.Thread(target=work, args=(segment,), daemon=True) for segment in segments]
    for thread in threads:
        thread.start()
    start.wait(WAIT_SECONDS)
    began = time.perf_counter()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    elapsed = time.perf_counter() - began
    assert all(float(segment[0]) == calls * WRITES_PER_CALL for segment in segments), "writes were lost"
    busy = statistics.mean(busy_seconds)
    return busy, busy / elapsed


def processors() -> list[int]:
    """The processors this process may use; threads are left unpinned, lest another's work sit on theirs."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def siblings(processor: int) -> set[int]:
    """Processors that are hardware threads of the same core; only itself where the system does not say."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list").read_text()
    except OSError:
        return {processor}
    found: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def measure(rounds: int, calls: int) -> dict[str, Any]:
    """All layouts and thread counts in turn, in an order that reverses every round."""
    import torch

    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    cases = [(layout, threads) for layout in LAYOUTS for threads in THREADS]
    taken: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    for turn in range(rounds + 1):
        for layout, threads in cases if turn % 2 else reversed(cases):
            segments = (ring_segments if layout == "ring" else packed_segments)(threads)
            one = write_seconds(segments, calls)
            if turn:  # the first round warms up
                taken[layout, threads].append(one)
    writes = calls * WRITES_PER_CALL
    rows = [describe(layout, threads, values, writes) for (layout, threads), values in taken.items()]
    ratios = {str(n): median_of(rows, "packed", n) / median_of(rows, "ring", n) for n in THREADS}
    allowed = processors()
    return {
        "rows": rows,
        "packed_over_ring": ratios,
        "rounds": rounds,
        "writes_per_thread": writes,
        "processors": len(allowed),
        "is_one_core": set(allowed) <= siblings(allowed[0]),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
    }


def describe(layout: str, threads: int, taken: list[tuple[float, float]], writes: int) -> dict[str, Any]:
    """One row of the table: nanoseconds of processor time for each write, and how undisturbed the threads ran."""
    per_write = sorted(busy / writes * 1e9 for busy, _ in taken)
    return {
        "layout": layout,
        "threads": threads,
        "ns_per_write": statistics.median(per_write),
        "ns_min": per_write[0],
        "ns_max": per_write[-1],
        "running_share": statistics.median(share for _, share in taken),
    }


def median_of(rows: Sequence[dict[str, Any]], layout: str, threads: int) -> float:
    """The median of one row."""
    return float(next(r["ns_per_write"] for r in rows if r["layout"] == layout and r["threads"] == threads))


def show(result: dict[str, Any]) -> None:
    """Print the table, the ratios and what limits them."""
    print(
        f"{'threads':>7}  {'segments':8}  {'ns per write':>12}  {'least':>6}  {'most':>6}  {'ratio':>6}  {'running':>7}"
    )
    for row in sorted(result["rows"], key=lambda row: (row["threads"], row["layout"] != "ring")):
        is_ring = row["layout"] == "ring"
        ratio = 1.0 if is_ring else result["packed_over_ring"][str(row["threads"])]
        print(
            f"{row['threads']:>7}  {row['layout']:8}  {row['ns_per_write']:>12.2f}  {row['ns_min']:>6.2f}  "
            f"{row['ns_max']:>6.2f}  {ratio:>6.2f}  {row['running_share']:>7.0%}"
        )
    print(
        f"processor time, median of {result['rounds']} rounds, {result['writes_per_thread']:,} writes per thread; "
        f"load {result['load_before']:.2f} before and {result['load_after']:.2f} after"
    )
    if min(row["running_share"] for row in result["rows"]) < QUIET_SHARE:
        print("the machine was not quiet: threads that take turns share no line, so the ratio is too low")
    if result["is_one_core"]:
        print("the processors are threads of one core: they share its cache, so a shared line costs little")


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars: nanoseconds per write by layout and thread count, with least and most."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, 3.2), layout="constrained")
    for index, layout in enumerate(LAYOUTS):
        rows = [row for row in result["rows"] if row["layout"] == layout]
        places = [row["threads"] + (index - 0.5) * 0.36 for row in rows]
        heights = [row["ns_per_write"] for row in rows]
        spread = [
            [row["ns_per_write"] - row["ns_min"] for row in rows],
            [row["ns_max"] - row["ns_per_write"] for row in rows],
        ]
        label = {"ring": "a line for each segment (the ring)", "packed": "segments share a line"}[layout]
        axes.bar(places, heights, 0.34, yerr=spread, capsize=3, label=label)
    axes.set_xticks(THREADS, [f"{n} thread{'s' if n > 1 else ''}" for n in THREADS])
    axes.set_ylabel("nanoseconds per write")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 where two threads cannot run side by side."""
    parser = argparse.ArgumentParser(
        description="Two threads write to ring segments, and to segments on one line."
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="measurements of each case (default: %(default)s)"
    )
    parser.add_argument(
        "--calls", type=int, default=20, help="millions of writes per thread (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them here (.png, .svg)")
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.calls < 1:
        parser.error("--rounds and --calls are at least 1")
    if len(processors()) < 2:
        print("one processor only: two threads never write at the same time here", file=sys.stderr)
        return 2
    result = measure(args.rounds, args.calls)
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.plot:
        plot(result, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
