"""Devices and tiers: one contract for every device, fakes that fail on every breach, bytes right under threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coop.checkpoint import open_checkpoint
from coop.devices import DONE, Device, Memory, copier, open_device
from coop.devices.copier import MAX_FLYING, MAX_JOBS, CopyThread
from coop.devices.cuda import pinned_pages
from coop.devices.fences import EventFence
from coop.errors import BudgetError, ClosedError, CoopError, PrefetchError, StoreError
from coop.ids import ExpertId
from coop.layout import resolve_layout
from coop.residency import Residency
from coop.shards import read_checkpoint_tensors
from coop.store import ExpertStore, Slot
from coop.tiers import HostTier
from tests.fakes import FakeDevice, FakeDeviceFault, FakeEvent, MemoryDisk, serve
from tests.families import build_family

SECONDS = 60.0
NBYTES = 8192
GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")],
)
EXPERTS = [ExpertId(layer, expert) for layer in range(2) for expert in range(8)]


@pytest.fixture(params=["cpu", "fake", GPU])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = FakeDevice() if request.param == "fake" else open_device(request.param)
    yield opened
    opened.close()


@contextmanager
def stalled(device: Device) -> Iterator[None]:
    """The compute queue stands still inside, as far as the device can do that."""
    gate = threading.Event()
    if isinstance(device, FakeDevice):
        device.launch(lambda: assert_set(gate), [])
    elif device.torch_device.type == "cuda":
        device.launch(lambda: torch.cuda._sleep(1_000_000_000), [])
    try:
        yield
    finally:
        gate.set()


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(SECONDS)


def staged(device: Device, value: int) -> torch.Tensor:
    return device.new_staging(NBYTES).fill_(value)


def filled_slot(device: Device, value: int) -> torch.Tensor:
    slot = device.new_slot(NBYTES)
    assert device.copy(staged(device, value), slot, None).wait(SECONDS)
    return slot


def bytes_seen(device: Device, slot: torch.Tensor) -> set[int]:
    """The different bytes that a kernel reads from `slot`."""
    seen = torch.zeros(NBYTES, dtype=torch.uint8, device=device.torch_device)
    device.launch(lambda: set_to(seen, slot), [slot])
    device.synchronize()
    return set(seen.cpu().tolist())


def set_to(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


# the contract


def test_a_copy_has_arrived_when_its_fence_is_done(device: Device) -> None:
    for value in range(20):
        slot = device.new_slot(NBYTES)
        fence = device.copy(staged(device, value), slot, DONE)
        assert fence.wait(SECONDS) and fence.is_done()
        assert bytes_seen(device, slot) == {value}


def test_a_copy_begins_after_the_fence_that_it_was_given(device: Device) -> None:
    slot = filled_slot(device, 1)
    old = torch.zeros(NBYTES, dtype=torch.uint8, device=device.torch_device)
    for value in range(2, 12):
        with stalled(device):
            device.launch(lambda: set_to(old, slot), [slot])
            copied = device.copy(staged(device, value), slot, device.record())
            if isinstance(device, FakeDevice):
                assert not copied.wait(0.01)
        assert copied.wait(SECONDS)
        device.synchronize()
        assert set(old.cpu().tolist()) == {value - 1}
        assert bytes_seen(device, slot) == {value}


def test_copies_run_in_the_order_they_were_asked_for(device: Device) -> None:
    slot = filled_slot(device, 0)
    fences = [device.copy(staged(device, value), slot, None) for value in range(1, 9)]
    assert fences[-1].wait(SECONDS)
    assert all(fence.is_done() for fence in fences)
    assert bytes_seen(device, slot) == {8}


def test_a_copy_may_be_told_to_wait_for_an_earlier_copy(device: Device) -> None:
    slot = device.new_slot(NBYTES)
    first = device.copy(staged(device, 1), slot, None)
    assert device.copy(staged(device, 2), slot, first).wait(SECONDS)
    assert bytes_seen(device, slot) == {2}


def test_launches_run_in_order_and_a_record_is_after_all_of_them(device: Device) -> None:
    number = torch.zeros((), dtype=torch.int64, device=device.torch_device)
    expected = 0
    for step in range(30):
        device.launch(lambda step=step: number.mul_(3).add_(step).remainder_(10_007), [])  # type: ignore[misc]
        expected = (expected * 3 + step) % 10_007
    fence = device.record()
    assert fence.wait(SECONDS) and fence.is_done()
    assert int(number) == expected


def test_a_wait_that_takes_longer_than_its_deadline_is_false(device: Device) -> None:
    if device.memory is Memory.HOST:
        pytest.skip("nothing is ever outstanding")
    slot = filled_slot(device, 1)
    with stalled(device):
        launched = device.record()
        copied = device.copy(staged(device, 2), slot, launched)
        assert not launched.is_done() and not launched.wait(0.0)
        assert not copied.is_done() and not copied.wait(0.0)
    assert launched.wait(SECONDS) and copied.wait(SECONDS)


def test_an_error_in_a_copy_reaches_who_waits_for_it(device: Device) -> None:
    slot, source = device.new_slot(NBYTES), device.new_staging(NBYTES // 2 + 1)
    with pytest.raises((RuntimeError, CoopError), match="size"):
        device.copy(source, slot, None).wait(SECONDS)


def test_a_device_whose_copy_failed_refuses_all_later_ones(device: Device) -> None:
    if device.memory is Memory.HOST:
        pytest.skip("an error is raised where the copy is asked for")
    slot, source = device.new_slot(NBYTES), device.new_staging(NBYTES // 2 + 1)
    with pytest.raises(PrefetchError):
        device.copy(source, slot, None).wait(SECONDS)
    with pytest.raises(PrefetchError, match="copying to the device failed"):
        device.copy(staged(device, 1), slot, None)


def test_a_device_can_be_closed_twice_and_copies_nothing_afterwards(device: Device) -> None:
    slot, source = device.new_slot(NBYTES), staged(device, 1)
    device.close()
    device.close()
    if device.memory is not Memory.HOST:
        with pytest.raises(ClosedError):
            device.copy(source, slot, None)


def test_slots_are_aligned_for_every_type_and_staging_to_pages(device: Device) -> None:
    for nbytes in (64, 4096, 12_352):
        assert device.new_slot(nbytes).data_ptr() % 64 == 0
        staging = device.new_staging(nbytes)
        assert staging.data_ptr() % 4096 == 0 and staging.numel() == nbytes
        assert staging.device.type == "cpu"


def test_slots_made_in_inference_mode_can_be_filled_by_other_threads(device: Device) -> None:
    with torch.inference_mode():
        slot, staging = device.new_slot(NBYTES), device.new_staging(NBYTES)
    staging.fill_(7)
    assert device.copy(staging, slot, None).wait(SECONDS)
    assert bytes_seen(device, slot) == {7}


def test_memory_for_slots_is_a_positive_number_of_bytes(device: Device) -> None:
    assert device.memory_available_bytes() > 0


def test_a_device_that_is_not_here_is_refused_with_those_that_are() -> None:
    for name in ("cuda:99", "tpu", ""):
        with pytest.raises(CoopError, match="is none of"):
            open_device(name)


# what the fake device must notice, or its silence means nothing


def test_the_fake_device_notices_a_copy_that_did_not_wait_for_the_last_reader() -> None:
    device = FakeDevice()
    slot = filled_slot(device, 1)
    gate = threading.Event()
    device.launch(lambda: assert_set(gate), [slot])
    assert device.copy(staged(device, 2), slot, None).wait(SECONDS)
    gate.set()
    with pytest.raises(FakeDeviceFault, match="a copy began over a slot that a kernel still reads"):
        device.synchronize()
    with pytest.raises(FakeDeviceFault):
        device.close()


def test_the_fake_device_notices_a_read_before_the_bytes_have_arrived() -> None:
    device = FakeDevice()
    slot = filled_slot(device, 1)
    with stalled(device):
        copied = device.copy(staged(device, 2), slot, device.record())
        device.launch(lambda: None, [slot])
    assert copied.wait(SECONDS)
    with pytest.raises(FakeDeviceFault, match="have not arrived"):
        device.close()


def test_the_fake_device_notices_a_read_of_a_slot_that_was_never_filled() -> None:
    device = FakeDevice()
    device.launch(lambda: None, [device.new_slot(NBYTES)])
    with pytest.raises(FakeDeviceFault, match="have not arrived"):
        device.close()


def test_the_fake_device_notices_staging_memory_that_is_reused_under_its_copy() -> None:
    device = FakeDevice()
    slot, staging = filled_slot(device, 1), staged(device, 2)
    with stalled(device):
        copied = device.copy(staging, slot, device.record())
        staging[-1] = 3
    assert copied.wait(SECONDS)
    with pytest.raises(FakeDeviceFault, match="staging memory changed"):
        device.close()


def test_the_fake_device_raises_what_a_kernel_raised() -> None:
    device = FakeDevice()
    device.launch(lambda: torch.zeros(2).copy_(torch.zeros(3)), [])
    with pytest.raises(RuntimeError, match="size"):
        device.synchronize()
    with pytest.raises(RuntimeError):
        device.close()


# the copy thread and the fences


class Engine:
    """Events that end when a test says so."""

    def __init__(self) -> None:
        self.events: list[FakeEvent] = []
        self._is_free = False

    def issue(self, *_: Any) -> FakeEvent:
        event = FakeEvent()
        self.events.append(event)
        if self._is_free:
            event.finish()
        return event

    def free(self) -> None:
        self._is_free = True
        for event in list(self.events):
            event.finish()


def submit(copies: CopyThread) -> Any:
    return copies.submit(torch.zeros(1), torch.zeros(1), None)


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("did not happen")


def submit_many(copies: CopyThread, count: int) -> list[Any]:
    return [submit(copies) for _ in range(count)]


def test_the_queue_of_copies_is_bounded_and_says_so_when_the_device_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copier, "SUBMIT_SECONDS", 0.01)
    engine = Engine()
    copies = CopyThread(engine.issue, "copies")
    with pytest.raises(PrefetchError, match=f"{MAX_JOBS} copies wait for the device"):
        submit_many(copies, MAX_JOBS + MAX_FLYING + 1)
    assert len(engine.events) <= MAX_FLYING
    engine.free()
    assert submit_many(copies, 3)[-1].wait(SECONDS)
    copies.close()


def test_closing_a_hung_device_lets_go_who_waits_for_what_had_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copier, "CLOSE_SECONDS", 0.01)
    engine = Engine()
    copies = CopyThread(engine.issue, "copies")
    begun = submit(copies)
    until(lambda: len(engine.events) == 1)
    waiting = [submit(copies) for _ in range(MAX_JOBS)]
    copies.close()
    with pytest.raises(ClosedError, match="before the copy began"):
        waiting[-1].wait(SECONDS)
    assert not begun.is_done()
    engine.free()
    assert begun.wait(SECONDS)


def test_a_copy_that_cannot_begin_fails_with_all_behind_it_and_those_before_it_arrive() -> None:
    engine, all_asked = Engine(), threading.Event()

    def issue(source: torch.Tensor, target: torch.Tensor, after: Any) -> FakeEvent:
        if source.numel() > 1:
            assert all_asked.wait(SECONDS)
            raise RuntimeError("out of order")
        return engine.issue()

    copies = CopyThread(issue, "copies")
    good = submit(copies)
    bad = copies.submit(torch.zeros(2), torch.zeros(1), None)
    behind = submit(copies)
    all_asked.set()
    engine.free()
    assert good.wait(SECONDS)
    for fence in (bad, behind):
        with pytest.raises(PrefetchError, match="out of order"):
            fence.wait(SECONDS)
    with pytest.raises(PrefetchError, match="out of order"):
        submit(copies)
    copies.close()


def test_a_copy_thread_is_never_told_to_wait_for_its_own_fence_only_for_those_of_others() -> None:
    engine, told = Engine(), []

    def issue(source: torch.Tensor, target: torch.Tensor, after: Any) -> FakeEvent:
        told.append(after)
        return engine.issue()

    engine.free()
    copies, others = CopyThread(issue, "copies"), CopyThread(engine.issue, "others")
    own, foreign = submit(copies), submit(others)
    for after in (own, foreign):
        assert copies.submit(torch.zeros(1), torch.zeros(1), after).wait(SECONDS)
    assert told == [None, None, foreign]
    copies.close()
    others.close()


def test_a_device_that_fails_fails_every_copy_that_had_begun() -> None:
    engine = Engine()
    copies = CopyThread(engine.issue, "copies")
    fences = [submit(copies) for _ in range(3)]
    until(lambda: len(engine.events) >= 1)
    engine.events[0].error = RuntimeError("device lost")
    engine.free()
    for fence in fences:
        with pytest.raises(PrefetchError, match="device lost"):
            fence.wait(SECONDS)
    copies.close()


def test_a_finished_copy_keeps_no_memory_alive() -> None:
    device = FakeDevice()
    slot, staging = device.new_slot(NBYTES), staged(device, 1)
    gone = [weakref.ref(slot), weakref.ref(staging)]
    assert device.copy(staging, slot, None).wait(SECONDS)
    del slot, staging
    until(lambda: all(ref() is None for ref in gone))
    device.close()


def test_an_event_is_waited_for_with_a_deadline_and_its_error_is_a_sentence() -> None:
    event = FakeEvent()
    fence = EventFence(event)
    assert not fence.is_done() and not fence.wait(0.001)
    threading.Timer(0.01, event.finish).start()
    assert fence.wait(SECONDS) and fence.is_done()

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("illegal address")

        def synchronize(self) -> None: ...

    with pytest.raises(PrefetchError, match="the device failed: illegal address"):
        EventFence(Broken()).wait(SECONDS)


class Driver:
    """The two calls of the CUDA runtime that pin memory."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.pinned = code, {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_pinned_pages_are_exactly_as_many_as_asked_and_unpinned_with_the_last_view() -> None:
    driver = Driver()
    memory = pinned_pages(12_345, driver)
    assert driver.pinned == {memory.data_ptr(): 12_345} and memory.data_ptr() % 4096 == 0
    view = memory[5:10].fill_(3)
    del memory
    gc.collect()
    assert driver.pinned and view.tolist() == [3] * 5
    del view
    gc.collect()
    assert not driver.pinned


