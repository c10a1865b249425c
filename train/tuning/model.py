"""Model: loads what is tuned, finds the weights of each group, and makes exactly those trainable.

Owns the groups (attention, experts, shared_experts, router, other); promises that a group that is asked for and
matches nothing is refused, and that nothing else is trained. `train.run` calls it, for a dry run with a model on
the meta device.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from coop.adapters.offload import Offloaded, open_offloaded, plan_offload
from coop.adapters.training import ExpertTraining, why_not
from coop.adapters.transformers import PEFT_PREFIX, _refuse_gaps, build_on_meta, find_experts, model_class
from coop.errors import CheckpointError, CoopError, RecipeError
from train.launch import sharding
from train.tuning.freeze import Freezer

if TYPE_CHECKING:
    from coop.plan import Plan
    from train.schema import Recipe, TuneSection

_FIRST_BACKEND = {"auto": "grouped_mm", "coop": "grouped_mm"}  # until `put_experts_in_force`
GROUPS = ("attention", "experts", "shared_experts", "router", "other")
SHARED_NAMES = ("shared_expert", "shared_experts", "shared_mlp", "shared_expert_gate")


@dataclass(frozen=True, slots=True)
class LoraTargets:
    """What PEFT is told: linear modules, and stacked parameters, by name suffix where that is unambiguous.

    `weights` are the full names of the weights that get adapters.
    """

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    weights: frozenset[str]


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Parameters of one group: how many there are, and how many are trained."""

    group: str
    total: int
    trainable: int


@dataclass(frozen=True, slots=True)
class TrainedWeight:
    """One weight that is trained: by an adapter of `rank`, or itself where `rank` is 0."""

    name: str
    group: str
    shape: tuple[int, ...]
    rank: int


def load_tokenizer(recipe: Recipe) -> Any:
    """The tokenizer beside the model. Raises CheckpointError if it cannot be loaded."""
    from transformers import AutoTokenizer

    _check_folder(recipe.model.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(recipe.model.path, trust_remote_code=False)
    except (OSError, ValueError) as exc:
        raise CheckpointError(
            f"{recipe.model.path}: no tokenizer can be loaded: {_first_line(exc)}{_how_to_get(recipe)}"
        ) from exc
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _how_to_get(recipe: Recipe) -> str:
    """What to do about a model that is not here."""
    path = recipe.model.path
    return (
        ""
        if is_local(recipe)
        else f"; download it where there is a network (hf download {path}) and give model.path=FOLDER"
    )


def load_config(recipe: Recipe) -> Any:
    """The model's config. Raises CheckpointError saying what is missing and what to do."""
    from transformers import AutoConfig

    path = recipe.model.path
    _check_folder(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"model.path: {path}: {_first_line(exc)}") from exc
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        kind = dict(quantised).get("quant_method", "quantised")
        raise CheckpointError(
            f"model.path: {path} holds {kind} weights, which cannot be trained: give a copy in bfloat16"
        )
    _refuse_attention(recipe, model_class(config))
    return config


def _refuse_attention(recipe: Recipe, model: type[nn.Module]) -> None:
    """Not every family has every implementation; transformers says so only once the weights are loaded."""
    asked = recipe.model.attention
    flag = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}.get(asked)
    if flag is not None and not getattr(model, flag, False):
        raise CheckpointError(f"model.attention: {model.__name__} does not support {asked}; set it to eager")


def load_model(recipe: Recipe) -> nn.Module:
    """The model with weights, in the recipe's type and implementations. Raises CheckpointError if any is missing."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    load_config(recipe)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            recipe.model.path,
            dtype=getattr(torch, recipe.model.dtype),
            experts_implementation=_FIRST_BACKEND.get(recipe.model.experts, recipe.model.experts),
            attn_implementation=recipe.model.attention,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as exc:
        raise CheckpointError(f"model.path: {recipe.model.path}: {_first_line(exc)}") from exc
    _refuse_gaps(Path(recipe.model.path), model, report)
    loaded: nn.Module = model
    return loaded


def load_offloaded(recipe: Recipe, device: str) -> Offloaded:
    """The model with its experts left on disk, served under the recipe's budget; close it after training."""
    model = recipe.model
    return open_offloaded(
        model.path,
        budget=model.experts_budget,
        dtype=getattr(torch, model.dtype),
        attention=model.attention,
        device=device,
    )


def plan_offloaded(recipe: Recipe, device: str) -> Plan:
    """What `load_offloaded` would use, from the headers alone, for a dry run."""
    model = recipe.model
    return plan_offload(
        model.path, budget=model.experts_budget, dtype=getattr(torch, model.dtype), device=device
    )


