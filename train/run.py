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
from coop.errors import CoopError, RecipeError
from coop.files import write_atomic
from coop.profile import PROFILE_NAME, Profile
from train import checkpoint, report
from train.callback import CoopCallback
from train.card import render_card
from train.checkpoint import ResumePoint
from train.data import Row, describe_sample, load_rows, to_dataset
from train.durable import recover
from train.export import export_result
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
from train.progress import Metrics, ProgressCallback, to_json
from train.push import check_login, push_result
from train.schema import Recipe
from train.stopping import Stop
from train.tracking import Tracking
from train.trainer import CoopTrainer, training_arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line asks besides the recipe. `resume`: None no, Path() the newest, else this checkpoint."""

    is_dry: bool = False
    resume: Path | None = None
    is_overwriting: bool = False
    is_forced: bool = False
    stop: Stop = field(default_factory=Stop)


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
    check_login(recipe.hub)
    show_header(console, recipe, recipe_path, state)
    with ExitStack() as held:
        loaded = _load(recipe, options.is_dry, console, phases, state.num_processes, held)
        show_plan(
            console, recipe, loaded.model, len(loaded.train_rows), loaded.total_steps, state.num_processes
        )
        if options.is_dry:
            console.print("dry run: everything above is in order; nothing was trained")
            return
        deciding = _run_facts(recipe, state.num_processes)
        point = _find_point(output, options, deciding, console, state)
        state.wait_for_everyone()
        if state.is_main_process:
            _prepare_output(recipe, output, options.is_overwriting)
        state.wait_for_everyone()
        _train(recipe, loaded, point, deciding, options.stop, console, phases)
    if state.is_main_process and recipe.hub.push:
        push_result(recipe.hub, output, lambda line: console.print(line, highlight=False, soft_wrap=True))


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


def _run_facts(recipe: Recipe, world: int) -> dict[str, Any]:
    files = [recipe.data.train, *([recipe.data.eval] if recipe.data.eval else [])]
    return checkpoint.run_facts(recipe.deciding, files, world)


def _find_point(
    output: Path, options: Options, deciding: dict[str, Any], console: Console, state: PartialState
) -> ResumePoint | None:
    """Where a resumed run goes on, once what a kill left behind is cleared away; None for a new run."""
    if options.resume is None:
        return None
    if state.is_main_process:
        with checkpoint.saving(output, output):
            for line in recover(output):
                console.print(line, highlight=False, markup=False, soft_wrap=True)
    state.wait_for_everyone()
    chosen = options.resume if options.resume != Path() else None
    return checkpoint.find_resume_point(output, chosen, deciding, options.is_forced)


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
    deciding: dict[str, Any],
    stop: Stop,
    console: Console,
    phases: Phases,
) -> None:
    """Train, evaluate, save and report; the parts that hold resources are closed whatever happens."""
    output = Path(recipe.output)
    is_main = PartialState().is_main_process
    metrics = _open_metrics(recipe, point) if is_main else Metrics(Path(os.devnull))
    progress = ProgressCallback(console, metrics)
    settings = (
        recipe.logging.wandb if is_main else recipe.logging.wandb.model_copy(update={"mode": "disabled"})
    )
    tracking = Tracking(settings, output, recipe.model_dump(), progress.say)
    coop = None
    if recipe.coop.profile.enabled:
        coop = CoopCallback(loaded.model, loaded.tokenizer, recipe.coop, progress.say, is_main)
    try:
        trainer = _build_trainer(recipe, loaded, coop, deciding, stop, [progress, tracking])
        if point is not None:
            show_resume(console, point)
            if coop is not None:
                coop.restore(point.folder)
        _fit(trainer, point, loaded, metrics, phases, stop)
        best = trainer.restore_best() if recipe.checkpoint.keep_best else None
        with phases.time("saving"), stop.waiting():
            held_out = loaded.eval_rows[: recipe.coop.profile.refresh_rows]
            profile = trainer.save_result(output, held_out)
        if is_main:
            with phases.time("export"):
                exported = export_result(recipe, loaded.model, progress.say)
            summary = _summarise(recipe, trainer, progress, metrics, profile, coop, phases, tracking)
            summary |= exported
            if best is not None:
                summary |= {"best_step": best.step, "eval_loss_after": best.eval_loss}
            with checkpoint.saving(output, output):
                _publish(recipe, summary, metrics, profile, tracking)
            console.rule("summary")
            console.print(
                report.render_summary(summary, output), highlight=False, markup=False, soft_wrap=True
            )
    except KeyboardInterrupt:
        progress.close()
        console.print(_how_to_go_on(output), highlight=False, markup=False, soft_wrap=True)
        raise
    finally:
        progress.close()
        tracking.close()
        if coop is not None:
            coop.close()


def _open_metrics(recipe: Recipe, point: ResumePoint | None) -> Metrics:
    path = Path(recipe.output) / checkpoint.METRICS_NAME
    is_patient = recipe.checkpoint.on_failure == "continue"
    return Metrics(path, point.step if point else 0, is_patient)


def _how_to_go_on(output: Path) -> str:
    """What a stopped run has on the disk, and the command that goes on from there."""
    option = "--resume" if checkpoint.has_whole(output) else "--overwrite"
    again = f"accelerate launch train/finetune.py {output / checkpoint.RECIPE_NAME} {option}"
    return f"stopped; {checkpoint.describe_newest(output)}; go on with: {again}"


def _build_trainer(
    recipe: Recipe,
    loaded: Loaded,
    coop: CoopCallback | None,
    deciding: dict[str, Any],
    stop: Stop,
    callbacks: list[Any],
) -> CoopTrainer:
    progress = callbacks[0]
    return CoopTrainer(
        coop=coop,
        deciding=deciding,
        recipe=recipe,
        stop=stop,
        say=progress.say,
        model=loaded.model,
        args=training_arguments(recipe, Path(recipe.output), loaded.total_steps),
        train_dataset=to_dataset(loaded.train_rows),
        eval_dataset=to_dataset(loaded.eval_rows) if loaded.eval_rows else None,
        processing_class=loaded.tokenizer,
        callbacks=callbacks,
    )


def _fit(
    trainer: CoopTrainer,
    point: ResumePoint | None,
    loaded: Loaded,
    metrics: Metrics,
    phases: Phases,
    stop: Stop,
) -> None:
    """Eval before, training, eval after; a resumed run has its first eval in its metrics already."""
    if loaded.eval_rows and point is None:
        with phases.time("eval before"):
            trainer.evaluate()
    with phases.time("training"), stop.waiting():
        if point is not None and point.step >= loaded.total_steps:
            trainer.restore(point.folder)
        else:
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
    is_adapter = recipe.tune.method == "lora"
    write_atomic(
        output / "README.md", render_card(recipe, summary, profile, is_adapter, output.name).encode()
    )
    report.draw_report(metrics.records, profile, output / "report.png")
    tracking.log(summary["balance"], summary["steps"])
    tracking.log_image("report", output / "report.png", summary["steps"])
    if "merged" in summary:
        _complete_merged(recipe, summary, profile, Path(summary["merged"]))
    write_atomic(output / checkpoint.SUMMARY_NAME, to_json(summary, indent=1).encode())


def _complete_merged(recipe: Recipe, summary: dict[str, Any], profile: Profile | None, merged: Path) -> None:
    """A merged model goes its own way: it gets a card of its own, and what the card speaks of."""
    card = render_card(recipe, summary, profile, False, Path(recipe.output).name)
    write_atomic(merged / "README.md", card.encode())
    for name in ("report.png", checkpoint.RECIPE_NAME):
        write_atomic(merged / name, (Path(recipe.output) / name).read_bytes())