def test_pages_that_cannot_be_pinned_are_an_error_that_names_their_size() -> None:
    with pytest.raises(RuntimeError, match=r"4096 bytes of host memory cannot be pinned .cuda error 2"):
        pinned_pages(4096, Driver(code=2))


# the host tier


def host_tier(disk: Any, device: Device, budget_bytes: int, loader_threads: int) -> HostTier:
    shape = (len(disk.geometry), max(layer.num_experts for layer in disk.geometry))
    return HostTier(
        disk,
        device,
        budget_bytes=budget_bytes,
        loader_threads=loader_threads,
        likelihood=np.random.default_rng(0).random(shape),
    )


def run_threads(work: Callable[[int], None], count: int) -> None:
    """Run `work(index)` on `count` threads at once; raises the first of their errors."""
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=guarded, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def open_when_leased(disk: MemoryDisk, tier: HostTier, count: int) -> None:
    """Let reads go on once `count` threads wait for them."""
    until(lambda: tier.host.leased() == count)
    disk.gate.set()


@pytest.mark.parametrize("budget_slots", [8, 11])
def test_eight_threads_get_every_byte_right_from_a_small_host_tier(budget_slots: int) -> None:
    disk, device = MemoryDisk(), FakeDevice()
    tier = host_tier(disk, device, budget_slots * 6144, loader_threads=8)
    sizes: list[int] = []

    def hammer(index: int) -> None:
        chosen = np.random.default_rng(index).integers(0, len(EXPERTS), 40)
        slots = [tier.new_slot(0), tier.new_slot(1)]
        for number in chosen:
            expert = EXPERTS[number]
            nbytes = tier.load(expert, slots[expert.layer])
            assert nbytes in (0, disk.geometry[expert.layer].slot_bytes)
            assert torch.equal(slots[expert.layer].buffer, disk.content(expert))
            sizes.append(tier.host.used_bytes)

    run_threads(hammer, 8)
    assert disk.reads_at_once_max == 1
    assert max(sizes) <= tier.host.used_bytes_max <= budget_slots * 6144
    assert tier.host.leased() == 0
    counters = tier.counters
    assert counters.host_hits + counters.host_misses == 320 and counters.host_hits > 0
    assert counters.host_misses == disk.reads.total() and tier.host.evictions > 0
    tier.close()
    device.close()


