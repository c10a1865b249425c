"""Topology: measured within its limits, kept for the next start, and never trusted nor a reason to fail."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from coop import rates, topology
from coop.devices import DONE, Memory
from coop.errors import StoreError
from coop.layout import resolve_layout
from coop.rates import load_rates, rates_file, save_rates
from coop.shards import read_checkpoint_tensors
from coop.staging import Window
from coop.store import DirectFile, ExpertStore
from coop.topology import (
    DEFAULT_QUEUE_DEPTH,
    LINK_BYTES,
    LINK_REPEATS,
    QUEUE_DEPTHS,
    SAMPLE_BYTES,
    Disk,
    Origin,
    Rate,
    measure,
    measure_disk,
    measure_link,
    measure_ram,
)
from tests.families import build_family

MIB = 2**20
PLENTY = 2**40
TICK = 1e-4  # seconds: the RAM of these tests reads 64 MiB in one


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


class FakeClock:
    """Stands still until it is moved, or moves `tick` seconds each time it is read."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@dataclass
class FakeSample:
    """A read that takes `seconds` on the fake clock and is noted in `reads`."""

    clock: FakeClock
    seconds: float = 0.01
    nbytes: int = 8 * MIB
    is_direct: bool = True
    file_system: int = 7
    error: Exception | None = None
    reads: list[int] = field(default_factory=list)

    def read(self, limit_bytes: int) -> int:
        self.reads.append(min(self.nbytes, limit_bytes))
        if self.error is not None:
            raise self.error
        self.clock.now += self.seconds
        return self.reads[-1]


