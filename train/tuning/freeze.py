"""Freezer: the exceptions from what a recipe trains: groups, ranges of decoder layers, names with `*`.

Owns the meaning of `tune.freeze`; promises that an entry that freezes nothing is refused. `train.tuning.model` asks it
about every weight that the groups would train.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from coop.errors import RecipeError

_RANGE = re.compile(r"^layers: ?(\d+)(?:-(\d+))?$")
_LAYER = re.compile(r"\.(\d+)\.")


class Freezer:
    """Says whether a weight is frozen, and remembers which entries have frozen something."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = tuple(entries)
        self._used: set[str] = set()

    def __call__(self, name: str, group: str) -> bool:
        """Whether the weight `name` of `group`, which would be trained otherwise, stays frozen."""
        matching = [entry for entry in self._entries if _matches(entry, name, group)]
        self._used.update(matching)
        return bool(matching)

    def refuse_unused(self) -> None:
        """Raises RecipeError for entries that have frozen nothing so far."""
        unused = [entry for entry in self._entries if entry not in self._used]
        if unused:
            raise RecipeError(f"tune.freeze: {', '.join(map(repr, unused))} matches nothing that is trained")


def _matches(entry: str, name: str, group: str) -> bool:
    """Names match whole, with or without the last part: `*.q_proj` is `*.q_proj.weight`."""
    layers = _RANGE.match(entry)
    if layers:
        layer, first = _LAYER.search(name), int(layers[1])
        return layer is not None and first <= int(layer[1]) <= int(layers[2] or first)
    return entry == group or fnmatchcase(name, entry) or fnmatchcase(name.rpartition(".")[0], entry)
