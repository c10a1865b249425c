"""Strategy: the three presets, each a frozen set of numbers with a reason.

Owns nothing; promises that every number is read by the part that its comment names. Chosen on the command
line or by `scheduler.set_strategy(name)`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from coop.errors import CoopError


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """How eagerly coop spends memory and disk bandwidth.

    half_life_tokens: decay of the use counts (forecast). prior_tokens: tokens of evidence that a profile is
    worth at the start (forecast). transition_weight: share of order-1 transitions in a likelihood
    (forecast). seed_share: share of the budget filled from the profile before the first token (scheduler).
    prefetch_experts: the most experts guessed for the next layer (scheduler). gap_factor: how many times the
    measured gap speculation may fill; above 1 it can delay a demand load (scheduler). auto_share: share of
    the free memory that `--budget auto` takes (plan).
    """

    name: str
    why: str
    half_life_tokens: float
    prior_tokens: float
    transition_weight: float
    seed_share: float
    prefetch_experts: int
    gap_factor: float
    auto_share: float


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            name="SpeedFirst",
            why="the machine is ours: fill the budget at once and guess ahead even where a guess may cost a wait",
            half_life_tokens=24.0,
            prior_tokens=64.0,
            transition_weight=0.5,
            seed_share=1.0,
            prefetch_experts=8,
            gap_factor=4.0,
            auto_share=0.9,
        ),
        Strategy(
            name="Balanced",
            why="fill the budget from the profile, then guess only where the calendar shows the disk idle",
            half_life_tokens=24.0,
            prior_tokens=64.0,
            transition_weight=0.5,
            seed_share=1.0,
            prefetch_experts=4,
            gap_factor=1.0,
            auto_share=0.7,
        ),
        Strategy(
            name="MemoryFirst",
            why="others live here too: hold only what has been asked for, read nothing on a guess",
            half_life_tokens=24.0,
            prior_tokens=64.0,
            transition_weight=0.5,
            seed_share=0.0,
            prefetch_experts=0,
            gap_factor=0.0,
            auto_share=0.35,
        ),
    )
}


def get_strategy(name: str) -> Strategy:
    """The preset of that name; CoopError with the nearest name otherwise."""
    if name in STRATEGIES:
        return STRATEGIES[name]
    near = difflib.get_close_matches(str(name), STRATEGIES, 1, 0.3)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise CoopError(f"strategy {name!r} is none of {', '.join(STRATEGIES)}{hint}")
