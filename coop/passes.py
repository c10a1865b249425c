"""PassForecast: what training needs next, which is known: forward goes up through the layers, backward comes down.

Owns the direction and what each layer used last; promises that an expert's likelihood falls with the number of
layer calls until it is used again, which is the order in which an optimal cache evicts. Read by residency; told of
every layer call by the scheduler. Only speed depends on it.
"""

from __future__ import annotations

import numpy as np

from coop.forecast import Forecast
from coop.strategy import Strategy

SELDOM = 0.05  # of an expert that its layer did not use last time: below all others, above nothing


class PassForecast(Forecast):
    """Likelihood = how probably an expert is used when its layer runs next / layer calls until then.

    Args:
        layers, experts: the shape of the model.
        strategy: for the half-life of the use counts.
    """

    def __init__(self, layers: int, experts: int, strategy: Strategy) -> None:
        super().__init__(layers, experts, strategy)
        self._use = np.ones((layers, experts))  # before the first pass everything is as likely
        self._last = -1
        self._is_backward = False

    def begin_prompt(self, tokens: int, top_k: object) -> None:
        """Nothing: every pass of training is one, and its order is known."""

    def observe(self, layer: int, expert_ids: np.ndarray) -> None:
        """A layer is called with int64 [tokens, top_k]; the direction follows from the layer before it.

        Backward begins at the layer that forward ended with. Layers that are computed again in backward
        (activation checkpointing) come in backward's order, so they need no telling.
        """
        is_turn = layer == self._last
        self._is_backward = layer > 0 if is_turn else layer == self._last - 1
        self._last = layer
        seen = np.full(self._use.shape[1], SELDOM)
        seen[np.unique(expert_ids)] = 1.0
        self._use[layer] = seen
        self.likelihood[:] = self._use / self._distances(layer)[:, None]

    def upcoming(self, layer: int) -> list[tuple[int, np.ndarray]]:
        """The layers after this one in the order of the passes, up to a whole pass beyond the turn.

        Each with the experts that it used last.
        """
        up, down = range(layer + 1, self._layers), range(layer - 1, -1, -1)
        turned = [*down, *range(self._layers)] if self._is_backward else [*up, *reversed(range(self._layers))]
        return [(following, self._use[following] > SELDOM) for following in turned]

    @property
    def _layers(self) -> int:
        return len(self._use)

    def _distances(self, layer: int) -> np.ndarray:
        """Layer calls until each layer is used again, float64 [layers], at least 1."""
        layers = np.arange(self._layers, dtype=np.float64)
        if self._is_backward:
            return np.where(layers < layer, layer - layers, layer + 1 + layers)
        return np.where(layers > layer, layers - layer, 2 * self._layers - 1 - layers - layer)
