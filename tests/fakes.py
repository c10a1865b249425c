"""Fakes: a device that notices every breach of the rules of `coop.devices`, a disk in memory, a small scheduler.

FakeDevice owns a compute queue and a copy engine, each in order, each job delayed at random from a seed. It
promises that a kernel that reads bytes which have not arrived, a copy over a slot that a kernel still reads, and
staging memory that changes under its copy are recorded, and raised at `synchronize` and `close`. Its copy thread
is the shipped one. Called by tests.
"""

from __future__ import annotations

import mmap
import queue
import random
import threading
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from coop.devices import Device, Fence, Memory
from coop.devices.copier import CopyThread
from coop.errors import PrefetchError, StoreError
from coop.ids import ExpertId
from coop.prefetch import Prefetcher
from coop.residency import Residency
from coop.staging import Staging, Window
from coop.store import LayerGeometry, Slot
from coop.tiers import HostTier

DELAY_SECONDS = (1e-6, 3e-3)
DEADLINE_SECONDS = 60.0
POISON = 0xA5


class FakeDeviceFault(AssertionError):
    """A rule of the contract was broken."""


class FakeEvent:
    """A mark in a queue, as torch's events are; also a fence."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def finish(self) -> None:
        self._done.set()

    def query(self) -> bool:
        return self._done.is_set()

    is_done = query

    def synchronize(self) -> None:
        assert self._done.wait(DEADLINE_SECONDS)
        if self.error is not None:
            raise self.error

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)


class FakeQueue:
    """One thread that runs jobs in order, each after a random delay."""

    def __init__(self, name: str, seed: int) -> None:
        self._random = random.Random(f"{name} {seed}")
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], FakeEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"fake-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> FakeEvent:
        event = FakeEvent()
        self._jobs.put((job, event))
        return event

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(DEADLINE_SECONDS)

    def delay(self) -> None:
        low, high = DELAY_SECONDS
        time.sleep(low * (high / low) ** self._random.random())

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, event = entry
            self.delay()
            try:
                job()
            except BaseException as exc:
                event.error = exc
            event.finish()
            del job, entry


class FakeDevice:
    """Slots are RAM that only the copy engine may write and only kernels may read.

    Args:
        seed: of the delays.
        memory_bytes: what `memory_available_bytes` says.
    """

    name = "fake"
    memory = Memory.DEVICE
    torch_device = torch.device("cpu")

    def __init__(self, seed: int = 0, memory_bytes: int = 2**30) -> None:
        self.faults: list[str] = []
        self.copies = 0
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._arriving: Counter[int] = Counter()  # copies asked for and not done, by slot
        self._reading: Counter[int] = Counter()  # kernels launched and not done, by slot
        self._filled: set[int] = set()
        self._kernel_errors: list[BaseException] = []
        self._compute = FakeQueue("compute", seed)
        self._engine = FakeQueue("copy", seed)
        self._copies = CopyThread(self._issue, "fake-copy-thread")
        # checksums of sources when their copies were asked for, by (source, target), oldest first
        self._sums: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
        self._is_closed = False

    def new_slot(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            slot = torch.full((nbytes,), POISON, dtype=torch.uint8)
        with self._lock:
            self._filled.discard(key(slot))  # the address may be that of a slot that is gone
        return slot

    def new_staging(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Fence | None) -> Fence:
        with self._lock:
            self._sums[key(source), key(target)].append(checksum(source))
            self._arriving[key(target)] += 1
            self.copies += 1
        try:
            return self._copies.submit(source, target, after)
        except BaseException:
            with self._lock:
                self._arriving[key(target)] -= 1
                self._sums[key(source), key(target)].pop()
            raise

    def launch(self, work: Callable[[], None], slots: Sequence[torch.Tensor]) -> None:
        keys = [key(slot) for slot in slots]
        with self._lock:
            for slot in keys:
                if self._arriving[slot] or slot not in self._filled:
                    self.faults.append("a kernel was launched on a slot whose bytes have not arrived")
            self._reading.update(keys)
        held = list(slots)  # the memory outlives the kernel, whoever drops the slot
        is_inference = torch.is_inference_mode_enabled()

        def kernel() -> None:
            try:
                with torch.inference_mode(is_inference), torch.no_grad():  # as in the thread that launches
                    work()
            except BaseException as exc:
                self._kernel_errors.append(exc)
            with self._lock:
                self._reading.subtract(keys)
            held.clear()

        self._compute.put(kernel)

    def record(self) -> Fence:
        return self._compute.put(lambda: None)

    def synchronize(self) -> None:
        if not self.record().wait(DEADLINE_SECONDS):
            raise PrefetchError("the fake device did not finish its work")
        self._raise_faults()

    def memory_available_bytes(self) -> int:
        return self._memory_bytes

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._copies.close()
        self._engine.close()
        self._compute.close()
        self._raise_faults()

    def _issue(self, source: torch.Tensor, target: torch.Tensor, after: Fence | None) -> FakeEvent:
        def copy() -> None:
            if after is not None and not after.wait(DEADLINE_SECONDS):
                raise PrefetchError("the last reader did not finish")
            with self._lock:
                expected = self._sums[key(source), key(target)].popleft()
                if self._reading[key(target)]:
                    self.faults.append("a copy began over a slot that a kernel still reads")
            target.fill_(POISON)
            self._engine.delay()
            target.copy_(source)
            with self._lock:
                if checksum(source) != expected:
                    self.faults.append("staging memory changed before its copy was done")
                self._arriving[key(target)] -= 1
                self._filled.add(key(target))

        return self._engine.put(copy)

    def _raise_faults(self) -> None:
        if self._kernel_errors:
            raise self._kernel_errors[0]
        if self.faults:
            raise FakeDeviceFault(f"{len(self.faults)} faults, first: {self.faults[0]}")


def key(memory: torch.Tensor) -> int:
    """Which allocation a tensor lies in."""
    return memory.untyped_storage().data_ptr()


def checksum(memory: torch.Tensor) -> int:
    return zlib.crc32(memory.numpy())


class MemoryDisk:
    """Two layers of eight experts, 4 and 6 KiB each, filled with bytes that only the expert itself has.

    Args:
        broken: experts whose read fails.
        gate: reads wait for it; set unless a test holds it back.
    """

    geometry = (LayerGeometry(8, 2, 4096, 0), LayerGeometry(8, 2, 6144, 1))

    def __init__(self, broken: Iterable[ExpertId] = ()) -> None:
        self.broken = set(broken)
        self.reads: Counter[ExpertId] = Counter()
        self.reads_at_once_max = 0
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()
        self._reading: Counter[ExpertId] = Counter()
        self._random = random.Random(0)

    def new_slot(self, layer: int) -> Slot:
        return self.slot_over(layer, torch.empty(self.geometry[layer].slot_bytes, dtype=torch.uint8))

    def slot_over(self, layer: int, buffer: torch.Tensor) -> Slot:
        assert buffer.numel() == self.geometry[layer].slot_bytes
        return Slot(buffer, {"words": buffer.view(torch.int32)})

    window_bytes = 6144

    def load(self, expert: ExpertId, slot: Slot, window: Window | None = None) -> int:
        with self._lock:
            self.reads[expert] += 1
            self._reading[expert] += 1
            self.reads_at_once_max = max(self.reads_at_once_max, *self._reading.values())
            pause = self._random.random() * 1e-3
        slot.buffer.fill_(POISON)
        time.sleep(pause)
        assert self.gate.wait(DEADLINE_SECONDS)
        slot.buffer.copy_(self.content(expert))
        with self._lock:
            self._reading[expert] -= 1
        if expert in self.broken:
            raise StoreError("shard", f"{expert}", "cannot be read: Input/output error")
        return slot.nbytes

    def content(self, expert: ExpertId) -> torch.Tensor:
        generator = torch.Generator().manual_seed(expert.layer * 100 + expert.expert)
        nbytes = self.geometry[expert.layer].slot_bytes
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)

    def disk_order(self, expert: ExpertId) -> tuple[str, int]:
        return ("", expert.expert)

    def close(self) -> None:
        """Nothing is open."""


Kernel = Callable[[int, ExpertId, Slot], None]


def serve(
    device: Device, tier: HostTier, calls: Sequence[Sequence[ExpertId]], budget_bytes: int, kernel: Kernel
) -> Residency:
    """What the scheduler does with a device: waves of leases, launches, one record for each wave, releases.

    `kernel(call, expert, slot)` is launched once for each expert of each call.
    """
    shape = (len(tier.geometry), max(layer.num_experts for layer in tier.geometry))
    residency = Residency(tier.geometry, budget_bytes, tier.new_slot, np.zeros(shape))
    prefetcher = Prefetcher(tier, residency, Staging(tier.window_bytes, 4), demand_threads=4, guess_threads=0)
    try:
        for call, experts in enumerate(calls):
            waiting = list(experts)
            while waiting:
                wave = {expert: None for expert in waiting if _ask(residency, prefetcher, expert)}
                assert wave, "no expert of the call fits"
                _run_wave(device, residency, call, list(wave), kernel)
                waiting = [expert for expert in waiting if expert not in wave]
        device.synchronize()
    finally:
        prefetcher.close()
    return residency


def _ask(residency: Residency, prefetcher: Prefetcher, expert: ExpertId) -> bool:
    if residency.hold(expert) or residency.lease(expert):
        return True
    slot = residency.reserve(expert, is_speculative=False)
    if slot is not None:
        prefetcher.demand([(expert, slot)])
    return slot is not None


def _run_wave(
    device: Device, residency: Residency, call: int, experts: list[ExpertId], kernel: Kernel
) -> None:
    slots = {}
    try:
        for expert in experts:
            slots[expert] = slot = _await(residency, expert)
            device.launch(lambda e=expert, s=slot: kernel(call, e, s), [slot.buffer])  # type: ignore[misc]
    finally:
        last_read = device.record()
        for slot in slots.values():
            slot.last_read = last_read
        for expert in experts:
            residency.release(expert)


def _await(residency: Residency, expert: ExpertId) -> Slot:
    deadline = time.monotonic() + DEADLINE_SECONDS
    with residency.changed:
        while (lease := residency.held(expert)) is None:
            error = residency.failure(expert)
            if error is not None:
                raise error
            assert time.monotonic() < deadline, f"{expert} did not arrive"
            residency.changed.wait(1.0)
    return lease.slot
