"""The transformers side of coop: where a model keeps its experts, and how it is built without them.

Owns no state beyond the registered experts function; promises that expert weights of a model built here
are never allocated. Called by `attach`, by the layout, and by training to find and name experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from coop.errors import CheckpointError, CoopError

if TYPE_CHECKING:
    from coop.profile import ProfileIdentity
    from coop.scheduler import Scheduler

IMPLEMENTATION = "coop"
EXPERT_PARAMETERS = (
    "gate_up_proj",
    "gate_up_proj_bias",
    "up_proj",
    "up_proj_bias",
    "down_proj",
    "down_proj_bias",
)
_ROUTER_NAMES = ("gate", "router")
_TOP_K_NAMES = ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token", "moe_k")
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class ExpertsModule:
    """One experts module of a model: `layer` is its ordinal among the MoE layers, `name` is without PEFT prefixes."""

    name: str
    module: nn.Module
    num_experts: int
    top_k: int
    layer: int

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the stacked expert parameters that this class has, in slot order."""
        return tuple(name for name in EXPERT_PARAMETERS if name in self.module._parameters)


def find_experts(model: nn.Module) -> list[ExpertsModule]:
    """Every experts module decorated with transformers' `use_experts_implementation`, in `named_modules` order.

    PEFT wrappers are looked through. Raises CheckpointError if the model has none, by the name of its class.
    """
    found: list[ExpertsModule] = []
    for name, module in model.named_modules():
        if "has_gate" not in module.__dict__ or "is_transposed" not in module.__dict__:
            continue
        plain = name.removeprefix(PEFT_PREFIX).replace(".base_layer", "")
        top_k = _top_k(model, plain, module)
        found.append(ExpertsModule(plain, module, int(_plain(module).num_experts), top_k, len(found)))
    if not found:
        raise CheckpointError(
            f"{type(model).__name__} has no mixture-of-experts layer that transformers lets a back-end serve "
            "(a dense model, or a family without `use_experts_implementation`)"
        )
    return found


def _plain(module: nn.Module) -> Any:
    """The module, for reading attributes that `nn.Module` types as tensors."""
    return module


def _top_k(model: nn.Module, name: str, module: nn.Module) -> int:
    for router in routers_of(model, name):
        if isinstance(getattr(router, "top_k", None), int):
            return int(_plain(router).top_k)
    config = module.config
    for key in _TOP_K_NAMES:
        if isinstance(getattr(config, key, None), int):
            return int(getattr(config, key))
    raise CheckpointError(
        f"{name}: the number of experts per token is neither on its router nor in the config"
    )


