"""Plan: one dial, the budget, turned into every number, and printed.

Owns nothing; promises that a budget under which the model cannot run is refused with the smallest that
can, before anything is loaded, and that what `auto` plans fits into what is free. Called by attach; shown by
the command line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from coop import kernels
from coop.ctu import SLICE_ROWS
from coop.devices import Memory
from coop.errors import BudgetError
from coop.ring import CACHE_LINE
from coop.store import LayerGeometry
from coop.strategy import STRATEGIES, Strategy
from coop.topology import Origin, Rate, Topology

if TYPE_CHECKING:
    from coop.profile import Profile

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
PLACING_THREADS = 2  # while these place and merge what was read, the others keep the disk busy
MIN_RING_BYTES = 2**16
MAX_RING_BYTES = 2**26  # a long prompt's outputs beyond this get memory of their own
MARGIN_SHARE = (
    0.05  # of what is free: activations of a prompt and the allocator's slack grow with the machine
)
MARGIN_BYTES = 2**28  # and at least this: threads, fragments and what other programs take in the meantime
FORMS = "a size such as 6GiB or 500MB, a share of the experts such as 50%, or auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Free memory of one kind, and what is taken from it before experts are."""

    free_bytes: int
    takers: tuple[tuple[str, int], ...]

    @property
    def margin_bytes(self) -> int:
        """What is left alone."""
        return max(int(self.free_bytes * MARGIN_SHARE), MARGIN_BYTES)

    @property
    def left_bytes(self) -> int:
        """What remains for experts, 0 if nothing does."""
        return max(0, self.free_bytes - self.margin_bytes - self.taken_bytes)

    @property
    def taken_bytes(self) -> int:
        """What is taken, without the margin."""
        return sum(nbytes for _, nbytes in self.takers)

    def needed_bytes(self, wanted_bytes: int) -> int:
        """The free memory at which `wanted_bytes` would remain."""
        used = wanted_bytes + self.taken_bytes
        return max(used + MARGIN_BYTES, math.ceil(used / (1 - MARGIN_SHARE)) + 1)

    def render(self) -> str:
        """The sum as a person reads it: 21.3 GiB free - 90.0 MiB KV cache - ... - 1.1 GiB margin."""
        parts = [f"{format_bytes(nbytes)} {name}" for name, nbytes in self.takers if nbytes]
        return " - ".join(
            [f"{format_bytes(self.free_bytes)} free", *parts, f"{format_bytes(self.margin_bytes)} margin"]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run will use. Bytes are of expert weights unless named otherwise.

    `loader_threads` is the most demanded loads at once, `guess_threads` the most speculative reads at once
    that any preset allows; together they are the most staging segments in use. Seconds are of reading from
    disk, 0.0 where the disk was not measured.
    """

    budget: str
    budget_bytes: int
    expert_bytes: int
    smallest_bytes: int
    cycle_bytes: int
    dense_bytes: int
    kv_cache_bytes: int
    max_context: int
    strategy: Strategy
    memory: Memory
    topology: Topology
    room: Room
    has_prefetch: bool
    seed_bytes: int
    ring_bytes: int
    slice_rows: int
    staging_segments: int
    staging_bytes: int
    host_tier_bytes: int
    adapter_bytes: int
    loader_threads: int
    guess_threads: int
    expert_seconds: float
    cycle_seconds: float

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
        memory: Memory = Memory.HOST,
        stored_bytes: int = 0,
        window_bytes: int = 0,
        adapter_bytes: int = 0,
        pending_adapter_bytes: int = 0,
        has_prefetch: bool = True,
    ) -> Plan:
        """Turn a budget into every number; BudgetError says what is wrong and the smallest budget that runs.

        `dense_bytes` are already in memory; `kv_cache_bytes` will be at `max_context` tokens; `row_bytes` is
        one output row of an expert; `memory` the kind behind the slots; `stored_bytes` all experts on disk, if
        stored in another type than served; `window_bytes` the largest read; `adapter_bytes` the factors of an
        adapter that are merged into experts as they are loaded, of which `pending_adapter_bytes` are not in
        memory yet.
        """
        if max_context < 1:
            raise BudgetError(f"max_context is {max_context}: plan for at least one token")
        strategy = strategy.adapted(memory)
        loaders = topology.disk.queue_depth + PLACING_THREADS
        # room for the most eager preset, so that another can be set at any time
        guessers = max(s.guesses_in_flight for s in STRATEGIES.values()) if has_prefetch else 0
        ring, staging = _ring_bytes(geometry, profile, row_bytes), (loaders + guessers) * window_bytes
        room, behind = _rooms(topology, memory, kv_cache_bytes, ring, staging, pending_adapter_bytes)
        expert_bytes, cycle = all_experts_bytes(geometry), cycle_bytes(geometry)
        wanted = parse_budget(budget, expert_bytes, int(room.left_bytes * strategy.auto_share))
        _check_budget(str(budget), wanted, geometry, room, strategy)
        used = min(wanted, expert_bytes)
        stored_share = stored_bytes / expert_bytes if stored_bytes else 1.0
        largest = max(layer.slot_bytes for layer in geometry)
        return cls(
            budget=str(budget),
            budget_bytes=used,
            expert_bytes=expert_bytes,
            smallest_bytes=smallest_bytes(geometry),
            cycle_bytes=cycle,
            dense_bytes=dense_bytes,
            kv_cache_bytes=kv_cache_bytes,
            max_context=max_context,
            strategy=strategy,
            memory=memory,
            topology=topology,
            room=room,
            has_prefetch=has_prefetch,
            seed_bytes=int(used * strategy.seed_share) if has_prefetch and profile is not None else 0,
            ring_bytes=ring,
            slice_rows=SLICE_ROWS,
            staging_segments=loaders + guessers,
            staging_bytes=staging,
            host_tier_bytes=min(int(behind.left_bytes * strategy.host_share), expert_bytes - used),
            adapter_bytes=adapter_bytes,
            loader_threads=loaders,
            guess_threads=guessers,
            expert_seconds=_seconds(largest * stored_share, topology.disk.lone_bytes_per_second),
            cycle_seconds=_seconds(cycle * stored_share, topology.disk.bytes_per_second),
        )

    def with_budget(self, budget: str | int, geometry: Sequence[LayerGeometry]) -> Plan:
        """This plan at another budget, all else as it was. BudgetError as for `derive`."""
        wanted = parse_budget(budget, self.expert_bytes, int(self.room.left_bytes * self.strategy.auto_share))
        _check_budget(str(budget), wanted, geometry, self.room, self.strategy)
        return replace(self, budget=str(budget), budget_bytes=min(wanted, self.expert_bytes))

    @property
    def is_auto(self) -> bool:
        """Whether the budget was left to the plan."""
        return _is_auto(self.budget)

    @property
    def total_bytes(self) -> int:
        """All that is still to be taken from the memory that slots are in, experts included, margin not."""
        return self.budget_bytes + self.room.taken_bytes

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed but will hurt, one sentence each."""
        found = []
        if self.budget_bytes < self.cycle_bytes:
            found.append(
                f"the budget is below the experts of one token ({format_bytes(self.cycle_bytes)}): "
                "almost every expert will be read again for every token"
            )
        beside = max(0, self.room.free_bytes - self.total_bytes + self.kv_cache_bytes)
        if self.kv_cache_bytes > beside:
            found.append(
                f"the KV cache of {self.max_context} tokens ({format_bytes(self.kv_cache_bytes)}) does not fit in "
                f"the {format_bytes(beside)} that the budget leaves free: plan for fewer tokens or a smaller budget"
            )
        elif self.total_bytes > self.room.free_bytes:
            found.append(
                f"the plan takes {format_bytes(self.total_bytes)} and {format_bytes(self.room.free_bytes)} are "
                "free: a smaller budget, or auto, keeps the system from swapping"
            )
        return tuple(found)

    def render(self) -> str:
        """The plan as lines for a person."""
        share = self.budget_bytes / self.expert_bytes
        budget = (
            f"budget {self.budget} = {format_bytes(self.budget_bytes)} of {format_bytes(self.expert_bytes)} "
            f"experts ({share:.0%}); one token uses {format_bytes(self.cycle_bytes)}, "
            f"the smallest that runs is {format_bytes(self.smallest_bytes)}"
        )
        left = min(int(self.room.left_bytes * self.strategy.auto_share), self.expert_bytes)
        auto = (
            f"auto: {self.room.render()} = {format_bytes(self.room.left_bytes)}, of which "
            f"{_takes(self.strategy)}, and no more than all experts: {format_bytes(left)}"
        )
        lines = [
            budget,
            *([auto] if self.is_auto else []),
            self._beside(),
            self._behaviour(),
            self._machine(),
        ]
        return "\n".join([*lines, *(f"warning: {sentence}" for sentence in self.warnings)])

    def _beside(self) -> str:
        """Memory beside the experts."""
        host = f", host tier {format_bytes(self.host_tier_bytes)}" if self.memory is Memory.DEVICE else ""
        return (
            f"beside it: dense weights {format_bytes(self.dense_bytes)}, "
            f"KV cache {format_bytes(self.kv_cache_bytes)} at {self.max_context} tokens, "
            f"adapter {format_bytes(self.adapter_bytes)}, "
            f"ring {format_bytes(self.ring_bytes)} for slices of {self.slice_rows} rows, "
            f"staging {format_bytes(self.staging_bytes)} for up to {self.staging_segments} loads{host}; "
            f"{format_bytes(self.total_bytes + self.dense_bytes + self.adapter_bytes)} in all, "
            "and Python with torch"
        )

    def _behaviour(self) -> str:
        """What the strategy does here."""
        guesses = (
            f"prefetch up to {self.strategy.prefetch_experts} experts ahead, "
            f"{self.strategy.guesses_in_flight} at once"
        )
        if not self.has_prefetch:
            guesses = "prefetch off"
        elif self.strategy.prefetch_experts == 0:
            guesses = "no prefetch"
        return (
            f"strategy {self.strategy.name} on {self.memory}: {guesses}, "
            f"{format_bytes(self.seed_bytes)} seeded from the profile, {self.loader_threads} loader threads"
        )

    def _machine(self) -> str:
        """Rates, where they come from, and what a miss costs at them."""
        disk = self.topology.disk
        rate = Rate(disk.bytes_per_second, disk.origin)
        reads = f"{'direct' if disk.is_direct else 'buffered'} reads of {format_bytes(disk.read_bytes)}"
        text = f"disk {_rate(rate)} in {reads} at queue depth {disk.queue_depth}"
        if self.memory is Memory.DEVICE:
            text += f", copies to the device {_rate(self.topology.link)}"
        text += f", RAM {_rate(self.topology.ram)}"
        if self.memory is Memory.HOST:
            text += f"; decode with {kernels.describe()}"
        if disk.origin is Origin.NOT_MEASURED:
            return text
        return (
            f"{text}; one expert alone takes {format_seconds(self.expert_seconds)} to read, those of one token, "
            f"with nothing resident, {format_seconds(self.cycle_seconds)}"
        )


def all_experts_bytes(geometry: Sequence[LayerGeometry]) -> int:
    """Bytes of all experts."""
    return sum(layer.slot_bytes * layer.num_experts for layer in geometry)


def smallest_bytes(geometry: Sequence[LayerGeometry]) -> int:
    """The smallest budget that runs: the experts of one token in the largest layer, or one that runs alone."""
    return max(layer.slot_bytes * layer.at_once for layer in geometry)


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
    if _is_auto(text):
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


def format_seconds(seconds: float) -> str:
    """Seconds, in milliseconds below one."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _takes(strategy: Strategy) -> str:
    return f"{strategy.name} takes up to {strategy.auto_share:.0%}"


def _is_auto(budget: str) -> bool:
    return budget.strip().lower() == "auto"


def _seconds(nbytes: float, bytes_per_second: float) -> float:
    return nbytes / bytes_per_second if bytes_per_second else 0.0


def _rate(rate: Rate) -> str:
    if rate.origin is Origin.NOT_MEASURED:
        return str(rate.origin)
    return f"{format_bytes(int(rate.bytes_per_second))}/s ({rate.origin})"


def _rooms(
    topology: Topology, memory: Memory, kv_cache: int, ring: int, staging: int, adapter: int
) -> tuple[Room, Room]:
    """The memory that slots are in, and the host memory behind a device (nothing where they are the same)."""
    outputs = (("KV cache", kv_cache), ("ring", ring))
    loads = (("staging", staging), ("adapter", adapter))
    host = topology.memory_available_bytes
    if memory is Memory.DEVICE:
        front = Room(free_bytes=topology.device_available_bytes, takers=outputs)
        return front, Room(free_bytes=host, takers=loads)
    if memory is Memory.UNIFIED:
        host = min(host, topology.device_available_bytes)
    return Room(free_bytes=host, takers=(*outputs, *loads)), Room(free_bytes=0, takers=())


def _check_budget(
    text: str, wanted: int, geometry: Sequence[LayerGeometry], room: Room, strategy: Strategy
) -> None:
    """BudgetError for less than the largest layer needs at once."""
    smallest = smallest_bytes(geometry)
    if wanted >= smallest:
        return
    layer = max(range(len(geometry)), key=lambda i: geometry[i].slot_bytes * geometry[i].at_once)
    purpose = "one expert at a time" if geometry[layer].runs_alone else "top-k"
    needs = f"layer {layer} needs {geometry[layer].at_once} x {format_bytes(geometry[layer].slot_bytes)} for {purpose}"
    if _is_auto(text):
        needed = room.needed_bytes(math.ceil(smallest / strategy.auto_share) + 1)
        raise BudgetError(
            f"budget auto: {room.render()} leaves {format_bytes(room.left_bytes)}, of which {_takes(strategy)}; "
            f"{needs}, which takes {needed} bytes ({format_bytes(needed)}) free: plan for fewer tokens, or give "
            f"the budget in bytes; the smallest that runs is {smallest} bytes ({format_bytes(smallest)})"
        )
    hint = f"; did you mean {text}%?" if text.isdigit() and 0 < int(text) <= 100 else ""
    raise BudgetError(
        f"budget {text} = {format_bytes(wanted)}: {needs}; the smallest that runs is {smallest} "
        f"bytes ({format_bytes(smallest)}){hint}"
    )


def _ring_bytes(geometry: Sequence[LayerGeometry], profile: Profile | None, row_bytes: int) -> int:
    """Room for the outputs of one call: the 95th percentile of rows for each expert, of all experts, twice.

    Never less than one slice, so that the scheduler can always go on.
    """
    rows = 1
    if profile is not None and profile.rows.size:
        rows = max(1, int(profile.rows[:, 1].max()))
    experts = max(layer.num_experts for layer in geometry)
    pitch = -(-row_bytes // CACHE_LINE) * CACHE_LINE  # each row begins on a cache line of its own
    slice_bytes = SLICE_ROWS * pitch
    return max(min(max(2 * rows * experts * pitch, MIN_RING_BYTES), MAX_RING_BYTES), slice_bytes)
