"""CoopTrainer: TRL's SFTTrainer whose checkpoints hold the profile, follow the umask and are marked when whole.

Owns nothing of its own; promises that a checkpoint is marked only when everything is in it, before older ones are
deleted, and that a fully tuned model resumes with its experts. `train.finetune` builds it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

from coop.errors import CoopError
from coop.profile import Profile
from train.balance import apply_aux_loss
from train.callback import CoopCallback
from train.checkpoint import describe_newest, follow_umask, mark_complete, rotate, saving
from train.data import Row, to_dataset
from train.expert_mask import ExpertMask
from train.schema import Recipe


class CoopTrainer(SFTTrainer):
    """The trainer of one recipe.

    Args:
        coop: counts and timings, or None when the recipe turns the profile off.
        mask: keeps the experts that are not selected, or None when all are trained.
        digest: goes into the mark of every checkpoint.
    """

    def __init__(
        self,
        *,
        coop: CoopCallback | None,
        mask: ExpertMask | None = None,
        digest: str,
        recipe: Recipe,
        **options: Any,
    ) -> None:
        self._coop, self._mask, self._digest, self._recipe = coop, mask, digest, recipe
        options["args"].router_aux_loss_coef = apply_aux_loss(options["model"], recipe)
        super().__init__(**options)
        self.remove_callback(PrinterCallback)
        for callback in (coop, mask):
            if callback is not None:
                self.add_callback(callback)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The weights that the optimiser decays: those of which some experts are frozen decay under their mask."""
        names: list[str] = super().get_decay_parameter_names(model)
        return self._mask.outside(names) if self._mask is not None else names

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Trainer's checkpoint, then the mark, then rotation: Trainer's own would run before the mark."""
        output = Path(self.args.output_dir)
        folder = output / f"checkpoint-{self.state.global_step}"
        with saving(output, folder):
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                follow_umask(folder)
                mark_complete(folder, self.state.global_step, self._digest)
                rotate(output, self._recipe.checkpoint.keep)
            self.accelerator.wait_for_everyone()

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: TRL's card names no model that is a folder; `train.report` writes one with facts at the end."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights and the profile of exactly these weights; all processes call it.

        Trainer calls it first of all in a checkpoint, so the profile is there before any push and before
        rotation. Checkpoints of a fully tuned model keep transformers' own names, because Trainer loads them
        back without converting (huggingface/transformers#48805).
        """
        folder = Path(output_dir or self.args.output_dir)
        self._refuse_broken_weights()
        with _own_names(self.model, _internal_call), _quiet_config(self.model):
            super().save_model(str(folder), _internal_call)
        if self._coop is not None:
            self.accelerator.wait_for_everyone()
            profile = self._coop.build_profile(folder, self.state.global_step, self._sum)
            if self.args.should_save:
                profile.save(folder)

    def save_result(self, output: Path, held_out: list[Row]) -> Profile | None:
        """The final weights, and their profile refreshed by a pass over `held_out`; no file of it is a pickle."""
        with saving(output, output):
            self.save_model(str(output))
            if self.args.should_save:
                (output / TRAINING_ARGS_NAME).unlink(missing_ok=True)
        profile = None
        if self._coop is not None:
            profile = self._coop.build_profile(output, self.state.global_step, self._sum)
            if held_out:
                profile = self._coop.refresh(profile, self._batches(held_out), self._sum)
        if self.args.should_save:
            with saving(output, output):
                if profile is not None:
                    profile.save(output)
                follow_umask(output)
        self.accelerator.wait_for_everyone()
        return profile

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
            yield {name: tensor.to(self.args.device) for name, tensor in batch.items()}

    def _sum(self, tensor: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return tensor
        summed: Tensor = self.accelerator.reduce(tensor.to(self.args.device), reduction="sum")
        return summed


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
        max_length=None,
    )
