"""What a comparison found: rows for JSON, a table for a terminal, a picture.

Owns the rows' keys; promises that a number that does not exist is null, and that an arm that was killed, failed
or is absent is shown with its reason. Called by `infer.bench`.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.contest import Outcome
from infer.lineup import Absent

MEDIANS = (
    "tokens_per_s",
    "token_ms_p50",
    "token_ms_p99",
    "ttft_ms",
    "hit_rate",
    "bytes_read",
    "wait_seconds",
)
KEYS = (
    "engine", "dtype", "budget_fraction", "memory_limit_bytes", "prompt_tokens", "new_tokens", *MEDIANS,
    "spread", "runs", "peak_bytes", "rss_bytes", "group_peak_bytes", "page_cache_grew_bytes", "load_seconds",
    "hits_decode", "misses_decode", "is_cut", "seed", "strategy", "replay", "path", "error", "skipped",
)  # fmt: skip
NOT_RUN = "not run"
NOTE = "note"
DROPPED = ("read GB", "min-max", "p50 ms", "ttft ms", "p99 ms", "hits")  # in this order, where it is narrow
COLOURS = ("#0b6e4f", "#c1292e", "#1f5fa8", "#d98324", "#6a4c93", "#555555")
HOLLOW: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 2, "linewidth": 0}
MARKS = ("o", "s", "D", "^", "v", "P")


def rows_of(outcomes: Sequence[Outcome], absent: Sequence[Absent], main: str) -> list[dict[str, Any]]:
    """One row for each arm and prompt length; `main` (tokens_per_s or ttft_ms) is what `spread` is of.

    Every key of KEYS is in every row, null where there is no number. Medians are over the runs.
    """
    rows = []
    for outcome in outcomes:
        arm = outcome.arm
        for place, length in enumerate(arm.prompt_tokens):
            is_coop = arm.engine == "coop"
            row = dict.fromkeys(KEYS) | {
                "engine": arm.engine,
                "dtype": arm.dtype,
                "budget_fraction": arm.budget_fraction if is_coop else None,
                "memory_limit_bytes": arm.memory_bytes or None,
                "prompt_tokens": length,
                "seed": arm.seed,
                "strategy": arm.strategy if is_coop else None,
                "replay": Path(arm.replay).name if arm.replay else None,
                "path": Path(arm.path).name,
                "runs": len(outcome.found),
                "error": outcome.error or None,
                "skipped": None if outcome.found or outcome.error else NOT_RUN,
            }
            rows.append(row | _numbers(outcome.found, place, main))
    for gone in absent:
        rows.append(
            dict.fromkeys(KEYS)
            | {"engine": gone.engine, "dtype": gone.dtype or None, "runs": 0, "skipped": gone.reason}
        )
    return rows


def _numbers(found: Sequence[dict[str, Any]], place: int, main: str) -> dict[str, Any]:
    if not found:
        return {}
    samples = [one["samples"][place] for one in found]
    numbers: dict[str, Any] = {
        name: _median(samples, name) for name in (*MEDIANS, "hits_decode", "misses_decode")
    }
    values = [sample[main] for sample in samples if sample.get(main) is not None]
    return numbers | {
        "spread": [min(values), max(values)] if values else None,
        "new_tokens": min(sample["new_tokens"] for sample in samples),
        "prompt_tokens": samples[0]["prompt_tokens"],
        "is_cut": any(sample["is_cut"] for sample in samples),
        "peak_bytes": max(one["peak_bytes"] for one in found),
        "rss_bytes": _median(found, "rss_bytes"),
        "group_peak_bytes": _largest(found, "group_peak_bytes"),
        "page_cache_grew_bytes": _median(found, "page_cache_grew_bytes"),
        "load_seconds": _median(found, "load_seconds"),
    }


def _median(samples: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [sample[name] for sample in samples if sample.get(name) is not None]
    return statistics.median(values) if values else None


def _largest(samples: Sequence[dict[str, Any]], name: str) -> int | None:
    return max((sample[name] for sample in samples if sample.get(name) is not None), default=None)


def show(console: Any, rows: Sequence[dict[str, Any]], main: str) -> None:
    """Print the rows as a table that fits the console; what does not fit goes: notes below, then columns."""
    lines, notes = _columns(rows, main), [""]
    if _width(console, lines) > console.width:
        notes += dict.fromkeys(note for note in lines[NOTE] if note)
        lines[NOTE] = [f"({notes.index(note)})" if note else "" for note in lines[NOTE]]
        for name in DROPPED:
            if name in lines and _width(console, lines) > console.width and not _is_main(name, main):
                del lines[name]
    table = _table(lines)
    table.width = _width(console, lines)  # cells stay whole on any terminal, which may break lines itself
    console.print(table, crop=False)
    for number, note in enumerate(notes[1:], 1):
        console.print(f"({number}) {note}", soft_wrap=True, highlight=False)


def _is_main(name: str, main: str) -> bool:
    return main == "ttft_ms" and name == "ttft ms"


def _width(console: Any, lines: dict[str, list[str]]) -> int:
    from rich.measure import Measurement

    unbounded = console.options.update(width=10**4)
    return int(Measurement.get(console, unbounded, _table(lines)).maximum)


def _table(lines: dict[str, list[str]]) -> Any:
    """A rich table of columns of cells by heading."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in lines:
        table.add_column(name, justify="left" if name in ("engine", "weights", NOTE) else "right")
    for cells in zip(*lines.values(), strict=True):
        table.add_row(*cells)
    return table


