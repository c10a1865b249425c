"""Rehearsal: a routing sample replayed through the shipping forecast and residency, without weights or a clock.

Owns nothing that outlives a call; promises the hits that demanded reads alone would have, because nothing is
guessed ahead. Training logs its rates, and `python -m coop.profile diff` and `drift` compare them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coop.errors import ProfileError
from coop.profile import Profile

if TYPE_CHECKING:  # the command line reads its options before it loads torch
    from coop.ids import ExpertId
    from coop.residency import Residency
    from coop.store import Slot

SHARES = (0.25, 0.5)  # of all experts in memory: the two budgets that every report names
STRATEGY = "Balanced"
FIRST_TOKENS = 64  # a seed is worth so many tokens of evidence: later on, what was seen since decides
WINDOWS = 8


def hit_rate(sample: NDArray[np.uint16], num_experts: int, share: float, seed: Profile | None) -> float:
    """Share of requests for experts that find them resident.

    Args:
        sample: [tokens, layers, top_k], decoded one token after another.
        num_experts: of each layer.
        share: of all experts that may be resident; never less than one token's experts of one layer.
        seed: fills the memory and the forecast before the first token; None starts cold and knows nothing.

    Raises ProfileError if the sample and the seed are of different shapes. NaN for an empty sample.
    """
    from coop.forecast import Forecast
    from coop.ids import ExpertId
    from coop.residency import Residency
    from coop.store import LayerGeometry
    from coop.strategy import get_strategy

    tokens, layers, top_k = sample.shape
    if not tokens:
        return float("nan")
    geometry = [LayerGeometry(num_experts, top_k, 1, 0)] * layers  # an expert weighs one byte
    forecast = Forecast.of(geometry, get_strategy(STRATEGY))
    slots = max(top_k, int(share * layers * num_experts))
    residency = Residency(geometry, slots, _new_slot, forecast.likelihood)
    if seed is not None:
        _check_shapes(seed, layers, num_experts, top_k)
        forecast.seed(seed)
        _load(residency, [ExpertId(*place) for place in forecast.hottest()[:slots]])
    hits = 0
    for token in sample.astype(np.int64):
        for layer, chosen in enumerate(token):
            forecast.observe(layer, chosen[None])
            hits += _load(residency, [ExpertId(layer, int(expert)) for expert in np.unique(chosen)])
    return hits / (tokens * layers * top_k)


def first_tokens_hit_rate(
    sample: NDArray[np.uint16], num_experts: int, share: float, seed: Profile | None
) -> float:
    """The mean of `hit_rate` over FIRST_TOKENS tokens from several places of `sample`: what a seed is worth."""
    last = max(0, len(sample) - FIRST_TOKENS)
    starts = sorted({round(last * i / (WINDOWS - 1)) // FIRST_TOKENS * FIRST_TOKENS for i in range(WINDOWS)})
    rates = [hit_rate(sample[start : start + FIRST_TOKENS], num_experts, share, seed) for start in starts]
    return float(np.mean(rates))


def _load(residency: Residency, experts: list[ExpertId]) -> int:
    """Lease, load what is missing, release; returns how many were there already."""
    granted = residency.demand(experts)
    for expert, _ in granted.to_load:
        residency.publish(expert)
    residency.release(*(e.expert for e in granted.leases), *(expert for expert, _ in granted.to_load))
    return len(granted.leases)


def _new_slot(layer: int) -> Slot:
    import torch

    from coop.store import Slot

    return Slot(torch.empty(1, dtype=torch.uint8), {})


def _check_shapes(seed: Profile, layers: int, num_experts: int, top_k: int) -> None:
    mine = (seed.num_layers, seed.identity.num_experts, seed.identity.top_k)
    if mine != (layers, num_experts, top_k):
        raise ProfileError(
            f"layers x experts x top-k are {list(mine)} in the profile, {[layers, num_experts, top_k]} in the sample"
        )
