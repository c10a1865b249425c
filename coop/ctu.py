"""CTU, the collaborative task unit: one expert's share of one layer call.

Owns nothing; describes work, never does it. Made by the data flow, ordered and run by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from coop.ids import ExpertId

SLICE_ROWS = 256  # rows of one slice of a unit: enough for full matrix speed, few enough for a bounded ring


@dataclass(frozen=True, slots=True)
class CTU:
    """Rows `start` to `stop` of the gathered input go through `expert`.

    `priority` orders units that are ready at the same time, highest first: units with more rows hide more
    loading behind their compute. It changes when a unit runs, never what it computes.
    """

    expert: ExpertId
    start: int
    stop: int
    priority: float

    @property
    def rows(self) -> int:
        """Number of token rows."""
        return self.stop - self.start