def _columns(rows: Sequence[dict[str, Any]], main: str) -> dict[str, list[str]]:
    """Cells by heading, one for each row."""
    cells = [_cells(row, main) for row in rows]
    return {name: [row[name] for row in cells] for name in cells[0]} if cells else {NOTE: []}


def _cells(row: dict[str, Any], main: str) -> dict[str, str]:
    """A row's cells by heading."""
    spread = row["spread"]
    between = f"{spread[0]:.4g}-{spread[1]:.4g}" if spread and row["runs"] > 1 else ""
    ttft = _show(row["ttft_ms"], ".0f" if main == "ttft_ms" else ".1f")
    if main == "ttft_ms":
        middle = {"prompt": _show(row["prompt_tokens"], ".0f"), "ttft ms": ttft, "min-max": between}
    else:
        middle = {
            "tokens/s": _show(row["tokens_per_s"], ".2f"),
            "min-max": between,
            "p50 ms": _show(row["token_ms_p50"], ".1f"),
            "p99 ms": _show(row["token_ms_p99"], ".1f"),
            "ttft ms": ttft,
        }
    budget, limit = row["budget_fraction"], row["memory_limit_bytes"]
    return {
        "engine": row["engine"],
        "weights": row["dtype"] or "",
        "experts": f"{budget:.0%}" if budget is not None else "",
        "limit GB": f"{limit / 1e9:.2f}" if limit else "" if row["seed"] is None else "none",
        **middle,
        "hits": f"{row['hit_rate']:.1%}" if row["hit_rate"] is not None else "",
        "read GB": _show(row["bytes_read"], ".2f", 1e9),
        "peak GB": _show(row["peak_bytes"], ".2f", 1e9),
        NOTE: _note(row),
    }


def _note(row: dict[str, Any]) -> str:
    cut = f"time limit: {row['new_tokens']} tokens" if row["is_cut"] else ""
    if row["skipped"] is None:
        return row["error"] or cut
    return NOT_RUN if row["skipped"] == NOT_RUN else f"skipped: {row['skipped']}"


def _show(value: float | None, form: str, unit: float = 1) -> str:
    return "" if value is None else format(value / unit, form)


def plot(rows: Sequence[dict[str, Any]], path: Path, main: str, title: str) -> None:
    """Write a picture: `main` against memory for decode, against prompt length for prefill.

    A line for each engine and dtype joins its limits; where there is no limit, a hollow point stands alone at the
    process's peak. A cross at the foot marks a limit at which an arm was killed or failed. Absent arms are named.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(8.6, 4.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_yscale("log")
    if main == "ttft_ms":
        _draw_prefill(axes, rows)
    else:
        _draw_decode(axes, rows)
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.grid(True, which="minor", axis="y", color="#f0f0f0", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(_plain)
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    figure.supxlabel(_absences(rows), fontsize=8, color="#666666", x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _absences(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each arm that is not in the picture."""
    lines = [f"{_name(row)}: {row['skipped']}" for row in rows if row["skipped"]]
    return "\n".join(textwrap.shorten(line, 130) for line in dict.fromkeys(lines))


