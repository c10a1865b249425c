"""Linear layers of an attached model: read at the speed of memory where a few rows pass, and in int8 where asked for.

Owns the classes that take the place of nn.Linear and of a router's weight; promises that many rows, and gradients,
take the plain way, and that nothing is rounded unless `RoundedLinear` was asked for. Called by `coop.adapters.dense`
and by attention; `round_linears` by attach, for packs that say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from coop import kernels
from coop.quantise import dequantise, quantise

_EPSILONS = ("variance_epsilon", "eps")
ROUNDED_AT_ONCE = 4096  # rows of a weight that are unpacked, or rounded, together


class QuickLinear(nn.Linear):
    """nn.Linear whose products of at most `kernels.MOST_ROWS` rows are read at the speed of memory."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        job = self.job(input.dtype) if _is_few(input, self.in_features) else None
        if job is None or (torch.is_grad_enabled() and needs_grad(self, input)):
            return super().forward(input)
        return _product(job, input)

    @property
    def stored(self) -> torch.Tensor:
        """What lies in memory, to see whether it has moved."""
        return self.weight

    def job(self, dtype: torch.dtype) -> kernels.Job | None:
        """The product without its inputs and outputs; None where the kernels do not take it."""
        weight = self._parameters["weight"]
        return _job_of(weight, dtype, self.bias) if type(weight) is nn.Parameter else None


class QuickWeight(nn.Parameter):
    """A router's weight, which its own class multiplies with: a few rows go through the kernels, all else as ever."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear and len(args) == 2 and not kwargs:
                hidden, weight = args
                if isinstance(weight, QuickWeight) and not torch.is_grad_enabled():
                    result = _quick_product(weight, hidden)
                    if result is not None:
                        return result
            return func(*args, **(kwargs or {}))


class RoundedLinear(nn.Module):
    """A linear layer in int8 with one scale for each 32 weights: half the bytes, other results.

    Codes and scales are buffers that no state dict holds: they are made from the checkpoint's weights when it is
    loaded. Inference only.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.dtype = plain.weight.dtype
        weight = plain.weight.detach()
        parts = [quantise(rows.float(), 8) for rows in weight.split(ROUNDED_AT_ONCE)]
        self.register_buffer("codes", torch.cat([codes for codes, _ in parts]), persistent=False)
        self.register_buffer("scales", torch.cat([scales for _, scales in parts]), persistent=False)
        self.bias = plain.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        has_kernel = kernels.load()[0] is not None and _is_few(input, self.in_features)
        job = self.job(input.dtype) if has_kernel else None
        if job is not None:
            return _product(job, input)
        parts = zip(self.codes.split(ROUNDED_AT_ONCE), self.scales.split(ROUNDED_AT_ONCE), strict=True)
        products = [
            nn.functional.linear(input, dequantise(codes, scales, self.in_features, input.dtype))
            for codes, scales in parts
        ]
        product = torch.cat(products, -1)
        return product if self.bias is None else product + self.bias

    @property
    def stored(self) -> torch.Tensor:
        """What lies in memory, to see whether it has moved."""
        return self.codes

    def job(self, dtype: torch.dtype) -> kernels.Job | None:
        """The product without its inputs and outputs; None where the kernels do not take it."""
        return kernels.job_of(self.codes, dtype, scales=self.scales, bias=self.bias)


def round_linears(model: nn.Module) -> None:
    """Put a RoundedLinear in the place of every linear layer of a model, its head included."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, RoundedLinear(child))


def dtype_of(linear: Any) -> torch.dtype:
    """The type that a linear layer of either class computes in."""
    found: torch.dtype = linear.dtype if isinstance(linear, RoundedLinear) else linear.weight.dtype
    return found


def _job_of(weight: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> kernels.Job | None:
    """What stays of the product with a weight between calls; made anew when it has moved."""
    at = (weight.data_ptr(), dtype, bias.data_ptr() if bias is not None else 0)
    found: tuple[tuple[int, torch.dtype, int], kernels.Job | None] | None = weight.__dict__.get("_coop_job")
    if found is None or found[0] != at:
        found = weight.__dict__["_coop_job"] = (at, kernels.job_of(weight.detach(), dtype, bias=bias))
    return found[1]


def _quick_product(weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
    """hidden [..., in] x weight [out, in]; None where the kernels do not take it."""
    is_quick = hidden.is_contiguous() and _is_few(hidden, weight.shape[1])
    job = _job_of(weight, hidden.dtype) if is_quick else None
    return _product(job, hidden) if job is not None else None


def _is_few(input: torch.Tensor, width: int) -> bool:
    """Whether `input` is a few rows of this width, of a kind that the kernels compute on."""
    return (
        input.ndim > 0
        and input.shape[-1] == width
        and 0 < input.numel() <= kernels.MOST_ROWS * width
        and kernels.takes(input)
    )


def _product(template: kernels.Job, input: torch.Tensor) -> torch.Tensor:
    job = kernels.Job.from_buffer_copy(template)  # another thread may be in the same layer
    source = input.reshape(-1, input.shape[-1])
    output = input.new_empty(source.shape[0], job.outputs)
    job.bind(source if source.stride(1) == 1 else source.contiguous(), output)
    kernels.loaded().products(job, 1)
    return output.view(*input.shape[:-1], job.outputs)


def needs_grad(module: nn.Module, hidden: torch.Tensor) -> bool:
    """Whether a gradient would flow through this call."""
    return hidden.requires_grad or any(p.requires_grad for p in module.parameters())


def epsilon_of(norm: Any) -> float:
    """What a norm adds before the root, 0.0 where it is not known."""
    found = next((getattr(norm, name) for name in _EPSILONS if hasattr(norm, name)), 0.0)
    return float(found) if isinstance(found, float) else 0.0