def expert_backend(recipe: Recipe, model: nn.Module) -> str:
    """Who computes experts: what the recipe says, or for `auto` coop where experts are frozen and adapted.

    RecipeError for coop with weights that are spread over processes (FSDP, DeepSpeed).
    """
    asked = sharding()
    wanted = "coop" if recipe.model.experts_offload else recipe.model.experts
    if wanted == "coop" and asked:
        key = "experts_offload=false" if recipe.model.experts_offload else "experts=grouped_mm"
        raise RecipeError(
            f"{asked} spreads weights over processes, which coop's experts do not: set model.{key}"
        )
    if wanted != "auto":
        return wanted
    is_adapted = recipe.tune.method == "lora" and "experts" in recipe.tune.groups and not asked
    return "coop" if is_adapted and not any(why_not(e) for e in find_experts(model)) else "grouped_mm"


def put_experts_in_force(model: nn.Module, backend: str, offloaded: Offloaded | None) -> None:
    """Let coop compute the experts of a model that is ready to be trained, if it is asked to."""
    if backend == "coop":
        ExpertTraining(model, offloaded.scheduler if offloaded else None)


def load_skeleton(recipe: Recipe) -> nn.Module:
    """The model without weights, for a dry run."""
    return build_on_meta(load_config(recipe))


def is_local(recipe: Recipe) -> bool:
    """Whether the model is a folder here, so that nothing needs the network."""
    return Path(recipe.model.path).is_dir()


def _check_folder(path: str) -> None:
    if _looks_local(path) and not Path(path, "config.json").is_file():
        raise CheckpointError(f"model.path: {path} holds no config.json: make or download the model first")


def _looks_local(path: str) -> bool:
    return (
        Path(path).exists()
        or path.startswith((".", "/", "~"))
        or path.count("/") != 1
        or path.startswith("models/")
    )


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0][:200]


class Groups:
    """Which group each weight of a model belongs to. Build it before PEFT wraps the model."""

    def __init__(self, model: nn.Module) -> None:
        self._experts = tuple(entry.name for entry in find_experts(model))
        blocks = [name.rpartition(".")[0] for name in self._experts]
        self._routers = tuple(f"{block}.{router}" for block in blocks for router in ("gate", "router"))
        self._attention = tuple(name for name, m in model.named_modules() if "Attention" in type(m).__name__)

    def of(self, name: str) -> str:
        """The group of a module or parameter, by its name in the model or in a PEFT model around it."""
        name = name.removeprefix(PEFT_PREFIX).replace(".base_layer", "")
        if _is_under(name, self._experts):
            return "experts"
        if _is_under(name, self._routers):
            return "router"
        parts = name.split(".")
        if any(part in SHARED_NAMES for part in parts):
            return "shared_experts"
        return "attention" if _is_under(name, self._attention) else "other"


def _is_under(name: str, parents: Iterable[str]) -> bool:
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def find_targets(model: nn.Module, wanted: Sequence[str], freeze: Sequence[str] = ()) -> LoraTargets:
    """Where LoRA goes for the groups `wanted` less what `freeze` excepts. Raises RecipeError if one matches nothing."""
    groups, freezer = Groups(model), Freezer(freeze)
    chosen = {
        name: group
        for name, group in _adaptable(model, groups)
        if group in wanted and not freezer(name, group)
    }
    freezer.refuse_unused()
    _refuse_empty(model, [group for group in wanted if group not in chosen.values()], groups)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    every = [name for name, _ in model.named_parameters()]
    # PEFT rewrites modules named like experts of older checkpoints (gate_proj, up_proj, down_proj) to the
    # stacked experts, which shared experts are not; it leaves parameters alone
    modules = [
        name.removesuffix(".weight")
        for name, group in chosen.items()
        if group != "shared_experts" and name.removesuffix(".weight") in linear
    ]
    parameters = [name for name in chosen if name.removesuffix(".weight") not in modules]
    return LoraTargets(
        shortest_suffixes(modules, linear, 1), shortest_suffixes(parameters, every, 3), frozenset(chosen)
    )


def _adaptable(model: nn.Module, groups: Groups) -> Iterator[tuple[str, str]]:
    """Weights that LoRA can adapt, with their group: linear layers, stacked experts and routers; never a bias."""
    for name, module in model.named_modules():
        # a gate of one output has nothing to factor
        if isinstance(module, nn.Linear) and module.out_features > 1:
            yield f"{name}.weight", groups.of(name)
    for entry in find_experts(model):
        for parameter in entry.parameters:
            if not parameter.endswith("_bias"):
                yield f"{entry.name}.{parameter}", "experts"
    for name, weight in model.named_parameters():
        if groups.of(name) == "router" and weight.ndim == 2:
            yield name, "router"


def _refuse_empty(model: nn.Module, empty: list[str], groups: Groups) -> None:
    present = {groups.of(name) for name, _ in model.named_parameters()}
    frozen = [group for group in empty if group in present]
    if frozen:
        raise RecipeError(
            f"tune.freeze: leaves nothing of {', '.join(frozen)} to train: take it out of tune.groups"
        )
    if empty:
        raise RecipeError(f"tune.groups: {', '.join(empty)} matches nothing in {type(model).__name__}")


