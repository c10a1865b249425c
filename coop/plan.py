"""Plan: one dial, the budget, turned into every number, and printed.

Owns nothing; promises that a budget under which the model cannot run is refused with the smallest that
can, before anything is loaded. Called by attach; shown by the command line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coop.errors import BudgetError
from coop.store import LayerGeometry
from coop.strategy import Strategy
from coop.topology import Topology

if TYPE_CHECKING:
    from coop.profile import Profile

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
LOADER_THREADS = 4  # disks reach their bandwidth at a queue depth of about four (DESIGN section 9)
MIN_RING_BYTES = 2**16
MAX_RING_BYTES = 2**26  # a long prompt's outputs beyond this get memory of their own
FORMS = "a size such as 6GiB or 500MB, a share of the experts such as 50%, or auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run will use. Bytes are of expert weights unless named otherwise."""

    budget: str
    budget_bytes: int
    expert_bytes: int
    smallest_bytes: int
    cycle_bytes: int
    dense_bytes: int
    kv_cache_bytes: int
    max_context: int
    strategy: Strategy
    has_prefetch: bool
    seed_bytes: int
    ring_bytes: int
    reader_bytes: int
    adapter_bytes: int
    loader_threads: int

    @classmethod
    def derive(
        cls,
        budget: str | int,
        *,
        geometry: Sequence[LayerGeometry],
        topology: Topology,
        strategy: Strategy,
        profile: Profile | None,
        dense_bytes: int,
        kv_cache_bytes: int,
        max_context: int,
        row_bytes: int,
        window_bytes: int = 0,
        adapter_bytes: int = 0,
        has_prefetch: bool = True,
    ) -> Plan:
        """Turn a budget into every number; BudgetError says what is wrong and the smallest budget that runs.

        `dense_bytes` are already in memory; `kv_cache_bytes` will be at `max_context` tokens; `row_bytes` is
        one output row of an expert; `window_bytes` the largest read; `adapter_bytes` the factors of an adapter
        that are merged into experts as they are loaded.
        """
        expert_bytes = sum(layer.slot_bytes * layer.num_experts for layer in geometry)
        smallest, cycle = smallest_bytes(geometry), cycle_bytes(geometry)
        if max_context < 1:
            raise BudgetError(f"max_context is {max_context}: plan for at least one token")
        reader_bytes = LOADER_THREADS * window_bytes
        free_bytes = max(0, topology.memory_available_bytes - kv_cache_bytes - reader_bytes)
        wanted = parse_budget(budget, expert_bytes, int(free_bytes * strategy.auto_share))
        _check_budget(str(budget), wanted, geometry, smallest)
        used = min(wanted, expert_bytes)
        return cls(
            budget=str(budget),
            budget_bytes=used,
            expert_bytes=expert_bytes,
            smallest_bytes=smallest,
            cycle_bytes=cycle,
            dense_bytes=dense_bytes,
            kv_cache_bytes=kv_cache_bytes,
            max_context=max_context,
            strategy=strategy,
            has_prefetch=has_prefetch,
            seed_bytes=int(used * strategy.seed_share) if has_prefetch and profile is not None else 0,
            ring_bytes=_ring_bytes(geometry, profile, row_bytes),
            reader_bytes=reader_bytes,
            adapter_bytes=adapter_bytes,
            loader_threads=LOADER_THREADS,
        )

    @property
    def warning(self) -> str:
        """One sentence when the budget is below what one token uses, else ""."""
        if self.budget_bytes >= self.cycle_bytes:
            return ""
        return (
            f"the budget is below the experts of one token ({format_bytes(self.cycle_bytes)}): "
            "almost every expert will be read again for every token"
        )

    def render(self) -> str:
        """The plan as lines for a person."""
        share = self.budget_bytes / self.expert_bytes
        guesses = f"up to {self.strategy.prefetch_experts} experts ahead" if self.has_prefetch else "off"
        lines = [
            f"budget {self.budget} = {format_bytes(self.budget_bytes)} of {format_bytes(self.expert_bytes)} "
            f"experts ({share:.0%}); one token uses {format_bytes(self.cycle_bytes)}",
            f"beside it: dense weights {format_bytes(self.dense_bytes)}, "
            f"KV cache {format_bytes(self.kv_cache_bytes)} at {self.max_context} tokens, "
            f"adapter {format_bytes(self.adapter_bytes)}, ring {format_bytes(self.ring_bytes)}, "
            f"read buffers {format_bytes(self.reader_bytes)}",
            f"strategy {self.strategy.name}: prefetch {guesses}, "
            f"{format_bytes(self.seed_bytes)} seeded from the profile, {self.loader_threads} loader threads",
        ]
        return "\n".join([*lines, f"warning: {self.warning}"] if self.warning else lines)


def smallest_bytes(geometry: Sequence[LayerGeometry]) -> int:
    """The smallest budget that runs: the top-k experts of the largest layer."""
    return max(layer.slot_bytes * min(layer.top_k, layer.num_experts) for layer in geometry)


def cycle_bytes(geometry: Sequence[LayerGeometry]) -> int:
    """Bytes of the experts that one token uses in all layers: below it every cache misses."""
    return sum(layer.slot_bytes * min(layer.top_k, layer.num_experts) for layer in geometry)


def parse_budget(budget: str | int, expert_bytes: int, auto_bytes: int) -> int:
    """Bytes of a budget: an integer, "6GiB", "500MB", "50%" of all experts, or "auto".

    Raises BudgetError for anything else.
    """
    if isinstance(budget, int) and not isinstance(budget, bool):
        return budget
    text = str(budget).strip()
    if text.lower() == "auto":
        return auto_bytes
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3}|%)", text)
    if match is None:
        raise BudgetError(f"budget {text[:40]!r} is not {FORMS}")
    number, unit = float(match.group(1)), match.group(2)
    if unit == "%":
        if number > 100:
            raise BudgetError(f"budget {text}: more than all experts; 100% keeps every one resident")
        return math.floor(expert_bytes * number / 100)
    if unit.upper() not in UNITS:
        raise BudgetError(f"budget {text[:40]!r} is not {FORMS}")
    return math.floor(number * UNITS[unit.upper()])


def format_bytes(nbytes: int) -> str:
    """Bytes in the largest binary unit that keeps a leading digit."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _check_budget(text: str, wanted: int, geometry: Sequence[LayerGeometry], smallest: int) -> None:
    if wanted >= smallest:
        return
    needs = [layer.slot_bytes * min(layer.top_k, layer.num_experts) for layer in geometry]
    layer = max(range(len(needs)), key=needs.__getitem__)
    top_k = min(geometry[layer].top_k, geometry[layer].num_experts)
    hint = f"; did you mean {text}%?" if text.isdigit() and 0 < int(text) <= 100 else ""
    raise BudgetError(
        f"budget {text} = {format_bytes(wanted)}: layer {layer} needs {top_k} x "
        f"{format_bytes(geometry[layer].slot_bytes)} for top-k; the smallest that runs is {smallest} "
        f"bytes ({format_bytes(smallest)}){hint}"
    )


def _ring_bytes(geometry: Sequence[LayerGeometry], profile: Profile | None, row_bytes: int) -> int:
    """Room for the outputs of one call: the 95th percentile of rows for each expert, of all experts, twice."""
    rows = 1
    if profile is not None and profile.rows.size:
        rows = max(1, int(profile.rows[:, 1].max()))
    experts = max(layer.num_experts for layer in geometry)
    return min(max(2 * rows * experts * row_bytes, MIN_RING_BYTES), MAX_RING_BYTES)