def test_an_expert_that_eight_threads_want_at_once_is_read_once() -> None:
    disk, device = MemoryDisk(), FakeDevice()
    disk.gate.clear()
    tier = host_tier(disk, device, 8 * 6144, loader_threads=8)
    expert, bytes_read = ExpertId(1, 3), []

    def want(index: int) -> None:
        if index == 8:
            open_when_leased(disk, tier, 8)
            return
        slot = tier.new_slot(1)
        bytes_read.append(tier.load(expert, slot))
        assert torch.equal(slot.buffer, disk.content(expert))

    run_threads(want, 9)
    assert sorted(bytes_read) == [0] * 7 + [6144]
    assert disk.reads == {expert: 1}
    assert (tier.counters.host_hits, tier.counters.host_misses) == (7, 1)
    assert tier.counters.bytes_copied == 8 * 6144
    device.close()


def test_a_failing_read_fails_only_its_expert_and_leaves_no_lease() -> None:
    bad, good = ExpertId(0, 2), ExpertId(0, 3)
    disk, device = MemoryDisk(broken=[bad]), FakeDevice()
    disk.gate.clear()
    tier = host_tier(disk, device, 8 * 6144, loader_threads=8)
    outcomes: list[str] = []

    def want(index: int) -> None:
        if index == 8:
            open_when_leased(disk, tier, 8)
            return
        slot = tier.new_slot(0)
        try:
            tier.load(good if index % 2 else bad, slot)
            outcomes.append("loaded")
        except StoreError:
            outcomes.append("failed")

    run_threads(want, 9)
    assert sorted(outcomes) == ["failed"] * 4 + ["loaded"] * 4
    assert disk.reads == {bad: 1, good: 1}
    assert tier.host.leased() == 0
    disk.broken.clear()
    slot = tier.new_slot(0)
    assert tier.load(bad, slot) == 4096
    assert torch.equal(slot.buffer, disk.content(bad))
    device.close()


