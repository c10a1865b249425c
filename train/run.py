"""Run: one fine-tuning run from a checked recipe to a finished output folder.

Owns the order of things; promises that everything that can be refused is refused before the first step. Called by
`train.finetune`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console
from torch import nn
from transformers import EarlyStoppingCallback, set_seed
from transformers.utils import logging as transformers_logging

from coop.adapters.transformers import find_experts
from coop.errors import RecipeError
from coop.files import write_atomic
from coop.profile import PROFILE_NAME, Profile
from train import checkpoint, report
from train.balance import describe_aux_loss
from train.callback import CoopCallback
from train.checkpoint import ResumePoint
from train.data import Row, describe_sample, load_rows, to_dataset
from train.expert_mask import ExpertMask
from train.launch import check_sharded, join_processes, launch_command
from train.model import (
    Groups,
    check_trainable,
    group_sizes,
    load_model,
    load_skeleton,
    load_tokenizer,
    make_trainable,
    trained_weights,
)
from train.opening import (
    show_data,
    show_groups,
    show_header,
    show_line,
    show_model,
    show_plan,
    show_resume,
    show_trained,
)
from train.progress import Metrics, ProgressCallback, to_json
from train.schema import Recipe
from train.selection import Selection, choose_experts
from train.tracking import Tracking
from train.trainer import CoopTrainer, training_arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line asks besides the recipe. `resume`: None no, Path() the newest, else this checkpoint."""

    is_dry: bool = False
    resume: Path | None = None
    is_overwriting: bool = False


@dataclass(slots=True)
class Phases:
    """Seconds of each phase of a run, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add what the block takes to the phase `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


@dataclass(slots=True)
class Loaded:
    """What a run works with."""

    tokenizer: Any
    model: nn.Module
    train_rows: list[Row]
    eval_rows: list[Row]
    total_steps: int
    selection: Selection | None
    mask: ExpertMask | None


def run(recipe: Recipe, recipe_path: Path, options: Options) -> None:
    """Do what the recipe says. Raises CoopError for anything that can be corrected, KeyboardInterrupt when stopped."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    state = join_processes(recipe, recipe_path, options.is_dry)
    console = Console(quiet=not state.is_main_process)
    output, phases = Path(recipe.output), Phases()
    checkpoint.check_output(
        output, is_resuming=options.resume is not None, is_overwriting=options.is_overwriting
    )
    show_header(console, recipe, recipe_path, state)
    loaded = _load(recipe, options, console, phases, state.num_processes)
    show_plan(console, recipe, loaded.model, len(loaded.train_rows), loaded.total_steps, state.num_processes)
    if options.is_dry:
        console.print("dry run: everything above is in order; nothing was trained")
        return
    digest = _run_digest(recipe)
    point = None
    if options.resume is not None:
        chosen = options.resume if options.resume != Path() else None
        point = checkpoint.find_resume_point(output, chosen, digest)
    state.wait_for_everyone()
    if state.is_main_process:
        _prepare_output(recipe, output, options.is_overwriting)
        if loaded.selection is not None:
            loaded.selection.save(output)
    state.wait_for_everyone()
    _train(recipe, loaded, point, digest, console, phases)


def _load(recipe: Recipe, options: Options, console: Console, phases: Phases, world: int) -> Loaded:
    """Data first, because it is quick to check; then the model."""
    tokenizer = load_tokenizer(recipe)
    with phases.time("data"):
        train_rows, eval_rows = _load_data(recipe, tokenizer, console)
    with phases.time("model"):
        model = load_skeleton(recipe) if options.is_dry else load_model(recipe)
        groups, entries = Groups(model), find_experts(model)
        show_model(console, model, recipe)
        earlier = Path(recipe.output) if options.resume is not None else None
        is_counted = recipe.tune.experts.select == "hot" and recipe.tune.experts.profile is None
        is_chosen = not (options.is_dry and is_counted)
        ids = [row.input_ids for row in train_rows[: recipe.tune.experts.profile_rows]]
        selection = choose_experts(model, recipe.tune.experts, ids, earlier) if is_chosen else None
        set_seed(recipe.train.seed)
        model = make_trainable(model, recipe.tune, recipe.model.path)
        mask = ExpertMask(model, selection, recipe.train.weight_decay) if selection is not None else None
    sizes = group_sizes(model, groups, mask.frozen_elements if mask else 0)
    show_groups(console, sizes)
    show_trained(console, trained_weights(model, groups))
    check_trainable(sizes, recipe.tune.groups)
    if selection is not None:
        show_line(console, selection.describe([entry.num_experts for entry in entries]))
    elif not is_chosen:
        show_line(
            console, f"experts trained: chosen by a pass of {len(ids)} training rows before the first step"
        )
    show_line(console, describe_aux_loss(model, recipe))
    steps = recipe.train.steps
    if steps is None:
        batch = recipe.train.batch_size * recipe.train.grad_accumulation * world
        steps = ceil(len(train_rows) * (recipe.train.epochs or 1) / batch)
    return Loaded(tokenizer, model, train_rows, eval_rows, steps, selection, mask)


def _load_data(recipe: Recipe, tokenizer: Any, console: Console) -> tuple[list[Row], list[Row]]:
    data = recipe.data
    common: dict[str, Any] = {"max_length": data.max_length, "strict": data.strict}
    train_rows, summary = load_rows(Path(data.train), tokenizer, max_rows=data.max_train_rows, **common)
    show_data(console, "train", summary)
    eval_rows: list[Row] = []
    if data.eval is not None:
        eval_rows, summary = load_rows(Path(data.eval), tokenizer, max_rows=data.max_eval_rows, **common)
        show_data(console, "eval", summary)
    console.print("sample (only the bold part is trained):", highlight=False)
    console.print(describe_sample(tokenizer, train_rows[0]), highlight=False, soft_wrap=True)
    return train_rows, eval_rows


