"""Topology: what this machine has, measured.

Owns nothing; promises numbers that are bounded and a fingerprint that changes when timings would. Called by
the plan (free memory) and by profiles (are these timings of this hardware?).
"""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Processors, threads that compute, and memory that may still be taken, in bytes (cgroup limits counted)."""

    processor: str
    cores: int
    threads: int
    memory_available_bytes: int


def probe() -> Topology:
    """Look at this machine; takes milliseconds."""
    return Topology(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_available_bytes=memory_available_bytes(),
    )


def hardware_fingerprint() -> str:
    """Sixteen hex digits over processor, cores, compute threads and torch version: timings carry it."""
    here = probe()
    text = f"{here.processor}|{here.cores}|{here.threads}|{torch.__version__}|{platform.system()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def memory_available_bytes() -> int:
    """Memory this process may still take: the system's estimate, or less where a cgroup limits it."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file in _cgroup_files():
        limit, used = _read_int(limit_file), _read_int(used_file)
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
    return available


def _cgroup_files() -> list[tuple[Path, Path]]:
    """(limit, used) of this process's group and of the root, cgroup version 2 and version 1."""
    groups = {"": "", "memory": ""}
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                groups["memory" if controllers else ""] = path.strip("/")
    except (OSError, ValueError):
        pass
    second, first = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
    places = [second / groups[""], second]
    files = [(place / "memory.max", place / "memory.current") for place in places]
    places = [first / groups["memory"], first]
    return files + [(p / "memory.limit_in_bytes", p / "memory.usage_in_bytes") for p in places]


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
