"""Factored experts: forward and backward of one layer of frozen experts with adapters, W + dW never made.

Owns the mathematics and nothing else; promises that what is kept for the backward pass grows with rows and not with
experts, that no more weights are used at once than a block's, and that the bits depend neither on the order in which
experts arrive nor on whether they come one by one or all together. Called by `coop.adapters.training`.

With x [rows, in] the rows of an expert, up = x W^T + s (x A^T) B^T, h = act(up), y the same product of h with the
second weight, and the layer's output the sum of y over a token's choices, weighted by the router. Factors are in
PEFT's layout: lora_A [experts * rank, in] expert-major, lora_B [out, rank * experts] rank-major.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from coop.errors import RoutingError

GROUPED_TYPES = (torch.float32, torch.bfloat16, torch.float16)  # what torch's grouped product knows
GROUPED_BYTES = 16  # rows of its operands must begin on a multiple of this


class LiveFactors(NamedTuple):
    """The adapter of one stacked parameter, as PEFT holds it: the tensors that are trained, and the scale."""

    lora_a: Tensor
    lora_b: Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class Routes:
    """A call's rows, sorted by expert: row r belongs to token order[r] // k; spans[e] are the rows of expert e.

    ids int64 [tokens, k]; ends int32 [experts], the row behind each expert's last.
    """

    ids: np.ndarray
    order: Tensor
    tokens: Tensor
    ends: Tensor
    spans: Mapping[int, slice]

    @classmethod
    def of(cls, expert_ids: Tensor, num_experts: int) -> Routes:
        """Routes of int64 [tokens, k]. RoutingError for an expert that does not exist."""
        ids = expert_ids.cpu().numpy()
        if ids.size and not (ids.min() >= 0 and ids.max() < num_experts):
            raise RoutingError(f"the router chose expert {ids.min()} or {ids.max()} of {num_experts}")
        order = torch.argsort(expert_ids.reshape(-1), stable=True)
        counts = np.bincount(ids.ravel(), minlength=num_experts)
        ends = np.cumsum(counts)
        spans = {e: slice(int(ends[e] - counts[e]), int(ends[e])) for e in np.flatnonzero(counts).tolist()}
        on_device = torch.from_numpy(ends.astype(np.int32)).to(expert_ids.device)
        return cls(ids, order, order // expert_ids.shape[1], on_device, spans)

    @property
    def rows(self) -> int:
        """tokens * k."""
        return int(self.ids.size)

    def sum_choices(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Rows [tokens * k, width] in sorted order -> their sum by token [tokens, width], in the router's order."""
        by_choice = torch.empty_like(rows)
        by_choice[self.order] = rows
        by_choice = by_choice.view(*self.ids.shape, -1)
        if weights is not None:
            by_choice = by_choice * weights.unsqueeze(-1)
        return by_choice.sum(1).to(rows.dtype)

    def unsort(self, values: Tensor) -> Tensor:
        """[tokens * k] in sorted order -> [tokens, k]."""
        result = torch.empty_like(values)
        result[self.order] = values
        return result.view(self.ids.shape)


class Block(NamedTuple):
    """Rows with the weights they are multiplied by: one expert's, or with `expert` None all rows and whole stacks."""

    span: slice
    expert: int | None
    weights: Mapping[str, Tensor]


Lend = Callable[[Routes], Generator[Block]]


