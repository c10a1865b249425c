"""Pressure guard and block device: others' work is seen, our own is not taken for it, and no trip lasts."""

from __future__ import annotations

import mmap
import os
import random
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coop.blockdevice import BlockDevice, DiskSample
from coop.pressure import PressureGuard, PressureSettings

BANDWIDTH = 1e9
REQUEST_BYTES = 2**20
BOOTED = 10**15  # bytes since boot: a year of work
NUMBERS = PressureSettings()


class FakeDisk:
    """A disk of BANDWIDTH that serves first come, first served; time passes only by `run`."""

    def __init__(self, device_bytes: int = 0) -> None:
        self.now = 100.0
        self.reads = 0
        self.own_waiting = 0.0
        self.counters = DiskSample(device_bytes, device_bytes // REQUEST_BYTES, 0, 0)
        self.is_visible = True
        self._moved = 0.0

    def clock(self) -> float:
        return self.now

    def read(self) -> DiskSample | None:
        self.reads += 1
        in_flight = -int(-self.own_waiting // REQUEST_BYTES)
        return replace(self.counters, in_flight=in_flight) if self.is_visible else None

    def submit(self, nbytes: int) -> None:
        """We ask for so many bytes at once; they count as ours from now on."""
        self.own_waiting += nbytes
        self.counters = replace(self.counters, own_bytes=self.counters.own_bytes + nbytes)

    def run(self, seconds: float, foreign_share: float = 0.0) -> None:
        """Time passes: others take their share of the bandwidth, our requests what is left of it."""
        self.now += seconds
        mine = min(self.own_waiting, BANDWIDTH * seconds * (1 - foreign_share))
        self.own_waiting -= mine
        self._moved += mine + BANDWIDTH * seconds * foreign_share
        whole = int(self._moved) // REQUEST_BYTES
        self._moved -= whole * REQUEST_BYTES
        old = self.counters
        self.counters = replace(
            old,
            device_bytes=old.device_bytes + whole * REQUEST_BYTES,
            device_requests=old.device_requests + whole,
        )


def guard_of(disk: FakeDisk, lines: list[str] | None = None) -> PressureGuard:
    say = (lambda line: None) if lines is None else lines.append
    return PressureGuard(
        disk.read, bandwidth_bytes_per_s=BANDWIDTH, name="vda", say=say, clock=disk.clock, settings=NUMBERS
    )


def run_for(guard: PressureGuard, disk: FakeDisk, seconds: float, foreign_share: float = 0.0) -> list[bool]:
    """Poll every 50 ms for `seconds`; the answers."""
    answers = []
    for _ in range(round(seconds / 0.05)):
        disk.run(0.05, foreign_share)
        answers.append(guard.poll())
    return answers


# from counters


@pytest.mark.parametrize("load_bytes", [2**14, 3 * 2**20, 2**26, 2**28, 2**30])
def test_our_own_reads_alone_never_trip_it_however_large(load_bytes: int) -> None:
    disk, source = FakeDisk(), random.Random(load_bytes)
    guard = guard_of(disk)
    for _ in range(400):
        while disk.own_waiting < load_bytes and source.random() < 0.7:
            disk.submit(load_bytes)
        disk.run(source.uniform(0.01, 0.2))
        assert not guard.poll()


@given(st.lists(st.tuples(st.integers(0, 2**29), st.floats(0.001, 3.0)), max_size=60))
@settings(deadline=None)
def test_our_own_reads_alone_never_trip_it_at_any_pace(steps: list[tuple[int, float]]) -> None:
    disk = FakeDisk()
    guard = guard_of(disk)
    for nbytes, seconds in steps:
        disk.submit(nbytes)
        disk.run(seconds)
        assert not guard.poll()


def test_a_foreign_load_trips_it_and_the_end_of_that_load_clears_it() -> None:
    disk, lines = FakeDisk(), []
    guard = guard_of(disk, lines)
    assert not any(run_for(guard, disk, 2.0))
    answers = run_for(guard, disk, 3.0, foreign_share=0.6)
    assert all(answers[10:]), "half a second of a load is enough"
    answers = run_for(guard, disk, 3.0)
    assert not any(answers[20:]), "a second after the load it is over"
    assert guard.times_pressed == 1
    assert 2.5 < guard.seconds_pressed < 4.0
    assert len(lines) == 2 and "of its bandwidth" in lines[0] and lines[1].startswith("vda is free")


def test_a_foreign_load_beside_our_own_reads_trips_it() -> None:
    disk = FakeDisk()
    guard = guard_of(disk)
    for _ in range(100):
        disk.submit(int(0.05 * BANDWIDTH * 0.5))
        disk.run(0.05, foreign_share=0.4)
        guard.poll()
    assert guard.is_pressed


def test_a_load_between_the_thresholds_changes_nothing_in_either_state() -> None:
    disk = FakeDisk()
    guard = guard_of(disk)
    between = (NUMBERS.trip_share + NUMBERS.clear_share) / 2
    assert not any(run_for(guard, disk, 3.0, between))
    assert run_for(guard, disk, 1.0, 0.9)[-1]
    assert all(run_for(guard, disk, 3.0, between))


def test_a_spike_of_less_than_a_poll_does_not_trip_it() -> None:
    disk = FakeDisk()
    guard = guard_of(disk)
    for _ in range(20):
        assert not any(run_for(guard, disk, 2.0))
        disk.run(0.06, foreign_share=0.9)
        assert not guard.poll()


def test_what_was_counted_before_the_start_does_not_trip_it() -> None:
    disk = FakeDisk(device_bytes=BOOTED)
    assert not any(run_for(guard_of(disk), disk, 5.0))


def test_a_load_seen_after_a_long_silence_is_over_when_it_is_over() -> None:
    disk = FakeDisk()
    guard = guard_of(disk)
    run_for(guard, disk, 2.0, foreign_share=0.9)
    assert guard.is_pressed
    disk.run(600.0, foreign_share=0.9)  # nobody polls
    assert not any(run_for(guard, disk, 3.0)[40:])


@pytest.mark.parametrize("fault", ["backwards", "vanishes", "jumps", "own_backwards", "stuck"])
@pytest.mark.parametrize("foreign_share", [0.0, 0.8])
def test_counters_that_lie_are_survived_and_leave_no_trip_behind(fault: str, foreign_share: float) -> None:
    disk = FakeDisk(device_bytes=BOOTED)
    guard = guard_of(disk)
    run_for(guard, disk, 2.0, foreign_share)
    good = disk.counters
    if fault == "backwards":
        disk.counters = DiskSample(0, 0, 0, good.own_bytes)
    elif fault == "vanishes":
        disk.is_visible = False
    elif fault == "jumps":
        disk.counters = replace(good, device_bytes=2**63)
    elif fault == "own_backwards":
        disk.counters = replace(good, own_bytes=-5)
    elif fault == "stuck":
        for _ in range(40):
            disk.run(0.05, foreign_share)
            disk.counters = good
            guard.poll()
    assert not any(run_for(guard, disk, 3.0)[40:])
    disk.is_visible = True
    assert run_for(guard, disk, 2.0, foreign_share=0.8)[-1], "the guard still works"


def test_counters_that_begin_anew_at_every_poll_cannot_keep_it_tripped() -> None:
    disk = FakeDisk()
    guard = guard_of(disk)
    assert run_for(guard, disk, 2.0, foreign_share=0.8)[-1]
    answers = []
    for step in range(100):
        disk.run(0.05)
        disk.counters = DiskSample(10**9 - step, 10**6, 0, 0)
        answers.append(guard.poll())
    assert not any(answers[40:])


def test_a_burst_of_our_own_that_waits_in_the_queue_for_seconds_does_not_trip_it() -> None:
    disk = FakeDisk()
    guard = guard_of(disk)
    run_for(guard, disk, 1.0)
    disk.submit(4 * 10**9)
    assert not any(run_for(guard, disk, 6.0))


# how often


def test_the_disk_is_looked_at_ten_times_a_second_at_most() -> None:
    disk = FakeDisk()
    guard = guard_of(disk)
    for _ in range(10_000):
        disk.run(0.001)
        guard.poll()
    assert 90 <= disk.reads <= 10.0 / NUMBERS.poll_seconds + 1


def test_threads_that_poll_at_once_look_once() -> None:
    disk = FakeDisk()
    guard = guard_of(disk)
    start = threading.Barrier(8)

    def work() -> None:
        start.wait(10)
        for _ in range(500):
            guard.poll()
            guard.note_load(1, 0.001)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert disk.reads == 1


@given(
    st.lists(
        st.tuples(st.floats(0.001, 2.0), st.floats(0, 1), st.integers(0, 2**28), st.booleans()), max_size=150
    )
)
@settings(deadline=None)
def test_it_changes_its_mind_at_most_once_in_the_hold_time(
    steps: list[tuple[float, float, int, bool]],
) -> None:
    disk, lines = FakeDisk(), []
    guard = guard_of(disk, lines)
    changes = []
    for seconds, foreign_share, nbytes, is_visible in steps:
        disk.is_visible = is_visible
        disk.submit(nbytes)
        disk.run(seconds, foreign_share)
        guard.note_load(nbytes, seconds)
        was = guard.is_pressed
        if guard.poll() != was:
            changes.append(disk.now)
    gaps = [later - earlier for earlier, later in pairwise(changes)]
    assert all(gap >= NUMBERS.hold_seconds for gap in gaps)
    assert guard.times_pressed == (len(changes) + 1) // 2
    assert guard.seconds_pressed <= disk.now - 100.0
    assert len(lines) <= 2 * (1 + (disk.now - 100.0) / NUMBERS.say_seconds)


def test_a_load_that_flaps_faster_than_the_hold_time_does_not_make_it_flap() -> None:
    disk = FakeDisk()
    guard = guard_of(disk)
    answers = [False]
    for _ in range(20):
        answers += run_for(guard, disk, 0.6, foreign_share=0.9) + run_for(guard, disk, 0.6)
    changes = sum(earlier != later for earlier, later in pairwise(answers))
    assert 2 <= changes <= 1 + 24.0 / NUMBERS.hold_seconds


def test_a_load_that_comes_and_goes_is_logged_once_a_minute_and_counted_each_time() -> None:
    disk, lines = FakeDisk(), []
    guard = guard_of(disk, lines)
    for _ in range(5):
        run_for(guard, disk, 2.0, foreign_share=0.9)
        run_for(guard, disk, 2.0)
    assert guard.times_pressed == 5
    assert len(lines) == 2
    run_for(guard, disk, 60.0)
    run_for(guard, disk, 2.0, foreign_share=0.9)
    assert len(lines) == 3


# from our own loads, where no device is visible


def load_for(
    guard: PressureGuard, disk: FakeDisk, seconds: float, each: float, side_by_side: int = 1
) -> None:
    """Loads of 1 MB that take `each` seconds, so many at a time, for `seconds`."""
    for _ in range(round(seconds / each)):
        disk.run(each)
        for _ in range(side_by_side):
            guard.note_load(10**6, each)
        guard.poll()


def blind_guard() -> tuple[PressureGuard, FakeDisk]:
    disk = FakeDisk()
    disk.is_visible = False
    return guard_of(disk), disk


def test_without_a_device_loads_that_take_much_longer_trip_it_and_fast_ones_clear_it() -> None:
    guard, disk = blind_guard()
    load_for(guard, disk, 3.0, each=0.01)
    assert not guard.is_pressed
    load_for(guard, disk, 3.0, each=0.05)
    assert guard.is_pressed
    load_for(guard, disk, 3.0, each=0.01)
    assert not guard.is_pressed and guard.times_pressed == 1


def test_without_a_device_loads_that_share_the_disk_among_themselves_do_not_trip_it() -> None:
    guard, disk = blind_guard()
    load_for(guard, disk, 3.0, each=0.01)
    load_for(guard, disk, 3.0, each=0.04, side_by_side=4)
    assert guard.times_pressed == 0


def test_without_a_device_and_without_loads_it_clears() -> None:
    guard, disk = blind_guard()
    load_for(guard, disk, 3.0, each=0.01)
    load_for(guard, disk, 3.0, each=0.05)
    assert guard.is_pressed
    assert not run_for(guard, disk, 3.0)[-1]


def test_a_disk_that_stays_slow_is_in_the_end_not_called_busy() -> None:
    guard, disk = blind_guard()
    load_for(guard, disk, 3.0, each=0.01)
    load_for(guard, disk, 300.0, each=0.05)
    assert guard.times_pressed >= 1 and not guard.is_pressed


@pytest.mark.parametrize(("nbytes", "seconds"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))])
def test_a_load_of_nothing_or_in_no_time_is_not_counted(nbytes: int, seconds: float) -> None:
    guard, disk = blind_guard()
    load_for(guard, disk, 3.0, each=0.01)
    for _ in range(100):
        disk.run(0.05)
        guard.note_load(nbytes, seconds)
        assert not guard.poll()


