"""L2, data flow: token rows to experts and back.

Owns nothing between calls; promises a combine whose order is fixed by the router's ranking alone, so the sum
has the same bits whichever expert was ready first. Called by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from coop.ctu import CTU
from coop.errors import RoutingError
from coop.ids import ExpertId


@dataclass(frozen=True, slots=True)
class Gathered:
    """One layer call, gathered by expert.

    rows [tokens * k, hidden]: inputs, each expert's rows together, experts ascending, tokens ascending in
    each. order int64 [tokens * k]: which (token, rank) pair each row is. units: one CTU for each distinct
    expert, ascending.
    """

    rows: torch.Tensor
    order: torch.Tensor
    units: tuple[CTU, ...]


def gather(layer: int, hidden: torch.Tensor, expert_ids: np.ndarray, num_experts: int) -> Gathered:
    """Group token rows by expert.

    hidden [tokens, hidden], expert_ids int64 [tokens, k]. Raises RoutingError for an id outside the layer.
    """
    top_k = expert_ids.shape[1]
    flat = expert_ids.reshape(-1)
    if flat.size and (flat.min() < 0 or flat.max() >= num_experts):
        bad = int(flat.min() if flat.min() < 0 else flat.max())
        raise RoutingError(f"layer {layer}: the router chose expert {bad} of {num_experts}")
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=num_experts)
    stops = np.cumsum(counts)
    units = tuple(
        CTU(ExpertId(layer, int(e)), int(stops[e] - counts[e]), int(stops[e]), float(counts[e]))
        for e in np.flatnonzero(counts)
    )
    index = torch.from_numpy(order)
    return Gathered(hidden[index // top_k], index, units)


def combine(
    outputs: torch.Tensor, gathered: Gathered, weights: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Weighted sum of each token's experts, in the router's rank order.

    outputs [tokens * k, hidden] in gathered order, weights [tokens, k] -> [tokens, hidden] of `dtype`.
    """
    tokens, top_k = weights.shape
    back = torch.empty_like(gathered.order)
    back[gathered.order] = torch.arange(back.numel())
    ranked = outputs[back].view(tokens, top_k, -1)  # [tokens, k, hidden]
    return (ranked * weights.unsqueeze(-1)).sum(1).to(dtype)
