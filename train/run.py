"""Run: one fine-tuning run from a checked recipe to a finished output folder.

Owns the order of things; promises that everything that can be refused is refused before the first step. Called by
`train.finetune`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from torch import nn
from transformers import set_seed
from transformers.utils import logging as transformers_logging

from coop.adapters.offload import Offloaded
from coop.adapters.transformers import find_experts
from coop.errors import CoopError, RecipeError
from coop.files import write_atomic
from coop.profile import PROFILE_NAME, Profile
from train import checkpoint, report
from train.callback import CoopCallback
from train.checkpoint import ResumePoint
from train.data import Row, describe_sample, load_rows, to_dataset
from train.model import (
    Groups,
    check_trainable,
    expert_backend,
    group_sizes,
    load_model,
    load_offloaded,
    load_skeleton,
    load_tokenizer,
    make_trainable,
    plan_offloaded,
    put_experts_in_force,
)
from train.opening import (
    show_data,
    show_groups,
    show_header,
    show_model,
    show_offload,
    show_plan,
    show_resume,
)
from train.progress import Metrics, ProgressCallback, say, to_json
from train.schema import Recipe
from train.tracking import Tracking
from train.trainer import CoopTrainer, training_arguments
from train.warmup import chosen_layers


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
    offloaded: Offloaded | None = None
    opening: str = ""  # what was shown before the first step


def run(recipe: Recipe, recipe_path: Path, options: Options) -> None:
    """Do what the recipe says. Raises CoopError for anything that can be corrected, KeyboardInterrupt when stopped."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    state = _join_processes()
    console = Console(quiet=not state.is_main_process, record=True)
    output, phases = Path(recipe.output), Phases()
    checkpoint.check_output(
        output, is_resuming=options.resume is not None, is_overwriting=options.is_overwriting
    )
    show_header(console, recipe, recipe_path, state)
    with ExitStack() as held:
        loaded = _load(recipe, options.is_dry, console, phases, state.num_processes, held)
        show_plan(
            console, recipe, loaded.model, len(loaded.train_rows), loaded.total_steps, state.num_processes
        )
        loaded.opening, console.record = console.export_text(), False
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


def _load(
    recipe: Recipe, is_dry: bool, console: Console, phases: Phases, world: int, held: ExitStack
) -> Loaded:
    """Data first, because it is quick to check; then the model. What must be closed goes onto `held`."""
    tokenizer = load_tokenizer(recipe)
    with phases.time("data"):
        train_rows, eval_rows = _load_data(recipe, tokenizer, console)
    with phases.time("model"):
        model, offloaded = _load_model(recipe, is_dry, console, held)
        if recipe.coop.profile.enabled:
            chosen_layers(recipe.coop.warmup, len(find_experts(model)))  # refused now, not after the start
        groups, backend = Groups(model), expert_backend(recipe, model)
        show_model(console, model, recipe, backend)
        set_seed(recipe.train.seed)
        model = make_trainable(model, recipe.tune, recipe.model.path)
        put_experts_in_force(model, backend, offloaded)
    sizes = group_sizes(model, groups)
    show_groups(console, sizes)
    check_trainable(sizes, recipe.tune.groups)
    steps = recipe.train.steps
    if steps is None:
        batch = recipe.train.batch_size * recipe.train.grad_accumulation * world
        steps = ceil(len(train_rows) * (recipe.train.epochs or 1) / batch)
    return Loaded(tokenizer, model, train_rows, eval_rows, steps, offloaded)


def _load_model(
    recipe: Recipe, is_dry: bool, console: Console, held: ExitStack
) -> tuple[nn.Module, Offloaded | None]:
    """The model, and what serves its experts if they stay on disk; a dry run has neither weights nor readers."""
    device = PartialState().device.type
    if not recipe.model.experts_offload:
        return load_skeleton(recipe) if is_dry else load_model(recipe), None
    if is_dry:
        show_offload(console, plan_offloaded(recipe, device))
        return load_skeleton(recipe), None
    offloaded = held.enter_context(load_offloaded(recipe, device))
    show_offload(console, offloaded.plan)
    return offloaded.model, offloaded


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
    settings = (
        recipe.logging.wandb if is_main else recipe.logging.wandb.model_copy(update={"mode": "disabled"})
    )
    tracking = Tracking(settings, output, recipe.model_dump(), partial(say, console))
    metrics = (
        Metrics(output / checkpoint.METRICS_NAME, point.step if point else 0, tracking.log_record)
        if is_main
        else Metrics(Path(os.devnull))
    )
    progress = ProgressCallback(console, metrics)
    coop = _build_callback(recipe, loaded, metrics, progress, is_main)
    try:
        trainer = _build_trainer(recipe, loaded, coop, digest, [progress])
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
                finished = report.Finished(recipe, summary, metrics.records, profile, loaded.opening)
                _publish(finished, metrics, tracking)
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


def _build_callback(
    recipe: Recipe, loaded: Loaded, metrics: Metrics, progress: ProgressCallback, is_main: bool
) -> CoopCallback | None:
    if not recipe.coop.profile.enabled:
        return None
    return CoopCallback(
        loaded.model,
        loaded.tokenizer,
        recipe.coop,
        progress.say,
        is_main,
        scheduler=loaded.offloaded.scheduler if loaded.offloaded else None,
        log=lambda values, step: metrics.append({"step": step, **values}),
        is_detailed=recipe.logging.wandb.detailed,
    )


def _build_trainer(
    recipe: Recipe, loaded: Loaded, coop: CoopCallback | None, digest: str, callbacks: list[Any]
) -> CoopTrainer:
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
        "name": recipe.logging.wandb.run_name or Path(recipe.output).name,
        "steps": trainer.state.global_step,
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


def _publish(run: report.Finished, metrics: Metrics, tracking: Tracking) -> None:
    """The report, what W&B gets of it, and last the summary, which marks the run as finished."""
    summary, output = run.summary, Path(run.recipe.output)
    write_atomic(output / "README.md", report.render_card(run.recipe, summary).encode())
    if summary["final"]:
        metrics.append({"step": summary["steps"], **summary["final"]})
    pictures = report.write_report(run, output)
    tracking.log_images(pictures, summary["steps"])
    if run.profile is not None:
        tracking.log_profile(output / PROFILE_NAME, summary["steps"])
    write_atomic(output / checkpoint.SUMMARY_NAME, to_json(summary, indent=1).encode())