class FakeDevice:
    """A device whose copies take `seconds` on the fake clock."""

    memory, torch_device = Memory.DEVICE, torch.device("meta")

    def __init__(self, clock: FakeClock, seconds: float = 0.5, is_hung: bool = False) -> None:
        self.clock, self.seconds, self.is_hung, self.copies = clock, seconds, is_hung, 0

    def new_slot(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    new_staging = new_slot

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> Any:
        self.copies += 1
        self.clock.now += self.seconds
        return self if self.is_hung else DONE

    def wait(self, seconds: float) -> bool:
        return False

    def memory_available_bytes(self) -> int:
        return 123 * MIB


@pytest.mark.parametrize(
    ("per_depth", "depth"),
    [
        ((), DEFAULT_QUEUE_DEPTH),
        ((1.0e9,), 1),
        ((1.0e9, 1.02e9, 1.01e9, 1.0e9), 1),
        ((0.9e9, 1.2e9, 1.5e9, 1.55e9), 4),
        ((1e9, 2e9, 3e9, 4e9), 8),
        ((1e9, 2e9, 0.5e9, 0.4e9), 2),
    ],
)
def test_the_queue_is_as_deep_as_ninety_five_percent_of_the_best_rate_needs(
    per_depth: tuple[float, ...], depth: int
) -> None:
    disk = Disk(rates=per_depth)
    assert disk.queue_depth == depth
    assert disk.bytes_per_second == (per_depth[QUEUE_DEPTHS.index(depth)] if per_depth else 0.0)


def test_a_second_start_reads_nothing_and_knows_the_same() -> None:
    clock = FakeClock(TICK)
    samples = [FakeSample(clock) for _ in range(4)]
    first = measure(samples, clock=clock)
    reads = [len(sample.reads) for sample in samples]
    second = measure(samples, clock=clock)
    assert sum(reads) > 8 and [len(sample.reads) for sample in samples] == reads
    assert (first.disk.origin, first.ram.origin) == (Origin.MEASURED, Origin.MEASURED)
    assert (second.disk.origin, second.ram.origin) == (Origin.CACHED, Origin.CACHED)
    assert second.disk.rates == first.disk.rates and second.disk.read_bytes == 8 * MIB
    assert second.ram.bytes_per_second == first.ram.bytes_per_second


@pytest.mark.parametrize("change", [{"file_system": 8}, {"nbytes": 20 * MIB}])
def test_another_file_system_or_read_size_is_measured_by_itself(change: dict[str, int]) -> None:
    clock = FakeClock(TICK)
    measure([FakeSample(clock)], clock=clock)
    other = FakeSample(clock, **change)  # type: ignore[arg-type]
    assert measure([other], clock=clock).disk.origin is Origin.MEASURED
    assert other.reads
    assert len(load_rates()) == 3  # RAM and two disks


def test_another_machine_is_measured_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(TICK)
    measure([FakeSample(clock)], clock=clock)
    monkeypatch.setattr(topology, "hardware_fingerprint", lambda: "0" * 16)
    again = measure([FakeSample(clock)], clock=clock)
    assert (again.ram.origin, again.disk.origin) == (Origin.MEASURED, Origin.MEASURED)


def spoil(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    """The file with one thing about its content changed."""

    def spoiled(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return spoiled


def all_rates(value: Any) -> Callable[[str], str]:
    """The file with every entry replaced."""
    return spoil(lambda c: c.update(rates=dict.fromkeys(c["rates"], value)))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 50_000,
        lambda text: text + " " * rates.MAX_FILE_BYTES,
        lambda text: text.replace('"version": 1', '"version": 1, "version": 1'),
        lambda text: "\udcff",
        all_rates([float("nan")]),
        all_rates([float("inf")]),
        all_rates([-1e9]),
        all_rates([0]),
        all_rates([1e14]),
        all_rates([10**400]),
        all_rates([True]),
        all_rates(["1e9"]),
        all_rates([None]),
        all_rates([]),
        all_rates([1e9] * 5),
        all_rates(1e9),
        all_rates({"0": 1e9}),
        spoil(lambda c: c.update(version=2)),
        spoil(lambda c: c.update(more=1)),
        spoil(lambda c: c.update(rates=[])),
        spoil(lambda c: c["rates"].update({"k" * 101: [1e9]})),
        spoil(lambda c: c["rates"].update({str(i): [1e9] for i in range(64)})),
    ],
)
def test_a_cache_that_we_did_not_write_is_ignored_and_measured_anew(damage: Callable[[str], str]) -> None:
    clock = FakeClock(TICK)
    measure([FakeSample(clock)], clock=clock)
    good = load_rates()
    assert len(good) == 2
    damaged = damage(rates_file().read_text())
    rates_file().write_bytes(damaged.encode("utf-8", "surrogateescape"))
    assert load_rates() == {}
    sample = FakeSample(clock)
    assert measure([sample], clock=clock).disk.origin is Origin.MEASURED
    assert sample.reads and load_rates().keys() == good.keys()


def test_a_cache_that_is_a_pipe_does_not_hang(cache_folder: Path) -> None:
    (cache_folder / "coop").mkdir(parents=True)
    os.mkfifo(cache_folder / "coop" / "topology.json")
    assert load_rates() == {}


def test_a_cache_that_cannot_be_written_is_no_error(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sample = FakeClock(TICK), None
    cache_folder.write_text("a file where the folder should be")
    for _ in range(2):
        sample = FakeSample(clock)
        assert measure([sample], clock=clock).disk.origin is Origin.MEASURED
        assert sample.reads

    def refuse(path: Path, data: bytes) -> None:
        raise PermissionError(13, "Permission denied")

    cache_folder.unlink()
    monkeypatch.setattr(rates, "write_atomic", refuse)
    assert measure([FakeSample(clock)], clock=clock).disk.origin is Origin.MEASURED
    assert load_rates() == {}


def test_the_cache_lies_where_the_system_keeps_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert rates_file() == tmp_path / ".cache" / "coop" / "topology.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert rates_file() == tmp_path / "own" / "coop" / "topology.json"


def test_a_home_that_is_not_there_means_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    save_rates({"ram": (1e9,)})
    assert load_rates() == {}


def test_the_cache_keeps_the_newest_entries() -> None:
    save_rates({str(i): (1e9,) for i in range(rates.MAX_ENTRIES + 5)})
    assert list(load_rates()) == [str(i) for i in range(5, rates.MAX_ENTRIES + 5)]


def test_an_absurd_measurement_does_not_spoil_the_others() -> None:
    save_rates({"ram": (1e9,), "disk": (1e30, 1e9), "none": ()})
    assert load_rates() == {"ram": (1e9,)}


def test_time_bounds_the_reads_of_each_depth() -> None:
    clock = FakeClock()
    sample = FakeSample(clock, seconds=0.06)
    disk = measure_disk([sample], PLENTY, clock)
    # two reads fill a burst of 0.1 s and each place gets one: 2, 2, 4, 8 upwards; then 0.96 s are gone, and of
    # the way back only what still fits into 1.2 s
    assert len(disk.rates) == 4
    assert 16 <= len(sample.reads) <= 16 + 8 + 4 + 7


def test_a_slow_disk_is_read_once() -> None:
    clock = FakeClock()
    sample = FakeSample(clock, seconds=1.0)
    disk = measure_disk([sample], PLENTY, clock)
    assert (len(sample.reads), disk.queue_depth) == (1, 1)
    assert disk.rates == pytest.approx([8 * MIB])


def test_bytes_bound_the_reads_of_a_disk_that_is_faster_than_the_clock() -> None:
    clock = FakeClock()
    sample = FakeSample(clock, seconds=0.0, nbytes=100 * SAMPLE_BYTES)
    measure_disk([sample], PLENTY, clock)
    assert sample.reads == [SAMPLE_BYTES] * (2 * len(QUEUE_DEPTHS) * topology.BURST_BYTES // SAMPLE_BYTES)


def test_buffers_of_a_probe_are_bounded_by_the_free_memory() -> None:
    clock = FakeClock()
    sample = FakeSample(clock)
    disk = measure_disk([sample], 8 * 16 * MIB, clock)
    assert len(disk.rates) == 2  # four buffers of 8 MiB are more than an eighth of what is free
    assert measure_ram(8 * 64 * MIB - 1, clock) == Rate()


def test_reads_are_under_way_at_once() -> None:
    clock, together = FakeClock(), threading.Barrier(4)

    class Meeting(FakeSample):
        def read(self, limit_bytes: int) -> int:
            try:
                together.wait(10)
            except threading.BrokenBarrierError as exc:
                raise StoreError("file", "", "alone") from exc
            clock.now = 1.0
            return super().read(limit_bytes)

    assert topology._Burst(itertools.cycle([Meeting(clock)]), 4, clock).rate() > 0


def test_every_expert_may_be_sampled() -> None:
    clock = FakeClock()
    samples = [FakeSample(clock, seconds=0.001) for _ in range(16)]
    measure_disk(samples, PLENTY, clock)
    assert all(sample.reads for sample in samples)


def test_a_tiny_checkpoint_is_not_measured() -> None:
    clock = FakeClock(TICK)
    samples = [FakeSample(clock, nbytes=MIB) for _ in range(3)]
    for _ in range(2):
        disk = measure(samples, clock=clock).disk
        assert (disk.origin, disk.queue_depth, disk.read_bytes) == (Origin.NOT_MEASURED, 4, MIB)
    assert not any(sample.reads for sample in samples)
    assert measure([], clock=clock).disk == Disk()


@pytest.mark.parametrize("error", [StoreError("file", "tensor", "gone"), OSError(5, "I/O error")])
def test_a_read_that_fails_leaves_the_disk_unmeasured_and_is_not_remembered(error: Exception) -> None:
    clock = FakeClock(TICK)
    disk = measure([FakeSample(clock), FakeSample(clock, error=error)], clock=clock).disk
    assert (disk.origin, disk.queue_depth) == (Origin.NOT_MEASURED, DEFAULT_QUEUE_DEPTH)
    assert [key for key in load_rates() if key.startswith("disk")] == []


def test_a_read_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, end = FakeClock(), threading.Event()

    class Hanging(FakeSample):
        def read(self, limit_bytes: int) -> int:
            end.wait(30)
            return super().read(limit_bytes)

    monkeypatch.setattr(topology, "JOIN_SECONDS", 0.01)
    sample = Hanging(clock, seconds=0.0)
    assert measure_disk([sample], PLENTY, clock).origin is Origin.NOT_MEASURED
    late = [thread for thread in threading.enumerate() if thread.name.startswith("coop-probe")]
    end.set()
    for thread in late:
        thread.join(10)
    assert len(sample.reads) == 1  # the late thread took nothing more


def test_buffered_reads_are_said_to_be_buffered() -> None:
    clock = FakeClock()
    assert measure_disk([FakeSample(clock)], PLENTY, clock).is_direct
    assert not measure_disk([FakeSample(clock), FakeSample(clock, is_direct=False)], PLENTY, clock).is_direct


def test_ram_is_read_a_few_times_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "RAM_BYTES", (2**12, 2**12))
    ticks = itertools.count()
    rate = measure_ram(PLENTY, lambda: next(ticks) * 0.01)
    assert rate.origin is Origin.MEASURED and rate.bytes_per_second == pytest.approx(2**12 / 0.01)
    assert next(ticks) == 1 + 3 * topology.RAM_REPEATS
    slow = itertools.count()
    measure_ram(PLENTY, lambda: float(next(slow)))
    assert next(slow) == 1 + 3  # one reading is all that there is time for


def test_a_link_is_measured_through_the_device() -> None:
    clock = FakeClock()
    device: Any = FakeDevice(clock)
    here = measure([], device, clock)
    assert (device.copies, here.device_available_bytes) == (LINK_REPEATS, 123 * MIB)
    assert here.link == Rate(LINK_BYTES / 0.5, Origin.MEASURED)
    assert measure([], clock=clock).link == Rate()


def test_a_link_that_hangs_or_has_no_room_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    hung: Any = FakeDevice(clock, is_hung=True)
    assert measure_link(hung, clock) == Rate() and hung.copies == 1

    def no_room(nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    full: Any = FakeDevice(clock)
    monkeypatch.setattr(full, "new_slot", no_room)
    assert measure_link(full, clock) == Rate()


def test_a_limit_of_the_control_group_counts_where_it_is_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(topology, "_cgroup_files", lambda: [(limit, used)])
    used.write_text(f"{3 * MIB}\n")
    limit.write_text(f"{10 * MIB}\n")
    assert topology.memory_available_bytes() == 7 * MIB == measure([]).memory_available_bytes
    limit.write_text(f"{MIB}\n")
    assert topology.memory_available_bytes() == 0
    limit.write_text("max\n")
    assert topology.memory_available_bytes() > 10 * MIB


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_real_checkpoint_is_sampled_through_the_reads_of_the_runtime(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_family(tmp_path / "model", family)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    store = ExpertStore(resolve_layout(config, read_checkpoint_tensors(tmp_path / "model"), torch.float32))
    seen: list[tuple[int, int]] = []
    read = DirectFile.read

    def note(self: DirectFile, offset: int, nbytes: int, tensor: str, staged: Window) -> memoryview:
        seen.append((offset, nbytes))
        return read(self, offset, nbytes, tensor, staged)

    monkeypatch.setattr(DirectFile, "read", note)
    monkeypatch.setattr(topology, "SMALLEST_DISK_BYTES", 1)
    samples = store.sample_reads()
    try:
        here = measure(samples)
        assert here.disk.origin is Origin.MEASURED and seen
        assert set(seen) <= {(sample.offset, sample.nbytes) for sample in samples}
        assert len(samples) == sum(layer.num_experts for layer in store.geometry)
        assert max(sample.nbytes for sample in samples) + 2 * 4096 == store.window_bytes
        assert samples[0].file_system == (tmp_path / "model").stat().st_dev
        assert store.stored_bytes >= sum(sample.nbytes for sample in samples)
    finally:
        store.close()
