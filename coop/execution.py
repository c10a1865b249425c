"""L1, execution: the arithmetic of experts, through two entries that a kernel can take over whole.

Owns nothing; promises the same bits for the same rows and weights, wherever they lie and whatever runs beside
them. Called by the scheduler for units that are ready. Flags, gate and activation are the model's own, so
every family's arithmetic is its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from coop.quantise import dequantise

Weights = Mapping[str, torch.Tensor]


def run_decode(
    experts: Any, weights: Sequence[Weights], rows: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
) -> None:
    """Several experts of one layer, a few rows each: outs[i][:] = expert i of rows[i], [n_i, hidden] both."""
    for weight, x, out in zip(weights, rows, outs, strict=True):
        run_prefill(experts, weight, x, out)


def run_prefill(experts: Any, weights: Weights, rows: torch.Tensor, out: torch.Tensor) -> None:
    """One expert, many rows: out[:] = down(activation(up(rows))), with the biases, gate and norm of the module.

    rows [n, hidden], out [n, hidden]; weights are one expert's, shaped as the module's stacks without their
    first dimension, input-major where `is_transposed`.
    """
    if experts.has_gate:
        activated = experts._apply_gate(_project(rows, weights, "gate_up_proj", experts.is_transposed))
    else:
        activated = experts.act_fn(_project(rows, weights, "up_proj", experts.is_transposed))
    if experts.has_post_expert_norm:
        projected = _project(activated, weights, "down_proj", experts.is_transposed)
        out.copy_(experts.post_expert_norm(projected))
        return
    _project(activated, weights, "down_proj", experts.is_transposed, out)


def _project(
    rows: torch.Tensor,
    weights: Weights,
    name: str,
    is_transposed: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    scales = weights.get(f"{name}_scale")
    if scales is not None:  # quantised weights are output-major in every class
        weight = dequantise(weights[name], scales, rows.shape[1], rows.dtype).t()
    else:
        weight = weights[name] if is_transposed else weights[name].t()  # [in, out]
    product = torch.mm(rows, weight, out=out)
    bias = weights.get(f"{name}_bias")
    # added after rounding, as transformers' grouped path does: the sum then has its bits
    return product if bias is None else product.add_(bias)
