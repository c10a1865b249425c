"""ExpertId: the one name of an expert.

Owns nothing; promises that an id cannot be negative. Used by every other room of `coop`.
"""

from __future__ import annotations

from typing import NamedTuple


class ExpertId(NamedTuple):
    """An expert, by the ordinal of its mixture-of-experts layer and its index in that layer.

    `layer` counts only layers that have experts, in the order of `model.named_modules()`.
    """

    layer: int
    expert: int
