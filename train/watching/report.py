"""Report: what a finished run came to, as a picture, a page, a model card and lines for the terminal.

Owns nothing; promises that every number comes from the run's own metrics and profile. `train.run` calls it last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coop.files import write_atomic
from coop.profile import Profile
from train.schema import Recipe
from train.watching.expert_scalars import balance_scalars, hit_rate_scalars
from train.watching.page import render_page
from train.watching.pictures import run_pictures


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished run: what its report is made of. `opening`: what it showed before its first step."""

    recipe: Recipe
    summary: dict[str, Any]
    records: list[dict[str, Any]]
    profile: Profile | None
    opening: str


def write_report(run: Finished, output: Path) -> dict[str, bytes]:
    """Write report.png and report.html; returns the pictures by name."""
    pictures = run_pictures(run.records, run.profile)
    write_atomic(output / "report.png", pictures["report"])
    closing = render_summary(run.summary, output)
    page = render_page(run.recipe, run.summary, run.profile, pictures, run.opening, closing)
    write_atomic(output / "report.html", page.encode("utf-8", "replace"))
    return pictures


def final_scalars(profile: Profile) -> dict[str, float]:
    """Balance of the final profile, of answer tokens if there are any, and hit rates on its own routing sample.

    A refreshed profile's sample is of held-out rows, and the memory is seeded from training rows: what the rates
    say of text that was not seen.
    """
    counts = profile.hot_answer if profile.tokens_answer else profile.hot_prompt
    seed = replace(
        profile,
        hot_prompt=profile.train_prompt,
        hot_answer=profile.train_answer,
        tokens_prompt=profile.train_tokens_prompt,
        tokens_answer=profile.train_tokens_answer,
    )
    values = (balance_scalars(counts) if counts.any() else {}) | hit_rate_scalars(profile, seed)
    return {name.replace("experts/", "final/"): value for name, value in values.items()}


def eval_losses(records: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    """The first and the last eval loss of a run, or None where there is none."""
    losses = [record["eval_loss"] for record in records if "eval_loss" in record]
    return (losses[0], losses[-1]) if losses else (None, None)


def render_summary(summary: dict[str, Any], output: Path) -> str:
    """The closing lines of a run, from the values that are written to summary.json."""
    steps, here = summary["steps"], summary["steps_here"]
    of_them = f", the last {here} of them" if here < steps else ""
    lines = [f"finished {steps} steps{of_them} in {summary['phases']['training']:.1f} s"]
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
        lines += _render_profile(summary)
    if "offload" in summary:
        lines.append(summary["offload"])
    lines += [f"{name} {summary[name]}" for name in ("merged", "pack") if name in summary]
    if summary["wandb"]:
        lines.append(f"W&B {summary['wandb']}")
    lines.append(f"report {output / 'report.html'} and {output / 'report.png'}")
    lines.append(f'next: python -m infer.generate --ckpt {output} --budget 50% --prompt "..."')
    return "\n".join(lines)


def _render_profile(summary: dict[str, Any]) -> list[str]:
    final, cost = summary["final"], summary["profile_cost"]
    lines = []
    if "final/dead" in final:
        lines.append(
            f"experts: busiest {final['final/busiest_over_mean']:.2f} x mean, {final['final/dead']:.0f} dead, "
            f"hottest half takes {100 * final['final/hottest_half_share']:.1f}% of the uses"
        )
    if "final/hit_rate_50" in final:
        lines.append(
            f"predicted hit rate {100 * final['final/hit_rate_25']:.1f}% with a quarter of the experts in memory, "
            f"{100 * final['final/hit_rate_50']:.1f}% with half"
        )
    total = max(cost["train_seconds"], 1e-9)
    lines.append(
        f"profile {summary['profile']}; {cost['warmups']} warm-ups took {cost['warmup_seconds']:.2f} s, "
        f"{100 * cost['warmup_seconds'] / total:.1f}% of training, "
        f"counting and logging {cost['counting_seconds']:.2f} s, {100 * cost['counting_seconds'] / total:.1f}%"
    )
    return lines
