"""Run: one fine-tuning run from a checked recipe to a finished output folder.

Owns the order of things; promises that everything that can be refused is refused before the first step. Called by
`train.finetune`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from rich.console import Console
from transformers import EarlyStoppingCallback
from transformers.utils import logging as transformers_logging

from coop.errors import RecipeError
from coop.files import write_atomic
from coop.profile import PROFILE_NAME
from train import finish
from train.data.packing import IsolationCheck
from train.data.rows import to_dataset
from train.launch import check_sharded, join_processes, launch_command
from train.loading import Loaded, load, steps_per_epoch
from train.opening import show_header, show_plan, show_resume
from train.phases import Phases
from train.saving import checkpoint
from train.saving.base import identify_base
from train.saving.checkpoint import ResumePoint
from train.saving.durable import recover
from train.saving.export import export_result
from train.saving.output import HEADER, check_output, clear_output, locked
from train.saving.push import check_login, push_result
from train.schema import Recipe
from train.stopping import Stop
from train.trainer import CoopTrainer, training_arguments
from train.watching import report
from train.watching.callback import CoopCallback
from train.watching.progress import Metrics, ProgressCallback, say
from train.watching.tracking import Tracking


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line asks besides the recipe. `resume`: None no, Path() the newest, else this checkpoint."""

    is_dry: bool = False
    resume: Path | None = None
    is_overwriting: bool = False
    is_forced: bool = False
    stop: Stop = field(default_factory=Stop)


def run(recipe: Recipe, recipe_path: Path, options: Options) -> None:
    """Do what the recipe says. Raises CoopError for anything that can be corrected, KeyboardInterrupt when stopped."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    state = join_processes(recipe, recipe_path, options.is_dry)
    console = Console(quiet=not state.is_main_process, record=True)
    output, phases = Path(recipe.output), Phases()
    is_resuming = options.resume is not None
    check = partial(
        check_output, recipe, recipe_path, is_resuming=is_resuming, is_overwriting=options.is_overwriting
    )
    check()
    check_login(recipe.hub)
    with ExitStack() as held:
        if not options.is_dry:
            _lock(output, check, held, state)
        show_header(console, recipe, recipe_path, state)
        earlier = output if is_resuming else None
        loaded = load(recipe, console, phases, held, is_dry=options.is_dry, earlier=earlier)
        epochs = loaded.total_steps / steps_per_epoch(recipe, len(loaded.train_rows))
        show_plan(console, recipe, loaded.model, loaded.total_steps, epochs, state.num_processes)
        loaded.opening, console.record = console.export_text(), False
        if options.is_dry:
            console.print("dry run: everything above is in order; nothing was trained")
            return
        deciding = _facts(recipe, loaded, state)
        point = _find_point(output, options, deciding, console, state)
        state.wait_for_everyone()
        if state.is_main_process:
            _prepare_output(recipe, loaded, output, options.is_overwriting)
        state.wait_for_everyone()
        _train(recipe, loaded, point, deciding, options.stop, console, phases)
    if state.is_main_process and recipe.hub.push:
        push_result(recipe.hub, output, partial(say, console))


def _lock(output: Path, check: Callable[[], None], held: ExitStack, state: PartialState) -> None:
    """Keep other runs out until `held` ends; all processes refuse together. One may have ended here since `check`."""
    refusal: RecipeError | None = None
    if state.is_main_process:
        try:
            held.enter_context(locked(output))
            check()
        except RecipeError as exc:
            refusal = exc
    refusals: list[str | None] = broadcast_object_list([refusal and str(refusal)])
    if refusals[0] is not None:
        raise refusal or RecipeError(refusals[0])


def _facts(recipe: Recipe, loaded: Loaded, state: PartialState) -> dict[str, Any]:
    """What a resumed run must agree with; one process reads the base's files for all."""
    base = None
    if state.is_main_process:
        base = identify_base(recipe.model.path, getattr(loaded.model, "config", None))
    found: list[Any] = broadcast_object_list([base])
    return checkpoint.run_facts(recipe.deciding, loaded.data_digest, state.num_processes, found[0])


def _find_point(
    output: Path, options: Options, deciding: dict[str, Any], console: Console, state: PartialState
) -> ResumePoint | None:
    """Where a resumed run goes on, once what a kill left behind is cleared away; None for a new run."""
    if options.resume is None:
        return None
    if state.is_main_process:
        with checkpoint.saving(output, output):
            for line in recover(output):
                say(console, line)
    state.wait_for_everyone()
    chosen = options.resume if options.resume != Path() else None
    return checkpoint.find_resume_point(output, chosen, deciding, options.is_forced)


def _prepare_output(recipe: Recipe, loaded: Loaded, output: Path, is_overwriting: bool) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        if is_overwriting:
            clear_output(output)
        write_atomic(output / checkpoint.RECIPE_NAME, HEADER + recipe.to_yaml().encode())
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else None
        raise RecipeError(f"output: {output}: {reason or exc}") from exc
    if loaded.selection is not None:
        loaded.selection.save(output)


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
    with ExitStack() as held:
        tracking = _open_tracking(recipe, console)
        held.callback(tracking.close)
        metrics = _open_metrics(recipe, point, tracking)
        progress = ProgressCallback(console, metrics)
        held.callback(progress.close)
        coop = _build_callback(recipe, loaded, metrics, progress)
        if coop is not None:
            held.callback(coop.close)
        try:
            trainer = _build_trainer(recipe, loaded, coop, deciding, stop, progress)
            if point is not None:
                show_resume(console, point)
                if coop is not None:
                    _restore_counts(coop, point, console)
            _fit(trainer, point, loaded, metrics, phases, stop, recipe.eval.at_start)
            _finish(recipe, loaded, trainer, progress, metrics, coop, phases, tracking, stop, console)
        except KeyboardInterrupt:
            progress.close()
            say(console, _how_to_go_on(recipe))
            raise


