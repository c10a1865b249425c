"""Schema: every key of a recipe, its default, its bounds and its meaning.

Owns the sections; promises that a key that is accepted is in force. `train.recipe` parses a file into a Recipe
and writes docs/recipes.md from the descriptions here.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from train.plain_yaml import PlainDumper

Group = Literal["attention", "experts", "shared_experts", "router", "other"]
Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"]
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
COLUMNS = [
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "prompt",
    "completion",
    "text",
    "system",
    "tools",
]


class Section(BaseModel):
    """A group of keys; unknown keys, wrong types, and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def changed(self, *names: str) -> str:
        """The first of `names` (all without any) whose value is not its default, "" if none is."""
        fields = type(self).model_fields
        return next((name for name in names or fields if getattr(self, name) != fields[name].default), "")


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
        default="50%",
        pattern=r"(?i)^(auto|[0-9]+(\.[0-9]+)? *(%|[kmgt]?i?b?))$",
        description="memory for offloaded experts: 6GiB, a share of all experts such as 50%, or auto; needs "
        "model.experts_offload",
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        default="sdpa", description="how transformers computes attention"
    )

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        if not self.experts_offload and self.changed("experts_budget"):
            raise ValueError("model.experts_budget: needs model.experts_offload=true")
        return self


class SourceSection(Section):
    """One source of rows. `data.train` and `data.eval` take a path, one source with these keys, or a list of them."""

    path: str = Field(
        min_length=1,
        description="file (.jsonl, .json, .csv, .tsv, each also with .gz, or .parquet), folder of such files, or "
        "dataset id of the hub such as owner/name",
    )
    format: Format | None = Field(default=None, description="what a row is; null: as data.format says")
    split: str | None = Field(
        default=None,
        pattern=r"^[\w.-]+(\[(-?\d+|\d+%)?:(-?\d+|\d+%)?\])?$",
        description="split and slice, such as train, train[:1000] or train[90%:], counted before bad rows are left "
        "out; in a folder, the files with that word in their name; a single file is the split train; null: all rows "
        "of a file or a folder, or the only split of a hub dataset",
    )
    subset: str | None = Field(
        default=None, description="configuration of a hub dataset; null: its only or default one"
    )
    weight: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="share of this source among all rows, relative to the other weights: as many rows as the shares "
        "allow without using one twice, picked by a hash of train.seed and the row's tokens; set it for every source "
        "of a list or for none; null: all rows",
    )
    max_rows: Count = Field(default=0, description="use only the first so many usable rows; 0: all")
    columns: dict[str, str] = Field(
        default={},
        description="columns with other names, ours to theirs, such as {instruction: question}; ours are "
        + ", ".join(COLUMNS),
    )

    @model_validator(mode="after")
    def _check(self) -> SourceSection:
        for ours in self.columns:
            if ours not in COLUMNS:
                raise ValueError(f"columns.{ours}: not a name of ours, which are {', '.join(COLUMNS)}")
        return self


def _as_sources(value: Any) -> Any:
    """A path or one source stands for a list of one."""
    if isinstance(value, str):
        return [{"path": value}]
    return [value] if isinstance(value, dict) else value


Sources = Annotated[list[SourceSection], Field(min_length=1, max_length=100), BeforeValidator(_as_sources)]


