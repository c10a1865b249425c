"""Demand: the experts of one layer call, from asking for them to giving them back.

Owns the leases of the call; promises that each distinct expert is read at most once for it, in disk order,
that a wait ends with weights, an error or a deadline, and that nothing stays leased however the call ends.
Called by the scheduler, which runs what has arrived while the rest is on its way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from coop.errors import CoopError, PrefetchError
from coop.ids import ExpertId
from coop.policy import UNLIMITED
from coop.prefetch import Prefetcher
from coop.residency import Lease, Residency

LOAD_DEADLINE_SECONDS = 120.0  # no disk in use takes this long for one expert
ALIVE_CHECK_SECONDS = 1.0


@dataclass(slots=True)
class Waits:
    """Seconds a call stood still, by cause."""

    load: float = 0.0  # for a read that was demanded
    guess: float = 0.0  # for a read that a guess had begun
    room: float = 0.0  # for a slot: everything that could go was leased or loading
    ring: float = 0.0  # for the expert next in the sum, because the output ring was full

    @property
    def total(self) -> float:
        """All of it."""
        return self.load + self.guess + self.room + self.ring


class Demand:
    """A context manager around one call's experts.

    Args:
        experts: distinct experts of one layer.
        residency, prefetcher: where they are, and who brings them.
        disk_order: sort key of where an expert lies.
        waits: where seconds are counted.
        streams: experts of the call that may pass through at a time, in place of likelier ones.
        check_open: raises when the runtime was closed meanwhile.
    """

    def __init__(
        self,
        experts: Sequence[ExpertId],
        residency: Residency,
        prefetcher: Prefetcher,
        disk_order: Callable[[ExpertId], tuple[str, int]],
        waits: Waits,
        streams: int = UNLIMITED,
        check_open: Callable[[], None] = lambda: None,
    ) -> None:
        self._residency, self._prefetcher = residency, prefetcher
        self._waits, self._streams, self._check_open = waits, streams, check_open
        self._coming: dict[ExpertId, bool] = {}  # leased, not arrived; True: a guess brings it
        self._pending: list[ExpertId] = []
        self._urgent: ExpertId | None = None
        hits = residency.lease_resident(experts)
        self._leases = {lease.expert: lease for lease in hits}
        self._arrived = list(self._leases)
        self.hits, self.misses = len(hits), len(experts) - len(hits)
        if self.misses:
            self._pending = sorted((e for e in experts if e not in self._leases), key=disk_order)

    def __enter__(self) -> Demand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back every lease."""
        if self._pending:
            self._residency.calm()
        self._residency.release(*self._leases, *self._coming)
        self._leases.clear()
        self._coming.clear()
        self._pending.clear()

    @property
    def is_short(self) -> bool:
        """Some experts have found no room yet."""
        return bool(self._pending)

    def request(self) -> None:
        """Ask for everything that is missing and finds room."""
        self._replace_failed_guesses()
        if not self._pending:
            return
        granted = self._residency.demand(self._pending, self._urgent, self._streams)
        self._pending = granted.without_room
        for lease in granted.leases:
            self._arrive(lease)
        self._coming.update(dict.fromkeys(granted.joined, True))
        self._coming.update((expert, False) for expert, _ in granted.to_load)
        try:
            self._prefetcher.demand(granted.to_load)
        except BaseException as exc:  # even Ctrl-C must not leave a reservation that nobody fills
            for expert in self._prefetcher.withdraw(granted.to_load):
                self._residency.abandon(expert, exc)
            raise

    def put_first(self, expert: ExpertId) -> bool:
        """Ask for `expert` before the others that have found no room; False if there is none for it either."""
        if expert in self._pending:
            self._urgent = expert
            self.request()
        return expert not in self._pending

    def give_way(self, also_coming: bool) -> None:
        """Give back what is here, or on its way too; it is asked for again, behind what is missing already."""
        given = [*self._leases, *(self._coming if also_coming else ())]
        for expert in given:
            self._leases.pop(expert, None)
            self._coming.pop(expert, None)
        self._pending += given
        self._residency.release(*given)

    def hand_over(self, expert: ExpertId) -> Lease:
        """The lease of an expert that has arrived, now the caller's to release."""
        return self._leases.pop(expert)

    def take_arrived(self) -> list[ExpertId]:
        """Experts whose weights are there, each told once."""
        for expert in list(self._coming):
            lease = self._residency.held(expert)
            if lease is not None:
                del self._coming[expert]
                self._arrive(lease)
        arrived, self._arrived = self._arrived, []
        return arrived

    def is_coming(self, expert: ExpertId) -> bool:
        """Whether its weights are on their way."""
        return expert in self._coming

    def has(self, expert: ExpertId) -> bool:
        """Whether its weights are here, leased."""
        return expert in self._leases

    def covers(self, expert: ExpertId) -> bool:
        """Whether it was asked for and not released yet."""
        return expert in self._leases or expert in self._coming or expert in self._pending

    def lease(self, expert: ExpertId) -> Lease:
        """The lease of an expert that has arrived."""
        return self._leases[expert]

    def release(self, *experts: ExpertId) -> None:
        """The call is done with these experts."""
        for expert in experts:
            del self._leases[expert]
        self._residency.release(*experts)

    def wait(self, for_ring: bool = False) -> None:
        """Until something arrives or there is room for what found none.

        Raises what a loader raised, PrefetchError past the deadline or for a dead loader, ClosedError.
        """
        began = time.perf_counter()
        cause = "ring" if for_ring else self._cause()
        try:
            self._until_news(began)
        finally:
            setattr(self._waits, cause, getattr(self._waits, cause) + time.perf_counter() - began)

    def _until_news(self, began: float) -> None:
        with self._residency.changed:
            while not self._has_news():
                self._check_open()
                if time.perf_counter() - began > LOAD_DEADLINE_SECONDS:
                    late = next(iter([*self._coming, *self._pending]))
                    raise PrefetchError(f"{late} did not arrive in {LOAD_DEADLINE_SECONDS:.0f} s")
                self._residency.changed.wait(ALIVE_CHECK_SECONDS)
                self._prefetcher.check_alive()

    def _cause(self) -> str:
        if not self._coming:
            return "room"
        return "guess" if all(self._coming.values()) else "load"

    def _has_news(self) -> bool:
        for expert in self._coming:
            if self._residency.held(expert) is not None:
                return True
            error = self._residency.failure(expert)
            if error is not None and self._coming[expert]:
                return True  # to be asked for by `request`
            if isinstance(error, CoopError):
                raise error
            if error is not None:
                raise PrefetchError(f"loading {expert} failed: {error}") from error
        return any(self._can_reserve(expert) for expert in self._pending)

    def _replace_failed_guesses(self) -> None:
        """A guess that failed is no reason to fail: what this call had joined, it now asks for itself."""
        failed = [
            expert
            for expert, is_guess in self._coming.items()
            if is_guess and self._residency.failure(expert) is not None
        ]
        for expert in failed:
            del self._coming[expert]
            self._residency.release(expert)
        self._pending += failed

    def _can_reserve(self, expert: ExpertId) -> bool:
        streams = UNLIMITED if expert == self._urgent else self._streams
        return self._residency.can_reserve(expert, streams)

    def _arrive(self, lease: Lease) -> None:
        self._leases[lease.expert] = lease
        self._arrived.append(lease.expert)
