"""Measure an external priority on recorded routing: an agent that changes between two modes that it knows.

Owns the replay, which runs the shipped Forecast and Residency token by token, and the policy that the document
on external priority shows; promises that every variant sees the same tokens. Run by hand:
`python scripts/measure_priority.py --trace A.npz --trace B.npz`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from coop.errors import CoopError
from coop.forecast import Forecast
from coop.ids import ExpertId
from coop.residency import Residency
from coop.store import LayerGeometry, Slot
from coop.strategy import get_strategy

LEARN_CALLS = 512  # a mode's hotness is a mean over about so many layer calls
SETTLE_CALLS = 32  # after a switch the forecast still speaks of the other mode: nothing is learned from it
FADE_CALLS = 64.0  # the forecast catches up: half of the weight is gone after so many layer calls
REWARD_STEPS = 64  # the running reward is a mean over about so many steps
WARM_SEGMENTS = 4  # each mode is seen twice before anything is counted
SEED = 7


class ModePriority:
    """Learned expert hotness of each mode, blended with the forecast as far as that mode has paid off."""

    def __init__(self, modes: Sequence[str], layers: int, experts: int) -> None:
        self.mode = modes[0]
        self.trust = dict.fromkeys(modes, 0.0)  # running reward of each mode, 0 to 1
        self._hot = {mode: np.zeros((layers, experts)) for mode in modes}
        self._learned = {mode: np.zeros(layers) for mode in modes}  # layer calls
        self._since = np.zeros(layers)  # layer calls since the switch

    def enter(self, mode: str) -> None:
        """The agent changes to `mode`."""
        self.mode = mode
        self._since[:] = 0

    def reward(self, value: float, steps: int = 1) -> None:
        """How well the last steps went, 0 to 1; NaN counts as 0."""
        weight = 1 - (1 - 1 / REWARD_STEPS) ** steps
        self.trust[self.mode] += weight * (min(1.0, max(0.0, value)) - self.trust[self.mode])

    def adjust(self, layer: int, likelihood: NDArray[np.float64]) -> NDArray[np.float64]:
        """Called by coop for each layer call: what the forecast expects becomes what the mode makes of it."""
        hot, learned = self._hot[self.mode][layer], self._learned[self.mode]
        self._since[layer] += 1
        if self._since[layer] > SETTLE_CALLS:
            learned[layer] += 1
            hot += (likelihood - hot) / min(learned[layer], LEARN_CALLS)
        if not learned[layer]:
            return likelihood
        weight = self.trust[self.mode] * 0.5 ** (self._since[layer] / FADE_CALLS)
        return (1 - weight) * likelihood + weight * hot


# the replay


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that were recorded in one mode, int64 [tokens, layers, top_k], and the mode that the agent says."""

    mode: str
    ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Result:
    """Hit rates, 0 to 1, of requests in the first tokens after each switch and in all, and what was read."""

    hit_rate_first: float
    hit_rate: float
    loads: int
    loads_at_switch: int


class Replay:
    """A cache that sees tokens one by one, as decoding does: the forecast learns, then the token asks.

    Args:
        layers, experts, top_k: the shape of the model.
        share: of all experts that may be resident.
        policy: the signal from outside, or None.
    """

    def __init__(
        self, layers: int, experts: int, top_k: int, share: float, policy: ModePriority | None
    ) -> None:
        self.forecast = Forecast(layers, experts, get_strategy("Balanced"))
        self._room = int(share * layers * experts)
        geometry = [LayerGeometry(experts, top_k, 1, 0)] * layers
        self.residency = Residency(geometry, self._room, _empty_slot, self.forecast.likelihood)
        self.policy, self.loads, self.loads_at_switch = policy, 0, 0

    def switch(self, mode: str, is_idle: bool) -> None:
        """The agent enters a mode; where it is idle for a moment, what is now likeliest is loaded."""
        if self.policy is None:
            return
        self.policy.enter(mode)
        self.forecast.set_policy(self.policy)
        for layer, expert in self.forecast.hottest()[: self._room] if is_idle else []:
            if self.residency.reserve(ExpertId(layer, expert), is_speculative=True) is not None:
                self.residency.publish(ExpertId(layer, expert))
                self.loads_at_switch += 1

    def step(self, token: NDArray[np.int64]) -> tuple[int, int]:
        """One token, int64 [layers, top_k]; returns (hits, requests). The agent's reward is its hit rate."""
        hits = requests = 0
        for layer, chosen in enumerate(token):
            self.forecast.observe(layer, chosen[None])
            experts = [ExpertId(layer, expert) for expert in np.unique(chosen).tolist()]
            here = {lease.expert for lease in self.residency.lease_resident(experts)}
            missing = self.residency.demand([expert for expert in experts if expert not in here])
            for expert, _ in missing.to_load:
                self.residency.publish(expert)
            self.residency.release(*experts)
            self.loads += len(missing.to_load)
            hits, requests = hits + len(here), requests + len(experts)
        if self.policy is not None:
            self.policy.reward(hits / requests)
        return hits, requests


def _empty_slot(layer: int) -> Slot:
    return Slot(torch.empty(0, dtype=torch.uint8), {})


