"""The page cache's share of some files: dropped before an arm is measured, counted while it runs.

Owns nothing; promises that files are only looked at, and that a system that cannot say says None. Called by
`infer.contest` (drop) and `infer.arms` (count).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

CHUNK_BYTES = 2**30  # of a file that is mapped at a time while its pages are counted


def weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint or pack folder that are larger than a page, or the file itself."""
    if folder.is_file():
        return [folder]
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if path.stat().st_size > mmap.PAGESIZE)


def drop(paths: Iterable[Path]) -> None:
    """Ask the system to forget the clean pages of these files."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.fsync(file.fileno())  # a dirty page stays
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_bytes(paths: Iterable[Path]) -> int | None:
    """Bytes of these files that are in the page cache; None where the system cannot be asked."""
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        return sum(_cached_bytes(path, mincore) for path in paths)
    except (OSError, AttributeError, ValueError):
        return None


def _cached_bytes(path: Path, mincore: Callable[..., int]) -> int:
    size, pages = path.stat().st_size, 0
    with path.open("rb") as file:
        for start in range(0, size, CHUNK_BYTES):
            length = min(CHUNK_BYTES, size - start)
            # private and writable, so that its address can be taken; nothing is written
            with mmap.mmap(
                file.fileno(),
                length,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=start,
            ) as view:
                holder = ctypes.c_char.from_buffer(view)
                marks = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
                failed = mincore(ctypes.c_void_p(ctypes.addressof(holder)), ctypes.c_size_t(length), marks)
                del holder  # the map cannot close while its address is held
                if failed:
                    raise OSError(ctypes.get_errno(), "mincore")
                pages += sum(mark & 1 for mark in bytes(marks))
    return pages * mmap.PAGESIZE