def _restore_counts(coop: CoopCallback, point: ResumePoint, console: Console) -> None:
    if (point.folder / PROFILE_NAME).is_file():
        coop.restore(point.folder)
    else:
        line = f"{point.folder} has no expert profile: counting begins at step {point.step}"
        say(console, line)


def _open_tracking(recipe: Recipe, console: Console) -> Tracking:
    settings = recipe.logging.wandb
    if not PartialState().is_main_process:
        settings = settings.model_copy(update={"mode": "disabled"})
    return Tracking(settings, Path(recipe.output), recipe.model_dump(), partial(say, console))


def _open_metrics(recipe: Recipe, point: ResumePoint | None, tracking: Tracking) -> Metrics:
    if not PartialState().is_main_process:
        return Metrics(Path(os.devnull))
    path = Path(recipe.output) / checkpoint.METRICS_NAME
    is_patient = recipe.checkpoint.on_failure == "continue"
    return Metrics(path, point.step if point else 0, tracking.log_record, is_patient)


def _how_to_go_on(recipe: Recipe) -> str:
    """What a stopped run has on the disk, and the command that goes on from there."""
    output = Path(recipe.output)
    option = "--resume" if checkpoint.has_whole(output) else "--overwrite"
    again = f"{launch_command(recipe, output / checkpoint.RECIPE_NAME)} {option}"
    return f"stopped; {checkpoint.describe_newest(output)}; go on with: {again}"


def _build_callback(
    recipe: Recipe, loaded: Loaded, metrics: Metrics, progress: ProgressCallback
) -> CoopCallback | None:
    if not recipe.coop.profile.enabled:
        return None
    return CoopCallback(
        loaded.model,
        loaded.tokenizer,
        recipe.coop,
        progress.say,
        PartialState().is_main_process,
        scheduler=loaded.offloaded.scheduler if loaded.offloaded else None,
        log=lambda values, step: metrics.append({"step": step, **values}),
        is_detailed=recipe.logging.wandb.detailed,
    )


def _build_trainer(
    recipe: Recipe,
    loaded: Loaded,
    coop: CoopCallback | None,
    deciding: dict[str, Any],
    stop: Stop,
    progress: ProgressCallback,
) -> CoopTrainer:
    callbacks: list[Any] = [progress]
    if recipe.data.packing:
        callbacks.append(IsolationCheck(recipe.model.attention))
    if recipe.eval.patience:
        callbacks.append(EarlyStoppingCallback(recipe.eval.patience))
    trainer = CoopTrainer(
        coop=coop,
        mask=loaded.mask,
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
    check_sharded(trainer.accelerator)
    return trainer


def _fit(
    trainer: CoopTrainer,
    point: ResumePoint | None,
    loaded: Loaded,
    metrics: Metrics,
    phases: Phases,
    stop: Stop,
    is_measured_first: bool,
) -> None:
    """Eval before, training, eval after; a resumed run has its first eval in its metrics already."""
    if loaded.eval_rows and point is None and is_measured_first:
        with phases.time("eval before"):
            trainer.evaluate()
    with phases.time("training"), stop.waiting():
        if point is not None and (point.step >= loaded.total_steps or trainer.has_ended(point.folder)):
            trainer.restore(point.folder)
        else:
            trainer.train(resume_from_checkpoint=str(point.folder) if point else None)
    is_measured = any("eval_loss" in r and r["step"] == trainer.state.global_step for r in metrics.records)
    if loaded.eval_rows and not is_measured:
        with phases.time("eval after"):
            trainer.evaluate()


def _finish(
    recipe: Recipe,
    loaded: Loaded,
    trainer: CoopTrainer,
    progress: ProgressCallback,
    metrics: Metrics,
    coop: CoopCallback | None,
    phases: Phases,
    tracking: Tracking,
    stop: Stop,
    console: Console,
) -> None:
    """The result with its profile, exports, report and summary."""
    output = Path(recipe.output)
    best = trainer.restore_best() if recipe.checkpoint.keep_best else None
    with phases.time("saving"), stop.waiting():
        held_out = loaded.eval_rows[: recipe.coop.profile.refresh_rows]
        profile = trainer.save_result(output, held_out)
    if not PartialState().is_main_process:
        return
    with phases.time("export"):
        exported = export_result(recipe, loaded.model, progress.say)
    steps = trainer.state.global_step
    summary = finish.summarise(recipe, steps, progress, metrics, profile, coop, phases, tracking) | exported
    summary |= finish.describe_experts(loaded)
    if best is not None:
        summary |= {"best_step": best.step, "eval_loss_after": best.eval_loss}
    with checkpoint.saving(output, output):
        finished = report.Finished(recipe, summary, metrics.records, profile, loaded.opening)
        finish.publish(finished, metrics, tracking)
    console.rule("summary")
    say(console, report.render_summary(summary, output))
