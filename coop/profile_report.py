"""Profile report: a profile as a table, as JSON and as a picture.

Owns nothing; promises that every number shown is computed from the profile's own counts. `coop.profile_commands`
prints it, and training draws its heat maps into the report of a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coop.errors import RequestError
from coop.profile import Profile

PICTURE_ENDINGS = (".png", ".jpg", ".pdf", ".svg")


def check_picture(path: Path) -> None:
    """Raise RequestError unless `path` can be the name of a picture."""
    if path.is_dir():
        raise RequestError(
            f"{path}: is a folder; name a file for the picture, such as {path / 'profile.png'}"
        )
    if path.suffix.lower() not in PICTURE_ENDINGS:
        raise RequestError(f"{path}: a picture must end in {', '.join(PICTURE_ENDINGS)}")


def layer_balance(counts: NDArray[np.int64]) -> list[dict[str, Any]]:
    """For each layer of `counts` [layers, experts]: how unevenly its experts are used.

    max_over_mean: load of the busiest expert over the mean load (1 is even). effective_experts: exponential of
    the entropy of the shares (the number of experts if even). unused: experts never chosen. NaN without counts.
    """
    return [_balance(row) for row in counts]


def _balance(row: NDArray[np.int64]) -> dict[str, Any]:
    total = int(row.sum())
    shares = row[row > 0] / total if total else np.array([np.nan])
    return {
        "max_over_mean": float(row.max() / row.mean()) if total else float("nan"),
        "effective_experts": float(np.exp(-(shares * np.log(shares)).sum())),
        "unused": int((row == 0).sum()),
        "hottest": [int(i) for i in np.argsort(-row, kind="stable")[:4]],
    }


def half_coverage(counts: NDArray[np.int64]) -> float:
    """Share of all uses that the hottest half of each layer's experts takes; NaN without counts."""
    ordered = -np.sort(-counts, axis=1)
    total = int(counts.sum())
    return float(ordered[:, : (counts.shape[1] + 1) // 2].sum() / total) if total else float("nan")


def summarise(profile: Profile) -> dict[str, Any]:
    """The facts of a profile as JSON values; a number that does not exist is null."""
    measured = ~np.isnan(profile.compute_ms)
    return {
        "architecture": profile.identity.architecture,
        "layers": profile.num_layers,
        "experts": profile.identity.num_experts,
        "top_k": profile.identity.top_k,
        "step": profile.step,
        "refreshed": profile.is_refreshed,
        "tokens_prompt": profile.tokens_prompt,
        "tokens_answer": profile.tokens_answer,
        "train_tokens_prompt": profile.train_tokens_prompt,
        "train_tokens_answer": profile.train_tokens_answer,
        "answer": {
            "hottest_half_share": _known(half_coverage(profile.hot_answer)),
            "by_layer": [_all_known(facts) for facts in layer_balance(profile.hot_answer)],
        },
        "rows_per_expert": profile.rows.tolist(),
        "sample_tokens": len(profile.sample),
        "fingerprint": profile.fingerprint,
        "warmup_seconds": profile.warmup_seconds,
        "timings": [
            {
                "rows": int(rows),
                "median_ms": _median(profile.compute_ms[..., i]),
                "experts": int(measured[..., i].sum()),
            }
            for i, rows in enumerate(profile.row_counts)
        ],
    }


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def _all_known(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: _known(value) if isinstance(value, float) else value for name, value in facts.items()}


def _median(values: NDArray[np.float32]) -> float | None:
    return float(np.nanmedian(values)) if not np.isnan(values).all() else None


def render(profile: Profile) -> str:
    """The summary as text: one line of facts each, then a table with a line for each layer."""
    facts = summarise(profile)
    origin = "a pass with the final weights" if profile.is_refreshed else "training"
    lines = [
        f"{facts['architecture']}: {facts['layers']} layers x {facts['experts']} experts, top-{facts['top_k']}",
        f"step {profile.step}; hot maps from {origin}: {profile.tokens_prompt:,} prompt and "
        f"{profile.tokens_answer:,} answer tokens",
        f"training: {profile.train_tokens_prompt:,} prompt and {profile.train_tokens_answer:,} answer tokens; "
        f"routing sample of {len(profile.sample):,} tokens",
        _render_timings(facts, profile),
        "",
        f"{'layer':>5} {'answer: busiest/mean':>21} {'effective experts':>18} {'unused':>7} {'rows p50/p95/max':>17}"
        "  hottest",
    ]
    for layer, balance in enumerate(layer_balance(profile.hot_answer)):
        rows = "/".join(str(n) for n in profile.rows[layer])
        hottest = " ".join(str(i) for i in balance["hottest"])
        lines.append(
            f"{layer:>5} {balance['max_over_mean']:>21.2f} {balance['effective_experts']:>18.2f} "
            f"{balance['unused']:>7} {rows:>17}  {hottest}"
        )
    share = half_coverage(profile.hot_answer)
    lines.append(f"the hottest half of the experts takes {100 * share:.1f}% of the answer tokens' uses")
    return "\n".join(lines)


def _render_timings(facts: dict[str, Any], profile: Profile) -> str:
    timings = [t for t in facts["timings"] if t["median_ms"] is not None]
    if not timings:
        return "timings: none measured"
    shown = ", ".join(f"{t['median_ms']:.3f} ms at {t['rows']} row{'s' * (t['rows'] > 1)}" for t in timings)
    return f"timings: median expert {shown} ({profile.fingerprint})"


def plot(profile: Profile, path: Path) -> None:
    """Write a picture, by the ending of `path`, with the heat maps of answer and prompt tokens side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = 2.5 + 0.12 * min(96, profile.identity.num_experts)
    figure = Figure(
        figsize=(2 * max(4.5, width), max(3.5, 1.5 + 0.14 * profile.num_layers)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    draw_heatmaps(profile, figure.subplots(1, 2))
    figure.suptitle(
        f"{profile.identity.architecture}, step {profile.step}: share of each layer's expert uses"
    )
    figure.savefig(path, dpi=130)


def draw_heatmaps(profile: Profile, axes: Any) -> None:
    """Draw answer and prompt hotness, as shares of each layer, on two matplotlib axes with one colour scale."""
    maps = [
        ("answer", profile.hot_answer, profile.tokens_answer),
        ("prompt", profile.hot_prompt, profile.tokens_prompt),
    ]
    shares = [counts / np.maximum(1, counts.sum(axis=1, keepdims=True)) for _, counts, _ in maps]
    # a few experts of extreme use must not darken all the others
    top = max(float(np.percentile(share, 99.5)) for share in shares)
    top = top or max(float(share.max()) for share in shares) or 1.0
    for ax, (name, _, tokens), share in zip(axes, maps, shares, strict=True):
        image = ax.imshow(share, aspect="auto", cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
        ax.set_title(f"{name} tokens ({tokens:,} seen)")
        ax.set_xlabel("expert")
        ax.set_ylabel("MoE layer")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.yaxis.get_major_locator().set_params(integer=True)
    has_more = any(share.max() > top for share in shares)
    bar = axes[-1].figure.colorbar(
        image,
        ax=list(axes),
        format=lambda value, _: f"{100 * value:.3g}%",
        extend="max" if has_more else "neither",
    )
    bar.set_label(f"share of uses (even: {100 / profile.identity.num_experts:.1f}%)")