def test_a_failing_copy_leaves_no_lease_on_the_host_slot() -> None:
    disk, device = MemoryDisk(), FakeDevice()
    tier = host_tier(disk, device, 6144, loader_threads=1)
    wrong = Slot(device.new_slot(100), {})
    with pytest.raises(PrefetchError, match="a copy to the device failed"):
        tier.load(ExpertId(0, 0), wrong)
    assert tier.host.leased() == 0
    device.close()


def test_a_copy_that_hangs_keeps_its_host_slot_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coop.tiers.COPY_DEADLINE_SECONDS", 0.01)
    disk, device = MemoryDisk(), FakeDevice()
    tier = host_tier(disk, device, 6144, loader_threads=1)
    slot = tier.new_slot(0)
    with stalled(device):
        slot.last_read = device.record()
        with pytest.raises(PrefetchError, match="was not copied to the device in 0 s"):
            tier.load(ExpertId(0, 0), slot)
        assert tier.host.leased() == 1
        monkeypatch.setattr("coop.tiers.HOST_DEADLINE_SECONDS", 0.01)
        with pytest.raises(PrefetchError, match="no host slot was free"):
            tier.load(ExpertId(0, 1), tier.new_slot(0))
    device.close()


def test_a_host_budget_below_one_expert_for_each_loader_is_refused_with_the_smallest() -> None:
    with pytest.raises(BudgetError, match=f"needs {4 * 6144} bytes"):
        host_tier(MemoryDisk(), open_device("cpu"), 4 * 6144 - 1, loader_threads=4)
    assert host_tier(MemoryDisk(), open_device("cpu"), 4 * 6144, loader_threads=4).host.budget_bytes == 24_576


