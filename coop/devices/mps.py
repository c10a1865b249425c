"""MpsDevice: Apple's GPU, which computes on the machine's own RAM.

Owns a lock; promises the contract of `coop.devices` with copies that are done when they return. Called through
`open_device`. Torch's public API has no view of an MPS tensor's memory for the host, so although the RAM is
the same, the bytes of an expert are read into host memory and copied once more: staging is not a tier there.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence

import torch

from coop.devices import DONE, Fence, Memory
from coop.devices.fences import EventFence
from coop.errors import PrefetchError
from coop.topology import memory_available_bytes

DEADLINE_SECONDS = 120.0  # no layer call and no copy of one expert takes this long


class MpsDevice:
    """The GPU of an Apple chip; torch has one stream for it, on which kernels and copies run in order."""

    name = "mps"
    memory = Memory.UNIFIED
    torch_device = torch.device("mps")

    def __init__(self) -> None:
        self._one_copy = threading.Lock()  # loader threads would write to the one stream side by side

    def new_slot(self, nbytes: int) -> torch.Tensor:
        """Memory from torch's allocator, which aligns to pages. RuntimeError when it refuses."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def new_staging(self, nbytes: int) -> torch.Tensor:
        """Anonymous pages; nothing needs pinning."""
        with torch.inference_mode(False):
            return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Fence | None) -> Fence:
        """Copy now, after `after`. PrefetchError if the last reader or another copy does not finish."""
        if after is not None and not after.wait(DEADLINE_SECONDS):
            raise PrefetchError(f"the last reader of a slot did not finish in {DEADLINE_SECONDS:.0f} s")
        if not self._one_copy.acquire(timeout=DEADLINE_SECONDS):
            raise PrefetchError(f"another copy did not finish in {DEADLINE_SECONDS:.0f} s")
        try:
            target.copy_(source)
        except RuntimeError as exc:
            raise PrefetchError(f"a copy to the device failed: {exc}") from exc
        finally:
            self._one_copy.release()
        return DONE

    def launch(self, work: Callable[[], None], slots: Sequence[torch.Tensor]) -> None:
        """Run `work`, whose kernels torch queues on the stream."""
        work()

    def record(self) -> Fence:
        """An event on the stream."""
        event = torch.mps.Event()
        event.record()
        return EventFence(event)

    def synchronize(self) -> None:
        """Block until the stream is empty. PrefetchError if it is not after two minutes."""
        if not self.record().wait(DEADLINE_SECONDS):
            raise PrefetchError(f"mps did not finish its work in {DEADLINE_SECONDS:.0f} s")

    def memory_available_bytes(self) -> int:
        """Free RAM, or what Metal recommends to take at most, whichever is less."""
        left = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return max(0, min(memory_available_bytes(), left))

    def close(self) -> None:
        """Nothing to stop."""
