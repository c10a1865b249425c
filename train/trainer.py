"""CoopTrainer: TRL's SFTTrainer whose checkpoints hold the profile, follow the umask and appear only when whole.

Owns nothing of its own; promises that a checkpoint appears, before older ones are deleted, only when everything is
in it and on the disk, that all processes succeed or fail in it together, and that a model goes on from one with
exactly its weights, fused experts included. `train.run` builds it.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTConfig, SFTTrainer

from coop.errors import CheckpointError, CoopError, SaveError
from coop.profile import PROFILE_NAME, Profile
from train.data.rows import IGNORED_LABEL, Row, to_dataset
from train.saving.checkpoint import (
    MARK_NAME,
    Best,
    describe_differences,
    describe_newest,
    find_best,
    follow_umask,
    mark_complete,
    read_mark,
    saving,
    surplus,
)
from train.saving.durable import (
    STAGING_NAME,
    begin_staging,
    check_room,
    checkpoint_bytes,
    discard_staging,
    publish,
    retire,
    sync_files,
)
from train.schema import Recipe
from train.stopping import Stop, StopCallback
from train.tuning.balance import apply_aux_loss
from train.tuning.expert_mask import ExpertMask
from train.watching.callback import CoopCallback

_OK, _UNSAVED, _WRONG = 0, 1, 2  # what a process tells the others about its part in a save


class CoopTrainer(SFTTrainer):
    """The trainer of one recipe.

    Args:
        coop: counts and timings, or None when the recipe turns the profile off.
        mask: keeps the experts that are not selected, or None when all are trained.
        deciding: what a resumed run must agree with; goes into the mark of every checkpoint.
        stop: the signal that this process has heard.
        say: gets one line when a checkpoint could not be written and training goes on.
    """

    def __init__(
        self,
        *,
        coop: CoopCallback | None,
        mask: ExpertMask | None = None,
        deciding: dict[str, Any],
        recipe: Recipe,
        stop: Stop | None = None,
        say: Callable[[str], None] = print,
        **options: Any,
    ) -> None:
        self._coop, self._mask, self._deciding, self._recipe, self._say = coop, mask, deciding, recipe, say
        options["args"].router_aux_loss_coef = apply_aux_loss(options["model"], recipe)
        self._is_staging = False
        self._eval_sums = [0.0, 0.0]  # loss times tokens, tokens
        self._best: Best | None = None
        super().__init__(**options)
        self.remove_callback(PrinterCallback)
        for callback in (coop, mask):
            if callback is not None:
                self.add_callback(callback)
        self.add_callback(StopCallback(stop or Stop(), self.agree))
        self.add_callback(FlowCallback())

    @property
    def _output(self) -> Path:
        return Path(self.args.output_dir)

    def agree(self, number: int) -> int:
        """The largest number that any process passes; all call it together."""
        if self.accelerator.num_processes == 1:
            return number
        mine = torch.tensor([number], device=self.args.device)
        return int(self.accelerator.gather(mine).max())

    def _together(self, action: Callable[[], object], what: Path) -> None:
        """Run `action` on every process; if one cannot write `what`, all raise, so that none waits for another."""
        error: CoopError | None = None
        try:
            with saving(self._output, what):
                action()
        except CoopError as exc:
            error = exc
        worst = self.agree(_OK if error is None else _UNSAVED if isinstance(error, SaveError) else _WRONG)
        if worst != _OK:
            kind = SaveError if worst == _UNSAVED else CoopError
            raise error or kind(f"{what}: cannot be saved: another process of this run says why")

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's preparation, in spite of an evaluation before.

        That marks the model as prepared, and accelerate would not wrap it for training any more: each process would
        train on its own, and only the first would be saved.
        """
        if not self._has_sharded_saves:
            self.model.__dict__.pop("_is_accelerate_prepared", None)
        prepared = super()._prepare_for_training(*args, **kwargs)
        is_shared = self.model_wrapped is not self.model or self._has_sharded_saves
        assert is_shared or self.accelerator.num_processes == 1, "processes would train without each other"
        return prepared

    def _get_output_dir(self, trial: Any) -> str:
        """Where Trainer puts checkpoint-N: the hidden folder, while it is written."""
        folder = self._output / STAGING_NAME if self._is_staging else self._output
        return str(folder)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The weights that the optimiser decays: those of which some experts are frozen decay under their mask."""
        names: list[str] = super().get_decay_parameter_names(model)
        return self._mask.take_decay(names) if self._mask is not None else names

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """Trainer's, whose loss is the mean over all held-out tokens instead of that over batches."""
        self._eval_sums = [0.0, 0.0]
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        kind = torch.float32 if self.args.device.type == "mps" else torch.float64  # mps has no float64
        sums = self._sum(torch.tensor(self._eval_sums, dtype=kind, device=self.args.device)).tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = sums[0] / max(1.0, sums[1])
        return output

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's; notes the loss by the tokens that it is the mean of, each row once among all processes."""
        inputs = {**inputs, "labels": self._own_labels(inputs)}
        tokens = int((inputs["labels"] != IGNORED_LABEL).sum())  # of each row, the first is never one
        step = super().prediction_step(model, inputs, *args, **kwargs)
        if tokens:
            self._eval_sums[0] += float(step[0]) * tokens
            self._eval_sums[1] += tokens
        return step

    def _own_labels(self, inputs: dict[str, Any]) -> Tensor:
        """Labels [rows, tokens] without those of the rows that accelerate repeats to fill the last batches up."""
        labels: Tensor = inputs["labels"]
        state, world = self.accelerator.gradient_state, self.accelerator.num_processes
        if world == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return labels
        size = self.args.per_device_eval_batch_size
        own = max(0, state.remainder - self.accelerator.process_index * size)
        is_flat = "position_ids" in inputs  # packed: rows behind each other, each from position 0 on
        row = (inputs["position_ids"] == 0).cumsum(-1) - 1 if is_flat else torch.arange(len(labels))[:, None]
        return labels.masked_fill(row.to(labels.device) >= own, IGNORED_LABEL)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Trainer's checkpoint, in the hidden folder; then it appears, and then older ones are deleted."""
        name = f"checkpoint-{self.state.global_step}"
        try:
            self._write_checkpoint(model, trial, name)
        except SaveError as exc:
            self._on_main(lambda: discard_staging(self._output), self._output / STAGING_NAME)
            if self._recipe.checkpoint.on_failure == "stop" or self._has_sharded_saves:
                raise
            if self.args.should_save:
                self._say(f"warning: {exc}; training goes on, the next checkpoint is the next try")

    @property
    def _has_sharded_saves(self) -> bool:
        """Whether saving itself is made of steps that processes take together: a failed one leaves them apart."""
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def _write_checkpoint(self, model: nn.Module, trial: Any, name: str) -> None:
        place, staged = self._output / name, self._output / STAGING_NAME / name
        self._on_main(self._begin_checkpoint, place)
        self._is_staging = True
        try:
            self._together(lambda: super(CoopTrainer, self)._save_checkpoint(model, trial), place)
        finally:
            self._is_staging = False
        self._on_main(lambda: self._finish_checkpoint(staged), place)

    def _on_main(self, action: Callable[[], object], what: Path) -> None:
        self._together(lambda: action() if self.args.should_save else None, what)

    def _begin_checkpoint(self) -> None:
        begin_staging(self._output)
        check_room(self._output, checkpoint_bytes(self.model))

    def _finish_checkpoint(self, staged: Path) -> None:
        follow_umask(staged)
        sync_files(staged)
        mark_complete(staged, self.state.global_step, self._deciding, self._eval_loss())
        publish(self._output, staged.name)
        checkpoint = self._recipe.checkpoint
        for path in surplus(self._output, checkpoint.keep, checkpoint.keep_best):
            retire(path)

    def _eval_loss(self) -> float | None:
        """The loss on held-out rows with the weights as they are now, if it was measured."""
        now = [log for log in self.state.log_history if log["step"] == self.state.global_step]
        return next((float(log["eval_loss"]) for log in now if "eval_loss" in log), None)

    def restore(self, folder: Path) -> None:
        """Weights and state of a checkpoint, without training: for one of the last step, or the best.

        Trainer itself would train one more step if it were asked to go on from the last one.
        """
        self._load_from_checkpoint(str(folder))
        self.state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))

    def has_ended(self, folder: Path) -> bool:
        """Whether the run of the checkpoint in `folder` had used up its patience there, so that it trains no more."""
        patience = self._recipe.eval.patience
        if not patience:
            return False
        states = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).stateful_callbacks
        saved = states.get(EarlyStoppingCallback.__name__, {})
        saved = saved[0] if isinstance(saved, list) else saved
        return bool(saved.get("attributes", {}).get("early_stopping_patience_counter", 0) >= patience)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Trainer's evaluation; random states are afterwards as they were, so that measuring changes no step."""
        with kept_random_states():
            losses: dict[str, float] = super().evaluate(*args, **kwargs)
        return losses

    def _load_callback_state(self) -> None:
        """Trainer's, but the patience is the recipe's, not that of the run that wrote the checkpoint."""
        super()._load_callback_state()
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EarlyStoppingCallback):
                callback.early_stopping_patience = self._recipe.eval.patience

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Trainer's; where --force goes on with other keys of `train`, the recipe's values are put in force again."""
        if checkpoint is None or not self._is_changed(Path(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        if self.is_deepspeed_enabled:
            raise CheckpointError(
                f"{checkpoint}: with DeepSpeed --force cannot change keys of train; start anew with --overwrite"
            )
        fresh = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        base_lrs = list(self.lr_scheduler.base_lrs)
        super()._load_optimizer_and_scheduler(checkpoint)
        scheduler = self.lr_scheduler
        scheduler.base_lrs = base_lrs
        for group, values in zip(self.optimizer.param_groups, fresh, strict=True):
            group.update(values)
        factors = [rule(scheduler.last_epoch) for rule in scheduler.lr_lambdas]
        rates = [rate * factor for rate, factor in zip(base_lrs, factors, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates

    def _is_changed(self, folder: Path) -> bool:
        """Whether keys of `train` differ from those of the checkpoint."""
        if not (folder / MARK_NAME).is_file():
            return False
        before = read_mark(folder, is_thorough=False)["deciding"]
        return any(line.startswith("train.") for line in describe_differences(before, self._deciding))

    def restore_best(self) -> Best | None:
        """Make the weights of the best checkpoint the result, and say which it is; None if no loss was measured."""
        self._best = find_best(self._output, is_thorough=True)
        if self._best is not None and self._best.step != self.state.global_step:
            self._load_from_checkpoint(str(self._best.folder))
        return self._best

    @property
    def _weights_step(self) -> int:
        return self._best.step if self._best is not None else self.state.global_step

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Trainer's loading, and a proof that it loaded: it only logs what it passes over."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if not self._has_sharded_saves:
            check_loaded(self.model, Path(resume_from_checkpoint))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: TRL's card names no model that is a folder; `train.saving.card` writes one with facts."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights and the profile of exactly these weights; all processes call it.

        Trainer calls it first of all in a checkpoint, so the profile is there before any push and before
        rotation. Checkpoints of a fully tuned model keep transformers' own names, because Trainer loads them
        back without converting (huggingface/transformers#48805).
        """
        folder = Path(output_dir or self.args.output_dir)
        self._together(self._refuse_broken_weights, folder)
        with _own_names(self.model, _internal_call), _quiet_config(self.model):
            self._together(lambda: super(CoopTrainer, self).save_model(str(folder), _internal_call), folder)
        if self._coop is not None:
            profile = self._coop.build_profile(folder, self._weights_step, self._sum)
            self._on_main(lambda: profile.save(folder), folder)

    def save_result(self, output: Path, held_out: list[Row]) -> Profile | None:
        """The final weights, and their profile refreshed by a pass over `held_out`; no file of it is a pickle."""
        self.save_model(str(output))
        self._on_main(lambda: (output / TRAINING_ARGS_NAME).unlink(missing_ok=True), output)
        profile = None
        if self._coop is not None:
            profile = self._coop.build_profile(output, self._weights_step, self._sum)
            if held_out:
                profile = self._coop.refresh(profile, self._batches(held_out), self._sum)
        self._on_main(lambda: self._finish_result(output, profile), output)
        return profile

    def _finish_result(self, output: Path, profile: Profile | None) -> None:
        if profile is not None:
            profile.save(output)
        follow_umask(output)

    def _refuse_broken_weights(self) -> None:
        """A step between two logged ones may have broken the weights; such weights are never saved."""
        for name, weight in self.model.named_parameters():
            if weight.requires_grad and not bool(torch.isfinite(weight).all()):
                raise CoopError(
                    f"step {self.state.global_step}: {name} is not finite: the training has diverged; lower "
                    f"train.learning_rate (it is {self.args.learning_rate:g}) and start anew with --overwrite; "
                    f"{describe_newest(Path(self.args.output_dir))}"
                )

    def _batches(self, rows: list[Row]) -> Iterator[dict[str, Tensor]]:
        """This process's share of `rows`, collated; every process gets equally many, none twice."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        mine = to_dataset(rows[: len(rows) - len(rows) % world][rank::world] or rows)
        size = self.args.per_device_eval_batch_size
        for begin in range(0, len(mine), size):
            batch = self.data_collator([mine[i] for i in range(begin, min(begin + size, len(mine)))])
            yield send_to_device(batch, self.args.device)

    def _sum(self, tensor: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return tensor
        summed: Tensor = self.accelerator.reduce(tensor.to(self.args.device), reduction="sum")
        return summed


@contextlib.contextmanager
def kept_random_states() -> Iterator[None]:
    """Random states of Python, NumPy, torch and its accelerator (CUDA, XPU) are at the end what they were before."""
    python, arrays = random.getstate(), np.random.get_state()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = accelerator.type if accelerator is not None and accelerator.type in ("cuda", "xpu") else ""
    devices = [torch.accelerator.current_device_index()] if kind else []
    try:
        with torch.random.fork_rng(devices, device_type=kind or "cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


class FlowCallback(TrainerCallback):
    """What Trainer leaves out of its flow for resumed runs."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Intervals are the recipe's: the state of a checkpoint brings those of the run that wrote it."""
        state.compute_steps(args, state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A checkpoint is also a line of the log: means over steps begin anew there, resumed or not."""
        control.should_log = control.should_log or control.should_save


def check_loaded(model: nn.Module, folder: Path) -> None:
    """Raise CheckpointError unless every trained weight is, bit for bit, what the checkpoint in `folder` holds."""
    live = _saved_names(model)
    seen = set()
    for path in sorted(folder.glob("*.safetensors")):
        if path.name == PROFILE_NAME:
            continue
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                weight = live.get(name)
                if weight is None or not torch.equal(weight.cpu(), file.get_tensor(name)):
                    raise CheckpointError(f"{path}: {name} was not taken over by the model")
                seen.add(weight.data_ptr())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.data_ptr() not in seen:
            raise CheckpointError(f"{folder}: holds nothing for {name}, which is trained")


def _saved_names(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights by the names that its checkpoints have."""
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict

        adapter: dict[str, Tensor] = get_peft_model_state_dict(model)
        return adapter
    return model.state_dict()


@contextlib.contextmanager
def _own_names(model: Any, is_checkpoint: bool) -> Iterator[None]:
    """Make `save_pretrained` keep the names of the live model; adapters need nothing of the kind."""
    if not is_checkpoint or hasattr(model, "peft_config"):
        yield
        return
    model.save_pretrained = functools.partial(type(model).save_pretrained, model, save_original_format=False)
    try:
        yield
    finally:
        del model.save_pretrained


@contextlib.contextmanager
def _quiet_config(model: Any) -> Iterator[None]:
    """Save the config without `output_router_logits`, which TRL sets for its auxiliary loss."""
    config = model.config.get_text_config()
    value = getattr(config, "output_router_logits", None)
    if value:
        config.output_router_logits = False
    try:
        yield
    finally:
        if value:
            config.output_router_logits = value


def training_arguments(recipe: Recipe, output: Path, total_steps: int) -> SFTConfig:
    """The recipe in TRL's terms."""
    train = recipe.train
    return SFTConfig(
        output_dir=str(output),
        max_steps=total_steps,
        per_device_train_batch_size=train.batch_size,
        per_device_eval_batch_size=recipe.eval.batch_size,
        gradient_accumulation_steps=train.grad_accumulation,
        learning_rate=train.learning_rate,
        lr_scheduler_type=train.schedule,
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        optim=train.optimizer,
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        max_grad_norm=train.max_grad_norm,
        gradient_checkpointing=train.activation_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if train.activation_checkpointing else None,
        seed=train.seed,
        bf16=train.mixed_precision == "bf16",
        fp16=False,
        use_cpu=not torch.accelerator.is_available(),
        router_aux_loss_coef=recipe.moe.aux_loss_coef,
        eval_strategy="steps" if recipe.eval.every_steps else "no",
        eval_steps=recipe.eval.every_steps or None,
        metric_for_best_model="eval_loss" if recipe.eval.patience else None,
        greater_is_better=False if recipe.eval.patience else None,
        restore_callback_states_from_checkpoint=bool(recipe.eval.patience),
        save_strategy="steps" if recipe.checkpoint.every_steps else "no",
        save_steps=recipe.checkpoint.every_steps or total_steps,
        save_total_limit=None,
        logging_steps=recipe.logging.every_steps,
        logging_strategy="steps",
        logging_first_step=True,
        logging_nan_inf_filter=False,  # it would show a loss that is not finite as 0
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.accelerator.is_available(),
        dataset_kwargs={"skip_prepare_dataset": True},
        packing=recipe.data.packing,  # rows come packed: this makes the collator keep them apart
        max_length=None,
    )
