"""Pictures: what a run looked like, drawn from its own metrics and profile.

Owns the colours; promises numbers that come from metrics.jsonl and the profile alone, in colours that can be told
apart without seeing red or green. `train.watching.report` writes report.png, the HTML page and W&B get the parts.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np

from coop.profile import Profile
from coop.profile_report import draw_heatmaps, layer_balance

# of Okabe and Ito: told apart under every common colour blindness
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
Records = list[dict[str, Any]]


def run_pictures(records: Records, profile: Profile | None) -> dict[str, bytes]:
    """PNG files by name: report, losses and, where there is something to show, heatmap, balance, experts, timings."""
    pictures = {"losses": render((10, 3.6), lambda figure: draw_losses(records, figure.subplots()))}
    if _series(records, "experts/busiest_over_mean"):
        pictures["experts"] = render((10, 3.2), lambda figure: draw_experts(records, figure.subplots(1, 2)))
    if profile is not None:
        tall = min(9.0, 2.2 + 0.11 * profile.num_layers)
        pictures["heatmap"] = render((10, tall), lambda figure: draw_heatmaps(profile, figure.subplots(1, 2)))
        pictures["balance"] = render((10, 3.2), lambda figure: draw_balance(profile, figure.subplots(1, 2)))
        if not np.isnan(profile.compute_ms).all():
            pictures["timings"] = render(
                (10, 3.6), lambda figure: draw_timings(profile, figure.subplots(1, 2))
            )
    height = 4.0 if profile is None else 8.4 + min(5.0, 0.08 * profile.num_layers)
    pictures["report"] = render((10, height), lambda figure: _draw_all(records, profile, figure))
    return pictures


def render(size: tuple[float, float], draw: Callable[[Any], None]) -> bytes:
    """A PNG of `size` in inches, drawn by `draw` on an empty figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, format="png")
    return buffer.getvalue()


def _draw_all(records: Records, profile: Profile | None, figure: Any) -> None:
    if profile is None:
        draw_losses(records, figure.subplots())
        return
    top, middle, bottom = figure.subfigures(3, 1, height_ratios=(1, 1.3, 0.9))
    draw_losses(records, top.subplots())
    draw_heatmaps(profile, middle.subplots(1, 2))
    draw_balance(profile, bottom.subplots(1, 2))


def draw_losses(records: Records, ax: Any) -> None:
    """Training loss as a line, held-out loss as points."""
    lines = (("loss", "training", "-", BLUE), ("eval_loss", "held out", "o--", ORANGE))
    for name, label, style, colour in lines:
        points = _series(records, name)
        if points:
            ax.plot(*zip(*points, strict=True), style, label=label, color=colour, markersize=6, linewidth=1.5)
    _finish(ax, "cross-entropy on the assistant's tokens", "step", "nats per token")


def draw_experts(records: Records, axes: Any) -> None:
    """Balance and predicted hit rates as the run went, on two axes."""
    balance, rates = axes
    points = _series(records, "experts/busiest_over_mean")
    balance.plot(*zip(*points, strict=True), "o-", color=BLUE, markersize=4)
    balance.set_ylim(1, 1.05 * balance.get_ylim()[1])
    _finish(balance, "busiest expert over the mean, worst layer", "step", "x mean load")
    for share, colour, marker in ((50, BLUE, "o-"), (25, ORANGE, "s--")):
        points = [(step, 100 * rate) for step, rate in _series(records, f"experts/hit_rate_{share}")]
        if points:
            label = f"{share}% of the experts in memory"
            rates.plot(*zip(*points, strict=True), marker, color=colour, markersize=4, label=label)
    rates.set_ylim(0, 100)
    rates.set_xlim(balance.get_xlim())
    _finish(rates, "predicted hit rate of decoding", "step", "% of requests")


def draw_balance(profile: Profile, axes: Any) -> None:
    """For each layer, on two axes: the busiest expert over the mean, and how many experts the use amounts to."""
    layers = np.arange(profile.num_layers)
    kinds = [
        ("answer tokens", profile.hot_answer, BLUE, "o-"),
        ("prompt tokens", profile.hot_prompt, ORANGE, "s--"),
    ]
    names = ("max_over_mean", "effective_experts")
    for ax, name in zip(axes, names, strict=True):
        for label, counts, colour, style in kinds:
            if counts.any():
                values = [balance[name] for balance in layer_balance(counts)]
                ax.plot(layers, values, style, color=colour, label=label, markersize=4, linewidth=1.2)
    axes[0].axhline(1, color=GREY, linewidth=0.8)
    axes[0].set_ylim(0, 1.1 * axes[0].get_ylim()[1])
    axes[1].axhline(profile.identity.num_experts, color=GREY, linewidth=0.8)
    axes[1].set_ylim(0, 1.08 * profile.identity.num_experts)
    _finish(axes[0], "busiest expert over the mean (line: even)", "MoE layer", "x mean load")
    _finish(axes[1], "effective experts (line: all alike)", "MoE layer", "experts")


def draw_timings(profile: Profile, axes: Any) -> None:
    """Time of one expert: spread over experts by row count, and a map at the smallest row count that was timed."""
    spread, chart = axes
    timed = [i for i in range(profile.row_counts.size) if not np.isnan(profile.compute_ms[..., i]).all()]
    columns = [profile.compute_ms[..., i] for i in timed]
    spread.boxplot(
        [column[~np.isnan(column)] for column in columns],
        tick_labels=[str(profile.row_counts[i]) for i in timed],
        whis=(5, 95),
        showfliers=False,
        medianprops={"color": ORANGE, "linewidth": 1.6},
        boxprops={"color": BLUE},
        whiskerprops={"color": BLUE},
        capprops={"color": BLUE},
    )
    spread.set_ylim(bottom=0)
    _finish(spread, "time of one expert (box: half, whiskers: 90%)", "token rows", "milliseconds")
    top = float(np.nanpercentile(columns[0], 95))  # one slow first call must not darken all the others
    image = chart.imshow(columns[0], aspect="auto", cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
    rows = int(profile.row_counts[timed[0]])
    _label_map(chart, f"time at {rows} row{'s' * (rows > 1)} (white: not timed)")
    chart.figure.colorbar(image, ax=chart, extend="max").set_label("milliseconds")


def _label_map(ax: Any, title: str) -> None:
    ax.set_title(title, fontsize=11)
    ax.set_xlabel("expert")
    ax.set_ylabel("MoE layer")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.yaxis.get_major_locator().set_params(integer=True)


def _series(records: Records, name: str) -> list[tuple[int, float]]:
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def _finish(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, fontsize=11)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if x != "token rows":
        ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.3)
    if any(not line.get_label().startswith("_") for line in ax.lines):
        ax.legend(fontsize=9)
