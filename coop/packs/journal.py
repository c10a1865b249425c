"""Pack journal: what of a pack is written already, so that the same command goes on where it stopped.

Owns the hidden folder `.NAME.packing` beside the pack to be, and the journal in it; promises that one process at a
time writes there, that an expert is in the journal only after its bytes are on the disk, that a folder begun
with other options is not mixed with these, and that nothing is removed which coop has not written. Called by the
packer.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from coop.checkpoint import PACK_MANIFEST
from coop.errors import CoopError, RequestError
from coop.files import fsync_folder, parse_json

JOURNAL_NAME = ".packing.jsonl"
MAX_JOURNAL_BYTES = 2**30
_DIGEST = re.compile(r"[0-9a-f]{64}")


def hidden_folder(out: Path) -> Path:
    """Where the pack `out` lies until it is whole."""
    return out.parent / f".{out.name}.packing"


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
        self.out, self.folder = out, hidden_folder(out)
        self._old = out.parent / f".{out.name}.old"
        self._is_overwriting = is_overwriting
        self._pending: list[dict[str, Any]] = []
        self.written = Written()
        with disk_faults_as_sentences(out):
            self._check_out()
            self._check_folder()
            self.folder.mkdir(parents=True, exist_ok=True)
            # no symlink: what it names is not coop's
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.fdopen(os.open(self.folder / JOURNAL_NAME, flags, 0o666), "a+b")
            try:
                self._lock()
                self._begin(dict(facts))
            except BaseException:
                self._file.close()
                raise

    def _begin(self, facts: dict[str, Any]) -> None:
        try:
            if self._is_overwriting:
                self._clear()
            self.written = self._replay(facts)
        except OSError:
            self._remove_if_empty()
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
        if self._old.is_symlink() or (self._old.exists() and not (self._old / PACK_MANIFEST).is_file()):
            raise RequestError(
                f"{self._old} is not a pack, and --overwrite needs the name for the one it replaces: move it away"
            )

    def _check_folder(self) -> None:
        """Refuse what bears the hidden folder's name and is not coop's."""
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise RequestError(
                f"{self.folder} is not a folder that coop began to pack in: move it away, or name another --out"
            )
        names = {path.name for path in self.folder.iterdir()} if self.folder.exists() else set()
        if names and JOURNAL_NAME not in names:
            raise RequestError(
                f"{self.folder} holds files and no journal of coop's: move it away, or name another --out"
            )

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise RequestError(
                f"another process packs to {self.out} now: wait for it, or name another folder"
            ) from exc
        if os.fstat(self._file.fileno()).st_nlink == 0:  # the process before us has just taken it away
            raise RequestError(f"another process packed to {self.out} just now: run the same command again")

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
        try:
            return _written(entries[1:])
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise RequestError(
                f"{self.folder / JOURNAL_NAME} has lines that coop did not write: pass --overwrite to begin anew"
            ) from exc

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
        with disk_faults_as_sentences(self.out):
            self._check_out()  # hours may have passed
            fsync_folder(self.folder)
            if self.out.exists():
                self._remove_old()
                os.rename(self.out, self._old)
            os.rename(self.folder, self.out)
            (self.out / JOURNAL_NAME).unlink()
            fsync_folder(self.out.parent)
            self._remove_old()

    def _remove_old(self) -> None:
        if (self._old / PACK_MANIFEST).is_file() and not self._old.is_symlink():
            shutil.rmtree(self._old, ignore_errors=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not self.written.experts and not self.written.dense_sha256:
            self._remove_if_empty()
        self._file.close()

    def _remove_if_empty(self) -> None:
        """Take the folder away where nothing but the journal is in it; under the lock."""
        with suppress(OSError):
            if [path.name for path in self.folder.iterdir()] == [JOURNAL_NAME]:
                (self.folder / JOURNAL_NAME).unlink()
                self.folder.rmdir()


@contextmanager
def disk_faults_as_sentences(out: Path) -> Iterator[None]:
    """CoopError in place of OSError; it names `--out` where the fault is in the hidden folder."""
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CoopError(
                f"the disk of {out.parent} is full: make room and run the same command again, which goes on where "
                "this one stopped"
            ) from exc
        name = str(exc.filename or "")
        is_ours = (
            not name or hidden_folder(out).is_relative_to(name) or name.startswith(str(hidden_folder(out)))
        )
        raise CoopError(
            f"{f'--out {out}' if is_ours else name}: cannot be {'written' if is_ours else 'read'}: "
            f"{exc.strerror or exc}; put that right and run the same command again"
            f"{', or name another folder' if is_ours else ''}"
        ) from exc


def _difference(left: Any, right: Mapping[str, Any]) -> str:
    """The first option that differs, with both values."""
    left = left if isinstance(left, dict) else {}
    name = next((key for key in right if left.get(key) != right.get(key)), "journal")
    if isinstance(right.get(name), dict) or name not in right:
        return name
    return f"{name}: {str(left.get(name))[:80]}, now {right[name]}"


def _written(entries: list[Any]) -> Written:
    """What the lines say; ValueError, TypeError, KeyError or AttributeError for one that is not ours."""
    written = Written()
    for entry in entries:
        if "dense" in entry:
            written.dense_sha256 = {
                str(name): _digest(value) for name, value in entry["dense"].items() if name
            }
        else:
            layer, expert = map(_index, entry["expert"])
            error, squares = map(_square, entry["squares"])
            written.experts[layer, expert] = WrittenExpert(_digest(entry["sha256"]), error, squares)
    return written


def _digest(value: Any) -> str:
    if not _DIGEST.fullmatch(value):
        raise ValueError("no digest")
    return str(value)


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("no index")
    return value


def _square(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError("no sum of squares")
    return float(value)
