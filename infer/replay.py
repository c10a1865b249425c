"""Replay: decode steps routed as a recorded trace says, to see what a trained model's locality would give.

Owns the trace and the place in it; promises that prompts are routed by the model itself, and that the model's
answer is then of no meaning: only counts and clocks are. Called by `infer.arms`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from coop.errors import DataError
from coop.routes import Routes

if TYPE_CHECKING:
    import torch


class Trace(Routes):
    """Recorded routes, laid on the layers of the model that replays them."""

    __slots__ = ()

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read an .npz file as Routes does. DataError names the option."""
        try:
            return super().load(path)
        except DataError as exc:
            raise DataError(f"--replay {exc}") from exc

    def layer_for(self, layer: int, num_layers: int) -> int:
        """The traced layer that the model's `layer` is routed by: first by first, last by last, even between."""
        return round(layer * (self.ids.shape[1] - 1) / max(1, num_layers - 1))

    def check(self, num_experts: int) -> None:
        """DataError if the trace asks for experts that the model has not."""
        if self.num_experts > num_experts:
            raise DataError(
                f"the trace has {self.num_experts} experts in a layer and the model {num_experts}: "
                "replay it on a model with as many"
            )

    def describe(self, num_layers: int, num_experts: int, top_k: int) -> str:
        """How the trace is laid on the model, in one sentence."""
        layers, k = self.ids.shape[1:]
        parts = [f"layers 0 to {num_layers - 1} are routed by layers 0 to {layers - 1} of the trace, evenly"]
        if k < top_k:
            parts.append(f"each token asks for {k} experts, not {top_k}")
        if k > top_k:
            parts.append(f"each token asks for the first {top_k} of the trace's {k} experts")
        if self.num_experts < num_experts:
            parts.append(f"only experts 0 to {self.num_experts - 1} of {num_experts} are ever asked for")
        return "; ".join(parts)


class Replay:
    """Stands before a scheduler and exchanges the expert ids of decode calls for those of a trace."""

    def __init__(self, scheduler: Any, trace: Trace) -> None:
        self._execute, self._trace = scheduler.execute, trace
        self._num_layers = len(scheduler.geometry)
        self.token = -1
        trace.check(min(layer.num_experts for layer in scheduler.geometry))
        scheduler.execute = self.execute

    def execute(
        self, layer: int, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """As `Scheduler.execute`, for one row with the trace's ids; the trace starts again at its end."""
        if hidden.shape[0] > 1:
            return self._execute(layer, hidden, expert_ids, weights)
        if layer == 0:
            self.token = (self.token + 1) % len(self._trace.ids)
        row = self._trace.ids[self.token, self._trace.layer_for(layer, self._num_layers)]
        k = min(len(row), expert_ids.shape[1])
        chosen = expert_ids.new_tensor(row[:k].tolist()).unsqueeze(0)  # [1, k]
        return self._execute(layer, hidden, chosen, weights[:, :k])
