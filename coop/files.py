"""Files: atomic writes, names that stay inside a folder, JSON that is bounded.

Owns no state; promises that a reader sees the old file or the new one, never half of one,
and that nothing outside a given folder is opened. Called by profile, store, checkpoint and train.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

MAX_JSON_BYTES = 64 * 2**20


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: temporary file beside it, fsync, rename, fsync of the folder; mode by umask."""
    umask = os.umask(0)
    os.umask(umask)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def contained_file(root: Path, name: str, error: Callable[[str], Exception]) -> Path:
    """The regular file `name` directly in `root`, or `error(reason)`.

    A symlink is followed only to a file in the same folder or, for a hub cache snapshot
    (`.../snapshots/REV/file`), in that repository's `blobs` folder.
    """
    if not name or name != os.path.basename(name) or name in (".", "..") or "\0" in name or len(name) > 255:
        raise error(f"{name[:80]!r} is not a plain file name")
    path = root / name
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except OSError as exc:
        raise error(f"{name}: {exc.strerror or exc}") from exc
    allowed = {root.resolve(), (root.resolve().parent.parent / "blobs")}
    if real.parent not in allowed:
        raise error(f"{name} leads outside {root}")
    if not stat.S_ISREG(mode):
        raise error(f"{name} is not a regular file")
    return path


def parse_json(data: bytes, error: Callable[[str], Exception], limit_bytes: int = MAX_JSON_BYTES) -> Any:
    """Strict JSON: bounded, no duplicate keys, no NaN or Infinity; anything else is `error(reason)`."""

    def refuse_constant(token: str) -> NoReturn:
        raise ValueError(f"{token} is not a number")

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) != len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in names if names.count(key) > 1)
            raise ValueError(f"key {twice[:80]!r} appears twice")
        return keys

    if len(data) > limit_bytes:
        raise error(f"{len(data)} bytes of JSON, more than the limit of {limit_bytes}")
    try:
        return json.loads(
            data.decode("utf-8"), parse_constant=refuse_constant, object_pairs_hook=refuse_duplicates
        )
    except (ValueError, RecursionError) as exc:
        raise error(f"not valid JSON: {exc}"[:300]) from exc


def read_json(path: Path, error: Callable[[str], Exception], limit_bytes: int = MAX_JSON_BYTES) -> Any:
    """The JSON in `path`, parsed by `parse_json`; the size is checked before reading."""
    try:
        size = path.stat().st_size
        if size > limit_bytes:
            raise error(f"{path}: {size} bytes, more than the limit of {limit_bytes}")
        return parse_json(path.read_bytes(), error, limit_bytes)
    except OSError as exc:
        raise error(f"{path}: {exc.strerror or exc}") from exc
