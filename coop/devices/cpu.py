"""CpuDevice: slots are ordinary memory, work runs where it is launched, a copy is done when it returns.

Owns nothing; promises the contract of `coop.devices` in its simplest form. Loader threads fill slots straight
from the disk, so nothing is staged.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import torch

from coop.devices import DONE, Fence, Memory
from coop.topology import memory_available_bytes


class CpuDevice:
    """The processor and its RAM."""

    name = "cpu"
    memory = Memory.HOST
    torch_device = torch.device("cpu")

    def new_slot(self, nbytes: int) -> torch.Tensor:
        """Memory from torch's allocator, which aligns to 64 bytes."""
        with torch.inference_mode(False):  # loader threads may not write to an inference tensor
            return torch.empty(nbytes, dtype=torch.uint8)

    def new_staging(self, nbytes: int) -> torch.Tensor:
        """Anonymous pages."""
        with torch.inference_mode(False):
            return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Fence | None) -> Fence:
        """Copy now."""
        target.copy_(source)
        return DONE

    def launch(self, work: Callable[[], None], slots: Sequence[torch.Tensor]) -> None:
        """Run now."""
        work()

    def record(self) -> Fence:
        """Everything launched has been run."""
        return DONE

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""

    def memory_available_bytes(self) -> int:
        """Free RAM, within the limits of the control group."""
        return memory_available_bytes()

    def close(self) -> None:
        """Nothing to stop."""
