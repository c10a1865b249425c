"""BlockDevice: how much a disk has moved, and how much of that this process asked for.

Owns two paths; promises that `read` never raises and answers None wherever the kernel does not tell (no Linux,
no /sys, a file system of no single device). Made by attach for a checkpoint, polled by the pressure guard.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SECTOR_BYTES = 512  # the unit of every block layer counter, whatever the device's own sector is
MAX_COUNTER_FILE_BYTES = 4096
MAX_SLAVES_DEEP = 8


@dataclass(frozen=True, slots=True)
class DiskSample:
    """Counters since boot of one device, and what this process read since it began, in bytes and requests.

    `own_bytes` counts a read when it is handed to the kernel, `device_bytes` when the device has finished it:
    between the two lie the `in_flight` requests.
    """

    device_bytes: int
    device_requests: int
    in_flight: int
    own_bytes: int


class BlockDevice:
    """The whole disk under `path`: partitions, and volumes that lie on one disk, are followed to that disk.

    Args:
        path: a file or folder on the disk; links are followed.
        sys, proc: where the kernel's files are.
    """

    def __init__(self, path: Path, sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> None:
        self._own_file = proc / "self" / "io"
        folder = _disk_folder(path, sys, proc)
        self.name = folder.name if folder else ""
        self._stat_file = folder / "stat" if folder else Path()

    def read(self) -> DiskSample | None:
        """The counters now, or None where they cannot be read; takes about 20 microseconds."""
        if not self.name:
            return None
        try:
            # reads, merged, sectors, ms, writes, merged, sectors, ms, in flight: Documentation/block/stat.rst
            fields = [int(word) for word in _read_small(self._stat_file).split()[:9]]
            reads, _, read_sectors, _, writes, _, written_sectors, _, in_flight = fields
            own_bytes = _field(_read_small(self._own_file), b"read_bytes:")
        except (OSError, ValueError):
            return None
        if min(reads, read_sectors, writes, written_sectors, in_flight, own_bytes) < 0:
            return None
        sectors = read_sectors + written_sectors
        return DiskSample(sectors * SECTOR_BYTES, reads + writes, in_flight, own_bytes)


def _read_small(path: Path) -> bytes:
    """One read of a kernel file: pathlib's own takes twice as long."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        return os.read(fd, MAX_COUNTER_FILE_BYTES)
    finally:
        os.close(fd)


def _field(table: bytes, name: bytes) -> int:
    """The number behind `name` in a table of `name number` lines; ValueError without one."""
    for line in table.splitlines():
        if line.startswith(name):
            return int(line[len(name) :])
    raise ValueError(f"no {name!r}")


def _disk_folder(path: Path, sys: Path, proc: Path) -> Path | None:
    """The folder in /sys of the disk that holds `path`, or None."""
    try:
        number = path.stat().st_dev
        if (
            os.major(number) == 0
        ):  # btrfs and the like have no number of their own; their mount names the disk
            number = _mounted_device(number, proc)
        folder = (sys / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").resolve(strict=True)
        return _whole_disk(folder)
    except (OSError, ValueError):
        return None


def _mounted_device(number: int, proc: Path) -> int:
    """The device that the mount `number` came from; ValueError if its source is no device."""
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in (proc / "self" / "mountinfo").read_text(errors="replace").splitlines():
        mount, _, source = line.partition(" - ")
        words, sources = mount.split(), source.split()
        if len(words) > 2 and words[2] == wanted and len(sources) > 1 and sources[1].startswith("/dev/"):
            return os.stat(sources[1]).st_rdev
    raise ValueError(f"{wanted} is on no device")


def _whole_disk(folder: Path) -> Path:
    """Up from a partition to its disk, down from a volume to the one device below it; an array stays itself."""
    for _ in range(MAX_SLAVES_DEEP):
        if (folder / "partition").exists():
            folder = folder.parent
        below = list((folder / "slaves").iterdir()) if (folder / "slaves").is_dir() else []
        if len(below) != 1:
            break
        folder = below[0].resolve(strict=True)
    return folder
