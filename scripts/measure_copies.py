"""Measure host-to-device copies and how much of them hides behind compute; prints two tables.

Owns nothing; promises numbers of the shipped CudaDevice, not of torch alone. Called by scripts/device_check.sh.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from coop.devices import Device, open_device

MIB = 2**20
SECONDS = 60.0
BYTES_EACH_SIZE = 2**31  # a tenth of a second at the speed of PCIe 4
COPIES_MAX = 512
OVERLAP_BYTES = 16 * MIB  # an expert of a 30B mixture in bfloat16 has about 9 MiB, of Mixtral 336 MiB
OVERLAP_COPIES = 64
MATRIX = 4096


def copy_all(device: Device, sources: list[torch.Tensor], targets: list[torch.Tensor], count: int) -> None:
    """`count` copies, one after another in turn over the pairs; the last fence is waited for."""
    fences = [device.copy(sources[i % len(sources)], targets[i % len(targets)], None) for i in range(count)]
    if not all(fence.wait(SECONDS) for fence in fences):
        sys.exit("error: the copies did not end within a minute")


def seconds_of(work: Callable[[], None], repeats: int = 3) -> float:
    """The fastest of `repeats` runs, after one that is not counted."""
    best = float("inf")
    for repeat in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if repeat:
            best = min(best, time.perf_counter() - began)
    return best


def rate(device: Device, sources: list[torch.Tensor], nbytes: int) -> float:
    """GiB/s of copies of `nbytes` from `sources`."""
    targets = [device.new_slot(nbytes) for _ in sources]
    count = min(COPIES_MAX, BYTES_EACH_SIZE // nbytes)
    return nbytes * count / 2**30 / seconds_of(lambda: copy_all(device, sources, targets, count))


def print_bandwidth(device: Device) -> None:
    """Copies of the sizes that experts have, from pinned and from ordinary memory."""
    print(f"{'copy size':>12} {'pinned':>14} {'not pinned':>14}")
    for nbytes in (MIB // 4, MIB, 9 * MIB, 64 * MIB, 256 * MIB):
        pinned = [device.new_staging(nbytes).fill_(1) for _ in range(2)]
        pageable = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(2)]
        rates = [rate(device, sources, nbytes) for sources in (pinned, pageable)]
        print(f"{nbytes / MIB:8.2f} MiB {rates[0]:8.1f} GiB/s {rates[1]:8.1f} GiB/s")


def print_overlap(device: Device) -> None:
    """Copies and matrix products alone and together; hidden is the share of the shorter that cost nothing."""
    sources = [device.new_staging(OVERLAP_BYTES).fill_(1) for _ in range(2)]
    targets = [device.new_slot(OVERLAP_BYTES) for _ in range(2)]
    left = torch.randn(MATRIX, MATRIX, device=device.torch_device, dtype=torch.bfloat16)
    right, out = torch.randn_like(left), torch.empty_like(left)

    def multiply(count: int) -> None:
        for _ in range(count):
            device.launch(lambda: torch.mm(left, right, out=out), [])

    def both(count: int) -> None:
        multiply(count)
        copy_all(device, sources, targets, OVERLAP_COPIES)

    copies = seconds_of(lambda: copy_all(device, sources, targets, OVERLAP_COPIES))
    products = max(1, round(copies / (seconds_of(lambda: multiply(20)) / 20)))
    compute = seconds_of(lambda: multiply(products))
    together = seconds_of(lambda: both(products))
    hidden = (copies + compute - together) / min(copies, compute)
    print(f"\n{'copies':>10} {'compute':>10} {'together':>10} {'hidden':>8}")
    print(f"{copies * 1e3:7.1f} ms {compute * 1e3:7.1f} ms {together * 1e3:7.1f} ms {hidden:8.0%}")


def main() -> None:
    """Both tables for the current GPU."""
    device = open_device("cuda")
    try:
        print(torch.cuda.get_device_name(device.torch_device))
        print_bandwidth(device)
        print_overlap(device)
    finally:
        device.close()


if __name__ == "__main__":
    main()
