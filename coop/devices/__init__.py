"""Devices: where experts are computed, and how their bytes get there. One small contract for all of them.

A device has one compute queue, on which work runs in the order it was launched, and moves bytes from host
staging memory into slots beside it. Two rules keep weights right, and every implementation holds both:

- a copy into a slot begins only after the fence that it was given, the slot's last reader, is done;
- a slot is read only after the fence of the copy that filled it is done (residency publishes it then).

The host never waits for one expert's kernels: `record` once for each layer call is all that is needed.
Called by stores and tiers (copies), by the scheduler (launches), by the plan (what kind of memory this is).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import torch


class Memory(StrEnum):
    """What lies behind a slot, which is what a strategy adapts to."""

    HOST = "CPU + disk"  # slots are RAM, loader threads fill them straight from the disk
    DEVICE = (
        "GPU + host + disk"  # slots are the device's own memory, filled from pinned RAM, filled from disk
    )
    UNIFIED = "unified memory"  # the device computes on the machine's RAM, which everything shares


class Fence(Protocol):
    """A point in a queue: done once everything before it is."""

    def is_done(self) -> bool:
        """Whether the point has been passed; never blocks. Raises what `wait` raises."""

    def wait(self, seconds: float) -> bool:
        """Block the calling thread until done; False if that takes longer. CoopError if it never will be."""


class Device(Protocol):
    """One place that computes. A context is opened once and closed once; all methods but `close` may be
    called from any thread, `launch` and `record` only from the thread that computes."""

    name: str
    memory: Memory
    torch_device: torch.device

    def new_slot(self, nbytes: int) -> torch.Tensor:
        """Slot memory, uint8 [nbytes], 64-byte aligned, undefined contents."""

    def new_staging(self, nbytes: int) -> torch.Tensor:
        """Host memory that `copy` reads from, uint8 [nbytes], page-aligned, pinned where copies need it."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Fence | None) -> Fence:
        """Begin to copy staging bytes into a slot, not before `after` is done.

        Returns at once with the fence of this copy; `source` must stay as it is until that is done. Copies run
        in the order they were asked for. An error is raised here or by `wait` of the fence, and a device whose
        copy failed refuses all later ones.
        """

    def launch(self, work: Callable[[], None], slots: Sequence[torch.Tensor]) -> None:
        """Put `work`, which reads the memory of `slots`, on the compute queue."""

    def record(self) -> Fence:
        """A fence after everything launched so far."""

    def synchronize(self) -> None:
        """Block until the compute queue is empty: results may be read by the host.

        Needed where `torch_device` is the CPU, whose tensors any thread reads at once. Torch's own operations
        on an accelerator's tensors queue behind what was launched, and reading one waits by itself.
        """

    def memory_available_bytes(self) -> int:
        """Bytes of slot memory that may still be taken."""

    def close(self) -> None:
        """Stop threads and streams; safe to call twice."""


class Done:
    """The fence of work that was finished when it was asked for."""

    def is_done(self) -> bool:
        """Always."""
        return True

    def wait(self, seconds: float) -> bool:
        """At once."""
        return True


DONE = Done()


def open_device(name: str) -> Device:
    """The device of a torch name: "cpu", "cuda", "cuda:1", "mps". CoopError for one that is not here."""
    from coop.errors import CoopError

    kind = name.partition(":")[0]
    if kind == "cpu":
        from coop.devices.cpu import CpuDevice

        return CpuDevice()
    if kind == "cuda" and torch.cuda.is_available():
        from coop.devices.cuda import CudaDevice

        return CudaDevice(name)
    if kind == "mps" and torch.backends.mps.is_available():
        from coop.devices.mps import MpsDevice

        return MpsDevice()
    here = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    here += ["mps"] if torch.backends.mps.is_available() else []
    raise CoopError(
        f"device {name[:40]!r} is none of those that torch {torch.__version__} finds here: {', '.join(here)}; "
        "a GPU needs its driver and a torch build for it"
    )
