"""Opening: what a run shows before its first step: versions, data, model, what is trained, the plan.

Owns the words; promises to show only what is in force. `train.run` calls each part when its facts are known.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from torch import nn

from coop.adapters.transformers import find_experts
from coop.plan import Plan, format_bytes
from train.data.load import LoadedData, SourceSummary
from train.data.masking import describe_sample
from train.launch import sharding
from train.saving.checkpoint import ResumePoint
from train.saving.durable import checkpoint_bytes
from train.schema import Recipe
from train.tuning.model import GroupSize, TrainedWeight
from train.watching.progress import say


def show_header(console: Console, recipe: Recipe, recipe_path: Path, state: PartialState) -> None:
    """Versions, processes, recipe and output folder."""
    import peft
    import transformers
    import trl

    console.rule("coop fine-tuning")
    libraries = (torch, transformers, peft, trl)
    versions = ", ".join(f"{library.__name__} {library.__version__}" for library in libraries)
    lines = [
        f"{versions}; {state.num_processes} process{'es' if state.num_processes > 1 else ''} on {state.device}"
        f"{', sharded by ' + sharding() if sharding() else ''}",
        f"recipe {recipe_path} ({recipe.digest[:12]}), seed {recipe.train.seed}, output {recipe.output}",
    ]
    say(console, "\n".join(lines))


def show_data(console: Console, data: LoadedData, tokenizer: Any) -> None:
    """A line for each source, a table to compare several, what was done with them, and a row of each format."""
    lines = [f"train: {summary.describe()}" for summary in data.train]
    lines += [f"eval: {summary.describe()}" for summary in data.eval]
    say(console, "\n".join(lines))
    if len(data.train) > 1:
        console.print(_mixture_table(data.train))
    if data.notes:
        say(console, "\n".join(data.notes))
    samples = {name: row for summary in reversed(data.train) for name, row in summary.samples.items()}
    for name, row in samples.items():
        console.print(f"sample of {name} (only the bold part is trained):", highlight=False)
        console.print(describe_sample(tokenizer, row), highlight=False, soft_wrap=True)


def _mixture_table(summaries: Sequence[SourceSummary]) -> Table:
    """Rows of each source on their way from the file to the training, in the order of the recipe."""
    names = ("source", "read", "bad", "dropped", "used", "tokens", "share of tokens")
    table = Table(*names, title="mixture", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    total = sum(summary.tokens for summary in summaries)
    for number, summary in enumerate(summaries, 1):
        dropped = summary.dropped + summary.without_answer
        counts = (summary.read, summary.faults.total(), dropped, summary.used, summary.tokens)
        share = f"{summary.tokens / max(1, total):.1%}"
        table.add_row(f"{number} {Path(summary.name).name}", *(f"{count:,}" for count in counts), share)
    return table


def show_model(console: Console, model: nn.Module, recipe: Recipe, backend: str) -> None:
    """The model, its experts and who computes them."""
    experts = find_experts(model)
    first = experts[0]
    elements = sum(p.numel() for p in first.module.parameters(recurse=False)) // first.num_experts
    nbytes = elements * getattr(torch, recipe.model.dtype).itemsize
    total = sum(parameter.numel() for parameter in model.parameters())
    say(
        console,
        f"model {recipe.model.path}: {type(model).__name__}, {total / 1e6:,.1f} M parameters in {recipe.model.dtype}, "
        f"{len(experts)} MoE layers x {first.num_experts} experts, top-{first.top_k}, {nbytes / 2**20:,.2f} MiB each, "
        f"computed by {backend}",
    )


def show_offload(console: Console, plan: Plan) -> None:
    """How many of the offloaded experts are resident at once, and how they are read."""
    share = plan.budget_bytes / plan.expert_bytes
    say(
        console,
        f"experts offloaded: {format_bytes(plan.budget_bytes)} of {format_bytes(plan.expert_bytes)} ({share:.0%}) "
        f"resident at most, the others read from disk in forward and again in backward by {plan.loader_threads} "
        f"threads; the smallest budget that runs is {format_bytes(plan.smallest_bytes)}",
    )


def show_groups(console: Console, sizes: Sequence[GroupSize]) -> None:
    """A table of parameters by group: how many, and how many of them are trained."""
    table = Table("group", "parameters", "trained", title="what is trained", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for size in sizes:
        table.add_row(size.group, f"{size.total:,}", f"{size.trainable:,}" if size.trainable else "frozen")
    total, trained = sum(s.total for s in sizes), sum(s.trainable for s in sizes)
    table.add_row("all", f"{total:,}", f"{trained:,} ({100 * trained / total:.2f}%)")
    console.print(table)


def show_trained(console: Console, weights: Sequence[TrainedWeight]) -> None:
    """Which weights are trained: one line for each name and shape, layer numbers as `*`."""
    table = Table(title="what matched", title_justify="left")
    for name in ("group", "weights", "count", "shape", "by"):
        table.add_column(name, overflow="fold")
    for (group, pattern, shape, by), count in count_patterns(weights).items():
        table.add_row(group, pattern, str(count), " x ".join(map(str, shape)), by)
    console.print(table)


def count_patterns(weights: Sequence[TrainedWeight]) -> dict[tuple[str, str, tuple[int, ...], str], int]:
    """How many weights there are of each group, name without layer numbers, shape and way of training."""
    counts: dict[tuple[str, str, tuple[int, ...], str], int] = {}
    for weight in sorted(weights, key=lambda w: w.group):
        pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", weight.name)
        key = (weight.group, pattern, weight.shape, f"LoRA r={weight.rank}" if weight.rank else "itself")
        counts[key] = counts.get(key, 0) + 1
    return counts


def show_plan(
    console: Console, recipe: Recipe, model: nn.Module, total_steps: int, epochs: float, world: int
) -> None:
    """Steps, epochs, checkpoints and the disk that they need."""
    train, coop = recipe.train, recipe.coop
    rows = train.batch_size * train.grad_accumulation * world
    what = "sequences" if recipe.data.packing else "rows"
    parts = [f"plan: {total_steps} steps of {rows} {what} ({epochs:.2f} epochs)"]
    every = recipe.checkpoint.every_steps
    parts.append(
        f"a checkpoint every {every} steps, {recipe.checkpoint.keep} kept" if every else "no checkpoints"
    )
    if not coop.profile.enabled:
        parts.append("no expert profile")
    elif coop.warmup.every_steps:
        parts.append(f"expert warm-up every {coop.warmup.every_steps} steps")
    needed = checkpoint_bytes(model)
    folder = next(
        path for path in (Path(recipe.output), *Path(recipe.output).absolute().parents) if path.exists()
    )
    free = shutil.disk_usage(folder).free
    parts.append(f"a checkpoint takes about {needed / 2**20:,.0f} MiB, {free / 2**30:,.1f} GiB are free")
    say(console, "; ".join(parts))


def show_resume(console: Console, point: ResumePoint) -> None:
    """Where the run goes on, and what was passed over on the way there."""
    for reason in point.skipped:
        say(console, f"passed over: {reason}")
    for difference in point.differences:
        say(console, f"forced, though {difference}")
    line = f"resuming from {point.folder} at step {point.step}"
    say(console, line)
