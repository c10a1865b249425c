"""The simulated machine: a disk that reads share, a processor that takes time, a device with a copy engine.

Owns what each would own; promises a log of every read, a failure of the world for a read of what is being read and
for a slot that two loads fill at once, and faults as the seed and the workload ask for them. Made by the simulation.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from coop.blockdevice import DiskSample
from coop.devices import DONE, Fence, Memory
from coop.devices.copier import CopyThread
from coop.devices.cpu import CpuDevice
from coop.errors import StoreError
from coop.ids import ExpertId
from coop.staging import Window
from coop.store import LayerGeometry, Slot
from tests.sim.world import Task, World

HIDDEN = 8
HALF_READ = 0x7F  # bytes of a slot that is being filled


@dataclass(slots=True)
class Read:
    """One read: who asked, when it began and ended, and whether its bytes came."""

    expert: ExpertId
    thread: str
    nbytes: int
    began: float
    ended: float = -1.0
    is_good: bool = False

    @property
    def is_guess(self) -> bool:
        return "guess" in self.thread


class TinyExperts:
    """The flags and functions that the scheduler asks an experts module for."""

    def __init__(self, has_gate: bool, is_transposed: bool) -> None:
        self.has_gate, self.is_transposed, self.has_post_expert_norm = has_gate, is_transposed, False
        self.act_fn = functional.silu

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        name, rows = ("gate_up_proj", 2 * width) if self.has_gate else ("up_proj", width)
        shapes = {name: (rows, HIDDEN), "down_proj": (HIDDEN, width)}
        shapes = {n: s[::-1] if self.is_transposed else s for n, s in shapes.items()}
        return {**shapes, "down_proj_bias": (HIDDEN,)}


@dataclass(slots=True)
class Faults:
    """What goes wrong, changed by the workload while it runs."""

    error_share: float = 0.0  # of reads, at random
    slow_share: float = 0.0
    broken: set[ExpertId] = field(default_factory=set)
    hanging: set[ExpertId] = field(default_factory=set)
    has_memory: bool = True


class Spindle:
    """The bandwidth that all reads in flight share, and foreign traffic that takes a part of it."""

    def __init__(self, world: World, bytes_per_s: float) -> None:
        self.world, self.bytes_per_s = world, bytes_per_s
        self.foreign_share = 0.0
        self.moved, self.requests, self.own_bytes = 0.0, 0, 0
        self._left: dict[Task, float] = {}
        self._settled = world.now

    def transfer(self, nbytes: float) -> None:
        """Take as long as the bytes take."""
        task = self.world.current
        self._settle()
        self.requests += 1
        self.own_bytes += int(nbytes)
        self._left[task] = nbytes
        self._retime()
        while self._left[task] > 1e-6:
            self.world.block("wait", task.deadline, "the disk")
            self._settle()
        del self._left[task]
        self._retime()

    def set_foreign(self, share: float) -> None:
        """Other programs take this share of the bandwidth from now on."""
        self._settle()
        self.foreign_share = share
        self._retime()

    def sample(self) -> DiskSample:
        """Counters as the kernel would tell them."""
        self._settle()
        return DiskSample(int(self.moved), self.requests, len(self._left), self.own_bytes)

    def _rate(self) -> float:
        return self.bytes_per_s * (1.0 - self.foreign_share) / max(1, len(self._left))

    def _settle(self) -> None:
        seconds = self.world.now - self._settled
        self._settled = self.world.now
        self.moved += self.bytes_per_s * self.foreign_share * seconds
        for task in self._left:
            done = min(self._left[task], self._rate() * seconds)
            self._left[task] -= done
            self.moved += done

    def _retime(self) -> None:
        for task, left in self._left.items():
            if not task.is_ready or task is self.world.current:
                task.deadline = self.world.now + left / self._rate() + 1e-9


class SimDisk:
    """Experts of one model, as a store and as a placed store.

    Args:
        world, spindle: whose time and bandwidth a read takes.
        geometry: of each layer; `widths` are the experts' inner sizes.
        seed: of the weights and the faults.
    """

    def __init__(
        self,
        world: World,
        spindle: Spindle,
        modules: Sequence[TinyExperts],
        counts: Sequence[int],
        widths: Sequence[int],
        top_k: int,
        seed: int,
    ) -> None:
        self.world, self.spindle = world, spindle
        self.faults, self.log = Faults(), list[Read]()
        self.is_closed = False
        self._random = random.Random(f"disk {seed}")
        self._modules, self._widths = modules, widths
        self._reading: Counter[ExpertId] = Counter()
        self._filling: set[int] = set()
        generator = torch.Generator().manual_seed(seed)
        kinds = [repr(m.shapes(w)) for m, w in zip(modules, widths, strict=True)]
        self.geometry = tuple(
            LayerGeometry(count, top_k, 4 * sum(_count(s) for s in m.shapes(w).values()), kinds.index(kind))
            for m, w, count, kind in zip(modules, widths, counts, kinds, strict=True)
        )
        self.weights = {
            ExpertId(layer, expert): {
                name: torch.randn(shape, generator=generator) for name, shape in m.shapes(w).items()
            }
            for layer, (m, w, count) in enumerate(zip(modules, widths, counts, strict=True))
            for expert in range(count)
        }
        self.latency = 10 ** self._random.uniform(-4, -3)

    def new_slot(self, layer: int) -> Slot:
        if not self.faults.has_memory:
            raise RuntimeError("cannot allocate memory")
        return self.slot_over(layer, torch.empty(self.geometry[layer].slot_bytes, dtype=torch.uint8))

    def slot_over(self, layer: int, buffer: torch.Tensor) -> Slot:
        views, start = {}, 0
        for name, shape in self._modules[layer].shapes(self._widths[layer]).items():
            end = start + 4 * _count(shape)
            views[name] = buffer[start:end].view(torch.float32).view(shape)
            start = end
        return Slot(buffer, views)

    def load(self, expert: ExpertId, slot: Slot, window: Window | None = None) -> int:
        world, memory = self.world, id(slot)
        began = world.now
        world.check(window is not None, f"{expert} is read past the staging ring")
        world.check(id(window) not in self._filling, f"{expert} is read into a window in use")
        world.check(not self._reading[expert], f"{expert} is read twice at once")
        world.check(memory not in self._filling, f"two loads fill the slot of {expert} at once")
        world.check(not self.is_closed, f"{expert} is read from a disk that is closed")
        read = Read(expert, world.current.name, slot.nbytes, world.now)
        self.log.append(read)
        self._reading[expert] += 1
        self._filling |= {memory, id(window)}
        try:
            slot.buffer.fill_(HALF_READ)
            world.point(f"reads {expert}")
            self._take_time(expert, slot.nbytes)
            intact = bool((slot.buffer == HALF_READ).all())
            world.check(intact, f"the slot of {expert} was written by another while it was filled")
            self._raise_fault(expert)
            for name, weight in self.weights[expert].items():
                slot.weights[name].copy_(weight)
            read.is_good = True
        finally:
            read.ended = world.now
            self._reading[expert] -= 1
            self._filling -= {memory, id(window)}
            window.read_seconds += world.now - began
        return slot.nbytes

    def _take_time(self, expert: ExpertId, nbytes: int) -> None:
        slow = 20.0 if self._random.random() < self.faults.slow_share else 1.0
        self.world.block("sleep", self.world.now + self.latency * slow, "the seek")
        self.spindle.transfer(nbytes * slow)
        while expert in self.faults.hanging:
            self.world.block("sleep", self.world.now + 5.0, "a hanging read")

    def _raise_fault(self, expert: ExpertId) -> None:
        if expert in self.faults.broken:
            raise StoreError("shard", f"{expert}", "cannot be read: Input/output error")
        if self._random.random() < self.faults.error_share:
            raise OSError("transient")

    window_bytes = 4096

    def disk_order(self, expert: ExpertId) -> tuple[str, int]:
        self.weights[expert]  # only what exists has a place
        return ("", expert.layer * 1000 + expert.expert * 7 % 16)

    def close(self) -> None:
        self.is_closed = True


class SimCpu(CpuDevice):
    """The processor: work takes virtual time."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._random = world, random.Random(f"cpu {seed}")

    def launch(self, work: Callable[[], None], slots: Sequence[torch.Tensor]) -> None:
        if slots:
            self._world.block("sleep", self._world.now + 10 ** self._random.uniform(-5, -3), "compute")
        work()


