"""Schema: every key of a recipe, its default, its bounds and its meaning.

Owns the sections; promises that a key that is accepted is in force. `train.recipe` parses a file into a Recipe
and writes docs/recipes.md from the descriptions here.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from train.plain_yaml import PlainDumper

Group = Literal["attention", "experts", "shared_experts", "router", "other"]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A group of keys; unknown keys, wrong types, and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """The model that is tuned."""

    path: str = Field(description="folder of the model in Hub layout, or a model id of the hub")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16",
        description="type the weights are loaded and run in; LoRA weights are always float32",
    )
    experts: Literal["auto", "coop", "grouped_mm", "batched_mm", "eager"] = Field(
        default="auto",
        description="who computes experts in training: coop (adapters applied expert by expert, never W + dW), "
        "or one of transformers; auto: coop for frozen experts with adapters or offload, else grouped_mm",
    )
    experts_offload: bool = Field(
        default=False,
        description="frozen experts stay on disk and are read in forward and again in backward, as many resident "
        "as model.experts_budget holds; for models larger than memory",
    )
    experts_budget: str = Field(
        default="50%", description="memory for offloaded experts: 6GiB, or a share of all experts such as 50%"
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        default="sdpa", description="how transformers computes attention"
    )


class DataSection(Section):
    """Chat data: one JSON object a line, `{"messages": [{"role": ..., "content": ...}, ...]}`."""

    train: str = Field(description="jsonl file to train on")
    eval: str | None = Field(
        default=None, description="jsonl file of held-out rows; null: no eval loss, no refreshed profile"
    )
    max_length: Annotated[int, Field(ge=8)] = Field(
        default=1024, description="tokens of a row; what is longer is cut at its end"
    )
    max_train_rows: Count = Field(default=0, description="use only the first so many rows; 0: all")
    max_eval_rows: Count = Field(default=0, description="use only the first so many held-out rows; 0: all")
    strict: bool = Field(
        default=True, description="true: a bad row stops the start; false: it is counted and left out"
    )


class LoraSection(Section):
    """Size of the adapters."""

    r: Positive = Field(default=8, description="rank")
    alpha: Positive = Field(default=16, description="scale; the update is multiplied by alpha / r")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="dropout before LoRA; must be 0 unless attention alone is trained (PEFT cannot drop elsewhere)",
    )


class TuneSection(Section):
    """Which weights are trained, and how."""

    method: Literal["lora", "full"] = Field(
        default="lora", description="adapters on frozen weights, or the weights themselves"
    )
    groups: Annotated[list[Group], Field(min_length=1)] = Field(
        default=["attention", "experts"],
        description="what is trained: attention, experts, shared_experts, router and, with `full`, other "
        "(embeddings, norms, dense layers); a group that matches nothing is refused",
    )
    lora: LoraSection = LoraSection()

    @model_validator(mode="after")
    def _check(self) -> TuneSection:
        if self.method == "lora" and "other" in self.groups:
            raise ValueError("tune.groups: 'other' needs tune.method=full")
        stacked = [group for group in self.groups if group not in ("attention", "other")]
        if self.method == "lora" and self.lora.dropout and stacked:
            raise ValueError(f"tune.lora.dropout: must be 0 when {' and '.join(stacked)} are in tune.groups")
        return self


class MoeSection(Section):
    """Load balancing while training."""

    aux_loss_coef: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="weight of the load-balancing loss, in training and eval loss; null: as the model says; 0: off",
    )


class TrainSection(Section):
    """The optimisation."""

    steps: Positive | None = Field(default=None, description="optimiser steps; set this or `epochs`")
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="passes over the data; set this or `steps`"
    )
    batch_size: Positive = Field(default=1, description="rows a device takes at once")
    grad_accumulation: Positive = Field(default=1, description="batches in one optimiser step")
    learning_rate: Annotated[float, Field(gt=0)] = Field(default=2e-4, description="highest learning rate")
    schedule: Literal["cosine", "linear", "constant_with_warmup"] = Field(
        default="cosine", description="how the learning rate falls after warm-up"
    )
    warmup_steps: Count = Field(default=0, description="steps in which the learning rate rises from 0")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, description="of AdamW")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="gradients are scaled down to this norm"
    )
    activation_checkpointing: bool = Field(
        default=False, description="compute activations again in backward to save memory"
    )
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(
        default=0, description="of shuffling, LoRA start values and dropout"
    )

    @model_validator(mode="after")
    def _check(self) -> TrainSection:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("train: set exactly one of train.steps and train.epochs")
        return self


class WarmupSection(Section):
    """The expert warm-up: one virtual task for every expert, timed, without touching the training."""

    every_steps: Count = Field(
        default=100,
        description="run it every so many optimiser steps, within `max_share`; what it has not reached by the end "
        "is made up after the last step; 0: never",
    )
    at_start: bool = Field(
        default=False,
        description="also run it before the first step, within `max_seconds` alone; a resumed run that has every "
        "timing goes without",
    )
    at_end: bool = Field(
        default=False, description="also run it after the last step, within `max_seconds` alone"
    )
    row_counts: Annotated[list[Annotated[int, Field(ge=1, le=65536)]], Field(min_length=1, max_length=16)] = (
        Field(default=[1, 8, 64], description="token rows of the virtual tasks, rising, at most 16")
    )
    repeats: Annotated[int, Field(ge=1, le=100)] = Field(
        default=3, description="runs of each task; the fastest of all warm-ups counts"
    )
    max_seconds: Annotated[float, Field(gt=0)] = Field(
        default=5.0, description="a warm-up stops after this long; the next one goes on where it stopped"
    )
    max_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.02,
        description="most that all warm-ups together may take of the training time so far; a scheduled one is "
        "shortened or postponed to keep it",
    )
    layers: Literal["all"] | Annotated[list[Count], Field(min_length=1)] = Field(
        default="all", description="all, or which MoE layers are timed, counted from 0, such as [0, 15]"
    )

    @model_validator(mode="after")
    def _check(self) -> WarmupSection:
        if sorted(set(self.row_counts)) != self.row_counts:
            raise ValueError("coop.warmup.row_counts: must rise, such as [1, 8, 64]")
        if self.layers != "all" and sorted(set(self.layers)) != self.layers:
            raise ValueError("coop.warmup.layers: must rise, such as [0, 15]")
        return self


class ProfileSection(Section):
    """The expert profile that is written into every checkpoint."""

    enabled: bool = Field(
        default=True, description="count how experts are used; false: no warm-up and no profile either"
    )
    refresh_rows: Count = Field(
        default=64,
        description="held-out rows routed through the final weights for the final profile; 0: keep training counts",
    )
    log_every_steps: Count = Field(
        default=50,
        description="record expert balance and predicted hit rates every so many optimiser steps; 0: only at the end",
    )


class CoopSection(Section):
    """What coop adds to training."""

    warmup: WarmupSection = WarmupSection()
    profile: ProfileSection = ProfileSection()


class EvalSection(Section):
    """Loss on held-out rows; measured before and after training in any case when `data.eval` is set."""

    every_steps: Count = Field(
        default=0, description="also measure every so many steps; 0: only before and after"
    )
    batch_size: Positive = Field(default=1, description="rows a device takes at once")


class CheckpointSection(Section):
    """Checkpoints to resume from, and the form of the result."""

    every_steps: Count = Field(
        default=100, description="write one every so many steps; 0: only the final result"
    )
    keep: Positive = Field(default=2, description="newest checkpoints that are kept")
    keep_best: bool = Field(
        default=False,
        description="also keep the checkpoint with the lowest eval loss, and make it the result; needs "
        "eval.every_steps, and checkpoint.every_steps a multiple of it",
    )
    on_failure: Literal["stop", "continue"] = Field(
        default="stop",
        description="when one cannot be written, such as for a full disk: stop and name the last whole one, or warn, "
        "train on and try again at the next",
    )
    final: Literal["adapter", "merged"] = Field(
        default="adapter",
        description="result of LoRA: the adapter alone, or also the whole model with it merged, in `merged` inside "
        "the output folder, for any program that reads Hub models",
    )
    pack: Literal["none", "bf16", "int8", "int4"] = Field(
        default="none",
        description="also write the result as a coop pack, in `pack` inside the output folder, as coop.pack does",
    )


class HubSection(Section):
    """Upload of the result; a failure never touches what is on this disk."""

    push: bool = Field(
        default=False, description="upload the result when it is finished; needs `hf auth login` or HF_TOKEN"
    )
    repo_id: str | None = Field(default=None, description="where to: NAME/MODEL; needed with push")
    private: bool = Field(
        default=True,
        description="a repository that the upload creates is private; one that exists stays as it is",
    )

    @model_validator(mode="after")
    def _check(self) -> HubSection:
        if self.push and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.repo_id or ""):
            raise ValueError("hub.repo_id: needed with hub.push, as NAME/MODEL")
        return self


class WandbSection(Section):
    """Tracking with W&B; a failure of it never stops a run, and a resumed run goes on under the same id."""

    mode: Literal["offline", "online", "disabled"] = Field(
        default="offline", description="where the run is tracked"
    )
    project: str = Field(default="coop", description="W&B project")
    run_name: str | None = Field(
        default=None, description="name of the run; null: the name of the output folder"
    )
    group: str | None = Field(default=None, description="group that the run is shown in; null: none")
    tags: Annotated[list[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=32)] = Field(
        default=[], description="tags of the run, at most 32"
    )
    detailed: bool = Field(
        default=False,
        description="also track the balance of every MoE layer; false: only numbers over all layers",
    )


class LoggingSection(Section):
    """What is shown while training."""

    every_steps: Positive = Field(default=1, description="show and record the loss every so many steps")
    wandb: WandbSection = WandbSection()


class Recipe(Section):
    """A whole fine-tuning run."""

    output: str = Field(description="folder of the result; checkpoints go inside it")
    model: ModelSection
    data: DataSection
    tune: TuneSection = TuneSection()
    moe: MoeSection = MoeSection()
    coop: CoopSection = CoopSection()
    train: TrainSection
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()
    hub: HubSection = HubSection()

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if self.model.experts_offload and self.tune.method == "full":
            raise ValueError("model.experts_offload: needs tune.method=lora: offloaded experts are read-only")
        if self.model.experts_offload and self.model.experts not in ("auto", "coop"):
            raise ValueError("model.experts: must be auto or coop with model.experts_offload")
        self._check_checkpoint()
        if self.model.experts == "coop" and self.tune.method == "full" and "experts" in self.tune.groups:
            raise ValueError(
                "model.experts: coop trains adapters on frozen experts; use auto with tune.method=full"
            )
        if self.data.eval is None:
            if self.coop.profile.enabled and self.coop.profile.refresh_rows:
                raise ValueError(
                    "coop.profile.refresh_rows: needs data.eval; set one of them (0 keeps training counts)"
                )
            if self.eval.every_steps:
                raise ValueError("eval.every_steps: needs data.eval")
        return self

    def _check_checkpoint(self) -> None:
        checkpoint = self.checkpoint
        if checkpoint.keep_best:
            if not (self.eval.every_steps and checkpoint.every_steps):
                raise ValueError("checkpoint.keep_best: needs eval.every_steps and checkpoint.every_steps")
            if checkpoint.every_steps % self.eval.every_steps:
                raise ValueError(
                    "checkpoint.keep_best: checkpoint.every_steps must be a multiple of eval.every_steps, so that "
                    "every checkpoint has its eval loss"
                )
        if checkpoint.final == "merged" and self.tune.method == "full":
            raise ValueError(
                "checkpoint.final: merged is for tune.method=lora; full tuning has nothing to merge"
            )

    @property
    def deciding(self) -> dict[str, Any]:
        """What decides the weights, by dotted key: a resumed run must agree with it."""
        return _flatten(self.model_dump(mode="json", include={"model", "data", "tune", "moe", "train"}))

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the weights."""
        return hashlib.sha256(yaml.safe_dump(self.deciding, sort_keys=True).encode()).hexdigest()

    def to_yaml(self) -> str:
        """The resolved recipe, every key spelled out; `load_recipe` reads it back as the same."""
        return yaml.dump(self.model_dump(), Dumper=PlainDumper, sort_keys=False)


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
