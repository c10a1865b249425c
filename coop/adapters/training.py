"""Expert training: frozen experts, live or served from disk, computed with their adapters in factored form.

Owns the experts function "coop_training" and what each experts module needs for it; promises that adapters stay
PEFT's own (names, layout, saving, merging), that W + dW is never made, and that a model that cannot be computed so
is refused before it is changed. Called by training.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from coop.adapters.factored import (
    Block,
    Layer,
    LiveFactors,
    Routes,
    can_group,
    live_blocks,
    run_experts,
)
from coop.adapters.transformers import ExpertsModule, find_experts
from coop.errors import CheckpointError, CoopError
from coop.scheduler import Scheduler

IMPLEMENTATION = "coop_training"


class ExpertTraining:
    """Computes the experts of one model.

    Args:
        model: a transformers model, or a PEFT model around it whose expert adapters were made with
            `target_parameters`.
        scheduler: serves the experts' weights, for a model that has none of its own; None: they are in the model.

    Raises CheckpointError for experts that cannot be computed so.
    """

    def __init__(self, model: nn.Module, scheduler: Scheduler | None = None) -> None:
        self.experts = find_experts(model)
        for entry in self.experts:
            refuse_unknown(entry)
        _register()
        wrappers = _wrappers(model)
        for entry in self.experts:
            own = {w.parameter_name: w for w in wrappers if w.get_base_layer() is entry.module}
            lend = _Live(entry.module, own) if scheduler is None else partial(_served, scheduler, entry.layer)
            entry.module.__dict__["coop_training"] = _Served(Layer(entry.module, lend), own)
        for wrapper in wrappers:
            _pass_through(wrapper)
        if scheduler is not None:
            _keep_from_ddp(model, self.experts)
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        base.set_experts_implementation(IMPLEMENTATION)
        unset = [e.name for e in self.experts if e.module.config._experts_implementation != IMPLEMENTATION]  # type: ignore[union-attr]
        if unset:
            raise CheckpointError(f"{unset[0]}: transformers does not let coop compute its experts")


class _Served:
    """What one experts module is computed with."""

    def __init__(self, layer: Layer, wrappers: Mapping[str, Any]) -> None:
        self.layer = layer
        self._wrappers = wrappers

    def factors(self) -> list[LiveFactors | None]:
        """The adapters in force, of the first and of the second product."""
        return [_factors(self._wrappers.get(name)) for name in self.layer.names]


def training_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts function: [tokens, hidden], int64 [tokens, k], [tokens, k] -> [tokens, hidden]."""
    served: _Served | None = self.__dict__.get("coop_training")
    if served is None:
        raise CoopError(
            "this model asks for the experts implementation 'coop_training' but was not set up for it"
        )
    return run_experts(served.layer, hidden_states, top_k_index, top_k_weights, served.factors())


def refuse_unknown(entry: ExpertsModule) -> None:
    """Raise CheckpointError for experts that the factored form does not cover."""
    why = why_not(entry)
    if why:
        raise CheckpointError(f"{entry.name}: {why}; set model.experts to grouped_mm")


def why_not(entry: ExpertsModule) -> str:
    """Why an experts module cannot be computed in factored form, or "" if it can."""
    module: Any = entry.module
    if getattr(module, "has_post_expert_norm", False):
        return "a norm follows each expert, which coop does not train through"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over processes (expert parallelism)"
    return ""


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, training_forward)


class _Live:
    """Lends what is in the module itself, looked up at every call: a merge, a cast or a copy may have changed it."""

    def __init__(self, module: nn.Module, wrappers: Mapping[str, Any]) -> None:
        self._module, self._wrappers = module, wrappers

    def __call__(self, routes: Routes) -> Generator[Block]:
        own = {name: p for name, p in self._module._parameters.items() if p is not None}
        if any(p.requires_grad for p in own.values()):
            raise CoopError(
                "coop trains adapters of experts, not their weights: set model.experts to grouped_mm"
            )
        ranks = [rank for wrapper in self._wrappers.values() for rank in wrapper.r.values()]
        stacks = {name: p.detach() for name, p in own.items()}
        yield from live_blocks(stacks, routes, can_group(stacks, ranks))


def _served(scheduler: Scheduler, layer: int, routes: Routes) -> Generator[Block]:
    """Lends experts one by one as the scheduler brings them."""
    with closing(scheduler.stream(layer, routes.ids)) as stream:
        for expert, weights in stream:
            yield Block(routes.spans[expert], expert, weights)


def _keep_from_ddp(model: nn.Module, experts: Sequence[ExpertsModule]) -> None:
    """Tell DistributedDataParallel not to send placeholders from process to process: it would fill them out."""
    modules = {id(entry.module) for entry in experts}
    names = [
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if id(module) in modules
        for parameter in module._parameters
    ]
    model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]


# PEFT's wrappers


def _wrappers(model: nn.Module) -> list[Any]:
    """PEFT's wrappers around stacked expert parameters; none where experts have no adapters."""
    from peft.tuners.lora.layer import ParamWrapper

    return [
        m
        for m in model.modules()
        if isinstance(m, ParamWrapper) and "has_gate" in m.get_base_layer().__dict__
    ]


def _pass_through(wrapper: Any) -> None:
    """Make a wrapper hand its call on to the experts module; PEFT's own forward would make W + dW first."""
    wrapper.__class__ = _pass_through_class()


@cache
def _pass_through_class() -> type[nn.Module]:
    from peft.tuners.lora.layer import ParamWrapper

    class FactoredWrapper(ParamWrapper):
        """PEFT's wrapper in everything but its forward."""

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self._check_forward_args(x, *args, **kwargs)
            result: Tensor = self.get_base_layer()(x, *args, **kwargs)
            return result

        def merge(self, *args: Any, **kwargs: Any) -> None:
            if 0 in self.get_param().stride():
                raise CoopError(
                    "the experts are on disk, so nothing can be merged into them here: save the adapter and run "
                    "python -m coop.pack --ckpt ADAPTER --out DIR, or train with checkpoint.final=merged"
                )
            super().merge(*args, **kwargs)

    return FactoredWrapper


def _factors(wrapper: Any) -> LiveFactors | None:
    """The adapter of one wrapper that is in force: none where it is absent, disabled or merged."""
    if wrapper is None or wrapper.disable_adapters or wrapper.merged:
        return None
    active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if len(active) > 1:
        raise CoopError(
            f"{len(active)} adapters are active on one expert parameter; coop computes one at a time"
        )
    if not active:
        return None
    name = active[0]
    return LiveFactors(wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.scaling[name])


def placeholder(like: Tensor, device: torch.device) -> nn.Parameter:
    """What stands for served experts: the shape and type of `like`, one NaN in memory, loud if computed with."""
    nan = torch.full((), torch.nan, dtype=like.dtype, device=device)
    return nn.Parameter(nan.expand(like.shape), requires_grad=False)
