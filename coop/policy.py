"""Policy: what makes room, what a guess may push out, what runs first, and a signal from outside.

Pure functions over arrays; own nothing, so they are tested with tables and replayed by a simulator.
Called by residency under its lock, by the scheduler, and by the forecast.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coop.errors import CoopError
from coop.ids import ExpertId

UNLIMITED = 2**31


class PriorityPolicy(Protocol):
    """A signal from outside about which experts matter: a state that the caller knows, or a reward.

    It moves eviction and prefetch, never which experts the router chooses, so results keep their bits.
    """

    def adjust(self, layer: int, likelihood: NDArray[np.float64]) -> NDArray[np.float64]:
        """New priorities for a layer's experts.

        likelihood float64 [experts]: expected uses of each expert by the next token, as the forecast sees
        it (a copy, yours to change). Returns the same shape, finite and not negative; higher stays longer
        and is fetched earlier. Called once for each layer call, from the thread that runs the model.
        """


def adjusted(policy: PriorityPolicy, layer: int, likelihood: NDArray[np.float64]) -> NDArray[np.float64]:
    """What `policy` makes of a likelihood; CoopError for an answer that cannot be ordered."""
    answer = np.asarray(policy.adjust(layer, likelihood.copy()), dtype=np.float64)
    if answer.shape != likelihood.shape:
        raise CoopError(
            f"layer {layer}: the priority policy answered {answer.shape} for {likelihood.shape} experts"
        )
    if not np.isfinite(answer).all() or (answer < 0).any():
        raise CoopError(
            f"layer {layer}: the priority policy answered numbers that are negative or not finite"
        )
    return answer


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


def may_stream(leased: int, streams: int) -> bool:
    """Whether a demanded expert may evict one that is as likely to be used again as itself, or likelier.

    A prompt needs nearly every expert of a layer once. Only so many of those pass through at a time, in slots
    that the call itself has just given back, and what decoding will want stays. With nothing leased it always
    may, so a call always gets on.
    """
    return leased < streams


def unit_priority(rows: int, compute_ms: float, is_memory_short: bool) -> float:
    """Which of several ready units runs first, highest first.

    Longest first, by measured time or rows where none is known: its compute hides the most loading. Shortest
    first while other units wait for room: each one that ends gives its slot to a load.
    """
    cost = compute_ms if compute_ms > 0 else rows * 1e-6
    return -cost if is_memory_short else cost
