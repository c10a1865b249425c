"""Mixture: how many rows of each source are used, which ones, and which of them are held out.

Owns two rules, both by hashes of a row's tokens; promises exact counts, that no row is used twice, and that
neither the order of rows nor a library's random generator decides. Pure; `train.data.load` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from coop.errors import DataError
from train.data.rows import Row


def mix_counts(available: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Rows of each source: the largest counts in proportion to `weights`, rounded down, that `available` allows.

    The source that is scarcest for its weight is used whole: with T = min(available_i / share_i) rows in all,
    source i gives floor(T x share_i).
    """
    exact = [Fraction(weight) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    total = min(count / share for count, share in zip(available, shares, strict=True))
    return [int(total * share) for share in shares]


def pick(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """`count` of `rows`, in their order: those with the smallest hashes of seed and tokens."""
    ranked = sorted(range(len(rows)), key=lambda index: (rows[index].token_digest(f"mixture {seed}"), index))
    return [rows[index] for index in sorted(ranked[:count])]


def mix(
    sources: Sequence[Sequence[Row]], weights: Sequence[float], names: Sequence[str], seed: int
) -> list[list[Row]]:
    """The rows that are used of each source. Raises DataError for a source of which no row would be."""
    counts = mix_counts([len(rows) for rows in sources], weights)
    for name, count, weight in zip(names, counts, weights, strict=True):
        if not count:
            raise DataError(f"{name}: with weight {weight:g} no row of it is used; raise it, or leave it out")
    return [pick(rows, count, seed) for rows, count in zip(sources, counts, strict=True)]


def hold_out(rows: Sequence[Row], fraction: float, seed: int) -> tuple[list[Row], list[Row]]:
    """(kept, held out): a row is held out if its hash with the seed, as a number in [0, 1), is under `fraction`."""
    limit = int(fraction * 2**64)
    sides: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        sides[int.from_bytes(row.token_digest(f"held out {seed}")[:8]) < limit].append(row)
    return sides
