"""Launch: how many processes take part, what shards the model, and whether that is what the recipe asks for.

Owns the checks of `launch` and the command that a user should type; promises that a launcher's setting is either
in force or refused: accelerate itself starts one process, or drops FSDP, without a word. `train.run` joins with it.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from accelerate.utils import DistributedType

from coop.errors import CoopError, RecipeError
from train.schema import Recipe

SCRIPT = "train/finetune.py"
# the form that starts several processes without accelerators: `--cpu --num_processes 2` starts one (accelerate 1.15)
CPU_LAUNCH = (
    "ACCELERATE_USE_CPU=true accelerate launch "
    "--multi_gpu --num_machines 1 --mixed_precision no --dynamo_backend no"
)


def join_processes(recipe: Recipe, recipe_path: Path, is_dry: bool = False) -> PartialState:
    """The processes of this run. Raises CoopError where they are not what the launcher or the recipe says."""
    # TrainingArguments takes the launcher's value where it is not told bf16
    os.environ["ACCELERATE_MIXED_PRECISION"] = recipe.train.mixed_precision or "no"
    kind, asked = (None if recipe.launch.config is None else read_kind(recipe.launch.config)), sharding()
    state = PartialState(cpu=not torch.accelerator.is_available())
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != state.num_processes:
        raise CoopError(
            f"{launched} processes were launched but this one sees {state.num_processes}; start with: "
            f"{launch_command(recipe, recipe_path)} [key=value ...]"
        )
    _refuse_dropped(asked, state)
    _refuse_untried(asked, recipe)
    if not is_dry:
        _check_recipe(recipe, recipe_path, state, kind, asked)
    return state


def sharding() -> str:
    """What the launcher asked to shard the model with: FSDP, DEEPSPEED, or "" for nothing."""
    for name in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1", "yes"):
            return name
    return ""


def check_sharded(accelerator: Any) -> None:
    """Raise CoopError if the trainer's accelerator does not shard as the launcher asked for."""
    asked, found = (
        sharding(),
        str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type)),
    )
    if asked and found != asked:
        raise CoopError(f"the launcher asked for {asked}, but accelerate runs as {found}")


def read_kind(config: str) -> str:
    """What an accelerate config file asks for: FSDP, DEEPSPEED or "". Raises RecipeError for no such file."""
    from accelerate.commands.config.config_args import load_config_from_file

    if not Path(config).is_file():
        raise RecipeError(f"launch.config: {config}: no such file")
    try:
        kind = str(getattr(load_config_from_file(config).distributed_type, "value", ""))
    except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as exc:
        raise RecipeError(f"launch.config: {config}: not an accelerate config: {str(exc)[:200]}") from exc
    return kind if kind in ("FSDP", "DEEPSPEED") else ""


def launch_command(recipe: Recipe, recipe_path: Path) -> str:
    """The command that starts the run as the recipe asks for it."""
    launch, count = recipe.launch, recipe.launch.processes
    if launch.config is not None:
        number = f" --num_processes {count}" if count is not None else ""
        start = f"accelerate launch --config_file {shlex.quote(launch.config)}{number}"
    elif count == 1 or (count is None and int(os.environ.get("WORLD_SIZE", "1")) == 1):
        start = "accelerate launch"
    elif torch.accelerator.is_available():
        start = f"accelerate launch --multi_gpu --num_processes {count or 'N'}"
    else:
        start = f"{CPU_LAUNCH} --num_processes {count or 'N'}"
    return f"{start} {SCRIPT} {shlex.quote(str(recipe_path))}"


def _refuse_dropped(asked: str, state: PartialState) -> None:
    if asked and state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        count = (
            f"{state.num_processes} process{'es' if state.num_processes > 1 else ''} on {state.device.type}"
        )
        raise CoopError(
            f"the launcher asked for {asked}, which accelerate silently drops for {count}; start on several "
            "accelerators, or with a config without it such as recipes/launch/ddp.yaml"
        )


def _refuse_untried(asked: str, recipe: Recipe) -> None:
    if asked and recipe.tune.method == "lora":
        raise CoopError(
            f"tune.method: lora is not supported with {asked}: its expert factors cannot be sharded"
        )
    if asked and recipe.tune.experts.select != "all":
        raise CoopError(f"tune.experts.select: must be all with {asked}, which shards the experts")
    if asked and recipe.train.optimizer == "adafactor":
        raise CoopError("train.optimizer: adafactor cannot step sharded weights; take adamw_torch_fused")
    if asked and recipe.data.has_eval and recipe.eval.at_start:
        raise CoopError(
            f"eval.at_start: must be false with {asked}, which shards the model only when training begins"
        )
    if asked == "FSDP" and os.environ.get("FSDP_VERSION", "1") != "2":
        raise CoopError("the launcher asked for FSDP 1; set fsdp_version: 2, as in recipes/launch/fsdp2.yaml")


def _check_recipe(
    recipe: Recipe, recipe_path: Path, state: PartialState, kind: str | None, asked: str
) -> None:
    again = f"start with: {launch_command(recipe, recipe_path)} [key=value ...]"
    expected = recipe.launch.processes
    if expected is not None and expected != state.num_processes:
        raise CoopError(f"launch.processes is {expected}, but {state.num_processes} take part; {again}")
    if kind is not None and kind != asked:
        names = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "": "no sharding"}
        raise CoopError(
            f"launch.config {recipe.launch.config} means {names[kind]}, but the run has {names[asked]}; {again}"
        )
