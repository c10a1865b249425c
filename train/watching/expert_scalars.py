"""Expert scalars: what is logged about experts while a run trains.

Owns the counts of the last record, so that each record is about the steps since; promises numbers that come from
the counts alone, under names that W&B groups. The callback asks for them, on the main process, of its own tokens.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from coop.profile import Profile
from coop.profile_report import half_coverage, layer_balance
from coop.rehearsal import SHARES, hit_rate

REHEARSED_REQUESTS = 8192  # of the routing sample, the latest: about a tenth of a second on one core
REHEARSAL_SHARE = (
    0.005  # most of the training time so far that hit rates may have taken; then they are left out
)
MAX_LAYER_KEYS = 192  # of the detailed ones; a model with more layers is shown by its first


class ExpertScalars:
    """Scalars of each record.

    Args:
        is_detailed: whether each layer has keys of its own.
    """

    def __init__(self, is_detailed: bool = False) -> None:
        self._is_detailed = is_detailed
        self._before: NDArray[np.int64] | None = None
        self._rehearsal_seconds = 0.0

    def take(self, profile: Profile) -> dict[str, float]:
        """The scalars of the training counts since the last call, or of all of them on the first call."""
        counts = profile.train_prompt + profile.train_answer
        window = counts if self._before is None else counts - self._before
        self._before = counts
        if not window.any():
            return {}
        values = balance_scalars(window)
        if self._rehearsal_seconds <= REHEARSAL_SHARE * profile.train_seconds:
            began = time.perf_counter()
            values |= hit_rate_scalars(profile, profile)
            self._rehearsal_seconds += time.perf_counter() - began
        return values | (layer_scalars(window) if self._is_detailed else {})


def balance_scalars(counts: NDArray[np.int64]) -> dict[str, float]:
    """How evenly experts are used in `counts` [layers, experts], over all layers.

    busiest_over_mean: the worst layer's busiest expert over its mean. load_entropy: of a layer's load, 1 where all
    experts are used alike, the mean over layers. dead: experts never chosen. hottest_half_share: of all uses.
    """
    layers = layer_balance(counts)
    return {
        "experts/busiest_over_mean": float(np.max([layer["max_over_mean"] for layer in layers])),
        "experts/load_entropy": float(np.mean([_entropy(layer, counts.shape[1]) for layer in layers])),
        "experts/dead": float(sum(layer["unused"] for layer in layers)),
        "experts/hottest_half_share": half_coverage(counts),
    }


def hit_rate_scalars(profile: Profile, seed: Profile) -> dict[str, float]:
    """Hit rates if decoding went on as the latest tokens of `profile` were routed, from a memory that `seed` fills.

    The shipping forecast and residency, nothing guessed ahead. Where both are one profile, its tokens are among
    those it counted: the rates of a run that has just begun are too good.
    """
    per_token = profile.num_layers * profile.identity.top_k
    sample = profile.sample[-max(1, REHEARSED_REQUESTS // per_token) :]
    if not len(sample):
        return {}
    num_experts = profile.identity.num_experts
    return {
        f"experts/hit_rate_{round(100 * share)}": hit_rate(sample, num_experts, share, seed)
        for share in SHARES
    }


def layer_scalars(counts: NDArray[np.int64]) -> dict[str, float]:
    """Balance of each layer, as many layers as MAX_LAYER_KEYS allows."""
    values: dict[str, float] = {}
    for layer, balance in enumerate(layer_balance(counts)[: MAX_LAYER_KEYS // 3]):
        prefix = f"experts_layer_{layer:02d}"
        values[f"{prefix}/busiest_over_mean"] = balance["max_over_mean"]
        values[f"{prefix}/load_entropy"] = _entropy(balance, counts.shape[1])
        values[f"{prefix}/dead"] = float(balance["unused"])
    return values


def _entropy(balance: dict[str, float], num_experts: int) -> float:
    """Entropy of the load over that of an even load."""
    return float(np.log(balance["effective_experts"]) / np.log(num_experts)) if num_experts > 1 else 1.0
