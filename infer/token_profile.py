"""Token profile: where the time of one token goes, layer by layer.

Owns the clocks that it puts around a scheduler; promises that its parts add up to the token. Called by
`infer.bench profile-token`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

PARTS = ("wait", "kernel", "python", "dense")


class TokenProfile:
    """Clocks around every experts call of a runtime's decode steps.

    `wait`: for weights. `kernel`: computing experts. `python`: the rest of a call. `dense`: from the end of the
    call before to the beginning of this one, which is attention, router and what torch needs to get there.
    What follows the last layer (norm, head, picking the token) and precedes the first is in the first's `dense`.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._execute = scheduler, scheduler.execute
        self._record_compute = scheduler.calendar.record_compute
        self._num_layers = len(scheduler.geometry)
        self._kernel_s, self._ended_s = 0.0, 0.0
        self.seconds: list[list[float]] = []  # one entry for each decode call, the PARTS of each
        scheduler.execute = self.execute
        scheduler.calendar.record_compute = self.record_compute

    def begin(self) -> None:
        """Count from here."""
        self.seconds.clear()

    def record_compute(self, layer: int, rows: int, seconds: float, experts: int = 1) -> None:
        """What the scheduler tells its calendar."""
        self._kernel_s += seconds * experts
        self._record_compute(layer, rows, seconds, experts)

    def execute(
        self, layer: int, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """As `Scheduler.execute`."""
        began_s, waits = time.perf_counter(), self._scheduler.counters.waits
        waited_s, self._kernel_s = waits.total, 0.0
        result = self._execute(layer, hidden, expert_ids, weights)
        now_s = time.perf_counter()
        if hidden.shape[0] == 1:
            wait_s = waits.total - waited_s
            python_s = now_s - began_s - wait_s - self._kernel_s
            self.seconds.append([wait_s, self._kernel_s, python_s, began_s - self._ended_s])
        self._ended_s = now_s
        return result

    def table_ms(self) -> np.ndarray:
        """Mean milliseconds of each part, [layers, parts], without the first token, which a prompt preceded."""
        whole = len(self.seconds) // self._num_layers * self._num_layers
        calls = np.asarray(self.seconds[:whole]).reshape(-1, self._num_layers, len(PARTS))
        return calls[1:].mean(axis=0) * 1e3


def render(table_ms: np.ndarray, tokens_per_s: float) -> Any:
    """A rich table, a row for each layer and one for the token."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("layer", *PARTS, "all"):
        table.add_column(name if name == "layer" else f"{name} ms", justify="right")
    for layer, row in enumerate(table_ms):
        table.add_row(str(layer), *_cells(row))
    table.add_section()
    table.add_row("token", *_cells(table_ms.sum(axis=0)))
    shares = table_ms.sum(axis=0) / table_ms.sum()
    table.add_row("share", *(f"{share:.0%}" for share in shares), f"{tokens_per_s:.2f}/s")
    return table


def _cells(row: Sequence[float]) -> list[str]:
    return [f"{value:.3f}" for value in (*row, sum(row))]
