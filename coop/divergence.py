"""Divergence: how differently two records use a layer's experts, and how much of that is chance.

Pure functions over counts; own nothing. `python -m coop.profile diff` and `drift` judge with them.

Tokens of one text are alike, so a sample of n tokens tells less than n independent ones. How much less is measured
on an ordered routing sample: its blocks are dealt into two halves again and again, and what the halves differ by is
set against what as many independent tokens would.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCKS = 8  # contiguous parts of a sample that are dealt into halves: a few texts each
MIN_BLOCK_TOKENS = 16
DRAWS = 200
SEED = 0  # the same files must always get the same verdict


def jensen_shannon(mine: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.float64]:
    """Jensen-Shannon divergence of each row in bits, 0 to 1, of counts [..., experts]; NaN for a row without counts."""
    with np.errstate(invalid="ignore", divide="ignore"):
        p = mine / mine.sum(axis=-1, keepdims=True)
        q = other / other.sum(axis=-1, keepdims=True)
        mean = (p + q) / 2
        terms = [np.where(part > 0, part * np.log2(part / mean), part) for part in (p, q)]
    return np.asarray(sum(part.sum(axis=-1) for part in terms) / 2)


def chance(
    mine: NDArray[np.int64], other: NDArray[np.int64], clumping: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What two records [layers, experts] of the same traffic would differ by: mean and 95th percentile, [layers].

    Both are drawn again from their common shares, with as many uses as they have, divided by `clumping`.
    """
    rng = np.random.default_rng(SEED)
    draws = np.empty((DRAWS, len(mine)))
    for layer, (a, b) in enumerate(zip(mine, other, strict=True)):
        shares = (a / a.sum() + b / b.sum()) / 2
        sizes = [max(1, round(int(counts.sum()) / clumping)) for counts in (a, b)]
        drawn = [rng.multinomial(size, shares / shares.sum(), size=DRAWS) for size in sizes]
        draws[:, layer] = jensen_shannon(*drawn)
    return draws.mean(axis=0), np.percentile(draws, 95, axis=0)


def clumping(sample: NDArray[np.uint16], num_experts: int) -> float:
    """How many tokens of `sample` [tokens, layers, top_k] tell as much as one independent token; at least 1.

    NaN where the sample is too short to tell.
    """
    if len(sample) < BLOCKS * MIN_BLOCK_TOKENS:
        return float("nan")
    blocks = np.stack([use_counts(part, num_experts) for part in np.array_split(sample, BLOCKS)])
    rng = np.random.default_rng(SEED)
    seen, by_chance = [], []
    for _ in range(DRAWS // 4):
        dealt = rng.permutation(BLOCKS)
        halves = [blocks[dealt[part::2]].sum(axis=0) for part in (0, 1)]
        seen.append(jensen_shannon(*halves).mean())
    whole = blocks.sum(axis=0)
    for counts in whole:
        drawn = [rng.multinomial(int(counts.sum()) // 2, counts / counts.sum(), size=DRAWS) for _ in (0, 1)]
        by_chance.append(jensen_shannon(*drawn).mean())
    return max(1.0, float(np.mean(seen) / max(1e-12, np.mean(by_chance))))


def use_counts(sample: NDArray[np.integer], num_experts: int) -> NDArray[np.int64]:
    """Uses of each expert in `sample` [tokens, layers, top_k], as int64 [layers, experts]."""
    layers = np.moveaxis(sample, 1, 0).reshape(sample.shape[1], -1).astype(np.int64)
    return np.stack([np.bincount(layer, minlength=num_experts) for layer in layers])
