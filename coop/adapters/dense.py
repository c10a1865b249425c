"""The dense part of an attached model, sped up where a decode step is bound by reading its weights.

Owns the norm that takes the place of plain ones, and what is replaced in a model by it and by `coop.adapters.linear`
and `coop.adapters.attention`; promises that a module is replaced only where it computes what the plain one does
(checked on numbers, not by name), and that calls of many rows, or with gradients, are the plain module's own. Called
by attach; without compiled kernels nothing is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from coop import kernels
from coop.adapters.attention import replace_attention
from coop.adapters.linear import QuickLinear, QuickWeight, epsilon_of, needs_grad

_CHECK_ROWS = 3


class QuickNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon), rounded, times weight: one pass in place of six operations."""

    weight: nn.Parameter

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]."""
        width = hidden_states.shape[-1]
        rows = hidden_states.numel() // max(1, width)
        is_same_kind = hidden_states.dtype == self.weight.dtype and width == self.weight.shape[0]
        is_quick = 0 < rows <= kernels.MOST_ROWS * 64 and is_same_kind and kernels.takes(hidden_states)
        if not is_quick or (torch.is_grad_enabled() and needs_grad(self, hidden_states)):
            return self.__dict__["_coop_plain"].forward(self, hidden_states)
        source = hidden_states.contiguous()
        output = torch.empty_like(source)
        kernels.loaded().rms_norm(source, self.weight, output, rows, epsilon_of(self))
        return output


def quicken(model: nn.Module, routers: Iterable[nn.Module] = ()) -> int:
    """Replace what is faster replaced, in place; returns how many modules were.

    `routers` are looked at for weights that their own classes multiply with.
    """
    if kernels.load()[0] is None:
        return 0
    replaced = 0
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = QuickLinear
            replaced += 1
        elif _is_rms_norm(module):
            plain = type(module)
            module.__dict__["_coop_plain"] = plain
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
    if len(module._parameters) != 1 or module._modules or weight is None or weight.ndim != 1:
        return False
    if epsilon_of(module) <= 0 or not kernels.takes(weight):
        return False
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
    kernels.loaded().rms_norm(x, weight.detach(), got, _CHECK_ROWS, epsilon_of(module))
    roundings = 4 * torch.finfo(x.dtype).eps
    return bool(torch.allclose(got, expected, rtol=roundings, atol=0))