def test_closing_lets_go_who_waits_for_a_read() -> None:
    disk, device = MemoryDisk(), FakeDevice()
    disk.gate.clear()
    tier = host_tier(disk, device, 2 * 6144, loader_threads=2)
    refused: list[BaseException] = []

    def want(index: int) -> None:
        if index == 2:
            until(lambda: disk.reads.total() == 1 and tier.host.leased() == 2)
            tier.close()
            tier.close()
            disk.gate.set()
            return
        with pytest.raises(ClosedError) as info:
            tier.load(ExpertId(0, 0), tier.new_slot(0))
        refused.append(info.value)

    run_threads(want, 3)
    assert len(refused) == 2
    device.close()


def test_every_expert_of_a_real_checkpoint_reaches_the_device_bit_for_bit(
    tmp_path: Path, device: Device
) -> None:
    import transformers

    build_family(tmp_path, "gpt_oss", dtype=torch.bfloat16)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    layout = resolve_layout(
        config, read_checkpoint_tensors(open_checkpoint(tmp_path).weights), torch.bfloat16
    )
    disk = ExpertStore(layout)
    tier = host_tier(disk, device, 3 * disk.geometry[0].slot_bytes, loader_threads=2)
    slot, direct = tier.new_slot(0), disk.new_slot(0)
    for expert in range(disk.geometry[0].num_experts):
        assert tier.load(ExpertId(0, expert), slot) > 0
        disk.load(ExpertId(0, expert), direct)
        assert slot.weights.keys() == direct.weights.keys()
        for name, weight in direct.weights.items():
            assert slot.weights[name].dtype == torch.bfloat16
            assert torch.equal(slot.weights[name].cpu(), weight)
    tier.close()


