"""Topology: what this machine has, measured.

Owns nothing; promises numbers that are bounded, a measurement of under two seconds that is made once and kept
in `coop.rates`, and a fingerprint that changes when timings would. What cannot be measured is said to be so and
is never a reason to fail. Called by the plan (free memory, rates) and by profiles (timings of this hardware?).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil
import torch

from coop.errors import CoopError
from coop.rates import load_rates, save_rates

if TYPE_CHECKING:
    from coop.devices import Device

QUEUE_DEPTHS = (1, 2, 4, 8)
DEFAULT_QUEUE_DEPTH = 4  # disks reach their bandwidth at a queue depth of about four (DESIGN section 9)
GOOD_ENOUGH = 0.95  # of the best rate: a deeper queue than that costs a read buffer for each place
BURST_SECONDS = 0.1  # for each queue depth, twice: up and down again, since neighbours disturb a disk
DISK_SECONDS = 1.2  # for all of them, so that the whole probe stays under two seconds
BURST_BYTES = 2**29  # for each of them: a fast disk needs no more to be known
SAMPLE_BYTES = (
    64 * 2**20
)  # the largest read that is sampled: beyond it the rate no longer depends on the size
SMALLEST_DISK_BYTES = 4 * 2**20  # of experts: below it a probe would time the system, not the disk
JOIN_SECONDS = 5.0  # a read that takes longer than this has no rate worth knowing
RAM_SECONDS = 0.15
RAM_REPEATS = 4
RAM_BYTES = (2**26, 2**29)  # smallest and largest buffer that is read
LINK_BYTES = 2**25
LINK_REPEATS = 3
LINK_WAIT_SECONDS = 1.0
FREE_SHARE = 8  # no buffer of the probe is larger than an eighth of the free memory

Clock = Callable[[], float]


class Origin(StrEnum):
    """Where a rate comes from."""

    MEASURED = "measured"
    CACHED = "cached"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes per second, 0.0 where not measured."""

    bytes_per_second: float = 0.0
    origin: Origin = Origin.NOT_MEASURED


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """The disk under a checkpoint: bytes per second at each of the QUEUE_DEPTHS, as many as were measured."""

    rates: tuple[float, ...] = ()
    origin: Origin = Origin.NOT_MEASURED
    read_bytes: int = 0
    is_direct: bool = False

    @property
    def queue_depth(self) -> int:
        """The smallest depth that reaches 95 % of the best rate; the default where nothing was measured."""
        if not self.rates:
            return DEFAULT_QUEUE_DEPTH
        enough = GOOD_ENOUGH * max(self.rates)
        return next(depth for depth, rate in zip(QUEUE_DEPTHS, self.rates, strict=False) if rate >= enough)

    @property
    def bytes_per_second(self) -> float:
        """The rate at the chosen depth; 0.0 where not measured."""
        return self.rates[QUEUE_DEPTHS.index(self.queue_depth)] if self.rates else 0.0

    @property
    def lone_bytes_per_second(self) -> float:
        """The rate of one read at a time, which is what a single miss sees; 0.0 where not measured."""
        return self.rates[0] if self.rates else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Processors, threads that compute, memory that may still be taken (cgroup limits counted), and rates.

    `device_available_bytes` is slot memory of a device that is not the processor, 0 without one.
    """

    processor: str
    cores: int
    threads: int
    memory_available_bytes: int
    device_available_bytes: int = 0
    ram: Rate = Rate()
    link: Rate = Rate()
    disk: Disk = Disk()


class Sample(Protocol):
    """One read of a checkpoint's expert, through the path that the runtime reads by."""

    @property
    def nbytes(self) -> int:
        """Size of the read."""

    @property
    def is_direct(self) -> bool:
        """Whether it bypasses the page cache."""

    @property
    def file_system(self) -> int:
        """Number of the file system."""

    def read(self, limit_bytes: int) -> int:
        """Read up to the limit and drop it; returns the bytes read. Raises CoopError."""


def probe() -> Topology:
    """Look at this machine without measuring; takes milliseconds."""
    return Topology(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_available_bytes=memory_available_bytes(),
    )