class DataSection(Section):
    """What is trained on. docs/data.md shows the formats, mixtures and packing by example."""

    train: Sources = Field(description="path to train on, or one source, or a list of sources: keys below")
    eval: Sources | None = Field(
        default=None, description="held-out rows, likewise; null: none, or those of data.eval_fraction"
    )
    eval_fraction: Annotated[float, Field(ge=0, le=0.5)] = Field(
        default=0.0,
        description="share of the training rows that is held out instead of data.eval, by a hash of train.seed and "
        "the row's tokens: equal rows are on the same side, and their order does not matter; 0: none",
    )
    format: Format = Field(
        default="auto", description="what a row is, unless its source says so; auto: seen by its keys"
    )
    loss_on: Literal["assistant", "all"] = Field(
        default="assistant",
        description="tokens that are trained: what the assistant wrote, its end mark included, or the whole row; "
        "plain text is trained whole in any case",
    )
    max_length: Annotated[int, Field(ge=8)] = Field(
        default=1024, description="tokens of a row, and of a packed sequence"
    )
    truncation: Literal["cut", "drop"] = Field(
        default="cut", description="a longer row is cut at its end, or dropped; both are counted"
    )
    packing: bool = Field(
        default=False,
        description="put several training rows into one sequence of up to max_length tokens; they do not see each "
        "other, which is tried out on the model before the first step; train.batch_size then counts sequences",
    )
    max_train_rows: Count = Field(
        default=0, description="use only the first so many rows, those of eval_fraction included; 0: all"
    )
    max_eval_rows: Count = Field(default=0, description="use only the first so many held-out rows; 0: all")
    strict: bool = Field(
        default=True, description="true: a bad row stops the start; false: it is counted and left out"
    )

    @property
    def has_eval(self) -> bool:
        """Whether rows are held out."""
        return self.eval is not None or self.eval_fraction > 0

    @property
    def train_names(self) -> str:
        """Where the training rows come from, as a part of a sentence."""
        return ", ".join(source.path for source in self.train)

    @property
    def eval_names(self) -> str:
        """Where the held-out rows come from, as a part of a sentence."""
        if self.eval is None:
            return f"{self.eval_fraction:g} of {self.train_names}" if self.eval_fraction else "none"
        return ", ".join(source.path for source in self.eval)

    @property
    def trained_part(self) -> str:
        """What of a row is trained, as a part of a sentence."""
        return "whole rows" if self.loss_on == "all" else "the assistant's tokens only"

    @model_validator(mode="after")
    def _check(self) -> DataSection:
        if self.eval is not None and self.eval_fraction:
            raise ValueError("data.eval_fraction: must be 0 with data.eval; set one of them")
        if self.max_eval_rows and not self.has_eval:
            raise ValueError("data.max_eval_rows: needs data.eval or data.eval_fraction")
        for name, sources in (("train", self.train), ("eval", self.eval or [])):
            _check_weights(name, sources)
            if len(sources) > 1 and getattr(self, f"max_{name}_rows"):
                raise ValueError(f"data.max_{name}_rows: needs one source; set max_rows of each instead")
        return self


def _check_weights(name: str, sources: list[SourceSection]) -> None:
    weighted = [source for source in sources if source.weight is not None]
    if weighted and len(sources) == 1:
        raise ValueError(f"data.{name}: weight needs a list of several sources")
    if weighted and len(weighted) < len(sources):
        missing = next(source.path for source in sources if source.weight is None)
        raise ValueError(f"data.{name}: {missing} has no weight; set it for every source or for none")


class LoraSection(Section):
    """Size of the adapters, with tune.method=lora."""

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
        idle = self.changed("share", "profile", "profile_rows")
        if idle and self.select != "hot":
            raise ValueError(f"tune.experts.{idle}: needs tune.experts.select=hot")
        if self.profile is not None and self.changed("profile_rows"):
            raise ValueError(
                "tune.experts.profile_rows: has no use with tune.experts.profile, which is counted"
            )
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
        if self.method == "full" and self.lora.changed():
            raise ValueError(f"tune.lora.{self.lora.changed()}: needs tune.method=lora")
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
        default=None,
        description="passes over the data; set this or `steps`. The last step of a pass may be short; the steps of a "
        "part of one are rounded up",
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
        "model.dtype. Experts that coop computes stay in model.dtype. A launcher's own setting is overruled",
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
    """Loss on held-out rows, the mean over their tokens; measured after training in any case when there are any."""

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
        if not self.push and self.changed():
            raise ValueError(f"hub.{self.changed()}: needs hub.push=true")
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


def _as_folder(name: str) -> str:
    """A path that the system can take, `~` expanded."""
    try:
        os.fsencode(name)
        expanded = os.path.expanduser(name)
    except UnicodeEncodeError as exc:
        raise ValueError("output: not a name that a folder can have") from exc
    if not name.strip() or "\0" in name or expanded.startswith("~"):
        raise ValueError(f"output: {name!r} is not a folder's name; write a path such as runs/demo")
    return expanded


class Recipe(Section):
    """A whole fine-tuning run."""

    output: Annotated[str, AfterValidator(_as_folder)] = Field(
        description="folder of the result; checkpoints go inside it"
    )
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
    launch: LaunchSection = LaunchSection()

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
        if not self.data.has_eval:
            if self.coop.profile.enabled and self.coop.profile.refresh_rows:
                raise ValueError(
                    "coop.profile.refresh_rows: needs data.eval or data.eval_fraction; set one of them "
                    "(0 keeps training counts)"
                )
            idle = self.eval.changed("every_steps", "batch_size", "patience")
            if idle:
                raise ValueError(f"eval.{idle}: needs data.eval or data.eval_fraction")
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
        keys = self.model_dump(mode="json", include={"model", "data", "tune", "moe", "train"})
        for name in ("experts_offload", "experts_budget"):  # the bits are the same at every budget
            del keys["model"][name]
        return _flatten(keys) | {"eval.patience": self.eval.patience}

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
