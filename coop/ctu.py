"""CTU, the collaborative task unit: rows of one layer call that go through one expert.

Owns the rule by which long work is sliced; describes work, never does it. Made by the data flow, ordered
and run by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coop.ids import ExpertId

SLICE_ROWS = 256  # a slice's outputs stay in cache until they are combined; more rows gain a product nothing
DECODE_ROWS = 8  # up to here a product is bound by reading the weights: the decode entry takes them


@dataclass(slots=True)
class CTU:
    """Rows `start` to `stop` of the gathered input go through `expert`; the output is [rows, width].

    `index` is its place in the order in which outputs are combined. `priority` orders units that are ready
    at the same time, highest first; the scheduler keeps it current.
    It changes when a unit runs, never what it computes.
    """

    expert: ExpertId
    start: int
    stop: int
    width: int
    index: int = 0
    priority: float = 0.0

    @property
    def rows(self) -> int:
        """Number of token rows."""
        return self.stop - self.start


def slices(rows: int) -> Sequence[tuple[int, int]]:
    """Ranges of at most SLICE_ROWS rows. The rule knows nothing but the row count, so bits depend on nothing else."""
    if rows <= SLICE_ROWS:
        return ((0, rows),)
    return [(start, min(start + SLICE_ROWS, rows)) for start in range(0, rows, SLICE_ROWS)]