def test_loads_too_short_for_the_clock_are_no_evidence() -> None:
    guard, disk = blind_guard()
    for _ in range(100):
        disk.run(0.05)
        for _ in range(5):
            guard.note_load(10**6, 1e-300)
        assert not guard.poll()


# the block device


STAT = "  10  0  {read}  7  5  0  {written}  7  {flight}  9  9\n"


def fake_kernel(root: Path, path: Path, stat: str, io: str) -> tuple[Path, Path]:
    """A /sys with one disk `sda`, its partition being the device of `path`, and a /proc with our own counts."""
    number = path.stat().st_dev
    disk = root / "sys" / "devices" / "sda"
    (disk / "sda1").mkdir(parents=True)
    (disk / "sda1" / "partition").write_text("1\n")
    (disk / "stat").write_text(stat)
    (root / "sys" / "dev" / "block").mkdir(parents=True)
    (root / "sys" / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(disk / "sda1")
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "io").write_text(io)
    (root / "proc" / "self" / "mountinfo").write_text("")
    return root / "sys", root / "proc"


def needs_device_number(path: Path) -> None:
    if os.major(path.stat().st_dev) == 0:
        pytest.skip("the temporary folder is on no device")


def test_a_partition_is_followed_to_its_disk_and_reads_and_writes_are_added(tmp_path: Path) -> None:
    needs_device_number(tmp_path)
    stat = STAT.format(read=100, written=20, flight=3)
    device = BlockDevice(tmp_path, *fake_kernel(tmp_path, tmp_path, stat, "rchar: 9\nread_bytes: 4096\n"))
    assert device.name == "sda"
    assert device.read() == DiskSample(120 * 512, 15, 3, 4096)


