"""L1, execution: the arithmetic of one expert.

Owns nothing; promises the same bits for the same rows and weights, wherever they lie. Called by the scheduler
for each ready CTU. Flags, gate and activation are the model's own, so every family's arithmetic is its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def run_expert(
    experts: Any, weights: Mapping[str, torch.Tensor], rows: torch.Tensor, out: torch.Tensor
) -> None:
    """out[:] = down(activation(up(rows))), with the biases, gate and norm that the experts module declares.

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
    weights: Mapping[str, torch.Tensor],
    name: str,
    is_transposed: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    weight = weights[name] if is_transposed else weights[name].t()  # [in, out]
    product = torch.mm(rows, weight, out=out)
    bias = weights.get(f"{name}_bias")
    # added after rounding, as transformers' grouped path does: the sum then has its bits
    return product if bias is None else product.add_(bias)
