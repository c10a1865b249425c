"""Page: report.html, a finished run on one page that needs nothing beside it.

Owns the layout; promises that no resource is loaded from anywhere, that no script runs and that every text is
escaped. `train.watching.report` writes it at the end of a run.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from coop.profile import Profile
from coop.profile_report import layer_balance
from train.schema import Recipe

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 64em; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; } th, td { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; } img { max-width: 100%; height: auto; }
pre { background: #f4f4f4; padding: .8em; overflow-x: auto; font-size: 13px; } figcaption { color: #444; }
figure { margin: 1em 0; }
"""
_CAPTIONS = {
    "losses": "Loss of training steps and on held-out rows.",
    "experts": "As the run went, over the tokens since the record before: the load of the busiest expert, and the hit "
    "rate of a memory of that size if decoding went on as the latest tokens were routed.",
    "heatmap": "How often each expert is used, as a share of its layer's uses.",
    "balance": "How even the use of each layer is.",
    "timings": "What one expert costs on this hardware, measured by the warm-up.",
}


def render_page(
    recipe: Recipe,
    summary: Mapping[str, Any],
    profile: Profile | None,
    pictures: Mapping[str, bytes],
    opening: str,
    closing: str,
) -> str:
    """The page as HTML.

    Args:
        summary: what summary.json holds.
        pictures: PNG files by name; those that `_CAPTIONS` names are shown.
        opening, closing: what the run showed before its first step and after its last.
    """
    parts = [
        f"<h1>{escape(str(summary['name']))}</h1>",
        f"<pre>{escape(closing)}</pre>",
        "<h2>Loss</h2>",
        _figure("losses", pictures),
    ]
    if profile is not None:
        parts.append("<h2>Experts</h2>")
        parts += [_figure(name, pictures) for name in ("heatmap", "balance", "experts") if name in pictures]
        parts += ["<h2>Layers</h2>", _layer_table(profile), "<h2>Cost</h2>", _cost_table(summary)]
        parts += [_figure("timings", pictures)] if "timings" in pictures else []
    parts += ["<h2>What was trained, and on what</h2>", f"<pre>{escape(opening)}</pre>"]
    parts += ["<h2>Recipe</h2>", f"<pre>{escape(recipe.to_yaml())}</pre>"]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(str(summary['name']))}: a coop run</title><style>{_STYLE}</style></head><body>",
            *parts,
            "</body></html>",
            "",
        ]
    )


def _figure(name: str, pictures: Mapping[str, bytes]) -> str:
    data = base64.b64encode(pictures[name]).decode("ascii")
    caption = escape(_CAPTIONS[name])
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<table><tr>", *(f"<th>{escape(cell)}</th>" for cell in head), "</tr>"]
    for row in rows:
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return "".join([*lines, "</table>"])


def _layer_table(profile: Profile) -> str:
    head = ("layer", "busiest / mean", "effective experts", "dead", "rows p50 / p95 / max", "hottest")
    is_answer = profile.tokens_answer > 0
    counts = profile.hot_answer if is_answer else profile.hot_prompt
    rows = [
        (
            str(layer),
            f"{balance['max_over_mean']:.2f}",
            f"{balance['effective_experts']:.2f} of {profile.identity.num_experts}",
            str(balance["unused"]),
            " / ".join(str(n) for n in profile.rows[layer]),
            " ".join(str(expert) for expert in balance["hottest"]),
        )
        for layer, balance in enumerate(layer_balance(counts))
    ]
    kind = "answer" if is_answer else "prompt"
    origin = "held-out rows through the final weights" if profile.is_refreshed else "training"
    return f"<p>Of {kind} tokens, from {escape(origin)}.</p>" + _table(head, rows)


def _cost_table(summary: Mapping[str, Any]) -> str:
    cost = summary["profile_cost"]
    total = max(cost["train_seconds"], 1e-9)
    rows = [
        (name, f"{seconds:.2f} s", f"{100 * seconds / total:.2f}%")
        for name, seconds in (
            (f"{cost['warmups']} warm-ups", cost["warmup_seconds"]),
            ("counting and logging", cost["counting_seconds"]),
            ("all training steps", cost["train_seconds"]),
        )
    ]
    return _table(("what", "time", "of training"), rows)
