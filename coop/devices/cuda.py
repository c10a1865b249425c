"""CudaDevice: slots in the memory of an NVIDIA GPU (or an AMD one, which torch calls cuda too).

Owns one copy stream and the thread that feeds it; promises the contract of `coop.devices` by events alone: the
copy stream waits for a slot's last reader, and the compute stream is never waited for by the host, except in
`synchronize`. Called through `open_device`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from coop.devices import Fence, Memory
from coop.devices.copier import CopyThread
from coop.devices.fences import EventFence
from coop.errors import CoopError, PrefetchError

DEADLINE_SECONDS = 120.0  # no layer call and no copy of one expert takes this long
HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process


class CudaDevice:
    """One GPU. Work runs on the stream that is current where `launch` is called.

    Args:
        name: "cuda" for the current device, "cuda:1" for one by index. CoopError if there is none of it.
    """

    memory = Memory.DEVICE

    def __init__(self, name: str = "cuda") -> None:
        index = name.partition(":")[2] or str(torch.cuda.current_device())
        if not index.isdecimal() or int(index) >= torch.cuda.device_count():
            raise CoopError(f"device {name[:40]!r} is none of the {torch.cuda.device_count()} GPUs here")
        self.name = f"cuda:{int(index)}"
        self.torch_device = torch.device("cuda", int(index))
        self._stream = torch.cuda.Stream(self.torch_device)  # torch makes its streams non-blocking
        self._copies = CopyThread(self._issue, f"coop-copy-{self.name}")

    def new_slot(self, nbytes: int) -> torch.Tensor:
        """Memory from torch's allocator, which aligns to 512 bytes. RuntimeError when the GPU is full."""
        with torch.inference_mode(False):  # the copy thread may not write to an inference tensor
            slot = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        # The allocator may hand out memory that kernels launched earlier still read: that is safe on their
        # stream, and on the copy stream only behind them.
        self._stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        return slot

    def new_staging(self, nbytes: int) -> torch.Tensor:
        """Pinned pages, exactly as many as asked for. RuntimeError when the driver refuses to pin them."""
        with torch.cuda.device(self.torch_device):
            return pinned_pages(nbytes, torch.cuda.cudart())

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Fence | None) -> Fence:
        """Queue the copy behind earlier ones and, on the copy stream, behind `after`."""
        return self._copies.submit(source, target, after)

    def launch(self, work: Callable[[], None], slots: Sequence[torch.Tensor]) -> None:
        """Run `work`, whose kernels torch queues on the current stream."""
        self._copies.check()
        stream = torch.cuda.current_stream(self.torch_device)
        for slot in slots:
            slot.record_stream(stream)  # a slot that is dropped is not reused before this stream is past it
        work()

    def record(self) -> Fence:
        """An event on the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return EventFence(event)

    def synchronize(self) -> None:
        """Block until the current stream is empty. PrefetchError if it is not after two minutes."""
        if not self.record().wait(DEADLINE_SECONDS):
            raise PrefetchError(f"{self.name} did not finish its work in {DEADLINE_SECONDS:.0f} s")
        self._copies.check()

    def memory_available_bytes(self) -> int:
        """Memory that no process has taken; what torch keeps for reuse is not counted."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def close(self) -> None:
        """Stop the copy thread."""
        self._copies.close()

    def _issue(self, source: torch.Tensor, target: torch.Tensor, after: Fence | None) -> torch.cuda.Event:
        """On the copy thread: wait for the last reader on the device, copy, and mark the end."""
        if isinstance(after, EventFence) and isinstance(after.event, torch.cuda.Event):
            self._stream.wait_event(after.event)
        elif after is not None and not after.wait(DEADLINE_SECONDS):
            raise PrefetchError(f"the last reader of a slot did not finish in {DEADLINE_SECONDS:.0f} s")
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            target.record_stream(
                self._stream
            )  # the allocator keeps the slot until this stream is past the copy
            event = torch.cuda.Event(blocking=True)  # who waits sleeps instead of taking a core
            event.record(self._stream)
        return event


class PinnedPages(mmap.mmap):
    """Anonymous pages that the driver has pinned, for as long as anything refers to them."""

    release: Callable[[], object] | None = None

    def __del__(self) -> None:
        # runs before the pages are unmapped; at the end of the process the driver may be gone, and refuses
        if self.release is not None:
            self.release()


def pinned_pages(nbytes: int, runtime: Any) -> torch.Tensor:
    """Page-aligned pinned memory, uint8 [nbytes]; `runtime` is `torch.cuda.cudart()`.

    Torch's own pinned allocator rounds each request up to a power of two (pytorch#95823, vllm#56410), which
    would take up to twice the budget. RuntimeError if the pages cannot be pinned.
    """
    pages = PinnedPages(-1, nbytes)  # shared, so that a fork never moves them away from under the device
    with torch.inference_mode(False):
        memory = torch.frombuffer(pages, dtype=torch.uint8)
    address = memory.data_ptr()
    code = int(runtime.cudaHostRegister(address, nbytes, HOST_REGISTER_PORTABLE))
    if code != 0:
        raise RuntimeError(f"{nbytes} bytes of host memory cannot be pinned (cuda error {code})")
    unregister = runtime.cudaHostUnregister
    pages.release = lambda: unregister(address)
    return memory