def test_a_volume_is_followed_to_the_one_disk_below_it_and_an_array_is_not(tmp_path: Path) -> None:
    needs_device_number(tmp_path)
    stat = STAT.format(read=100, written=20, flight=3)
    sys, proc = fake_kernel(tmp_path, tmp_path, stat, "read_bytes: 0\n")
    volume = sys / "devices" / "dm-0"
    (volume / "slaves").mkdir(parents=True)
    (volume / "slaves" / "sda1").symlink_to(sys / "devices" / "sda" / "sda1")
    (link,) = (sys / "dev" / "block").iterdir()
    link.unlink()
    link.symlink_to(volume)
    assert BlockDevice(tmp_path, sys, proc).name == "sda"
    (volume / "slaves" / "sdb1").symlink_to(sys / "devices" / "sda")
    assert BlockDevice(tmp_path, sys, proc).name == "dm-0"


@pytest.mark.parametrize(
    ("stat", "io"),
    [
        ("", "read_bytes: 0\n"),
        ("1 2 3\n", "read_bytes: 0\n"),
        ("a b c d e f g h i\n", "read_bytes: 0\n"),
        ("\xff" * 9, "read_bytes: 0\n"),
        (STAT.format(read=-1, written=0, flight=0), "read_bytes: 0\n"),
        (STAT.format(read=1, written=0, flight=0), ""),
        (STAT.format(read=1, written=0, flight=0), "rchar: 5\n"),
        (STAT.format(read=1, written=0, flight=0), "read_bytes: many\n"),
        (STAT.format(read="9" * 5000, written=0, flight=0), "read_bytes: 0\n"),
    ],
)
def test_counters_that_make_no_sense_are_no_counters(stat: str, io: str, tmp_path: Path) -> None:
    needs_device_number(tmp_path)
    device = BlockDevice(tmp_path, *fake_kernel(tmp_path, tmp_path, stat, io))
    assert device.name == "sda" and device.read() is None