class _Mark:
    """An event of a queue; also a fence."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: list[Task] = []
        self._is_passed = False
        self.error: BaseException | None = None

    def query(self) -> bool:
        return self._is_passed

    is_done = query

    def synchronize(self) -> None:
        self.wait(1e9)
        if self.error is not None:
            raise self.error

    def wait(self, seconds: float) -> bool:
        deadline = self._world.now + seconds
        while not self._is_passed and self._world.now < deadline:
            self._waiting.append(self._world.current)
            self._world.block("device", deadline, "a mark")
        return self._is_passed

    def finish(self) -> None:
        self._is_passed = True
        for task in self._waiting:
            self._world.wake(task)


class _Queue:
    """One thread that runs jobs in order, each after a virtual delay."""

    def __init__(self, world: World, name: str, seed: int) -> None:
        self._world, self._random = world, random.Random(f"{name} {seed}")
        self._jobs: list[tuple[Callable[[], None], _Mark]] = []
        self._is_closed = False
        self._task = world.start(name, self._work)

    def put(self, job: Callable[[], None]) -> _Mark:
        mark = _Mark(self._world)
        self._jobs.append((job, mark))
        self._world.wake(self._task)
        return mark

    def close(self) -> None:
        self._is_closed = True
        self._world.wake(self._task)

    def delay(self) -> None:
        self._world.block("sleep", self._world.now + 10 ** self._random.uniform(-5, -3), "the device")

    def _work(self) -> None:
        while True:
            while not self._jobs:
                if self._is_closed:
                    return
                self._world.block("device", float("inf"), "a job")
            job, mark = self._jobs.pop(0)
            if self._random.random() < 0.5:
                self.delay()
            try:
                job()
            except Exception as exc:
                mark.error = exc
            mark.finish()


class SimDevice:
    """A device with memory of its own: compute queue and copy engine, each in order, behind the shipped thread."""

    name = "simulated"
    memory = Memory.DEVICE
    torch_device = torch.device("cpu")

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._reading: Counter[int] = Counter()
        self._compute = _Queue(world, "device-compute", seed)
        self._engine = _Queue(world, "device-copies", seed)
        self._copies = CopyThread(self._issue, "device-copy-thread")
        self._errors: list[BaseException] = []

    def new_slot(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), HALF_READ, dtype=torch.uint8)

    new_staging = new_slot

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Fence | None) -> Fence:
        return self._copies.submit(source, target, after)

    def launch(self, work: Callable[[], None], slots: Sequence[torch.Tensor]) -> None:
        keys = [slot.data_ptr() for slot in slots]
        self._reading.update(keys)

        def kernel() -> None:
            try:
                with torch.no_grad():
                    work()
            except Exception as exc:
                self._errors.append(exc)
            self._reading.subtract(keys)

        self._compute.put(kernel)

    def record(self) -> Fence:
        return self._compute.put(lambda: None)

    def synchronize(self) -> None:
        self.record().wait(1e9)
        if self._errors:
            raise self._errors.pop()

    def memory_available_bytes(self) -> int:
        return 2**30

    def close(self) -> None:
        self._copies.close()
        self._engine.close()
        self._compute.close()

    def _issue(self, source: torch.Tensor, target: torch.Tensor, after: Fence | None) -> _Mark:
        def copy() -> None:
            (after or DONE).wait(1e9)
            self._world.check(not self._reading[target.data_ptr()], "a copy began over a slot that is read")
            target.fill_(HALF_READ)
            self._engine.delay()
            target.copy_(source)

        return self._engine.put(copy)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
