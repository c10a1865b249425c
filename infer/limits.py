"""Memory groups: a limit on everything that one process and its children take, page cache included.

Owns the groups it makes; promises that a group is removed when its block ends, and that a machine without
memory groups of our own (not Linux, not root, not delegated) is told by one sentence. Called by `infer.contest`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coop.errors import CoopError

ROOT = Path("/sys/fs/cgroup")
EMPTY_SECONDS = 10.0  # for a killed process to give its memory back before its group can go
_numbers = itertools.count()


class LimitError(CoopError):
    """No memory group can be made here, with the reason."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One control group of version 1 or 2. Its members are killed above `limit_bytes`."""

    path: Path
    version: int
    limit_bytes: int

    def launcher(self, command: list[str]) -> list[str]:
        """A command that enters the group and then becomes `command`, so that all it takes is counted."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *command]

    @property
    def peak_bytes(self) -> int:
        """The most that was counted, page cache included; 0 where the kernel does not say."""
        return _read_int(self.path / ("memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"))

    @property
    def kills(self) -> int:
        """Members that were killed for memory."""
        events = _read_table(self.path / ("memory.events" if self.version == 2 else "memory.oom_control"))
        return events.get("oom_kill", 0)


@contextlib.contextmanager
def memory_group(limit_bytes: int, root: Path = ROOT) -> Iterator[MemoryGroup]:
    """A group below this process's own, removed at the end. LimitError where none can be made."""
    group = _make(limit_bytes, root)
    try:
        yield group
    finally:
        _remove(group.path)


def why_unlimited(root: Path = ROOT) -> str:
    """Why no memory can be limited here, or "" if it can: asked by making a group and removing it."""
    try:
        with memory_group(2**30, root):
            return ""
    except LimitError as exc:
        return str(exc)


def _make(limit_bytes: int, root: Path) -> MemoryGroup:
    reasons = []
    for parent, version in _parents(root):
        path = parent / f"coop-bench-{os.getpid()}-{next(_numbers)}"
        try:
            path.mkdir()
        except OSError as exc:
            reasons.append(f"{parent}: {exc.strerror}")
            continue
        try:
            _set_limit(path, version, limit_bytes)
            return MemoryGroup(path, version, limit_bytes)
        except OSError as exc:
            reasons.append(f"{path}: {exc.strerror}")
            _remove(path)
    raise LimitError(
        f"memory cannot be limited here ({reasons[0] if reasons else 'no memory controller is mounted'})"
    )


def _set_limit(path: Path, version: int, limit_bytes: int) -> None:
    if version == 2:
        (path / "memory.max").write_text(str(limit_bytes))
        _write_if_there(path / "memory.swap.max", "0")
        return
    (path / "memory.limit_in_bytes").write_text(str(limit_bytes))
    _write_if_there(path / "memory.swappiness", "0")  # swapping would be memory beyond the limit


def _write_if_there(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        path.write_text(text)


def _parents(root: Path) -> Iterator[tuple[Path, int]]:
    """Folders in which a group could be made, with the version of their tree, the likeliest first."""
    own = {"": "", "memory": ""}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                own["memory" if controllers else ""] = name.strip("/")
    seen: list[Path] = []
    for place in (root / "memory" / own["memory"], root / "memory"):
        if (place / "memory.limit_in_bytes").is_file() and place not in seen:
            seen.append(place)
            yield place, 1
    for place in (root / own[""], root):
        if "memory" in _read_text(place / "cgroup.controllers").split() and place not in seen:
            seen.append(place)
            _write_if_there(place / "cgroup.subtree_control", "+memory")
            yield place, 2


def _remove(path: Path) -> None:
    """Remove an empty group; its last member may need a moment to be gone."""
    until = time.monotonic() + EMPTY_SECONDS
    while True:
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > until:
                return
            time.sleep(0.05)


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_int(path: Path) -> int:
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else 0


def _read_table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _read_text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
