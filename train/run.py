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

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from torch import nn
from transformers import set_seed
from transformers.utils import logging as transformers_logging

from coop.errors import CoopError, DataError, RecipeError
from coop.files import write_atomic
from coop.profile import PROFILE_NAME, Profile
from train import checkpoint, report
from train.callback import CoopCallback
from train.checkpoint import ResumePoint
from train.data import load_data
from train.model import (
    Groups,
    check_trainable,
    group_sizes,
    load_model,
    load_skeleton,
    load_tokenizer,
    make_trainable,
)
from train.opening import show_data, show_groups, show_header, show_model, show_plan, show_resume
from train.packing import IsolationCheck
from train.progress import Metrics, ProgressCallback, to_json
from train.rows import Row, to_dataset
from train.schema import Recipe
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
    data_digest: str
    total_steps: int


def run(recipe: Recipe, recipe_path: Path, options: Options) -> None:
    """Do what the recipe says. Raises CoopError for anything that can be corrected, KeyboardInterrupt when stopped."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    state = _join_processes()
    console = Console(quiet=not state.is_main_process)
    output, phases = Path(recipe.output), Phases()
    checkpoint.check_output(
        output, is_resuming=options.resume is not None, is_overwriting=options.is_overwriting
    )
    show_header(console, recipe, recipe_path, state)
    loaded = _load(recipe, options.is_dry, console, phases, state.num_processes)
    show_plan(console, recipe, loaded.model, len(loaded.train_rows), loaded.total_steps, state.num_processes)
    if options.is_dry:
        console.print("dry run: everything above is in order; nothing was trained")
        return
    digest = checkpoint.run_digest(recipe.digest, loaded.data_digest)
    point = None
    if options.resume is not None:
        chosen = options.resume if options.resume != Path() else None
        point = checkpoint.find_resume_point(output, chosen, digest)
    state.wait_for_everyone()
    if state.is_main_process:
        _prepare_output(recipe, output, options.is_overwriting)
    state.wait_for_everyone()
    _train(recipe, loaded, point, digest, console, phases)


def _join_processes() -> PartialState:
    """The processes of this run. Raises CoopError if the launcher started more than take part."""
    state = PartialState(cpu=not torch.accelerator.is_available())
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != state.num_processes:
        raise CoopError(
            f"{launched} processes were launched but this one sees {state.num_processes}; on CPUs launch with "
            "ACCELERATE_USE_CPU=true torchrun --nproc_per_node N train/finetune.py RECIPE"
        )
    return state


def _load(recipe: Recipe, is_dry: bool, console: Console, phases: Phases, world: int) -> Loaded:
    """Data first, because it is quick to check; then the model."""
    tokenizer = load_tokenizer(recipe)
    with phases.time("data"):
        data = load_data(recipe.data, tokenizer, recipe.train.seed, console)
        _refuse_other_data(data.digest())
    show_data(console, data, tokenizer)
    with phases.time("model"):
        model = load_skeleton(recipe) if is_dry else load_model(recipe)
        groups = Groups(model)
        show_model(console, model, recipe)
        set_seed(recipe.train.seed)
        model = make_trainable(model, recipe.tune, recipe.model.path)
    sizes = group_sizes(model, groups)
    show_groups(console, sizes)
    check_trainable(sizes, recipe.tune.groups)
    steps = recipe.train.steps
    if steps is None:
        batch = recipe.train.batch_size * recipe.train.grad_accumulation * world
        steps = ceil(len(data.train_rows) * (recipe.train.epochs or 1) / batch)
    return Loaded(tokenizer, model, data.train_rows, data.eval_rows, data.digest(), steps)


def _refuse_other_data(digest: str) -> None:
    """Every process must train the same rows in the same order, or steps would not be what they say."""
    digests = gather_object([digest])
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise DataError(
            f"process {others[0]} has read other rows than process 0; give all machines the same data"
        )


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
        _fit(trainer, point, loaded, metrics, phases)
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
        again = f"accelerate launch train/finetune.py {output / checkpoint.RECIPE_NAME} --resume"
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
    if recipe.data.packing:
        callbacks = [*callbacks, IsolationCheck(recipe.model.attention)]
    return CoopTrainer(
        coop=coop,
        digest=digest,
        recipe=recipe,
        model=loaded.model,
        args=training_arguments(recipe, Path(recipe.output), loaded.total_steps),
        train_dataset=to_dataset(loaded.train_rows),
        eval_dataset=to_dataset(loaded.eval_rows) if loaded.eval_rows else None,
        processing_class=loaded.tokenizer,
        callbacks=callbacks,
    )


def _fit(
    trainer: CoopTrainer, point: ResumePoint | None, loaded: Loaded, metrics: Metrics, phases: Phases
) -> None:
    """Eval before, training, eval after; a resumed run has its first eval in its metrics already."""
    if loaded.eval_rows and point is None:
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