@pytest.mark.parametrize("seed", range(4))
def test_experts_are_evicted_and_reloaded_while_kernels_still_read_and_every_sum_is_right(seed: int) -> None:
    disk, device = MemoryDisk(), FakeDevice(seed)
    tier = host_tier(disk, device, 5 * 6144, loader_threads=4)
    random = np.random.default_rng(seed)
    calls = [
        [ExpertId(call % 2, int(e)) for e in random.choice(8, int(random.integers(1, 6)), replace=False)]
        for call in range(60)
    ]
    sums: dict[tuple[int, ExpertId], int] = {}

    def kernel(call: int, expert: ExpertId, slot: Slot) -> None:
        sums[call, expert] = int(slot.weights["words"].sum(dtype=torch.int64))

    residency = serve(device, tier, calls, 3 * 6144, kernel)
    expected = {
        expert: int(disk.content(expert).view(torch.int32).sum(dtype=torch.int64)) for expert in EXPERTS
    }
    assert sums == {(call, e): expected[e] for call, experts in enumerate(calls) for e in experts}
    assert residency.evictions > 60 and residency.leased() == 0 and tier.host.leased() == 0
    assert residency.used_bytes_max <= 3 * 6144 and tier.host.used_bytes_max <= 5 * 6144
    assert device.copies > disk.reads.total()
    tier.close()
    device.close()


def test_a_reload_that_forgets_the_last_reader_is_noticed() -> None:
    disk, device = MemoryDisk(), FakeDevice()
    tier = host_tier(disk, device, 2 * 6144, loader_threads=1)
    residency = Residency(tier.geometry, 4096, tier.new_slot, np.zeros((2, 8)))
    gate = threading.Event()
    for expert in (ExpertId(0, 0), ExpertId(0, 1)):
        slot = residency.reserve(expert, is_speculative=False)
        assert slot is not None and slot.last_read is None
        tier.load(expert, slot)
        residency.publish(expert)
        device.launch(lambda: assert_set(gate), [slot.buffer])
        residency.release(expert)
    gate.set()
    with pytest.raises(FakeDeviceFault, match="a kernel still reads"):
        device.close()