def routers_of(model: nn.Module, experts_name: str) -> Iterator[nn.Module]:
    """The router beside an experts module: the child of the same block named `gate` or `router`."""
    parent_name, _, _ = experts_name.rpartition(".")
    wanted = {f"{parent_name}.{router}" if parent_name else router for router in _ROUTER_NAMES}
    for name, module in model.named_modules():
        if name.removeprefix(PEFT_PREFIX) in wanted:
            yield _plain(module).get_base_layer() if hasattr(module, "get_base_layer") else module


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether each process holds only a part of it (FSDP2); the whole is gathered by all processes together."""
    return hasattr(parameter, "full_tensor")


def router_digest(model: nn.Module) -> str:
    """SHA-256 over every router parameter rounded to bfloat16, in layer order: the routing a profile belongs to.

    Rounding makes the digest the same for a float32 training copy and the bfloat16 file it was loaded from.
    Experts without a recognisable router contribute their name only. Where routers are sharded, every process
    calls it together.
    """
    digest = hashlib.sha256()
    for experts in find_experts(model):
        digest.update(experts.name.encode())
        for router in routers_of(model, experts.name):
            for name, parameter in sorted(router.named_parameters(recurse=True)):
                if "lora_" in name:
                    continue
                weight: Any = parameter
                whole = weight.full_tensor() if is_sharded(weight) else weight
                values = whole.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8)
                digest.update(name.encode())
                digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 over the vocabulary, or "" without a tokenizer."""
    if tokenizer is None:
        return ""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}:{token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def model_identity(model: nn.Module, tokenizer: Any = None, adapter_digest: str = "") -> ProfileIdentity:
    """What a profile of this model must agree with: architecture, layers, router weights, vocabulary."""
    from coop.profile import ProfileIdentity

    experts = find_experts(model)
    base = _plain(model).get_base_model() if hasattr(model, "get_base_model") else model
    return ProfileIdentity(
        architecture=_class_name(base),
        layers=tuple(e.name for e in experts),
        num_experts=max(e.num_experts for e in experts),
        top_k=max(e.top_k for e in experts),
        router_digest=router_digest(model),
        adapter_digest=adapter_digest,
        tokenizer_digest=tokenizer_digest(tokenizer),
    )


def _class_name(model: nn.Module) -> str:
    """The model's class, also where FSDP2 has put one of its own, named after it, in front."""
    cls = type(model)
    return (cls.__bases__[-1] if cls.__name__.startswith("FSDP") else cls).__name__


def experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The function registered with transformers as "coop".

    hidden_states [tokens, hidden], top_k_index int64 [tokens, k], top_k_weights [tokens, k] -> [tokens, hidden].
    """
    scheduler, layer = served_by(self)
    return scheduler.execute(layer, hidden_states, top_k_index, top_k_weights)


def served_by(experts: nn.Module) -> tuple[Scheduler, int]:
    """The scheduler and layer ordinal that serve this experts module; CoopError if it was never attached."""
    served: tuple[Scheduler, int] | None = experts.__dict__.get("coop_served_by")
    if served is None:
        raise CoopError(
            "this model asks for the experts implementation 'coop' but was not attached: use coop.attach"
        )
    return served


def serve(experts: list[ExpertsModule], scheduler: Scheduler) -> None:
    """Point every experts module at `scheduler`; the attribute does not enter the state dict."""
    for entry in experts:
        entry.module.__dict__["coop_served_by"] = (scheduler, entry.layer)
        entry.module.register_state_dict_pre_hook(_refuse_state)


def register() -> None:
    """Make the name "coop" known to transformers; safe to call again."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def make_absent(experts: ExpertsModule) -> None:
    """Drop the stacked weights of an experts module; the module keeps its flags, activation and norms."""
    for name in experts.parameters:
        experts.module._parameters[name] = None
    # nothing is left here for transformers to initialise
    _plain(experts.module)._is_hf_initialized = True


def _refuse_state(module: nn.Module, *_: Any) -> None:
    raise CoopError(
        "this model's experts are served from its checkpoint and are not in it: saving it would lose them; "
        "copy the checkpoint's folder, or load the model without coop"
    )


def model_class(config: Any) -> type[nn.Module]:
    """The causal language model class of a config; CheckpointError names a model type that has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise CheckpointError(f"model type {config.model_type!r} has no causal language model") from None
    return found[0] if isinstance(found, tuple) else found


def build_on_meta(config: Any) -> nn.Module:
    """The whole model with every weight on the meta device: shapes and names, no memory.

    Raises CheckpointError for a config that its own model class cannot be built from.
    """
    model = model_class(config)
    try:
        with torch.device("meta"):
            return model(config)
    except Exception as exc:  # a stranger's config can make a model class raise anything
        raise CheckpointError(
            f"the config does not describe a {config.model_type} model: {type(exc).__name__}: {str(exc)[:200]}"
        ) from exc


def load_without_experts(
    folder: Path, config: Any, dtype: torch.dtype, attention: str | None = None
) -> nn.Module:
    """The model of a Hub-layout folder with dense weights loaded and expert weights absent.

    transformers loads it: conversion, tying, buffers and generation config are its own. Keys of expert
    tensors are unexpected to the pruned class, so their bytes are never read. CheckpointError for dense
    weights that are missing or of another shape, where transformers would go on with random ones.
    """
    register()
    pruned: Any = _without_experts(model_class(config))
    try:
        model, report = pruned.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            experts_implementation=IMPLEMENTATION,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as exc:  # a stranger's files can make the loader raise anything
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        raise CheckpointError(f"{folder}: transformers cannot load it: {reason[:200]}") from exc
    _refuse_gaps(folder, model, report)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()  # off the mapped file: one that shrinks would kill the process
    return model.eval()


def _refuse_gaps(folder: Path, model: nn.Module, report: dict[str, Any]) -> None:
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    bad = [*sorted(report["missing_keys"]), *meta]
    bad += [str(item[0] if isinstance(item, tuple) else item) for item in report["mismatched_keys"]]
    bad += [str(item) for item in report["error_msgs"]]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise CheckpointError(f"{folder}: no weights that fit for {bad[0]}{more}; the checkpoint is damaged")


def _without_experts(cls: type[nn.Module]) -> type[nn.Module]:
    def init(self: nn.Module, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        for experts in find_experts(self):
            make_absent(experts)

    ignored = [*(getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or []), r"experts"]
    members = {
        "__init__": init,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_keys_to_ignore_on_load_unexpected": ignored,
    }
    return type(cls.__name__, (cls,), members)
