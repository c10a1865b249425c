"""ExpertMask: keeps the routed experts that are not selected at their weights, bit for bit.

Owns the hooks on gradients and on the optimiser; promises that an expert outside the selection gets a gradient of
exact zeros and no weight decay, under LoRA (its update stays 0) and in full tuning. `train.run` makes it,
`train.trainer` leaves its weights out of the optimiser's own decay.

Adam moves a weight whose gradients were all zero by -lr * 0 / (sqrt(0) + eps) = 0, so only decay has to be kept
away. What is selected decays here as AdamW does it: w *= 1 - lr * decay before the step (Loshchilov & Hutter,
arXiv 1711.05101).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coop.adapters.transformers import find_experts
from train.tuning.selection import Selection


@dataclass(frozen=True, slots=True)
class _Masked:
    """One trained parameter: `frozen` is True, in a shape that broadcasts to it, where it may not move."""

    name: str
    parameter: nn.Parameter
    frozen: Tensor


class ExpertMask(TrainerCallback):
    """The mask of one model.

    Args:
        model: with its trainable parameters decided, before Trainer prepares it.
        selection: the experts that are trained.
        weight_decay: of the recipe, applied here to the experts that are trained.
    """

    def __init__(self, model: nn.Module, selection: Selection, weight_decay: float) -> None:
        self._weight_decay = weight_decay
        self._masked = _masked_parameters(model, selection)
        self._decayed: list[_Masked] = []  # until Trainer says what decays
        assert self._masked, "a selection of experts of which none is trained"
        self._hooks: list[Any] = [item.parameter.register_hook(_Zero(item.frozen)) for item in self._masked]

    @property
    def frozen_elements(self) -> int:
        """Elements of trainable parameters that stay as they are."""
        return sum(
            int(item.frozen.sum()) * (item.parameter.numel() // item.frozen.numel()) for item in self._masked
        )

    def take_decay(self, names: Sequence[str]) -> list[str]:
        """Of the weights that Trainer would decay (no biases), take on the masked; the others stay the optimiser's."""
        self._decayed = [item for item in self._masked if item.name in set(names)]
        mine = {item.name for item in self._decayed}
        return [name for name in names if name not in mine]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take over the decay of the masked parameters."""
        if self._weight_decay:
            optimizer = kwargs["optimizer"]
            plain = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
            self._hooks.append(plain.register_step_pre_hook(self._decay))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let go of the parameters and the optimiser."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @torch.no_grad()
    def _decay(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        for item in self._decayed:
            if item.parameter.grad is not None:
                factor = 1.0 - float(rates[id(item.parameter)]) * self._weight_decay
                frozen = item.frozen.to(item.parameter.device)
                item.parameter.mul_(torch.where(frozen, 1.0, factor))


class _Zero:
    """Replaces the gradient of what is frozen by exact zeros, NaN included."""

    def __init__(self, frozen: Tensor) -> None:
        self._frozen = frozen

    def __call__(self, gradient: Tensor) -> Tensor:
        self._frozen = self._frozen.to(gradient.device)
        return gradient.masked_fill(self._frozen, 0.0)


def _masked_parameters(model: nn.Module, selection: Selection) -> list[_Masked]:
    entries = find_experts(model)
    masked = []
    for name, parameter in model.named_parameters():
        layer = next((e.layer for e in entries if _is_of(name, e.name)), None)
        if layer is not None and parameter.requires_grad:
            is_frozen = torch.ones(entries[layer].num_experts, dtype=torch.bool)
            is_frozen[list(selection.experts[layer])] = False
            masked.append(_Masked(name, parameter, _spread(name, parameter, is_frozen)))
    return masked


def _is_of(name: str, experts: str) -> bool:
    return f".{experts}." in f".{name.replace('.base_layer', '')}"


def _spread(name: str, parameter: nn.Parameter, is_frozen: Tensor) -> Tensor:
    """`is_frozen` [experts] over a stacked parameter, or over PEFT's factors of one.

    PEFT keeps lora_A as [experts * rank, in] with the rank fastest, lora_B as [out, rank * experts] with the
    expert fastest.
    """
    count = len(is_frozen)
    if ".lora_A." in name:
        return is_frozen.repeat_interleave(parameter.shape[0] // count).unsqueeze(1)
    if ".lora_B." in name:
        return is_frozen.repeat(parameter.shape[1] // count).unsqueeze(0)
    assert parameter.shape[0] == count
    return is_frozen.view(count, *[1] * (parameter.ndim - 1))
