"""Schema: every key of a recipe, its default, its bounds and its meaning.

Owns the sections; promises that a key that is accepted is in force. `train.recipe` parses a file into a Recipe
and writes docs/recipes.md from the descriptions here.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from train.plain_yaml import PlainDumper

Group = Literal["attention", "experts", "shared_experts", "router", "other"]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _spell_range(entry: Any) -> Any:
    """A freeze entry written as a mapping, `layers: 0-11`, is the text "layers: 0-11"."""
    if isinstance(entry, dict) and list(entry) == ["layers"]:
        return f"layers: {entry['layers']}"
    return entry


FreezeEntry = Annotated[str, BeforeValidator(_spell_range), Field(min_length=1)]
ExpertList = Annotated[str, Field(pattern=r"^(\d+|\*):\d+(-\d+)?(,\d+(-\d+)?)*$")]
ExpertLists = list[ExpertList]


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
    rslora: bool = Field(default=False, description="scale by alpha / sqrt(r) instead of alpha / r")
    expert_r: Positive | None = Field(
        default=None, description="rank on routed experts, which then scale by alpha / expert_r; null: r"
    )


class ExpertsSection(Section):
    """Which routed experts are trained; layers are counted among the MoE layers from 0, as in profiles."""

    select: Literal["all", "hot", "list"] = Field(
        default="all",
        description="all; hot: in each layer the fewest that cover `share` of the uses; or those of `list`. "
        "The others keep their weights bit for bit",
    )
    list: ExpertLists = Field(
        default=[],
        description="with select=list: one entry `layer:experts` for each layer that is trained, such as "
        '"0:1,5,8-11"; `*` is every layer',
    )
    share: Share = Field(default=0.9, description="with select=hot: the share of uses that is covered")
    profile: str | None = Field(
        default=None,
        description="with select=hot: folder of an expert profile of this model; null: count the uses in a pass "
        "of training rows through the base model before the first step",
    )
    profile_rows: Positive = Field(default=64, description="training rows of that pass")

    @model_validator(mode="after")
    def _check(self) -> ExpertsSection:
        if bool(self.list) != (self.select == "list"):
            raise ValueError("tune.experts.list: goes with tune.experts.select=list, and only with it")
        if self.profile is not None and self.select != "hot":
            raise ValueError("tune.experts.profile: needs tune.experts.select=hot")
        return self


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
    freeze: list[FreezeEntry] = Field(
        default=[],
        description="exceptions from `groups`: a group, a range of decoder layers such as `layers: 0-11`, or a name "
        "with `*` such as `*.o_proj.weight`; an entry that freezes nothing is refused",
    )
    experts: ExpertsSection = ExpertsSection()
    lora: LoraSection = LoraSection()

    @model_validator(mode="after")
    def _check(self) -> TuneSection:
        if "experts" not in self.groups and self.experts.select != "all":
            raise ValueError("tune.experts.select: needs experts in tune.groups")
        if "experts" not in self.groups and self.lora.expert_r is not None:
            raise ValueError("tune.lora.expert_r: needs experts in tune.groups")
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
        description="weight of the load-balancing loss, in training and eval loss; null: as the model says; 0: off; "
        "above 0 it is refused for a model whose code has no such loss",
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
    warmup_steps: Count | Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0, description="steps in which the learning rate rises from 0; below 1: a share of all steps"
    )
    optimizer: Literal["adamw_torch_fused", "adamw_torch", "adafactor"] = Field(
        default="adamw_torch_fused",
        description="adafactor keeps no moments of full size: 8 bytes less for each trained float32 weight",
    )
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = Field(
        default=[0.9, 0.999], description="of AdamW"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, description="of the optimiser")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="gradients are scaled down to this norm"
    )
    activation_checkpointing: bool = Field(
        default=False, description="compute activations again in backward to save memory"
    )
    mixed_precision: Literal["bf16"] | None = Field(
        default=None,
        description="bf16: autocast to bfloat16, and with FSDP2 trained weights are kept in float32; null: all in "
        "model.dtype. A launcher's own setting is overruled",
    )
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(
        default=0, description="of shuffling, LoRA start values and dropout"
    )

    @model_validator(mode="after")
    def _check(self) -> TrainSection:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("train: set exactly one of train.steps and train.epochs")
        if self.optimizer == "adafactor" and self.betas != [0.9, 0.999]:
            raise ValueError("train.betas: adafactor has none; leave them at [0.9, 0.999]")
        return self


class WarmupSection(Section):
    """The expert warm-up: one virtual task for every expert, timed, without touching the training."""

    every_steps: Count = Field(default=100, description="run it every so many optimiser steps; 0: never")
    row_counts: Annotated[list[Annotated[int, Field(ge=1, le=65536)]], Field(min_length=1, max_length=16)] = (
        Field(default=[1, 8, 64], description="token rows of the virtual tasks, rising, at most 16")
    )
    repeats: Annotated[int, Field(ge=1, le=100)] = Field(
        default=3, description="runs of each task; the fastest of all warm-ups counts"
    )
    max_seconds: Annotated[float, Field(gt=0)] = Field(
        default=5.0, description="a warm-up stops after this long"
    )

    @model_validator(mode="after")
    def _check(self) -> WarmupSection:
        if sorted(set(self.row_counts)) != self.row_counts:
            raise ValueError("coop.warmup.row_counts: must rise, such as [1, 8, 64]")
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


class CoopSection(Section):
    """What coop adds to training."""

    warmup: WarmupSection = WarmupSection()
    profile: ProfileSection = ProfileSection()


class EvalSection(Section):
    """Loss on held-out rows; measured after training in any case when `data.eval` is set."""

    at_start: bool = Field(default=True, description="also measure before training; must be false with FSDP")
    every_steps: Count = Field(
        default=0, description="also measure every so many steps; 0: only before and after"
    )
    batch_size: Positive = Field(default=1, description="rows a device takes at once")
    patience: Count = Field(
        default=0,
        description="stop after so many measurements in a row without a new lowest loss; the last weights are the "
        "result; 0: never",
    )

    @model_validator(mode="after")
    def _check(self) -> EvalSection:
        if self.patience and not self.every_steps:
            raise ValueError("eval.patience: needs eval.every_steps")
        return self


class CheckpointSection(Section):
    """Checkpoints to resume from."""

    every_steps: Count = Field(
        default=100, description="write one every so many steps; 0: only the final result"
    )
    keep: Positive = Field(default=2, description="newest checkpoints that are kept")


class WandbSection(Section):
    """Tracking with W&B; a failure of it never stops a run."""

    mode: Literal["offline", "online", "disabled"] = Field(
        default="offline", description="where the run is tracked"
    )
    project: str = Field(default="coop", description="W&B project")
    run_name: str | None = Field(
        default=None, description="name of the run; null: the name of the output folder"
    )


class LoggingSection(Section):
    """What is shown while training."""

    every_steps: Positive = Field(default=1, description="show and record the loss every so many steps")
    wandb: WandbSection = WandbSection()


class LaunchSection(Section):
    """How the run is meant to be started; a start in another way is refused. A dry run may be started anyhow."""

    processes: Positive | None = Field(
        default=None, description="processes that must take part; null: as many as there are"
    )
    config: str | None = Field(
        default=None,
        description="accelerate config file that the run must be started with, such as recipes/launch/fsdp2.yaml; "
        "its kind (FSDP, DeepSpeed or neither) is checked",
    )


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
    launch: LaunchSection = LaunchSection()

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if self.model.experts_offload and self.tune.method == "full":
            raise ValueError("model.experts_offload: needs tune.method=lora: offloaded experts are read-only")
        if self.model.experts_offload and self.model.experts not in ("auto", "coop"):
            raise ValueError("model.experts: must be auto or coop with model.experts_offload")
        if self.data.eval is None:
            if self.coop.profile.enabled and self.coop.profile.refresh_rows:
                raise ValueError(
                    "coop.profile.refresh_rows: needs data.eval; set one of them (0 keeps training counts)"
                )
            if self.eval.every_steps:
                raise ValueError("eval.every_steps: needs data.eval")
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the weights: a resumed run must agree with it."""
        deciding = self.model_dump(
            include={
                "model": True,
                "data": True,
                "tune": True,
                "moe": True,
                "train": True,
                "eval": {"patience"},
            }
        )
        return hashlib.sha256(yaml.safe_dump(deciding, sort_keys=True).encode()).hexdigest()

    def to_yaml(self) -> str:
        """The resolved recipe, every key spelled out; `load_recipe` reads it back as the same."""
        return yaml.dump(self.model_dump(), Dumper=PlainDumper, sort_keys=False)
