"""The dense part of an attached model, sped up where a decode step is bound by reading its weights.

Owns module classes that take the place of plain ones, weights shared; promises that a module is replaced
only where it computes what the plain one does (checked on numbers, not by name), and that calls of many rows, or
with gradients, are the plain module's own. Called by attach; without compiled kernels nothing is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from coop import kernels
from coop.adapters.attention import replace_attention

_CHECK_ROWS = 3
_EPSILONS = ("variance_epsilon", "eps")


class QuickLinear(nn.Linear):
    """nn.Linear whose products of at most `kernels.MOST_ROWS` rows are read at the speed of memory."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        width = input.shape[-1]
        rows = input.numel() // max(1, width)
        job = self._job(input.dtype) if 0 < rows <= kernels.MOST_ROWS else None
        if (
            job is None
            or input.device.type != "cpu"
            or (torch.is_grad_enabled() and _needs_grad(self, input))
        ):
            return super().forward(input)
        source = input.reshape(rows, width)
        output = input.new_empty(rows, self.out_features)
        job.bind(source if source.stride(1) == 1 else source.contiguous(), output)
        _library().products(job, 1)
        return output.view(*input.shape[:-1], self.out_features)

    def _job(self, dtype: torch.dtype) -> kernels.Job | None:
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


class QuickNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon), rounded, times weight: one pass in place of six operations."""

    weight: nn.Parameter

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]."""
        width = hidden_states.shape[-1]
        rows = hidden_states.numel() // max(1, width)
        is_quick = rows <= kernels.MOST_ROWS * 64 and hidden_states.dtype == self.weight.dtype
        if not is_quick or (torch.is_grad_enabled() and _needs_grad(self, hidden_states)):
            return self.__dict__["_coop_plain"].forward(self, hidden_states)
        source = hidden_states.contiguous()
        output = torch.empty_like(source)
        _library().rms_norm(source, self.weight, output, rows, self.__dict__["_coop_epsilon"])
        return output


def _job_of(weight: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> kernels.Job | None:
    """What stays of the product with a weight between calls; made anew when it has moved."""
    at = (weight.data_ptr(), dtype)
    found: tuple[tuple[int, torch.dtype], kernels.Job | None] | None = weight.__dict__.get("_coop_job")
    if found is None or found[0] != at:
        found = weight.__dict__["_coop_job"] = (at, kernels.job_of(weight.detach(), dtype, bias=bias))
    return found[1]


def _quick_product(weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
    """hidden [..., in] x weight [out, in]; None where the kernels do not take it."""
    width = hidden.shape[-1]
    rows = hidden.numel() // max(1, width)
    is_few = 0 < rows <= kernels.MOST_ROWS and hidden.is_contiguous() and kernels.takes(hidden)
    job = _job_of(weight, hidden.dtype) if is_few else None
    if job is None:
        return None
    output = hidden.new_empty(rows, weight.shape[0])
    job.bind(hidden.view(rows, width), output)
    _library().products(job, 1)
    return output.view(*hidden.shape[:-1], weight.shape[0])


def quicken(model: nn.Module, routers: Iterable[nn.Module] = ()) -> int:
    """Replace what is faster replaced, in place; returns how many modules were.

    `routers` are looked at for weights that their own classes multiply with.
    """
    library, _ = kernels.load()
    if library is None:
        return 0
    replaced = 0
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = QuickLinear
            replaced += 1
        elif _is_rms_norm(module):
            plain = type(module)
            module.__dict__["_coop_plain"] = plain
            module.__dict__["_coop_epsilon"] = _epsilon(module)
            module.__class__ = type(plain.__name__, (QuickNorm, plain), {"__module__": plain.__module__})
            replaced += 1
    replaced += replace_attention(model)
    for router in routers:
        weight = router._parameters.get("weight")
        is_plain = type(weight) is nn.Parameter and weight.ndim == 2 and kernels.takes(weight)
        if is_plain and not isinstance(router, nn.Linear):
            assert weight is not None
            router._parameters["weight"] = QuickWeight(weight.detach(), requires_grad=False)
            replaced += 1
    return replaced


def _is_rms_norm(module: nn.Module) -> bool:
    """Whether a module is the root-mean-square norm that the kernel computes, by what it does to some numbers."""
    weight = module._parameters.get("weight")
    if (
        len(module._parameters) != 1
        or module._modules
        or weight is None
        or weight.ndim != 1
        or weight.is_meta
    ):
        return False
    if (
        _epsilon(module) <= 0
        or weight.dtype not in (torch.float32, torch.bfloat16)
        or weight.device.type != "cpu"
    ):
        return False
    library, _ = kernels.load()
    assert library is not None
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(_CHECK_ROWS, weight.shape[0], generator=generator)).to(weight.dtype)
    with torch.no_grad():
        try:
            expected = module(x)
        except Exception:  # a module with another call is not a norm
            return False
    if not isinstance(expected, torch.Tensor) or expected.shape != x.shape or expected.dtype != x.dtype:
        return False
    got = torch.empty_like(x)
    library.rms_norm(x, weight.detach(), got, _CHECK_ROWS, _epsilon(module))
    roundings = 4 * torch.finfo(x.dtype).eps
    return bool(torch.allclose(got, expected, rtol=roundings, atol=0))


def _epsilon(module: Any) -> float:
    found = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), 0.0)
    return float(found) if isinstance(found, float) else 0.0


def _needs_grad(module: nn.Module, hidden: torch.Tensor) -> bool:
    return hidden.requires_grad or any(p.requires_grad for p in module.parameters())


def _library() -> kernels.Kernels:
    library, why = kernels.load()
    assert library is not None, why
    return library
