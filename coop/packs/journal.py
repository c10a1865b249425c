"""Pack journal: what of a pack is written already, so that the same command goes on where it stopped.

Owns the hidden folder `.NAME.packing` beside the pack to be, and the journal in it; promises that one process at a
time writes there, that an expert is in the journal only after its bytes are on the disk, and that a folder begun
with other options is not mixed with these. Called by the packer.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from coop.checkpoint import PACK_MANIFEST
from coop.errors import RequestError
from coop.files import fsync_folder, parse_json

JOURNAL_NAME = ".packing.jsonl"
MAX_JOURNAL_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class WrittenExpert:
    """One finished expert: the digest of its extent, squared error and squares of its weights."""

    sha256: str
    squared_error: float
    squares: float


@dataclass(slots=True)
class Written:
    """Everything finished: experts by (layer, expert), and the digests of the dense files, if they are."""

    experts: dict[tuple[int, int], WrittenExpert] = field(default_factory=dict)
    dense_sha256: dict[str, str] = field(default_factory=dict)


class Journal:
    """A context manager over the hidden folder; leaving it keeps what is there, `publish` makes it the pack.

    Args:
        out: the pack to be.
        facts: the options and the source; a folder that was begun with others is refused.
        is_overwriting: begin anew, and replace a pack that is at `out`.
    """

    def __init__(self, out: Path, facts: Mapping[str, Any], is_overwriting: bool) -> None:
        self.out, self.folder = out, out.parent / f".{out.name}.packing"
        self._is_overwriting = is_overwriting
        self._pending: list[dict[str, Any]] = []
        self._check_out()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / JOURNAL_NAME).open("a+b")
        try:
            self._lock()
            if is_overwriting:
                self._clear()
            self.written = self._replay(dict(facts))
        except BaseException:
            self._file.close()
            raise

    def _check_out(self) -> None:
        if not self.out.exists() and not self.out.is_symlink():
            return
        if not self._is_overwriting:
            raise RequestError(f"{self.out} exists already: name another folder, or pass --overwrite")
        if self.out.is_symlink() or not (self.out / PACK_MANIFEST).is_file():
            raise RequestError(
                f"{self.out} is not a pack, so --overwrite will not replace it: remove it first"
            )

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise RequestError(
                f"another process packs to {self.out} now: wait for it, or name another folder"
            ) from exc

    def _clear(self) -> None:
        self._file.truncate(0)
        for path in self.folder.iterdir():
            if path.name != JOURNAL_NAME:
                path.unlink()

    def _replay(self, facts: dict[str, Any]) -> Written:
        """What an earlier run has finished; a line that was cut short by its end is dropped."""
        if self._file.seek(0, os.SEEK_END) > MAX_JOURNAL_BYTES:
            raise RequestError(f"{self.folder} holds no journal of coop's: remove it")
        self._file.seek(0)
        entries, good = [], 0
        for line in self._file:
            try:
                entries.append(parse_json(line, ValueError))
            except ValueError:
                break
            good += len(line)
        self._file.truncate(good)
        if not entries:
            self._clear()
            self._append(facts)
            return Written()
        if entries[0] != json.loads(json.dumps(facts)):
            raise RequestError(
                f"{self.folder} was begun with other options or another source ({_difference(entries[0], facts)}): "
                "give the same again to go on, or pass --overwrite to begin anew"
            )
        return _written(entries[1:])

    def note_expert(self, layer: int, expert: int, written: WrittenExpert) -> None:
        """Remember a finished expert, to be kept by the next `sync`."""
        self.written.experts[layer, expert] = written
        numbers = [written.squared_error, written.squares]
        self._pending.append({"expert": [layer, expert], "sha256": written.sha256, "squares": numbers})

    def note_dense(self, digests: Mapping[str, str]) -> None:
        """Remember that the dense files, which are on the disk, are finished."""
        self.written.dense_sha256 = dict(digests)
        self._append({"dense": dict(digests)})

    def sync(self, flush: Callable[[], None]) -> None:
        """Make what was noted durable: `flush` puts the experts' bytes on the disk, then the journal follows."""
        flush()
        self._append(*self._pending)
        self._pending.clear()

    def _append(self, *entries: dict[str, Any]) -> None:
        for entry in entries:
            self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def publish(self) -> None:
        """Give the folder its name, in place of an older pack if there is one."""
        old = self.out.parent / f".{self.out.name}.old"
        fsync_folder(self.folder)
        if self.out.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(self.out, old)
        os.rename(self.folder, self.out)
        (self.out / JOURNAL_NAME).unlink()
        fsync_folder(self.out.parent)
        shutil.rmtree(old, ignore_errors=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _difference(left: Any, right: Mapping[str, Any]) -> str:
    """The first option that differs, with both values."""
    left = left if isinstance(left, dict) else {}
    name = next(key for key in (*right, "journal") if left.get(key) != right.get(key))
    return name if isinstance(right.get(name), dict) else f"{name}: {left.get(name)}, now {right.get(name)}"


def _written(entries: list[Any]) -> Written:
    written = Written()
    for entry in entries:
        if "dense" in entry:
            written.dense_sha256 = entry["dense"]
        else:
            layer, expert = entry["expert"]
            written.experts[layer, expert] = WrittenExpert(entry["sha256"], *entry["squares"])
    return written