def _run_digest(recipe: Recipe) -> str:
    files = [recipe.data.train, *([recipe.data.eval] if recipe.data.eval else [])]
    return checkpoint.run_digest(recipe.digest, files)


def _prepare_output(recipe: Recipe, output: Path, is_overwriting: bool) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        if is_overwriting:
            checkpoint.clear_output(output)
        write_atomic(output / checkpoint.RECIPE_NAME, recipe.to_yaml().encode())
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else None
        raise RecipeError(f"output: {output}: {reason or exc}") from exc


def _train(
    recipe: Recipe,
    loaded: Loaded,
    point: ResumePoint | None,
    digest: str,
    console: Console,
    phases: Phases,
) -> None:
    """Train, evaluate, save and report; the parts that hold resources are closed whatever happens."""
    output = Path(recipe.output)
    is_main = PartialState().is_main_process
    metrics = (
        Metrics(output / checkpoint.METRICS_NAME, point.step if point else 0)
        if is_main
        else Metrics(Path(os.devnull))
    )
    progress = ProgressCallback(console, metrics)
    settings = (
        recipe.logging.wandb if is_main else recipe.logging.wandb.model_copy(update={"mode": "disabled"})
    )
    tracking = Tracking(settings, output, recipe.model_dump(), progress.say)
    coop = None
    if recipe.coop.profile.enabled:
        coop = CoopCallback(loaded.model, loaded.tokenizer, recipe.coop, progress.say, is_main)
    try:
        trainer = _build_trainer(recipe, loaded, coop, digest, [progress, tracking])
        if point is not None:
            show_resume(console, point)
            if coop is not None:
                coop.restore(point.folder)
        _fit(trainer, point, loaded, metrics, phases, recipe.eval.at_start)
        with phases.time("saving"):
            held_out = loaded.eval_rows[: recipe.coop.profile.refresh_rows]
            profile = trainer.save_result(output, held_out)
        if is_main:
            summary = _summarise(recipe, trainer, progress, metrics, profile, coop, phases, tracking)
            with checkpoint.saving(output, output):
                _publish(recipe, summary, metrics, profile, tracking)
            console.rule("summary")
            console.print(
                report.render_summary(summary, output), highlight=False, markup=False, soft_wrap=True
            )
    except KeyboardInterrupt:
        progress.close()
        again = f"{launch_command(recipe, output / checkpoint.RECIPE_NAME)} --resume"
        console.print(f"stopped; go on with: {again}", highlight=False, markup=False, soft_wrap=True)
        raise
    finally:
        progress.close()
        tracking.close()
        if coop is not None:
            coop.close()


def _build_trainer(
    recipe: Recipe, loaded: Loaded, coop: CoopCallback | None, digest: str, callbacks: list[Any]
) -> CoopTrainer:
    stopping = [EarlyStoppingCallback(recipe.eval.patience)] if recipe.eval.patience else []
    trainer = CoopTrainer(
        coop=coop,
        mask=loaded.mask,
        digest=digest,
        recipe=recipe,
        model=loaded.model,
        args=training_arguments(recipe, Path(recipe.output), loaded.total_steps),
        train_dataset=to_dataset(loaded.train_rows),
        eval_dataset=to_dataset(loaded.eval_rows) if loaded.eval_rows else None,
        processing_class=loaded.tokenizer,
        callbacks=[*callbacks, *stopping],
    )
    check_sharded(trainer.accelerator)
    return trainer


def _fit(
    trainer: CoopTrainer,
    point: ResumePoint | None,
    loaded: Loaded,
    metrics: Metrics,
    phases: Phases,
    is_measured_first: bool,
) -> None:
    """Eval before, training, eval after; a resumed run has its first eval in its metrics already."""
    if loaded.eval_rows and point is None and is_measured_first:
        with phases.time("eval before"):
            trainer.evaluate()
    with phases.time("training"):
        trainer.train(resume_from_checkpoint=str(point.folder) if point else None)
    is_measured = any("eval_loss" in r and r["step"] == trainer.state.global_step for r in metrics.records)
    if loaded.eval_rows and not is_measured:
        with phases.time("eval after"):
            trainer.evaluate()


def _summarise(
    recipe: Recipe,
    trainer: CoopTrainer,
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
        "steps": trainer.state.global_step,
        "train_loss_first": losses[0],
        "train_loss_last": losses[-1],
        "eval_loss_before": before,
        "eval_loss_after": after,
        "train_tokens": progress.train_tokens,
        "tokens_per_s": progress.tokens_per_s,
        "phases": {name: round(seconds, 2) for name, seconds in phases.seconds.items()},
        "profile": str(Path(recipe.output) / PROFILE_NAME) if profile else "",
        "profile_seconds": coop.counting_seconds + coop.warmup_seconds if coop else 0.0,
        "balance": report.balance_scalars(profile) if profile else {},
        "wandb": tracking.place,
    }


def _publish(
    recipe: Recipe, summary: dict[str, Any], metrics: Metrics, profile: Profile | None, tracking: Tracking
) -> None:
    """The report, what W&B gets of it, and last the summary, which marks the run as finished."""
    output = Path(recipe.output)
    write_atomic(output / "README.md", report.render_card(recipe, summary).encode())
    report.draw_report(metrics.records, profile, output / "report.png")
    tracking.log(summary["balance"], summary["steps"])
    tracking.log_image("report", output / "report.png", summary["steps"])
    write_atomic(output / checkpoint.SUMMARY_NAME, to_json(summary, indent=1).encode())
