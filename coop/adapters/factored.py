"""Factored experts: forward and backward of one layer of frozen experts with adapters, an expert at a time.

Owns the mathematics and nothing else; promises that W + dW is never made, that no more weights are used at once
than one expert's, that what is kept for the backward pass grows with rows and not with experts, and that the bits
do not depend on the order in which experts arrive. Called by `coop.adapters.training`.

With x [rows, in] the rows of one expert, up = x W^T + s (x A^T) B^T, h = act(up), y the same product of h with the
second weight, and the layer's output the sum of y over a token's choices, weighted by the router. Factors are in
PEFT's layout: lora_A [experts * rank, in] expert-major, lora_B [out, rank * experts] rank-major.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from coop.errors import RoutingError

# int64 [tokens, k] -> each distinct expert with its weights, which are valid until the next is asked for
Lend = Callable[[np.ndarray], Iterator[tuple[int, Mapping[str, Tensor]]]]


class LiveFactors(NamedTuple):
    """The adapter of one stacked parameter, as PEFT holds it: the tensors that are trained, and the scale."""

    lora_a: Tensor
    lora_b: Tensor
    scaling: float


class ExpertFactors(NamedTuple):
    """The same by expert: lora_a [experts, rank, in], lora_b [experts, out, rank]."""

    lora_a: Tensor
    lora_b: Tensor
    scaling: float

    @classmethod
    def of(cls, lora_a: Tensor, lora_b: Tensor, scaling: float, num_experts: int) -> ExpertFactors:
        """By expert, in at least float32, each expert's factors contiguous."""
        kind = torch.promote_types(lora_a.dtype, torch.float32)
        rank = lora_a.shape[0] // num_experts
        return cls(
            lora_a.detach().to(kind).view(num_experts, rank, -1),
            lora_b.detach().to(kind).view(-1, rank, num_experts).permute(2, 0, 1).contiguous(),
            scaling,
        )

    def new_gradients(self) -> ExpertFactors:
        """Zeros of the same shapes."""
        return ExpertFactors(torch.zeros_like(self.lora_a), torch.zeros_like(self.lora_b), self.scaling)

    def add_to(self, product: Tensor, rows: Tensor, expert: int) -> Tensor:
        """`product` plus the adapter's part, summed in float32 and rounded once."""
        update = rows.to(self.lora_a.dtype) @ self.lora_a[expert].t() @ self.lora_b[expert].t()
        return (product + update * self.scaling).to(product.dtype)

    def add_back(self, product: Tensor, gradient: Tensor, expert: int) -> Tensor:
        """`product`, the gradient of the rows by the frozen weight, plus the adapter's part of it."""
        update = gradient.to(self.lora_a.dtype) @ self.lora_b[expert] @ self.lora_a[expert]
        return (product + update * self.scaling).to(product.dtype)

    def note(self, gradients: ExpertFactors, rows: Tensor, gradient: Tensor, expert: int) -> None:
        """Write this expert's gradients, given its rows [n, in] and the gradient [n, out] of their product."""
        rows, gradient = rows.to(self.lora_a.dtype), gradient.to(self.lora_a.dtype)
        inner = (gradient @ self.lora_b[expert]) * self.scaling
        gradients.lora_a[expert] = inner.t() @ rows
        gradients.lora_b[expert] = gradient.t() @ (rows @ self.lora_a[expert].t()) * self.scaling

    def to_peft(self, lora_a: Tensor, lora_b: Tensor) -> tuple[Tensor, Tensor]:
        """In the shapes and types of PEFT's own tensors."""
        return (
            self.lora_a.reshape(lora_a.shape).to(lora_a.dtype),
            self.lora_b.permute(1, 2, 0).reshape(lora_b.shape).to(lora_b.dtype),
        )


