"""HostTier: experts in pinned RAM between the disk and a device that has memory of its own.

Owns a second residency, whose slots are what the device copies from; promises that no expert is read twice at
once, that a host slot stays as it is until the copies from it are done, and that a device slot is not written
before its last reader is done. A Store, called by the prefetcher's threads; each of its waits has a deadline.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from coop.devices import Device
from coop.errors import BudgetError, ClosedError, PrefetchError
from coop.ids import ExpertId
from coop.residency import Residency
from coop.staging import Window
from coop.store import LayerGeometry, Slot, Store

HOST_DEADLINE_SECONDS = 120.0  # no disk in use takes this long for one expert
COPY_DEADLINE_SECONDS = 120.0  # nor does a copy, with the kernels of a layer call before it


class PlacedStore(Store, Protocol):
    """A store that fills memory of the caller's."""

    def slot_over(self, layer: int, buffer: torch.Tensor) -> Slot:
        """A slot for an expert of `layer` in `buffer`, uint8 [slot_bytes], on any device."""


@dataclass(slots=True)
class TierCounters:
    """Loads that found their expert in host memory or not, and bytes copied to the device."""

    host_hits: int = 0
    host_misses: int = 0
    bytes_copied: int = 0


class HostTier:
    """The middle tier of three.

    Args:
        disk: where experts come from; closed with this tier.
        device: where they go; stays open.
        budget_bytes: the most that the host slots may take. BudgetError below one expert for each loader.
        loader_threads: threads that call `load` at once.
        likelihood: float64 [layers, experts], read when a victim is needed; owned by the forecast.
    """

    def __init__(
        self,
        disk: PlacedStore,
        device: Device,
        *,
        budget_bytes: int,
        loader_threads: int,
        likelihood: np.ndarray,
    ) -> None:
        self.geometry: tuple[LayerGeometry, ...] = disk.geometry
        smallest = max(1, loader_threads) * max(layer.slot_bytes for layer in self.geometry)
        if budget_bytes < smallest:
            raise BudgetError(
                f"host budget {budget_bytes}: one expert for each loader thread needs {smallest} bytes"
            )
        self.counters = TierCounters()
        self.host = Residency(self.geometry, budget_bytes, self._new_host_slot, likelihood)
        self._disk, self._device = disk, device
        self._is_closed = False

    def new_slot(self, layer: int) -> Slot:
        """An empty slot in the device's memory."""
        return self._disk.slot_over(layer, self._device.new_slot(self.geometry[layer].slot_bytes))

    @property
    def window_bytes(self) -> int:
        """The largest read of the disk."""
        return self._disk.window_bytes

    def load(self, expert: ExpertId, slot: Slot, window: Window | None = None) -> int:
        """Fill a device slot with `expert`; returns the bytes read from the disk, 0 on a host hit.

        Raises StoreError, PrefetchError for a wait that passed its deadline, ClosedError.
        """
        source, nbytes = self._lease(expert, window)
        try:
            is_copied = self._copy(source, slot)
        except Exception:
            self._release(expert)
            raise
        if not is_copied:
            # the lease is kept: the copy may yet read from the host slot, which nothing may overwrite
            raise PrefetchError(f"{expert} was not copied to the device in {COPY_DEADLINE_SECONDS:.0f} s")
        self._release(expert)
        return nbytes

    def disk_order(self, expert: ExpertId) -> tuple[str, int]:
        """Sort key of where the expert lies."""
        return self._disk.disk_order(expert)

    def close(self) -> None:
        """Free the host slots and close the disk; loads under way end with ClosedError."""
        with self.host.changed:
            if self._is_closed:
                return
            self._is_closed = True
            self.host.close()
        self._disk.close()

    def _new_host_slot(self, layer: int) -> Slot:
        return self._disk.slot_over(layer, self._device.new_staging(self.geometry[layer].slot_bytes))

    def _lease(self, expert: ExpertId, window: Window | None) -> tuple[Slot, int]:
        """The host slot of an expert, leased, and the bytes that were read for it."""
        deadline = time.monotonic() + HOST_DEADLINE_SECONDS
        with self.host.changed:
            while True:
                lease = self.host.lease(expert)
                if lease is not None:
                    self.counters.host_hits += 1
                    return lease.slot, 0
                if self.host.hold(expert):
                    return self._await(expert, deadline), 0
                slot = self.host.reserve(expert, is_speculative=False)
                if slot is not None:
                    self.counters.host_misses += 1
                    break
                self._wait(deadline, f"no host slot was free for {expert}")
        return slot, self._read(expert, slot, window)

    def _await(self, expert: ExpertId, deadline: float) -> Slot:
        """The slot of an expert that another thread reads, once it has arrived. Raises what that read raised."""
        try:
            while True:
                lease = self.host.held(expert)
                if lease is not None:
                    self.counters.host_hits += 1
                    return lease.slot
                error = self.host.failure(expert)
                if error is not None:
                    raise error
                self._wait(deadline, f"{expert} did not arrive in host memory")
        except BaseException:
            self._release(expert)
            raise

    def _wait(self, deadline: float, complaint: str) -> None:
        """Sleep until the host tier changes, under its lock, which is open meanwhile."""
        if self._is_closed:
            raise ClosedError("the host tier is closed")
        left = deadline - time.monotonic()
        if left <= 0:
            raise PrefetchError(f"{complaint} in {HOST_DEADLINE_SECONDS:.0f} s")
        self.host.changed.wait(left)

    def _read(self, expert: ExpertId, slot: Slot, window: Window | None) -> int:
        """Fill a reserved host slot from the disk; the bytes read."""
        try:
            nbytes = self._disk.load(expert, slot, window)
        except BaseException as exc:
            with self.host.changed:
                if not self._is_closed:
                    self.host.abandon(expert, exc)
                    self.host.release(expert)
            raise
        with self.host.changed:
            if self._is_closed:
                raise ClosedError("the host tier is closed")
            self.host.publish(expert)
        return nbytes

    def _copy(self, source: Slot, slot: Slot) -> bool:
        """Host slot to device slot, not before its last reader is done; False if that takes too long."""
        fence = self._device.copy(source.buffer, slot.buffer, slot.last_read)
        if not fence.wait(COPY_DEADLINE_SECONDS):
            return False
        slot.last_read = None
        with self.host.changed:
            self.counters.bytes_copied += source.nbytes
        return True

    def _release(self, expert: ExpertId) -> None:
        """Give back a lease, unless closing took all of them."""
        with self.host.changed:
            if not self._is_closed:
                self.host.release(expert)
