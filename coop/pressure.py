"""PressureGuard: tells when the disk or link is busy with other work, so that guesses wait.

Owns a short history of counters; promises that our own reads alone never trip it, that it clears once the other
work has ended, and that it changes its mind at most once in `hold_seconds`. Polled by the scheduler and the
loader threads. It never touches demand loads, so the tokens are the same with it and without.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from coop.blockdevice import DiskSample


@dataclass(frozen=True, kw_only=True, slots=True)
class PressureSettings:
    """The numbers of the guard, each with its reason. Seconds, shares of the bandwidth, or ratios.

    poll_seconds: a poll costs 30 us; ten in a second are nothing, and a tenth of a second is one token.
    window_seconds: three polls, so that one late poll or a short spike does not decide.
    window_max_seconds: how far the window may stretch until reads in flight are a small part of it.
    in_flight_share: that small part; less than the gap between the two thresholds below.
    hold_seconds: the least time in either state; shorter than the shortest backup, longer than a token.
    trip_share: measured on a virtual disk, others at 16 % cost our reads nothing, at 37 % they doubled p99.
    clear_share: well below, so that a load near the threshold does not flap.
    assumed_bytes_per_s: bandwidth until a better number is given or seen: a SATA disk.
    believable_bytes_per_s: a faster counter is garbage; no device comes near.
    trip_slowdown, clear_slowdown: where no device is visible. Queue depth and busy processors alone make our
        reads up to 1.7 times slower.
    pace_seconds, pace_loads: the loads that make a measurement of our own pace.
    pace_half_life_seconds: how fast the best pace is forgotten: a disk that stays slow is no longer called busy.
    say_seconds: the least time between two pairs of log lines.
    """

    poll_seconds: float = 0.1
    window_seconds: float = 0.3
    window_max_seconds: float = 4.0
    in_flight_share: float = 0.1
    hold_seconds: float = 1.0
    trip_share: float = 0.25
    clear_share: float = 0.1
    assumed_bytes_per_s: float = 500e6
    believable_bytes_per_s: float = 1e12
    trip_slowdown: float = 3.0
    clear_slowdown: float = 2.0
    pace_seconds: float = 1.0
    pace_loads: int = 4
    pace_half_life_seconds: float = 60.0
    say_seconds: float = 60.0

    def __post_init__(self) -> None:
        assert 0 < self.poll_seconds <= self.window_seconds <= self.window_max_seconds
        assert 0 < self.clear_share < self.trip_share < 1 <= self.clear_slowdown < self.trip_slowdown
        assert self.hold_seconds > 0 and self.pace_loads > 0


class _Reading(NamedTuple):
    """One look at the disk. Busy and quiet are not opposites: between the thresholds it is neither."""

    is_busy: bool
    is_quiet: bool
    why: str


NO_EVIDENCE = _Reading(is_busy=False, is_quiet=True, why="")


class PressureGuard:
    """Whether others use the disk, from its counters less our own reads, or from how our own reads slow down.

    Args:
        read_disk: counters now, or None where there are none (`BlockDevice.read`, or a simulator's).
        bandwidth_bytes_per_s: what the disk gives when it is ours, as measured; 0 if it was not.
        name: of the disk, for the log line.
        say: takes a log line.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        read_disk: Callable[[], DiskSample | None],
        *,
        bandwidth_bytes_per_s: float = 0.0,
        name: str = "disk",
        say: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        settings: PressureSettings | None = None,
    ) -> None:
        self.is_pressed = False
        self.times_pressed = 0
        self.seconds_pressed = 0.0
        self._settings = settings or PressureSettings()
        self._read_disk, self._name, self._say, self._clock = read_disk, name, say, clock
        self._foreign = _ForeignShare(self._settings, bandwidth_bytes_per_s)
        self._pace = _Pace(self._settings)
        self._lock = threading.Lock()
        self._next_poll = self._judged_at = -math.inf
        self._changed_at = self._said_at = -math.inf
        self._has_said = False

    def note_load(self, nbytes: int, seconds: float) -> None:
        """One expert of `nbytes` came in `seconds`, ending now; from any thread."""
        if nbytes > 0 and 0 < seconds < math.inf:
            with self._lock:
                self._pace.note(self._clock(), seconds, nbytes)

    def poll(self) -> bool:
        """Whether guesses should wait. Looks at the disk at most every `poll_seconds`; from any thread."""
        with self._lock:
            now = self._clock()
            if now < self._next_poll:
                return self.is_pressed
            self._next_poll = now + self._settings.poll_seconds
        sample = self._read_disk()
        with self._lock:
            line = self._judge(self._clock(), sample)
            is_pressed = self.is_pressed
        if line:
            with suppress(Exception):  # a log line that cannot be written is no reason to stop reading
                self._say(line)
        return is_pressed

    def _judge(self, now: float, sample: DiskSample | None) -> str:
        """Move between the two states; returns the line to log, or an empty one."""
        if self.is_pressed:
            self.seconds_pressed += now - self._judged_at
        self._judged_at = now
        foreign = self._foreign.read(now, sample)
        reading = foreign if sample is not None else self._pace.read(now)
        if now - self._changed_at < self._settings.hold_seconds:
            return ""
        if not self.is_pressed and reading.is_busy:
            return self._trip(now, reading.why)
        if self.is_pressed and reading.is_quiet:
            return self._clear(now)
        return ""

    def _trip(self, now: float, why: str) -> str:
        self.is_pressed, self._changed_at = True, now
        self.times_pressed += 1
        self._has_said = now - self._said_at >= self._settings.say_seconds
        if not self._has_said:
            return ""
        self._said_at = now
        return f"{self._name} is busy with other work ({why}): experts are loaded only when asked for"

    def _clear(self, now: float) -> str:
        seconds = now - self._changed_at
        self.is_pressed, self._changed_at = False, now
        if not self._has_said:
            return ""
        return f"{self._name} is free again after {seconds:.1f} s: experts are loaded ahead"


