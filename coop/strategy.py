"""Strategy: the three presets, each a frozen set of numbers with a reason, and how they adapt to a machine.

Owns nothing; promises that every number is read by the part that its comment names, and that on every machine
SpeedFirst is at least as eager as Balanced, and Balanced as MemoryFirst. Chosen on the command line or by
`scheduler.set_strategy(name)`.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coop.errors import CoopError

if TYPE_CHECKING:  # the command line lists the presets before it loads torch
    from coop.devices import Memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """How eagerly coop spends memory and disk bandwidth.

    half_life_tokens: decay of the use counts (forecast); 16 to 32 tokens beat recency on recorded routing.
    prior_tokens: tokens of evidence that a profile is worth at the start (forecast); 64 are 84 % of what that
    half-life can hold, so the profile leads at first and fades as tokens come.
    transition_weight: share of order-1 transitions in a likelihood (forecast); frequency knows the topic,
    transitions know the last token, and half of each is better than either alone.
    seed_share: share of the budget filled from the profile before the first token (scheduler); all or nothing,
    because memory left empty saves no read, and MemoryFirst takes none that was not asked for.
    prefetch_experts: the most experts guessed for the next layer (scheduler); about one top-k where a wrong
    guess may cost a wait, half of one where it must not.
    gap_factor: how many times the measured gap speculation may fill (scheduler); above 1 it can delay a
    demanded read, at 1 it just fits.
    guesses_in_flight: speculative reads at once (prefetcher); fewer than the four at which disks are busy, so
    that a demanded read never finds every place taken.
    guess_beside_demand: whether a speculative read may start while a demanded one is under way (prefetcher);
    it shares the disk with the read that the answer waits for, which only SpeedFirst accepts.
    ring_fill: fill of the output ring above which only the expert that the combine waits for may run
    (scheduler); the last 30 % are kept so that it always can.
    auto_share: share of the room that `--budget auto` takes (plan); 0.9 leaves a tenth to what grows later,
    0.35 leaves most of it to the neighbours.
    host_share: share of the free host memory for the host tier when a device's own memory is in front (plan);
    below auto_share, because RAM is shared with loaders and page cache, device memory mostly is not.
    """

    name: str
    why: str
    half_life_tokens: float
    prior_tokens: float
    transition_weight: float
    seed_share: float
    prefetch_experts: int
    gap_factor: float
    guesses_in_flight: int
    guess_beside_demand: bool
    ring_fill: float
    auto_share: float
    host_share: float

    def adapted(self, memory: Memory) -> Strategy:
        """This preset on a machine of that kind: a frozen copy, or itself where nothing differs."""
        change = ADAPTATIONS[memory.name]
        if change == Adaptation():
            return self
        return dataclasses.replace(
            self,
            prefetch_experts=self.prefetch_experts * change.prefetch_factor,
            auto_share=self.auto_share * change.auto_factor,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptation:
    """What a kind of memory changes, and why.

    prefetch_factor: times `prefetch_experts`. auto_factor: times `auto_share`, at most 1.
    """

    why: str = "the presets are written for it"
    prefetch_factor: int = 1
    auto_factor: float = 1.0


ADAPTATIONS = {  # by the name of a coop.devices.Memory
    "HOST": Adaptation(),
    "DEVICE": Adaptation(
        why="most guesses are copies from RAM, tens of times cheaper than reads: twice as many fit the same gap",
        prefetch_factor=2,
    ),
    "UNIFIED": Adaptation(
        why="the device, the system and every program share one RAM: leave them a quarter of what we would take",
        auto_factor=0.75,
    ),
}

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
            guesses_in_flight=3,
            guess_beside_demand=True,
            ring_fill=0.7,
            auto_share=0.9,
            host_share=0.8,
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
            guesses_in_flight=2,
            guess_beside_demand=False,
            ring_fill=0.7,
            auto_share=0.7,
            host_share=0.5,
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
            guesses_in_flight=0,
            guess_beside_demand=False,
            ring_fill=0.7,
            auto_share=0.35,
            host_share=0.2,
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
