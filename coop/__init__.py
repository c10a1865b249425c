"""Coop: profile-guided optimisation for mixture-of-experts language models.

Public names are loaded on first use, so that importing coop costs nothing until a model is touched.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coop.adapters.attach import Runtime, attach
    from coop.adapters.modulelist import attach_modulelist
    from coop.errors import CoopError
    from coop.profile import Profile

__all__ = ["CoopError", "Profile", "Runtime", "attach", "attach_modulelist"]
__version__ = "0.1.0"

_PLACES = {
    "attach": "coop.adapters.attach",
    "attach_modulelist": "coop.adapters.modulelist",
    "Runtime": "coop.adapters.attach",
    "Profile": "coop.profile",
    "CoopError": "coop.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'coop' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
