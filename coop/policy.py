"""Policy: which resident expert makes room, and whether a guess may push one out.

Pure functions over arrays; own nothing, so they are tested with tables and replayed by a simulator.
Called by residency under its lock.
"""

from __future__ import annotations

import numpy as np

from coop.ids import ExpertId


def pick_victim(likelihood: np.ndarray, is_evictable: np.ndarray) -> ExpertId | None:
    """The evictable expert least likely to be used again, or None when none may go.

    likelihood float64 [layers, experts], is_evictable bool [layers, experts]. Ties go to the lowest id, so
    the choice does not depend on history.
    """
    if not is_evictable.any():
        return None
    flat = int(np.argmin(np.where(is_evictable, likelihood, np.inf)))
    layer, expert = divmod(flat, likelihood.shape[1])
    return ExpertId(layer, expert)


def may_displace(likelihood: np.ndarray, candidate: ExpertId, victim: ExpertId) -> bool:
    """Speculation may evict only what is less likely to be used than itself."""
    return bool(likelihood[victim] < likelihood[candidate])
