"""CopyThread: the one thread of a device that issues copies, and the only one that waits for their events.

Owns the thread and a bounded queue; promises that copies begin in the order they were asked for, that source
and target live until their copy is done, and that an error reaches the fence of its copy and all later calls.
Called by devices whose copies run beside the compute queue; `issue` puts one copy on the device's own stream.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from coop.devices import Fence
from coop.devices.fences import CopyFence, Event
from coop.errors import ClosedError, PrefetchError

MAX_JOBS = 64  # each loader thread waits for its copy, so a device has fewer jobs than loaders
MAX_FLYING = 4  # enough that the copy engine finds the next copy when one ends
SUBMIT_SECONDS = 120.0
CLOSE_SECONDS = 2.0

Issue = Callable[[torch.Tensor, torch.Tensor, Fence | None], Event]


@dataclass(frozen=True, slots=True)
class _Job:
    source: torch.Tensor
    target: torch.Tensor
    after: Fence | None
    fence: CopyFence


class CopyThread:
    """Copies of one device, in order.

    Args:
        issue: begins one copy (source, target, after) on the device's copy stream; returns an event recorded
            behind it. Called from this thread only.
        name: of the thread.
    """

    def __init__(self, issue: Issue, name: str) -> None:
        self._issue = issue
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, source: torch.Tensor, target: torch.Tensor, after: Fence | None) -> CopyFence:
        """Queue one copy; waits for room in the queue. PrefetchError after an error, ClosedError after `close`."""
        fence = CopyFence(self)
        if isinstance(after, CopyFence) and after.maker is self:
            after = None  # copies run in order, and this thread must not wait for itself
        with self._wake:
            has_room = self._wake.wait_for(
                lambda: len(self._jobs) < MAX_JOBS or self._is_stopped(), SUBMIT_SECONDS
            )
            self.check()
            if not has_room:
                raise PrefetchError(
                    f"{MAX_JOBS} copies wait for the device, none began in {SUBMIT_SECONDS:.0f} s"
                )
            self._jobs.append(_Job(source, target, after, fence))
            self._wake.notify_all()
        return fence

    def check(self) -> None:
        """Raise PrefetchError if a copy has failed, ClosedError if this was closed."""
        if self._error is not None:
            raise PrefetchError(f"copying to the device failed: {self._error}") from self._error
        if self._is_closed:
            raise ClosedError("the device is closed")

    def close(self) -> None:
        """Refuse what is queued, let what has begun end; returns within two seconds even if the device hangs."""
        with self._wake:
            self._is_closed = True
            refused = self._take_all()
        for job in refused:
            job.fence.finish(ClosedError("the device was closed before the copy began"))
        self._thread.join(CLOSE_SECONDS)

    def _is_stopped(self) -> bool:
        return self._is_closed or self._error is not None

    def _take_all(self) -> list[_Job]:
        jobs = list(self._jobs)
        self._jobs.clear()
        self._wake.notify_all()
        return jobs

    def _work(self) -> None:
        flying: deque[tuple[_Job, Event]] = deque()
        while self._step(flying):
            pass

    def _step(self, flying: deque[tuple[_Job, Event]]) -> bool:
        """Begin a copy or wait for the oldest; False at the end. Returns so that no finished job is kept alive."""
        job = self._next(is_idle=not flying, has_room=len(flying) < MAX_FLYING)
        if job is None and not flying:
            return False
        if job is None:
            self._retire(flying)
            return True
        try:
            flying.append((job, self._issue(job.source, job.target, job.after)))
        except BaseException as exc:
            self._fail(exc, [job])
        return True

    def _next(self, is_idle: bool, has_room: bool) -> _Job | None:
        """The next job to issue; None if an older copy is to be waited for, or if this is the end."""
        with self._wake:
            while is_idle and not self._jobs and not self._is_stopped():
                self._wake.wait()
            if self._is_stopped() or not has_room or not self._jobs:
                return None
            job = self._jobs.popleft()
            self._wake.notify_all()
            return job

    def _retire(self, flying: deque[tuple[_Job, Event]]) -> None:
        """Wait for the oldest copy. If the device failed, no copy that has begun can be trusted."""
        try:
            flying[0][1].synchronize()
        except BaseException as exc:
            lost = [job for job, _ in flying]
            flying.clear()
            self._fail(exc, lost)
            return
        flying.popleft()[0].fence.finish()

    def _fail(self, error: BaseException, lost: list[_Job]) -> None:
        with self._wake:
            self._error = error
            lost = lost + self._take_all()
        for job in lost:
            job.fence.finish(error)