def measure(
    samples: Sequence[Sample], device: Device | None = None, clock: Clock = time.perf_counter
) -> Topology:
    """Look at this machine and measure it, or take what an earlier start measured: under two seconds.

    `samples`: one read for each expert. `device`: where experts are computed, if not on the processor.
    """
    ram, disk = _cached_or_measured(samples, clock)
    is_apart = device is not None and device.torch_device.type != "cpu"
    link = measure_link(device, clock) if device is not None and is_apart else Rate()
    return replace(
        probe(),  # after the buffers of the probe are gone
        device_available_bytes=device.memory_available_bytes() if device is not None and is_apart else 0,
        ram=ram,
        link=link,
        disk=disk,
    )


def hardware_fingerprint() -> str:
    """Sixteen hex digits over processor, cores, compute threads and torch version: timings carry it."""
    here = probe()
    text = f"{here.processor}|{here.cores}|{here.threads}|{torch.__version__}|{platform.system()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def memory_available_bytes() -> int:
    """Memory this process may still take: the system's estimate, or less where a cgroup limits it."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file in _cgroup_files():
        limit, used = _read_int(limit_file), _read_int(used_file)
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
    return available


# measuring


def measure_ram(free_bytes: int, clock: Clock) -> Rate:
    """Bytes per second at which all compute threads together read a buffer larger than the last-level cache."""
    smallest, largest = RAM_BYTES
    nbytes = min(max(smallest, 2 * _last_level_cache_bytes()), largest)
    if nbytes > free_bytes // FREE_SHARE:
        return Rate()
    words = torch.full((nbytes // 8,), 1, dtype=torch.int64)  # written, or all pages would be the same one
    began, best = clock(), 0.0
    for _ in range(RAM_REPEATS):
        start = clock()
        words.sum()
        best = max(best, nbytes / max(clock() - start, 1e-9))
        if clock() - began > RAM_SECONDS:
            break
    return Rate(best, Origin.MEASURED)


def measure_disk(samples: Sequence[Sample], free_bytes: int, clock: Clock) -> Disk:
    """Read experts at random at each queue depth, twice, within the limits; a depth has its better rate."""
    facts = _disk_facts(samples)
    if sum(sample.nbytes for sample in samples) < SMALLEST_DISK_BYTES:
        return facts
    shuffled = itertools.cycle(random.Random(0).sample(samples, len(samples)))
    best: dict[int, float] = {}
    ends = clock() + DISK_SECONDS
    for depth in (*QUEUE_DEPTHS, *reversed(QUEUE_DEPTHS)):
        nbytes = depth * facts.read_bytes
        is_too_slow = bool(best) and clock() + nbytes / max(best.values()) > ends
        if is_too_slow or nbytes > free_bytes // FREE_SHARE:
            continue  # the depths that were measured have to do
        rate = _Burst(shuffled, depth, clock).rate()
        if rate <= 0.0:
            return facts
        best[depth] = max(rate, best.get(depth, 0.0))
    rates = tuple(best[depth] for depth in QUEUE_DEPTHS if depth in best)
    return replace(facts, rates=rates, origin=Origin.MEASURED if rates else Origin.NOT_MEASURED)


def measure_link(device: Device, clock: Clock) -> Rate:
    """Bytes per second from host memory to a device's slots: the best of a few copies."""
    best = 0.0
    try:
        source, target = device.new_staging(LINK_BYTES), device.new_slot(LINK_BYTES)
        for _ in range(LINK_REPEATS):
            start = clock()
            if not device.copy(source, target, None).wait(LINK_WAIT_SECONDS):
                return Rate()
            best = max(best, LINK_BYTES / max(clock() - start, 1e-9))
    except (RuntimeError, CoopError):  # no room for the buffers, most likely: the plan says so next
        return Rate()
    return Rate(best, Origin.MEASURED)