@dataclass(frozen=True, slots=True)
class Routes:
    """A call's rows, sorted by expert: row r belongs to token order[r] // k; spans[e] are the rows of expert e."""

    ids: np.ndarray
    order: Tensor
    tokens: Tensor
    spans: Mapping[int, slice]

    @classmethod
    def of(cls, expert_ids: Tensor, num_experts: int) -> Routes:
        """Routes of int64 [tokens, k]. RoutingError for an expert that does not exist."""
        flat = expert_ids.reshape(-1)
        ids = expert_ids.cpu().numpy()
        if ids.size and not (ids.min() >= 0 and ids.max() < num_experts):
            raise RoutingError(f"the router chose expert {ids.min()} or {ids.max()} of {num_experts}")
        order = torch.argsort(flat, stable=True)
        counts = np.bincount(ids.ravel(), minlength=num_experts)
        ends = np.cumsum(counts)
        spans = {
            int(e): slice(int(ends[e] - counts[e]), int(ends[e])) for e in np.flatnonzero(counts).tolist()
        }
        return cls(ids, order, order // expert_ids.shape[1], spans)

    def sum_choices(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Rows [tokens * k, width] in sorted order -> their sum by token [tokens, width], in the router's order."""
        tokens, k = self.ids.shape
        by_choice = torch.empty_like(rows)
        by_choice[self.order] = rows
        by_choice = by_choice.view(tokens, k, -1)
        if weights is not None:
            by_choice = by_choice * weights.unsqueeze(-1)
        return by_choice.sum(1).to(rows.dtype)


class Layer:
    """One experts module as this file needs it: the names of its two products, its activation, its orientation."""

    def __init__(self, module: Any, lend: Lend) -> None:
        self.module, self.lend = module, lend
        self.num_experts = int(module.num_experts)
        self.is_transposed = bool(module.is_transposed)
        self.up_name = "gate_up_proj" if module.has_gate else "up_proj"
        self.names = (self.up_name, "down_proj")
        first, second = (module._parameters[name].shape for name in self.names)
        self.up_width = int(first[2] if self.is_transposed else first[1])
        self.out_width = int(second[2] if self.is_transposed else second[1])

    def activate(self, up: Tensor) -> Tensor:
        """[rows, up width] -> [rows, intermediate]."""
        result: Tensor = self.module._apply_gate(up) if self.module.has_gate else self.module.act_fn(up)
        return result

    def product(
        self,
        rows: Tensor,
        weights: Mapping[str, Tensor],
        name: str,
        factors: ExpertFactors | None,
        expert: int,
    ) -> Tensor:
        """[rows, in] -> [rows, out], bias and adapter included."""
        weight = weights[name].t() if self.is_transposed else weights[name]
        result = F.linear(rows, weight, weights.get(f"{name}_bias"))
        return result if factors is None else factors.add_to(result, rows, expert)

    def product_back(
        self,
        gradient: Tensor,
        weights: Mapping[str, Tensor],
        name: str,
        factors: ExpertFactors | None,
        expert: int,
    ) -> Tensor:
        """Gradient of the rows [rows, in] from that of their product [rows, out]."""
        result = gradient @ (weights[name].t() if self.is_transposed else weights[name])
        return result if factors is None else factors.add_back(result, gradient, expert)


def run_experts(
    layer: Layer, hidden: Tensor, expert_ids: Tensor, weights: Tensor, factors: Sequence[LiveFactors | None]
) -> Tensor:
    """One layer call: hidden [tokens, hidden], expert_ids and weights [tokens, k] -> [tokens, hidden].

    factors: of the first and of the second product, None where there is no adapter. Differentiable once, in hidden,
    weights and factors.
    """
    if hidden.shape[0] == 0:
        return torch.zeros_like(hidden)
    routes = Routes.of(expert_ids, layer.num_experts)
    tensors = [tensor for f in factors for tensor in ((f.lora_a, f.lora_b) if f else (None, None))]
    scalings = [f.scaling if f else 0.0 for f in factors]
    result: Tensor = _Experts.apply(layer, routes, scalings, hidden, weights, *tensors)
    return result


class _Experts(torch.autograd.Function):
    """Keeps hidden, the router's weights and the rows before the activation; reads every expert's weights again."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Layer,
        routes: Routes,
        scalings: list[float],
        hidden: Tensor,
        weights: Tensor,
        *tensors: Tensor | None,
    ) -> Tensor:
        first, second = _by_expert(tensors, scalings, layer.num_experts)
        rows = routes.order.numel()
        up = hidden.new_empty(rows, layer.up_width)
        out = hidden.new_empty(rows, layer.out_width)
        with closing(layer.lend(routes.ids)) as lent:  # type: ignore[type-var]
            for expert, own in lent:
                span = routes.spans[expert]
                x = hidden[routes.tokens[span]]
                up[span] = layer.product(x, own, layer.up_name, first, expert)
                out[span] = layer.product(layer.activate(up[span]), own, "down_proj", second, expert)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(hidden, weights, up, *tensors)
            ctx.layer, ctx.routes, ctx.scalings = layer, routes, scalings
        return routes.sum_choices(out, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hidden, weights, up, *tensors = ctx.saved_tensors
        layer, routes = ctx.layer, ctx.routes
        factors = _by_expert(tensors, ctx.scalings, layer.num_experts)
        wants_hidden, wants_weights = ctx.needs_input_grad[3:5]
        notes = [f.new_gradients() if f is not None else None for f in factors]
        back = _Backward(layer, factors, notes, wants_hidden)
        sorted_weights = weights.reshape(-1)[routes.order].unsqueeze(-1)
        grad_rows = hidden.new_empty(len(up), hidden.shape[1]) if wants_hidden else None
        grad_weights = torch.empty(len(up), dtype=weights.dtype, device=weights.device)
        with closing(layer.lend(routes.ids)) as lent:
            for expert, own in lent:
                span = routes.spans[expert]
                tokens = routes.tokens[span]
                by_rows, by_weights = back.run(
                    expert, own, hidden[tokens], up[span], grad[tokens], sorted_weights[span]
                )
                grad_weights[span] = by_weights
                if grad_rows is not None:
                    grad_rows[span] = by_rows
        grad_hidden = routes.sum_choices(grad_rows, None) if grad_rows is not None else None
        return (
            None,
            None,
            None,
            grad_hidden,
            _unsort(grad_weights, routes) if wants_weights else None,
            *(_to_peft(notes, tensors)),
        )


@dataclass(frozen=True, slots=True)
class _Backward:
    """The backward pass of one call, an expert at a time."""

    layer: Layer
    factors: Sequence[ExpertFactors | None]
    notes: Sequence[ExpertFactors | None]
    wants_rows: bool

    def run(
        self, expert: int, own: Mapping[str, Tensor], x: Tensor, up: Tensor, grad: Tensor, weights: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Gradients of x [rows, hidden] and of the router's weights [rows]; the factors' are noted.

        The router's weight of a row has the gradient grad . y = (grad W) . h + grad . bias, so y is not made again.
        """
        layer, (first, second), (first_notes, second_notes) = self.layer, self.factors, self.notes
        with torch.enable_grad():
            leaf = up.detach().requires_grad_()
            h = layer.activate(leaf)
        by_h = layer.product_back(grad, own, "down_proj", second, expert)
        wide = torch.promote_types(h.dtype, torch.float32)
        by_weights = (by_h.to(wide) * h.detach().to(wide)).sum(-1)
        if (bias := own.get("down_proj_bias")) is not None:
            by_weights += grad.to(wide) @ bias.to(wide)
        if second is not None and second_notes is not None:
            second.note(second_notes, h.detach(), grad * weights, expert)
        (by_up,) = torch.autograd.grad(h, leaf, (by_h * weights).to(h.dtype))
        if first is not None and first_notes is not None:
            first.note(first_notes, x, by_up, expert)
        by_rows = layer.product_back(by_up, own, layer.up_name, first, expert) if self.wants_rows else None
        return by_rows, by_weights.to(weights.dtype)


def _by_expert(
    tensors: Sequence[Tensor | None], scalings: Sequence[float], num_experts: int
) -> list[ExpertFactors | None]:
    pairs = zip(tensors[::2], tensors[1::2], scalings, strict=True)
    return [
        None if a is None or b is None else ExpertFactors.of(a, b, scaling, num_experts)
        for a, b, scaling in pairs
    ]


def _to_peft(notes: Sequence[ExpertFactors | None], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for index, note in enumerate(notes):
        a, b = tensors[2 * index : 2 * index + 2]
        found += [None, None] if note is None else note.to_peft(a, b)
    return found


def _unsort(values: Tensor, routes: Routes) -> Tensor:
    """[tokens * k] in sorted order -> [tokens, k]."""
    result = torch.empty_like(values)
    result[routes.order] = values
    return result.view(routes.ids.shape)