def replay(
    segments: Sequence[Segment],
    experts: int,
    share: float,
    policy: ModePriority | None = None,
    is_idle: bool = False,
    first_tokens: int = 32,
) -> Result:
    """Hit rates over all segments after the first `WARM_SEGMENTS`."""
    _, layers, top_k = segments[0].ids.shape
    cache = Replay(layers, experts, top_k, share, policy)
    first, every = np.zeros(2), np.zeros(2)
    for number, segment in enumerate(segments):
        cache.switch(segment.mode, is_idle)
        for index, token in enumerate(segment.ids):
            counts = cache.step(token)
            if number >= WARM_SEGMENTS:
                every += counts
                first += counts if index < first_tokens else (0, 0)
    return Result(float(first[0] / first[1]), float(every[0] / every[1]), cache.loads, cache.loads_at_switch)


# the traces


def read_trace(path: Path) -> tuple[NDArray[np.int64], int]:
    """Expert ids [tokens, layers, top_k] of a recorded trace, and the experts of a layer."""
    try:
        with np.load(path, allow_pickle=False) as trace:
            return trace["ids"].astype(np.int64), int(trace["n_experts"])
    except (OSError, ValueError, KeyError) as exc:
        raise CoopError(f"{path} is no routing trace (.npz with ids and n_experts): {exc}") from exc


def alternate(
    traces: dict[str, NDArray[np.int64]], segment_tokens: int, max_tokens: int
) -> Iterator[Segment]:
    """Pieces of each trace in turn, each trace in its own order."""
    tokens = min(max_tokens, *(len(ids) for ids in traces.values()))
    for start in range(0, tokens - segment_tokens + 1, segment_tokens):
        for mode, ids in traces.items():
            yield Segment(mode, ids[start : start + segment_tokens])


def mislabelled(segments: Sequence[Segment], modes: Sequence[str]) -> list[Segment]:
    """The same tokens with modes drawn at random: what the policy does where the agent knows nothing."""
    draw = random.Random(SEED)
    return [Segment(draw.choice(modes), segment.ids) for segment in segments]


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """One row for each share of experts in memory and each variant."""
    read = [read_trace(path) for path in args.trace]
    modes, experts = [path.stem for path in args.trace], read[0][1]
    traces = {mode: ids for mode, (ids, _) in zip(modes, read, strict=True)}
    segments = list(alternate(traces, args.segment_tokens, args.max_tokens))
    if len(segments) <= WARM_SEGMENTS:
        raise CoopError(f"{len(segments)} segments, more than {WARM_SEGMENTS} are needed: shorten them")
    layers = segments[0].ids.shape[1]
    rows: list[dict[str, object]] = []
    for share in args.share:
        for name, some, has_policy, is_idle in (
            ("forecast alone", segments, False, False),
            ("modes", segments, True, False),
            ("modes, loads at the switch", segments, True, True),
            ("modes drawn at random", mislabelled(segments, modes), True, False),
        ):
            policy = ModePriority(modes, layers, experts) if has_policy else None
            result = replay(some, experts, share, policy, is_idle, args.first_tokens)
            rows.append({"resident": share, "policy": name, **asdict(result)})
            print(f"{len(rows)} of {4 * len(args.share)} is done", file=sys.stderr)
    return rows


def show(rows: Sequence[dict[str, object]], first_tokens: int) -> None:
    """Print the rows as a Markdown table, rates in per cent."""
    print(f"| resident | policy | first {first_tokens} tokens | all tokens | loads | of them at a switch |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        first, every = float(str(row["hit_rate_first"])), float(str(row["hit_rate"]))
        loads, at_switch = int(str(row["loads"])), int(str(row["loads_at_switch"]))
        print(
            f"| {float(str(row['resident'])):.0%} | {row['policy']} | {100 * first:.1f} | {100 * every:.1f} "
            f"| {loads + at_switch:,} | {at_switch:,} |"
        )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; numbers that make no sense are refused."""
    parser = argparse.ArgumentParser(description="Hit rates of a cache of experts with an external priority.")
    add = parser.add_argument
    add("--trace", type=Path, action="append", required=True, metavar="NPZ", help="one for each mode")
    add("--share", type=float, action="append", metavar="X", help="resident experts (default: 0.25 and 0.5)")
    add("--segment-tokens", type=int, default=128, help="tokens between switches (default: %(default)s)")
    add("--first-tokens", type=int, default=32, help="counted apart after a switch (default: %(default)s)")
    add("--max-tokens", type=int, default=4096, help="the most of each trace (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args(argv)
    args.share = args.share or [0.25, 0.5]
    if len(args.trace) < 2 or len({path.stem for path in args.trace}) < len(args.trace):
        parser.error("give --trace at least twice, with different file names")
    if min(args.segment_tokens, args.first_tokens, args.max_tokens) < 1:
        parser.error("numbers of tokens are at least 1")
    if not all(0 < share <= 1 for share in args.share):
        parser.error("--share is above 0 and at most 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for traces that cannot be read."""
    args = parse_arguments(argv)
    try:
        rows = measure(args)
    except CoopError as exc:
        print(exc, file=sys.stderr)
        return 2
    show(rows, args.first_tokens)
    if args.json:
        args.json.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
