"""Calendar: what things cost here, and the gaps in which a load would be hidden.

Owns running means, updated online; promises no more than a measured past. Called by the scheduler, which
prefetches only into gaps, by the plan (how deep staging must be), and printed by `Calendar.table`.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import numpy as np

SMOOTHING = 0.1  # weight of a new measurement: a change of machine load shows within about ten calls


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(SMOOTHING, 1.0 / self.count) * (value - self.value)


class Calendar:
    """Measured milliseconds: `compute` of one expert by layer and row count, `between` two MoE layers, and loads
    by layer and by byte.

    Args:
        layers: number of MoE layers.
    """

    def __init__(self, layers: int) -> None:
        self._compute = [[_Mean() for _ in range(_BUCKETS)] for _ in range(layers)]
        self._between = [_Mean() for _ in range(layers)]
        self._load = [_Mean() for _ in range(layers)]
        self._load_ms_per_byte = _Mean()
        self._read_share = _Mean()  # of a load's time
        self._lock = threading.Lock()  # loads are recorded from loader threads

    def record_compute(self, layer: int, rows: int, seconds: float, experts: int = 1) -> None:
        """`experts` of `layer` computed about `rows` rows each, in `seconds` each."""
        self._compute[layer][_bucket(rows)].add(seconds * 1e3)

    def record_between(self, layer: int, seconds: float) -> None:
        """Time from the end of `layer`'s experts to the start of the next layer's."""
        self._between[layer].add(seconds * 1e3)

    def record_load(self, layer: int, nbytes: int, seconds: float, read_seconds: float = 0.0) -> None:
        """One expert of `nbytes` loaded, of which `read_seconds` were reading and the rest placing and merging.

        A load of no bytes says nothing about the disk.
        """
        if nbytes:
            with self._lock:
                self._load[layer].add(seconds * 1e3)
                self._read_share.add(read_seconds / seconds if seconds > 0 else 0.0)
                self._load_ms_per_byte.add(seconds * 1e3 / nbytes)

    def seed_compute(self, layer: int, rows: int, milliseconds: float) -> None:
        """Take a timing from a profile of the same hardware as a first measurement."""
        if np.isfinite(milliseconds) and milliseconds > 0:
            self._compute[layer][_bucket(rows)].add(milliseconds)

    def compute_ms(self, layer: int, rows: int) -> float:
        """Expected time of one expert with `rows` rows, 0 where never measured."""
        return self._compute[layer][_bucket(rows)].value

    def load_ms(self, nbytes: int) -> float:
        """Expected time to load `nbytes`, 0 where never measured."""
        return self._load_ms_per_byte.value * nbytes

    def gap_ms(self, layer: int, experts: int, rows: int) -> float:
        """Time until the next MoE layer asks for its experts, when `experts` of `layer` with `rows` rows still run."""
        return self._between[layer].value + experts * self.compute_ms(layer, rows)

    def loads_that_fit(self, gap_ms: float, nbytes: int) -> int:
        """How many loads of `nbytes`, one after another, end within a gap; a large number where none was measured."""
        load_ms = self.load_ms(nbytes)
        return int(gap_ms / load_ms) if load_ms > 0 else 2**31

    def staging_depth(self, queue_depth: int) -> int:
        """Loads in flight that keep `queue_depth` reads going while others are placed; 0 where none was measured.

        By Little's law: reads in progress = loads in flight x the share of a load that is reading.
        """
        share = self._read_share.value
        return math.ceil(queue_depth / share) if share > 0 else 0

    def table(self) -> list[dict[str, float]]:
        """One row for each layer, in ms: compute of one expert by row count, loading one, time to the next layer."""
        rows = []
        for layer, means in enumerate(self._compute):
            row = {"layer": float(layer), "between_ms": round(self._between[layer].value, 4)}
            row["load_ms"] = round(self._load[layer].value, 4)
            for bucket, mean in enumerate(means):
                if mean.count:
                    row[f"compute_ms_rows_{1 << bucket}"] = round(mean.value, 4)
            rows.append(row)
        return rows


_BUCKETS = 16  # row counts 1, 2-3, 4-7, ... up to 32,768 and more


def _bucket(rows: int) -> int:
    return min(max(rows, 1).bit_length() - 1, _BUCKETS - 1)
