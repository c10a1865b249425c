"""Profile compare: what differs between two profiles of one model, layer by layer, and what it costs.

Owns nothing; promises numbers computed from the two files alone, with what chance explains beside them.
`python -m coop.profile diff` prints it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coop.divergence import chance, clumping, jensen_shannon
from coop.errors import ProfileError
from coop.profile import Profile
from coop.rehearsal import SHARES, first_tokens_hit_rate

MOVERS = 3


def counts_of_one_kind(mine: Profile, other: Profile) -> tuple[str, NDArray[np.int64], NDArray[np.int64]]:
    """What can be compared: answer tokens where both have them, else prompt tokens. Raises ProfileError if neither."""
    for kind in ("answer", "prompt"):
        pair = getattr(mine, f"hot_{kind}"), getattr(other, f"hot_{kind}")
        if all(counts.any() for counts in pair):
            return kind, *pair
    raise ProfileError(
        "nothing to compare: one has seen prompt tokens only, or none, the other answer tokens only"
    )


def measured_clumping(mine: Profile, other: Profile) -> float:
    """Of the longer of the two routing samples; NaN where both are too short."""
    longer = max((other, mine), key=lambda profile: len(profile.sample))
    return clumping(longer.sample, longer.identity.num_experts)


def compare(mine: Profile, other: Profile, top: int = 0) -> dict[str, Any]:
    """The facts of a comparison as JSON values.

    Args:
        mine, other: profiles of the same layers, experts and top-k.
        top: the hottest experts whose overlap is counted; 0: a quarter of them.
    """
    kind, a, b = counts_of_one_kind(mine, other)
    clumps = measured_clumping(mine, other)
    divergence = jensen_shannon(a, b)
    expected, limit = chance(a, b, 1.0 if np.isnan(clumps) else clumps)
    top = min(top or -(-a.shape[1] // 4), a.shape[1])
    layers = [
        {
            "layer": layer,
            "top_overlap": overlap(a[layer], b[layer], top),
            "divergence_bits": float(divergence[layer]),
            "by_chance_bits": float(expected[layer]),
            "movers": movers(a[layer], b[layer]),
        }
        for layer in range(len(a))
    ]
    return {
        "tokens": kind,
        "top": top,
        "divergence_bits": float(divergence.mean()),
        "by_chance_bits": float(expected.mean()),
        "by_chance_bits_p95": float(limit.mean()),
        "clumping": None if np.isnan(clumps) else clumps,
        "hit_rates": [hit_rates("first", mine, mine, other), hit_rates("second", other, other, mine)],
        "layers": layers,
    }


def overlap(mine: NDArray[np.int64], other: NDArray[np.int64], top: int) -> float:
    """Share of the `top` hottest experts of one that are among those of the other."""
    hottest = [set(np.argsort(-counts, kind="stable")[:top].tolist()) for counts in (mine, other)]
    return len(hottest[0] & hottest[1]) / top


def movers(mine: NDArray[np.int64], other: NDArray[np.int64]) -> list[dict[str, Any]]:
    """The experts whose share of the layer's uses changed most, with both shares."""
    before, after = mine / mine.sum(), other / other.sum()
    chosen = np.argsort(-np.abs(after - before), kind="stable")[:MOVERS]
    return [
        {"expert": int(expert), "share_before": float(before[expert]), "share_after": float(after[expert])}
        for expert in chosen
    ]


def hit_rates(name: str, traffic: Profile, own: Profile, other: Profile) -> dict[str, Any]:
    """Hit rates on the routing sample of `traffic`: memory seeded from `own`, from `other`, and cold."""
    num_experts = traffic.identity.num_experts
    rates: dict[str, Any] = {"sample": name, "tokens": len(traffic.sample)}
    for share in SHARES if len(traffic.sample) else ():
        seeds = (("own", own), ("other", other), ("cold", None))
        rates[f"at_{round(100 * share)}"] = {
            label: first_tokens_hit_rate(traffic.sample, num_experts, share, seed) for label, seed in seeds
        }
    return rates


def render_comparison(facts: dict[str, Any]) -> str:
    """The facts as text: a table with a line for each layer, then what it comes to."""
    head = f"top-{facts['top']} overlap"
    lines = [
        f"{'layer':>5} {head:>15} {'divergence':>11} {'by chance':>10}  moved most (share before > after)"
    ]
    for layer in facts["layers"]:
        moved = ", ".join(
            f"{m['expert']}: {100 * m['share_before']:.1f} > {100 * m['share_after']:.1f}%"
            for m in layer["movers"]
        )
        lines.append(
            f"{layer['layer']:>5} {100 * layer['top_overlap']:>14.0f}% {layer['divergence_bits']:>11.4f} "
            f"{layer['by_chance_bits']:>10.4f}  {moved}"
        )
    lines.append(
        f"{facts['tokens']} tokens: mean divergence {facts['divergence_bits']:.4f} bits, "
        f"{facts['by_chance_bits']:.4f} by chance alone{_clumps(facts['clumping'])}"
    )
    lines += [line for rates in facts["hit_rates"] if "at_25" in rates for line in _render_rates(rates)]
    return "\n".join(lines)


def _clumps(value: float | None) -> str:
    if value is None:
        return " (the routing samples are too short to see how alike neighbouring tokens are: taken as independent)"
    return f" ({value:.1f} tokens tell as much as one independent token)"


def _render_rates(rates: dict[str, Any]) -> list[str]:
    return [
        f"hit rate on the {rates['sample']} one's routing sample with {percent}% of the experts in memory: "
        f"seeded from itself {100 * values['own']:.1f}%, from the other {100 * values['other']:.1f}%, "
        f"cold {100 * values['cold']:.1f}%"
        for percent, values in ((share, rates[f"at_{share}"]) for share in ("25", "50"))
    ]


def plot_comparison(mine: Profile, other: Profile, facts: dict[str, Any], path: Path) -> None:
    """Write a picture: divergence of each layer beside chance, and where shares rose and fell."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    _, a, b = counts_of_one_kind(mine, other)
    figure = Figure(figsize=(11, max(3.8, 1.5 + 0.14 * len(a))), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.6))
    layers = np.arange(len(a))
    left.barh(
        layers, [layer["divergence_bits"] for layer in facts["layers"]], color="#0072B2", label="divergence"
    )
    chance_bits = [layer["by_chance_bits"] for layer in facts["layers"]]
    left.plot(chance_bits, layers, "o", color="#D55E00", markersize=4, label="by chance alone")
    left.invert_yaxis()
    left.xaxis.get_major_locator().set_params(nbins=6)
    left.set_title("Jensen-Shannon divergence")
    left.set_xlabel("bits (0: the same, 1: no expert in common)")
    left.legend(fontsize=9)
    change = b / b.sum(axis=1, keepdims=True) - a / a.sum(axis=1, keepdims=True)
    top = max(1e-9, float(np.abs(change).max()))
    image = right.imshow(change, aspect="auto", cmap="PuOr_r", vmin=-top, vmax=top, interpolation="nearest")
    right.set_title(f"change of share, {facts['tokens']} tokens")
    right.set_xlabel("expert")
    for ax in (left, right):
        ax.set_ylabel("MoE layer")
        ax.yaxis.get_major_locator().set_params(integer=True)
    right.xaxis.get_major_locator().set_params(integer=True)
    bar = figure.colorbar(image, ax=right, format=lambda value, _: f"{100 * value:+.1f}")
    bar.set_label("points: rose above 0, fell below")
    figure.savefig(path, dpi=130)