class _ForeignShare:
    """Source one: the share of the disk's bandwidth that went to others, from counters."""

    def __init__(self, settings: PressureSettings, bandwidth_bytes_per_s: float) -> None:
        self._settings = settings
        self._bandwidth = bandwidth_bytes_per_s or settings.assumed_bytes_per_s
        self._samples: deque[tuple[float, DiskSample]] = deque()

    def read(self, now: float, sample: DiskSample | None) -> _Reading:
        """Take a sample in, and judge the window that it ends. Counters that jump or go back begin a new history."""
        if sample is None:
            self._samples.clear()
            return NO_EVIDENCE
        if self._samples and not self._follows(*self._samples[-1], now, sample):
            self._samples.clear()
        while len(self._samples) > 1 and self._samples[1][0] <= now - self._settings.window_max_seconds:
            self._samples.popleft()
        share = self._share(now, sample)
        self._samples.append((now, sample))
        is_busy, is_quiet = share >= self._settings.trip_share, share <= self._settings.clear_share
        return _Reading(is_busy, is_quiet, f"{min(share, 1):.0%} of its bandwidth")

    def _follows(self, before: float, older: DiskSample, now: float, newer: DiskSample) -> bool:
        moved = newer.device_bytes - older.device_bytes
        requests = newer.device_requests - older.device_requests
        is_forward = moved >= 0 and requests >= 0 and newer.own_bytes >= older.own_bytes and now > before
        return is_forward and moved <= self._settings.believable_bytes_per_s * (now - before)

    def _share(self, now: float, newer: DiskSample) -> float:
        """At least this share went to others, in the shortest window in which reads in flight weigh little.

        What was in flight when the window began was counted as ours before it and as the disk's within it, so
        all of it is taken off: the bound holds for reads of any size.
        """
        share = 0.0
        for then, older in reversed(self._samples):
            span = now - then
            if span < self._settings.window_seconds:
                continue
            moved = newer.device_bytes - older.device_bytes
            requests = newer.device_requests - older.device_requests
            in_flight_bytes = older.in_flight * moved / requests if requests else 0.0
            self._bandwidth = max(self._bandwidth, moved / span)
            could_move = self._bandwidth * span
            foreign = moved - (newer.own_bytes - older.own_bytes) - in_flight_bytes
            share = foreign / could_move
            if in_flight_bytes <= self._settings.in_flight_share * could_move:
                break
        return share


class _Pace:
    """Source two: how much slower our own loads are than at their recent best, counted over the time they ran.

    Loads that run side by side count their common time once, so our own queue depth is not taken for slowness.
    """

    def __init__(self, settings: PressureSettings) -> None:
        self._settings = settings
        self._loads: deque[tuple[float, float, int]] = deque(maxlen=64)  # (start, end, nbytes) by end
        self._best_bytes_per_s = 0.0
        self._read_at = -math.inf

    def note(self, end: float, seconds: float, nbytes: int) -> None:
        """One load that ended now."""
        self._loads.append((end - seconds, end, nbytes))

    def read(self, now: float) -> _Reading:
        """Compare the last `pace_seconds` with the best; few loads are no evidence."""
        lapse = now - self._read_at
        self._read_at = now
        self._best_bytes_per_s *= 0.5 ** (lapse / self._settings.pace_half_life_seconds)
        recent = [load for load in self._loads if load[1] > now - self._settings.pace_seconds]
        covered = _covered_seconds(recent)
        if len(recent) < self._settings.pace_loads or covered == 0:
            return NO_EVIDENCE
        pace = sum(nbytes for _, _, nbytes in recent) / covered
        self._best_bytes_per_s = max(self._best_bytes_per_s, pace)
        slowdown = self._best_bytes_per_s / pace
        is_busy = slowdown >= self._settings.trip_slowdown
        is_quiet = slowdown <= self._settings.clear_slowdown
        return _Reading(is_busy, is_quiet, f"reads are {slowdown:.1f} times slower than at their best")


def _covered_seconds(loads: list[tuple[float, float, int]]) -> float:
    """Length of the union of the loads' times; they come ordered by their end."""
    covered, left = 0.0, math.inf
    for start, end, _ in reversed(loads):
        covered += max(0.0, min(end, left) - start)
        left = min(left, start)
    return covered
