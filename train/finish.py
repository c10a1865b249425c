"""Finish: what is written when the last step is done, and in which order.

Owns the summary; promises that summary.json, which marks a run as finished, is written last of all. `train.run`
calls it on the main process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coop.adapters.transformers import find_experts
from coop.files import write_atomic
from coop.plan import format_bytes
from coop.profile import PROFILE_NAME, Profile
from train.loading import Loaded
from train.phases import Phases
from train.saving import checkpoint
from train.saving.card import render_card
from train.schema import Recipe
from train.watching import report
from train.watching.callback import CoopCallback
from train.watching.progress import Metrics, ProgressCallback, to_json
from train.watching.tracking import Tracking


def summarise(
    recipe: Recipe,
    steps: int,
    progress: ProgressCallback,
    metrics: Metrics,
    profile: Profile | None,
    coop: CoopCallback | None,
    phases: Phases,
    tracking: Tracking,
) -> dict[str, Any]:
    """The facts of a finished run; summary.json holds the same."""
    before, after = report.eval_losses(metrics.records)
    losses = [record["loss"] for record in metrics.records if "loss" in record]
    return {
        "name": recipe.logging.wandb.run_name or Path(recipe.output).name,
        "steps": steps,
        "steps_here": progress.steps_done,
        "train_loss_first": losses[0],
        "train_loss_last": losses[-1],
        "eval_loss_before": before,
        "eval_loss_after": after,
        "train_tokens": progress.train_tokens,
        "tokens_per_s": progress.tokens_per_s,
        "phases": {name: round(seconds, 2) for name, seconds in phases.seconds.items()},
        "profile": str(Path(recipe.output) / PROFILE_NAME) if profile else "",
        "profile_cost": coop.cost() if coop else {},
        "final": report.final_scalars(profile) if profile else {},
        "wandb": tracking.place,
    }


def describe_experts(loaded: Loaded) -> dict[str, str]:
    """What the summary and the card say of experts that were selected, and of those that stayed on disk."""
    found = {}
    if loaded.selection is not None:
        counts = [entry.num_experts for entry in find_experts(loaded.model)]
        found["experts_trained"] = loaded.selection.describe(counts)
    if loaded.offloaded is not None:
        scheduler = loaded.offloaded.scheduler
        counters, nbytes = scheduler.counters, scheduler.loads["bytes_read"]
        hits, misses = counters.hits_prefill, counters.misses_prefill
        found["offload"] = (
            f"offloaded experts: {format_bytes(nbytes)} read, {hits / max(1, hits + misses):.1%} of the requests "
            f"found their expert resident, waited {counters.waits.total:.1f} s for reads"
        )
    return found


def publish(run: report.Finished, metrics: Metrics, tracking: Tracking) -> None:
    """The card, the report, what W&B gets of it, and last the summary."""
    summary, output = run.summary, Path(run.recipe.output)
    is_adapter = run.recipe.tune.method == "lora"
    card = render_card(run.recipe, summary, run.profile, is_adapter, output.name)
    write_atomic(output / "README.md", card.encode())
    if summary["final"]:
        metrics.append({"step": summary["steps"], **summary["final"]})
    pictures = report.write_report(run, output)
    tracking.log_images(pictures, summary["steps"])
    if run.profile is not None:
        tracking.log_profile(output / PROFILE_NAME, summary["steps"])
    if "merged" in summary:
        _complete_merged(run, Path(summary["merged"]))
    write_atomic(output / checkpoint.SUMMARY_NAME, to_json(summary, indent=1).encode())


def _complete_merged(run: report.Finished, merged: Path) -> None:
    """A merged model goes its own way: it gets a card of its own, and what the card speaks of."""
    output = Path(run.recipe.output)
    card = render_card(run.recipe, run.summary, run.profile, False, output.name)
    write_atomic(merged / "README.md", card.encode())
    for name in ("report.png", checkpoint.RECIPE_NAME):
        write_atomic(merged / name, (output / name).read_bytes())