def shortest_suffixes(chosen: Iterable[str], every: Sequence[str], parts: int) -> tuple[str, ...]:
    """The last `parts` parts of the chosen names if they choose nothing else, else the whole names."""
    names = list(chosen)
    short = sorted({".".join(name.split(".")[-parts:]) for name in names})
    matched = [name for name in every if any(name == s or name.endswith("." + s) for s in short)]
    return tuple(short) if len(matched) == len(names) else tuple(names)


def make_trainable(model: nn.Module, tune: TuneSection, base_path: str) -> nn.Module:
    """The model with exactly the groups of the recipe trainable; a PeftModel for LoRA. Raises RecipeError."""
    if tune.method == "full":
        return _unfreeze(model, tune.groups, tune.freeze)
    from peft import LoraConfig, get_peft_model

    targets, groups = find_targets(model, tune.groups, tune.freeze), Groups(model)
    config = LoraConfig(
        r=tune.lora.r,
        lora_alpha=tune.lora.alpha,
        lora_dropout=tune.lora.dropout,
        use_rslora=tune.lora.rslora,
        rank_pattern=_rank_pattern(model, tune),
        target_modules=list(targets.modules),
        target_parameters=list(targets.parameters) or None,
        base_model_name_or_path=base_path,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # PEFT 0.21 looks for rank patterns among modules only and says that those of parameters match nothing
            warnings.filterwarnings("ignore", message="The following rank_pattern", category=RuntimeWarning)
            wrapped = get_peft_model(model, config)
    except (ValueError, RuntimeError) as exc:
        raise RecipeError(f"tune: PEFT refuses these targets: {_first_line(exc)}") from exc
    _check_adapted({weight.name for weight in trained_weights(wrapped, groups)}, targets.weights)
    return wrapped


def _rank_pattern(model: nn.Module, tune: TuneSection) -> dict[str, int]:
    """The rank of expert parameters where it differs, by regular expressions of their names."""
    if tune.lora.expert_r is None:
        return {}
    names = sorted({f"{e.name.rpartition('.')[2]}.{p}" for e in find_experts(model) for p in e.parameters})
    return {re.escape(name): tune.lora.expert_r for name in names if not name.endswith("_bias")}


def _check_adapted(adapted: set[str], wanted: frozenset[str]) -> None:
    differing = sorted(adapted ^ wanted)
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        kind = "adapted without being asked for" if differing[0] in adapted else "not adapted"
        raise CoopError(f"PEFT disagrees about its targets: {differing[0]}{more}: {kind}")


def _unfreeze(model: nn.Module, wanted: Sequence[str], freeze: Sequence[str]) -> nn.Module:
    groups, freezer = Groups(model), Freezer(freeze)
    found = set()
    for name, parameter in model.named_parameters():
        group = groups.of(name)
        is_trained = group in wanted and not freezer(name, group)
        parameter.requires_grad_(is_trained)
        found.update([group] if is_trained else [])
    freezer.refuse_unused()
    _refuse_empty(model, [group for group in wanted if group not in found], groups)
    return model


def trained_weights(model: nn.Module, groups: Groups) -> list[TrainedWeight]:
    """Every weight of the model, under its name there, that an adapter or the optimiser changes."""
    adapted = [w for name, m in model.named_modules() for w in _adapted_weights(name, m, groups)]
    plain = [
        TrainedWeight(name, groups.of(name), tuple(parameter.shape), 0)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ".lora_" not in name
    ]
    return adapted + plain


def _adapted_weights(name: str, module: nn.Module, groups: Groups) -> Iterator[TrainedWeight]:
    from peft.tuners.lora import LoraLayer

    if not isinstance(module, LoraLayer):
        return
    plain = name.removeprefix(PEFT_PREFIX).replace(".base_layer", "")
    layer: Any = module
    parameter = getattr(layer, "parameter_name", "weight")
    shape = tuple(getattr(layer.get_base_layer(), parameter).shape)
    ranks = [layer.r[adapter] for adapter in layer.active_adapters if adapter in layer.lora_A]
    if ranks and all(p.requires_grad for key, p in layer.named_parameters() if key.startswith("lora_")):
        yield TrainedWeight(f"{plain}.{parameter}", groups.of(plain), shape, ranks[0])


def group_sizes(model: nn.Module, groups: Groups, masked: int = 0) -> list[GroupSize]:
    """Parameters by group, all groups that exist, adapters included; `masked` of the experts' are held fast."""
    totals, trainable = dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 0)
    for name, parameter in model.named_parameters():
        group = groups.of(name)
        totals[group] += parameter.numel()
        trainable[group] += parameter.numel() if parameter.requires_grad else 0
    trainable["experts"] -= masked
    return [GroupSize(group, totals[group], trainable[group]) for group in GROUPS if totals[group]]


def check_trainable(sizes: list[GroupSize], wanted: Sequence[str]) -> None:
    """Assert that exactly the wanted groups are trained; anything else is a library that ignored its targets."""
    trained = {size.group for size in sizes if size.trainable}
    if trained != set(wanted):
        raise CoopError(
            f"asked to train {sorted(wanted)}, but the libraries made {sorted(trained)} trainable"
        )
