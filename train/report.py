"""Report: what a finished run came to, as a picture, a JSON file and lines for the terminal.

Owns nothing; promises that every number comes from the run's own metrics and profile. `train.finetune` calls it last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from coop.profile import Profile
from coop.profile_report import draw_heatmaps, half_coverage, layer_balance
from train.schema import Recipe


def draw_report(records: list[dict[str, Any]], profile: Profile | None, path: Path) -> None:
    """Write a PNG: the loss curve, and the heat maps of the profile below it if there is one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8.5 if profile else 4), layout="constrained")
    FigureCanvasAgg(figure)
    if profile is None:
        _draw_losses(records, figure.add_subplot())
    else:
        halves: Any = figure.subfigures(2, 1, height_ratios=(1, 1.2))
        top, bottom = halves
        _draw_losses(records, top.subplots())
        draw_heatmaps(profile, bottom.subplots(1, 2))
    figure.savefig(path, dpi=120)


def _draw_losses(records: list[dict[str, Any]], ax: Any) -> None:
    for name, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o--")):
        points = [(record["step"], record[name]) for record in records if name in record]
        if points:
            ax.plot(*zip(*points, strict=True), style, label=label, markersize=5, linewidth=1.4)
    ax.set_title("loss on the assistant's tokens")
    ax.set_xlabel("step")
    ax.set_ylabel("cross-entropy, nats per token")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.3)
    if ax.lines:
        ax.legend()


def eval_losses(records: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    """The first and the last eval loss of a run, or None where there is none."""
    losses = [record["eval_loss"] for record in records if "eval_loss" in record]
    return (losses[0], losses[-1]) if losses else (None, None)


def balance_scalars(profile: Profile) -> dict[str, float]:
    """Expert balance over all layers, from the answer tokens, for the terminal and for W&B."""
    layers = layer_balance(profile.hot_answer)
    worst = [layer["max_over_mean"] for layer in layers]
    return {
        "experts/busiest_over_mean": float(np.max(worst)),
        "experts/effective_mean": float(np.mean([layer["effective_experts"] for layer in layers])),
        "experts/unused": float(sum(layer["unused"] for layer in layers)),
        "experts/hottest_half_share": half_coverage(profile.hot_answer),
    }


def render_summary(summary: dict[str, Any], output: Path) -> str:
    """The closing lines of a run, from the values that are written to summary.json."""
    lines = [f"finished {summary['steps']} steps in {summary['phases']['training']:.1f} s"]
    if summary["eval_loss_before"] is not None:
        before, after = summary["eval_loss_before"], summary["eval_loss_after"]
        lines.append(f"eval loss {before:.4f} before, {after:.4f} after ({after - before:+.4f})")
    lines.append(
        f"training loss {summary['train_loss_first']:.4f} first, {summary['train_loss_last']:.4f} last"
    )
    lines.append(f"speed {summary['tokens_per_s']:,.1f} tokens/s over {summary['train_tokens']:,} tokens")
    lines.append(
        "time " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in summary["phases"].items())
    )
    if summary["profile"]:
        balance = summary["balance"]
        lines.append(
            f"experts: busiest {balance['experts/busiest_over_mean']:.2f} x mean, "
            f"{balance['experts/unused']:.0f} unused, hottest half takes "
            f"{100 * balance['experts/hottest_half_share']:.1f}% of the uses"
        )
        cost = summary["profile_seconds"]
        share = 100 * cost / summary["phases"]["training"]
        lines.append(f"profile {summary['profile']}; it cost {cost:.2f} s, {share:.1f}% of training")
    if summary["wandb"]:
        lines.append(f"W&B {summary['wandb']}")
    lines.append(f"report {output / 'report.png'}")
    lines.append(f'next: python -m infer.generate --ckpt {output} --budget 50% --prompt "..."')
    return "\n".join(lines)


def render_card(recipe: Recipe, summary: dict[str, Any]) -> str:
    """The model card of a result: front matter of the hub, then facts of this run."""
    is_adapter = recipe.tune.method == "lora"
    output = Path(recipe.output)
    facts = [
        f"- {'LoRA on' if is_adapter else 'full tuning of'} {', '.join(recipe.tune.groups)}, {summary['steps']} steps",
        f"- data: `{recipe.data.train_names}`, loss on {recipe.data.trained_part}",
    ]
    if summary["eval_loss_before"] is not None:
        facts.append(
            f"- loss on `{recipe.data.eval_names}`: {summary['eval_loss_before']:.4f} before, "
            f"{summary['eval_loss_after']:.4f} after"
        )
    if summary["profile"]:
        facts.append(
            "- `coop_profile.safetensors`: how often each expert is used, by prompt and by answer tokens"
        )
    return "\n".join(
        [
            "---",
            f"base_model: {recipe.model.path}",
            f"library_name: {'peft' if is_adapter else 'transformers'}",
            "pipeline_tag: text-generation",
            "tags: [coop, mixture-of-experts, sft]",
            "---",
            "",
            f"# {output.name}",
            "",
            f"`{recipe.model.path}`, fine-tuned with coop. `recipe.yaml` is the whole recipe.",
            "",
            *facts,
            "",
            "![loss and expert use](report.png)",
            "",
            "Run it with half of the experts in memory:",
            "",
            "```bash",
            f'python -m infer.generate --ckpt {output} --budget 50% --prompt "..."',
            "```",
            "",
        ]
    )
