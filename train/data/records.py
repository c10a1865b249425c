"""Record: one row as a file or the hub gives it, and what can be wrong with a row.

Owns the kinds of faults; promises that a fault says where its row stands. `train.data.sources` makes records,
`train.data.formats` and `train.data.masking` find faults in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from coop.errors import DataError

Fault = Literal["unreadable", "format", "field", "nothing to train", "chat template"]


class RowError(DataError):
    """One row that cannot be used; others can.

    Args:
        kind: under which heading it is counted.
        what: what is wrong with it.
    """

    def __init__(self, kind: Fault, what: str) -> None:
        self.kind = kind
        super().__init__(what)


@dataclass(frozen=True, slots=True)
class Record:
    """A row: `place` is file and line, or file and row; `value` is what stands there, or why it cannot be read."""

    place: str
    value: Any | RowError
