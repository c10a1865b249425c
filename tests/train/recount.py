"""Recount: what the routers of a model chose, counted with hooks and plain loops beside everything that coop does.

Owns its own hooks; promises to share no code with the recorder or the hot map. Called by tests of the callback.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from coop.adapters.transformers import find_experts


class Recount:
    """Counts of training passes: prompt and answer, int64 [3 layers, 8 experts]; recomputation is told by the pass.

    Without a mask every token is real.
    """

    def __init__(self, model: Any) -> None:
        self.prompt = np.zeros((3, 8), np.int64)
        self.answer = np.zeros((3, 8), np.int64)
        self.passes = 0
        self._inputs: dict[str, Tensor] = {}
        self._is_forward = False
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end)
        for entry in find_experts(model):
            entry.module.register_forward_pre_hook(
                lambda module, args, layer=entry.layer: self._count(layer, args[1])
            )

    def _begin(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._inputs, self._is_forward = kwargs, model.training
        self.passes += model.training

    def _end(self, *_: Any) -> None:
        self._is_forward = False

    def _count(self, layer: int, indices: Tensor) -> None:
        if not self._is_forward:
            return
        labels = self._inputs["labels"].flatten().tolist()
        mask = self._inputs.get("attention_mask")
        real = [1] * len(labels) if mask is None else mask.flatten().tolist()
        for is_real, label, experts in zip(real, labels, indices.tolist(), strict=True):
            for expert in experts if is_real else []:
                (self.prompt if label == -100 else self.answer)[layer, expert] += 1