class _Burst:
    """Threads that read samples at one queue depth until time or bytes are up."""

    def __init__(self, samples: Iterator[Sample], depth: int, clock: Clock) -> None:
        self._samples, self._depth, self._clock = samples, depth, clock
        self._lock = threading.Lock()
        self._taken = self._asked_bytes = self._read_bytes = 0
        self._has_failed = False
        self._began = clock()

    def rate(self) -> float:
        """Bytes per second; 0.0 if a read failed or hung."""
        threads = [
            threading.Thread(target=self._work, name=f"coop-probe-{i}", daemon=True)
            for i in range(self._depth)
        ]
        self._began = self._clock()
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            if self._has_failed or any(thread.is_alive() for thread in threads):
                self._has_failed = True  # a thread that comes back takes nothing more
                return 0.0
            return self._read_bytes / max(self._clock() - self._began, 1e-9)

    def _work(self) -> None:
        while (sample := self._take()) is not None:
            try:
                nbytes = sample.read(SAMPLE_BYTES)
            except (CoopError, OSError, ValueError):  # the runtime's own read will say what is wrong
                nbytes = -1
            with self._lock:
                self._has_failed |= nbytes < 0
                self._read_bytes += nbytes

    def _take(self) -> Sample | None:
        """The next sample; one for each thread at least, so that the queue has been that deep."""
        with self._lock:
            is_up = self._clock() - self._began >= BURST_SECONDS or self._asked_bytes >= BURST_BYTES
            if self._has_failed or (is_up and self._taken >= self._depth):
                return None
            sample = next(self._samples)
            self._taken += 1
            self._asked_bytes += min(sample.nbytes, SAMPLE_BYTES)
            return sample


def _disk_facts(samples: Sequence[Sample]) -> Disk:
    """The disk without its rates."""
    return Disk(
        read_bytes=min(max((sample.nbytes for sample in samples), default=0), SAMPLE_BYTES),
        is_direct=bool(samples) and all(sample.is_direct for sample in samples),
    )


def _cached_or_measured(samples: Sequence[Sample], clock: Clock) -> tuple[Rate, Disk]:
    """RAM and disk from the file of rates where it has them, else measured and put there."""
    known, free_bytes, fingerprint = load_rates(), memory_available_bytes(), hardware_fingerprint()
    ram_key = f"ram {fingerprint}"
    ram = Rate(known[ram_key][0], Origin.CACHED) if ram_key in known else measure_ram(free_bytes, clock)
    disk = _disk_facts(samples)
    # reads of about the same size share a rate, checkpoints on the same file system too
    size = 1 << (disk.read_bytes - 1).bit_length() if disk.read_bytes else 0
    disk_key = f"disk {fingerprint} {samples[0].file_system if samples else 0} {size}"
    if disk_key in known:
        disk = replace(disk, rates=known[disk_key], origin=Origin.CACHED)
    else:
        disk = measure_disk(samples, free_bytes, clock)
    fresh: dict[str, tuple[float, ...]] = {}
    if ram.origin is Origin.MEASURED:
        fresh[ram_key] = (ram.bytes_per_second,)
    if disk.origin is Origin.MEASURED:
        fresh[disk_key] = disk.rates
    if fresh:
        save_rates(known | fresh)
    return ram, disk


def _last_level_cache_bytes() -> int:
    """Bytes of all last-level caches together, 0 where the system does not say."""
    found: dict[str, int] = {}
    for cache in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        try:
            size = (cache / "size").read_text().strip()
            found[(cache / "shared_cpu_list").read_text()] = int(size.removesuffix("K")) * 1024
        except (OSError, ValueError):
            continue
    return sum(found.values())


def _cgroup_files() -> list[tuple[Path, Path]]:
    """(limit, used) of this process's group and of the root, cgroup version 2 and version 1."""
    groups = {"": "", "memory": ""}
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                groups["memory" if controllers else ""] = path.strip("/")
    except (OSError, ValueError):
        pass
    second, first = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
    places = [second / groups[""], second]
    files = [(place / "memory.max", place / "memory.current") for place in places]
    places = [first / groups["memory"], first]
    return files + [(p / "memory.limit_in_bytes", p / "memory.usage_in_bytes") for p in places]


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