class Products:
    """Products of the rows of one block, each row with its own expert's matrix.

    Matrices are [out, in], or stacks of them [experts, out, in] for a block of all rows.
    """

    def __init__(self, routes: Routes, block: Block) -> None:
        self._routes, self._block = routes, block

    def pick(self, stack: Tensor) -> Tensor:
        """Of a stack by expert, what this block multiplies by."""
        return stack if self._block.expert is None else stack[self._block.expert]

    def times(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        if self._block.expert is not None:
            return rows @ matrix.t()
        return F.grouped_mm(rows, matrix.transpose(1, 2), offs=self._routes.ends)

    def back(self, gradient: Tensor, matrix: Tensor) -> Tensor:
        """[rows, out] -> [rows, in]."""
        if self._block.expert is not None:
            return gradient @ matrix
        return F.grouped_mm(gradient, matrix, offs=self._routes.ends)

    def outer(self, gradient: Tensor, rows: Tensor, into: Tensor) -> Tensor:
        """Sum over each expert's rows of gradient [rows, out] x rows [rows, in], as `into` [experts, out, in]."""
        if self._block.expert is None:
            return F.grouped_mm(gradient.t(), rows, offs=self._routes.ends)
        torch.mm(gradient.t(), rows, out=into[self._block.expert])
        return into

    def place(self, value: Tensor, into: Tensor) -> Tensor:
        """`into` with this block's rows, which are `value` itself if there are no others."""
        if self._block.expert is None:
            return value
        into[self._block.span] = value
        return into

    def biases(self, name: str) -> Tensor | None:
        """The bias of each row, or of all of them; None without one."""
        bias = self._block.weights.get(name)
        if bias is None or self._block.expert is not None:
            return bias
        counts = self._routes.ends.long().diff(prepend=self._routes.ends.new_zeros(1).long())
        return bias.repeat_interleave(counts, 0)


class ExpertFactors(NamedTuple):
    """An adapter by expert: lora_a [experts, rank, in], lora_b [experts, out, rank], at least float32."""

    lora_a: Tensor
    lora_b: Tensor
    scaling: float

    @classmethod
    def of(cls, lora_a: Tensor, lora_b: Tensor, scaling: float, num_experts: int) -> ExpertFactors:
        """From PEFT's layout; each expert's factors are contiguous."""
        kind = torch.promote_types(lora_a.dtype, torch.float32)
        rank = lora_a.shape[0] // num_experts
        # a transposition of two dimensions, for which torch has a fast copy
        by_expert = lora_b.detach().to(kind).reshape(-1, num_experts).t().contiguous()
        return cls(
            lora_a.detach().to(kind).view(num_experts, rank, -1),
            by_expert.view(num_experts, -1, rank),
            scaling,
        )

    def new_gradients(self) -> ExpertGradients:
        """Zeros, to be written expert by expert."""
        experts, out, rank = self.lora_b.shape
        return ExpertGradients(torch.zeros_like(self.lora_a), self.lora_b.new_zeros(experts, rank, out))

    def add_to(self, product: Tensor, rows: Tensor, by: Products) -> Tensor:
        """`product` plus the adapter's part, summed in float32 and rounded once."""
        inner = by.times(rows.to(self.lora_a.dtype), by.pick(self.lora_a)).mul_(self.scaling)
        return by.times(inner, by.pick(self.lora_b)).add_(product).to(product.dtype)

    def add_back(self, product: Tensor, inner: Tensor, by: Products) -> Tensor:
        """`product`, a gradient by the frozen weight, plus the adapter's part: `inner` [rows, rank] by A."""
        return by.back(inner, by.pick(self.lora_a)).add_(product).to(product.dtype)

    def inner_back(self, gradient: Tensor, by: Products) -> Tensor:
        """The gradient [rows, out] of the product, in this type, through B: [rows, rank], scaled."""
        return by.back(gradient, by.pick(self.lora_b)).mul_(self.scaling)

    def note(
        self,
        so_far: ExpertGradients,
        rows: Tensor,
        gradient: Tensor,
        inner: Tensor,
        weights: Tensor,
        by: Products,
    ) -> ExpertGradients:
        """The factors' gradients from rows [n, in], their product's gradient [n, out] and its `inner_back`.

        weights [n, 1] multiplies each row's part: by the narrow side of each product.
        """
        rows = rows.to(self.lora_a.dtype)
        through_a = by.times(rows, by.pick(self.lora_a)).mul_(self.scaling).mul_(weights)
        return ExpertGradients(
            by.outer(inner * weights, rows, so_far.lora_a), by.outer(through_a, gradient, so_far.lora_b)
        )


class ExpertGradients(NamedTuple):
    """Gradients of an adapter by expert: lora_a [experts, rank, in], lora_b [experts, rank, out]."""

    lora_a: Tensor
    lora_b: Tensor

    def to_peft(self, lora_a: Tensor, lora_b: Tensor) -> tuple[Tensor, Tensor]:
        """In the shapes and types of PEFT's own tensors."""
        rank_major = self.lora_b.transpose(0, 1).reshape(-1, lora_b.shape[0])
        return self.lora_a.reshape(lora_a.shape).to(lora_a.dtype), rank_major.t().contiguous().to(
            lora_b.dtype
        )


class Layer:
    """One experts module as this file needs it: the names of its two products, its activation, its orientation."""

    def __init__(self, module: Any, lend: Lend) -> None:
        self.module, self.lend = module, lend
        self.num_experts = int(module.num_experts)
        self.is_transposed = bool(module.is_transposed)
        self.names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        first, second = (module._parameters[name].shape for name in self.names)
        self.dtype = module._parameters["down_proj"].dtype
        self.up_width = int(first[2] if self.is_transposed else first[1])
        self.out_width = int(second[2] if self.is_transposed else second[1])

    def activate(self, up: Tensor, block: Block, routes: Routes) -> Tensor:
        """[rows, up width] -> [rows, intermediate].

        Gates that take every other column are applied expert by expert on a CPU: there, the bits of an element
        that does not lie beside its neighbours depend on how many rows are computed with it.
        """
        gate = self.module._apply_gate if self.module.has_gate else self.module.act_fn
        is_apart = up.device.type == "cpu" and not getattr(self.module, "is_concatenated", True)
        if block.expert is None and is_apart:
            return torch.cat([gate(up[span]) for span in routes.spans.values()])
        result: Tensor = gate(up)
        return result

    def product(
        self, rows: Tensor, block: Block, which: int, factors: ExpertFactors | None, by: Products
    ) -> Tensor:
        """[rows, in] -> [rows, out], bias and adapter included."""
        name = self.names[which]
        result = by.times(rows, self._matrix(block, name))
        if (bias := by.biases(f"{name}_bias")) is not None:
            result = result + bias
        return result if factors is None else factors.add_to(result, rows, by)

    def product_back(self, gradient: Tensor, block: Block, which: int, by: Products) -> Tensor:
        """Gradient of the rows [rows, in] from that of their product [rows, out], by the frozen weight alone."""
        return by.back(gradient, self._matrix(block, self.names[which]))

    def _matrix(self, block: Block, name: str) -> Tensor:
        weight = block.weights[name]
        return weight.transpose(-1, -2) if self.is_transposed else weight


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
    # in the type of the weights: autocast would convert every expert's again in every call
    with torch.autocast(hidden.device.type, enabled=False):
        result: Tensor = _Experts.apply(layer, routes, scalings, hidden.to(layer.dtype), weights, *tensors)
    return result.to(hidden.dtype)


def live_blocks(stacks: Mapping[str, Tensor], routes: Routes, is_grouped: bool) -> Generator[Block]:
    """Blocks of weights that are all in memory: one of all rows where torch has a product for it, else by expert."""
    if is_grouped:
        yield Block(slice(0, routes.rows), None, stacks)
        return
    for expert, span in routes.spans.items():
        yield Block(span, expert, {name: stack[expert] for name, stack in stacks.items()})


def can_group(stacks: Mapping[str, Tensor], ranks: Sequence[int]) -> bool:
    """Whether torch's grouped product takes these stacks and float32 factors of these ranks."""
    widths = [(size, stack.element_size()) for stack in stacks.values() for size in stack.shape[1:]]
    widths += [(rank, torch.float32.itemsize) for rank in ranks]
    fits = all(size * itemsize % GROUPED_BYTES == 0 for size, itemsize in widths)
    return fits and hasattr(F, "grouped_mm") and all(s.dtype in GROUPED_TYPES for s in stacks.values())


class _Experts(torch.autograd.Function):
    """Keeps hidden, the router's weights and the rows before the activation; asks for every weight again."""

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
        up = hidden.new_empty(routes.rows, layer.up_width)
        out = hidden.new_empty(routes.rows, layer.out_width)
        with closing(layer.lend(routes)) as blocks:
            for block in blocks:
                by, span = Products(routes, block), block.span
                own = layer.product(hidden[routes.tokens[span]], block, 0, first, by)
                up = by.place(own, up)
                out = by.place(layer.product(layer.activate(own, block, routes), block, 1, second, by), out)
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
        back = _Backward(layer, routes, factors, notes, wants_hidden)
        sorted_weights = weights.reshape(-1)[routes.order].unsqueeze(-1)
        grad_rows = hidden.new_empty(routes.rows, hidden.shape[1])
        grad_weights = torch.empty(routes.rows, dtype=weights.dtype, device=weights.device)
        with closing(layer.lend(routes)) as blocks:
            for block in blocks:
                by, span = Products(routes, block), block.span
                tokens = routes.tokens[span]
                by_rows, by_weights = back.run(
                    block, hidden[tokens], up[span], grad[tokens], sorted_weights[span], by
                )
                grad_weights = by.place(by_weights, grad_weights)
                if by_rows is not None:
                    grad_rows = by.place(by_rows, grad_rows)
        grad_hidden = routes.sum_choices(grad_rows, None) if wants_hidden else None
        by_choice = routes.unsort(grad_weights) if wants_weights else None
        return None, None, None, grad_hidden, by_choice, *_to_peft(notes, tensors)


@dataclass(frozen=True, slots=True)
class _Backward:
    """The backward pass of one call, a block at a time."""

    layer: Layer
    routes: Routes
    factors: Sequence[ExpertFactors | None]
    notes: list[ExpertGradients | None]
    wants_rows: bool

    def run(
        self, block: Block, x: Tensor, up: Tensor, grad: Tensor, weights: Tensor, by: Products
    ) -> tuple[Tensor | None, Tensor]:
        """Gradients of x [rows, hidden] and of the router's weights [rows]; the factors' are noted.

        The router's weight of a row has the gradient grad . y = (grad W) . h + grad . bias, so y is not made again.
        """
        layer = self.layer
        with torch.enable_grad():
            leaf = up.detach().requires_grad_()
            h = layer.activate(leaf, block, self.routes)
        by_h = self._through(1, block, h.detach(), grad, weights, by)
        wide = torch.promote_types(h.dtype, torch.float32)
        by_weights = (by_h.to(wide) * h.detach()).sum(-1)
        if (bias := by.biases("down_proj_bias")) is not None:
            by_weights += (grad.to(wide) * bias).sum(-1)
        (by_up,) = torch.autograd.grad(h, leaf, (by_h * weights).to(h.dtype))
        by_rows = self._through(0, block, x, by_up, torch.ones_like(weights), by)
        return by_rows if self.wants_rows else None, by_weights.to(weights.dtype)

    def _through(
        self, which: int, block: Block, rows: Tensor, grad: Tensor, weights: Tensor, by: Products
    ) -> Tensor:
        """Gradient of a product's rows from `grad`; its factors' gradients are of `grad` times `weights`."""
        factors, note = self.factors[which], self.notes[which]
        frozen = self.layer.product_back(grad, block, which, by)
        if factors is None or note is None:
            return frozen
        wide = grad.to(factors.lora_a.dtype)
        inner = factors.inner_back(wide, by)
        self.notes[which] = factors.note(note, rows, wide, inner, weights, by)
        return factors.add_back(frozen, inner, by)


def _by_expert(
    tensors: Sequence[Tensor | None], scalings: Sequence[float], num_experts: int
) -> list[ExpertFactors | None]:
    pairs = zip(tensors[::2], tensors[1::2], scalings, strict=True)
    return [
        None if a is None or b is None else ExpertFactors.of(a, b, scaling, num_experts)
        for a, b, scaling in pairs
    ]


def _to_peft(notes: Sequence[ExpertGradients | None], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for index, note in enumerate(notes):
        a, b = tensors[2 * index : 2 * index + 2]
        found += [None, None] if note is None else note.to_peft(a, b)
    return found
