"""Recorder: watches which experts every token goes to, through the experts hook of transformers.

Owns the hook for as long as it is open; promises that results and random state are untouched and that each
forward pass is reported once, whole or not at all. The training callback opens it and feeds a HotMap.

A pass is collected between the model's forward pre-hook and forward hook. Layers that activation checkpointing
runs again in the backward pass are outside that window, so nothing is counted twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from coop.adapters.transformers import ExpertsModule, find_experts
from coop.errors import CheckpointError
from coop.hotmap import RoutedBatch

IMPLEMENTATION = "coop_recorder"
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class _Tap:
    """What one experts module needs while it is watched: where to report, and who computes."""

    recorder: Recorder
    layer: int
    compute: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def recording_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts function: note `top_k_index` [tokens, k], then compute as the model did before."""
    tap: _Tap = self.__dict__["coop_tap"]
    tap.recorder.see(tap.layer, top_k_index)
    return tap.compute(self, hidden_states, top_k_index, top_k_weights)


class Recorder:
    """Reports a RoutedBatch for each forward pass of `model`.

    Args:
        model: a transformers or PEFT model; call this very object, as Trainer does.
        report: gets the batch after each pass, on the thread and device of the pass.

    Raises CheckpointError if the experts cannot be watched; the first pass raises it too if a layer was not seen.
    """

    def __init__(self, model: nn.Module, report: Callable[[RoutedBatch], None]) -> None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, recording_forward)
        self.experts = find_experts(model)
        self.dropped_passes = 0  # passes in which not every layer saw every token
        self._report = report
        self._seen: dict[int, list[Tensor]] | None = None  # None: no pass is open
        self._tokens: tuple[Tensor, Tensor] | None = None
        self._has_seen_a_pass = False
        _check_one_top_k(self.experts)
        for entry in self.experts:
            entry.module.__dict__["coop_tap"] = _Tap(self, entry.layer, _implementation(entry.module))
        self._base = _transformers_model(model)
        self._before = self._base.get_experts_implementation()
        self._base.set_experts_implementation(IMPLEMENTATION)
        self._hooks = [
            model.register_forward_pre_hook(self._open_pass, with_kwargs=True),
            model.register_forward_hook(self._close_pass),
        ]
        unset = [e.name for e in self.experts if e.module.config._experts_implementation != IMPLEMENTATION]  # type: ignore[union-attr]
        if unset:
            self.close()
            raise CheckpointError(f"{unset[0]}: transformers does not let its experts be watched")

    def close(self) -> None:
        """Put back the implementation that was in force."""
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            self._base.set_experts_implementation(self._before)
        for entry in self.experts:
            entry.module.__dict__.pop("coop_tap", None)
        self._hooks = []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def see(self, layer: int, top_k_index: Tensor) -> None:
        """Note the routing of one layer call; ignored outside a pass, where only recomputation calls."""
        if self._seen is not None:
            self._seen.setdefault(layer, []).append(top_k_index.detach())

    def _open_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = _named_inputs(model, args, kwargs)
        self._tokens = token_kinds(inputs)
        self._seen = {}

    def _close_pass(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen, tokens, self._seen, self._tokens = self._seen, self._tokens, None, None
        if seen is None or tokens is None:
            return
        kinds, follows = tokens
        # a model may lie on several devices; the counters are where the first layer is
        device = next(iter(seen.values()))[0].device if seen else kinds.device
        kinds, follows = kinds.to(device), follows.to(device)
        layers = [torch.cat(seen[e.layer]).to(device) for e in self.experts if e.layer in seen]
        if len(layers) == len(self.experts) and all(len(layer) == len(kinds) for layer in layers):
            self._has_seen_a_pass = True
            self._report(RoutedBatch(torch.stack(layers), kinds, follows, model.training))
            return
        if not self._has_seen_a_pass:
            facts = f"{len(layers)} of {len(self.experts)} mixture-of-experts layers reported all {len(kinds)} tokens"
            raise CheckpointError(
                f"the experts hook was not called as expected: {facts}; set coop.profile.enabled=false"
            )
        self.dropped_passes += 1


def token_kinds(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Kinds int64 [tokens] and follows bool [tokens] of a forward pass, from its mask, labels and positions.

    A token with a label is an answer token: at run time the model itself writes it. Any other real token is a
    prompt token. Where there is no two-dimensional mask every token is real; positions that do not rise by one
    begin a new sequence, as in padding-free batches.
    """
    first = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"][..., 0]
    mask, labels, positions = (inputs.get(name) for name in ("attention_mask", "labels", "position_ids"))
    has_mask = isinstance(mask, Tensor) and mask.shape == first.shape
    is_real = mask.bool() if has_mask else torch.ones_like(first, dtype=torch.bool)  # type: ignore[union-attr]
    is_answer = is_real & (labels != IGNORED_LABEL) if labels is not None else torch.zeros_like(is_real)
    follows = torch.zeros_like(is_real)
    follows[:, 1:] = is_real[:, 1:] & is_real[:, :-1]
    if positions is not None:
        follows[:, 1:] &= positions[..., 1:] == positions[..., :-1] + 1
    return (is_real.long() + is_answer.long()).flatten(), follows.flatten()


def _named_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return kwargs
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _transformers_model(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _implementation(module: nn.Module) -> Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]:
    """The function that computes this module's experts now; "eager" is the class's own forward, undecorated."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    original = type(module).forward.__wrapped__  # type: ignore[attr-defined]
    name = module.config._experts_implementation  # type: ignore[union-attr]
    return ALL_EXPERTS_FUNCTIONS.get(name, original)


def _check_one_top_k(experts: list[ExpertsModule]) -> None:
    found = {entry.top_k for entry in experts}
    if len(found) > 1:
        raise CheckpointError(
            f"layers use different numbers of experts per token {sorted(found)}: no profile is kept"
        )