def _name(row: dict[str, Any]) -> str:
    return f"{row['engine']} {row['dtype'] or ''}".strip()


def _plain(value: float, _: object) -> str:
    return f"{value:g}"


def _series(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by line, coop first."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["skipped"] is None:
            lines.setdefault(_name(row), []).append(row)
    return dict(sorted(lines.items(), key=lambda item: not item[0].startswith("coop")))


def _style(number: int, name: str) -> dict[str, Any]:
    is_ours = name.startswith("coop")
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKS[number % len(MARKS)],
        "linewidth": 3.2 if is_ours else 1.5,
        "markersize": 8 if is_ours else 6,
        "zorder": 4 if is_ours else 3,
    }


def _draw_decode(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    rates = [row["tokens_per_s"] for row in rows if row["tokens_per_s"]]
    foot = min(rates, default=1.0)
    for number, (name, members) in enumerate(_series(rows).items()):
        style = _style(number, name)
        measured = sorted((row for row in members if row["tokens_per_s"]), key=_memory_gb)
        held = [row for row in measured if row["memory_limit_bytes"]]
        free = [row for row in measured if not row["memory_limit_bytes"]]
        axes.plot([_memory_gb(row) for row in held], _rates(held), label=name, **style)
        axes.plot([_memory_gb(row) for row in free], _rates(free), **(style | HOLLOW))
        _label_budgets(axes, measured, style["color"])
        for row in measured:
            axes.vlines(_memory_gb(row), *row["spread"], color=style["color"], linewidth=1.2, zorder=3)
        crosses = [row["memory_limit_bytes"] / 1e9 for row in members if _is_killed(row)]
        foot /= 1.3 if crosses else 1.0  # a line of its own for each engine: they meet at the same limits
        axes.scatter(crosses, [foot] * len(crosses), marker="x", s=50, color=style["color"], zorder=5)
    if any(_is_killed(row) for row in rows):
        axes.scatter([], [], marker="x", s=50, color="#888888", label="killed or failed at this limit")
    if any(row["tokens_per_s"] and not row["memory_limit_bytes"] for row in rows):
        axes.plot([], [], marker="o", color="#888888", label="no limit, at its peak memory", **HOLLOW)
    axes.set_xlabel("memory limit, GB")
    axes.set_ylabel("tokens per second, decode")
    axes.set_xlim(left=0)


def _label_budgets(axes: Any, measured: Sequence[dict[str, Any]], color: str) -> None:
    """The share of experts beside each point of coop."""
    for row in measured:
        if row["budget_fraction"] is not None:
            place = (_memory_gb(row), row["tokens_per_s"])
            text = f"{row['budget_fraction']:.0%}"
            axes.annotate(
                text, place, (-7, 6), textcoords="offset points", fontsize=8, color=color, ha="right"
            )


def _rates(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [row["tokens_per_s"] for row in rows]


def _is_killed(row: dict[str, Any]) -> bool:
    return bool(row["error"] and row["memory_limit_bytes"])


def _memory_gb(row: dict[str, Any]) -> float:
    return float(row["memory_limit_bytes"] or row["peak_bytes"]) / 1e9


def _draw_prefill(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    lines: dict[str, list[dict[str, Any]]] = {}
    for name, members in _series(rows).items():
        for row in members:
            budget = "" if row["budget_fraction"] is None else f" {row['budget_fraction']:.0%}"
            limit = row["memory_limit_bytes"]
            place = f" in {limit / 1e9:.1f} GB" if limit and row["budget_fraction"] is None else ""
            lines.setdefault(f"{name}{budget}{place}", []).append(row)
    for number, (name, members) in enumerate(lines.items()):
        points = sorted((row["prompt_tokens"], row["ttft_ms"]) for row in members if row["ttft_ms"])
        if points:
            axes.plot(*zip(*points, strict=True), label=name, **_style(number, name))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(_plain)
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("milliseconds to the first token")