def test_a_machine_without_these_files_has_no_counters(tmp_path: Path) -> None:
    device = BlockDevice(tmp_path, tmp_path / "sys", tmp_path / "proc")
    assert device.name == "" and device.read() is None
    assert BlockDevice(tmp_path / "no such folder").read() is None


def test_a_disk_that_is_unplugged_has_no_counters_any_more(tmp_path: Path) -> None:
    needs_device_number(tmp_path)
    stat = STAT.format(read=100, written=20, flight=3)
    sys, proc = fake_kernel(tmp_path, tmp_path, stat, "read_bytes: 0\n")
    device = BlockDevice(tmp_path, sys, proc)
    assert device.read() is not None
    (sys / "devices" / "sda" / "stat").unlink()
    assert device.read() is None


def test_the_real_counters_of_this_machine_count_a_direct_read(tmp_path: Path) -> None:
    device, path, nbytes = BlockDevice(tmp_path), tmp_path / "file", 2**20
    path.write_bytes(os.urandom(nbytes))
    before = device.read()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        pytest.skip("no direct reads here")
    if before is None:
        pytest.skip("no block device is visible here")
    with mmap.mmap(-1, nbytes) as window:
        assert os.preadv(fd, [window], 0) == nbytes
    os.close(fd)
    after = device.read()
    assert after is not None
    assert after.own_bytes - before.own_bytes >= nbytes
    assert after.device_bytes - before.device_bytes >= nbytes
