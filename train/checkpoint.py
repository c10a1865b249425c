"""Checkpoint: which checkpoint of a run is whole, which run an output folder holds, and whether it can go on.

Owns the mark that is written last into a checkpoint; promises that a run resumes only from a checkpoint that is
whole and of the same recipe and data. `train.trainer` writes the mark, `train.finetune` decides with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coop.errors import CheckpointError, CoopError, RecipeError
from coop.files import read_json, write_atomic

MARK_NAME = "coop_checkpoint.json"
SUMMARY_NAME = "summary.json"
RECIPE_NAME = "recipe.yaml"
METRICS_NAME = "metrics.jsonl"
_FOLDER = re.compile(r"^checkpoint-(\d+)$")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint to go on from, and what was passed over on the way to it."""

    folder: Path
    step: int
    skipped: tuple[str, ...] = ()


def run_digest(recipe_digest: str, data_digest: str) -> str:
    """What a resumed run must agree with: what decides the weights in the recipe, and the rows that are trained."""
    return hashlib.sha256(f"{recipe_digest}{data_digest}".encode()).hexdigest()


def follow_umask(folder: Path) -> None:
    """Give every regular file in `folder` the mode the umask asks for; safetensors writes 0600."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~umask)


def mark_complete(folder: Path, step: int, digest: str) -> None:
    """Write the mark, with the size of every file; the last thing that is written into a checkpoint."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    mark = {"step": step, "digest": digest, "files": files}
    write_atomic(folder / MARK_NAME, json.dumps(mark, indent=1).encode())


def list_checkpoints(output: Path) -> list[Path]:
    """Checkpoint folders in `output`, newest first."""
    found = [path for path in output.iterdir() if path.is_dir() and _FOLDER.match(path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def describe_newest(output: Path) -> str:
    """Which checkpoint of `output` is the newest whole one, as a part of a sentence."""
    folders = list_checkpoints(output) if output.is_dir() else []
    whole = next((path for path in folders if (path / MARK_NAME).is_file()), None)
    return f"the last whole checkpoint is {whole}" if whole else "there is no whole checkpoint"


@contextmanager
def saving(output: Path, what: Path) -> Iterator[None]:
    """Turn whatever writing `what` into `output` raises, such as for a full disk, into a CoopError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as exc:
        reason = (
            (exc.strerror if isinstance(exc, OSError) else None) or str(exc).strip() or type(exc).__name__
        )
        raise CoopError(
            f"{what}: cannot be saved: {reason.splitlines()[0][:200]}; {describe_newest(output)}"
        ) from exc


def rotate(output: Path, keep: int) -> None:
    """Delete whole checkpoints beyond the newest `keep`, and incomplete ones older than the newest whole one."""
    whole = [path for path in list_checkpoints(output) if (path / MARK_NAME).is_file()]
    for path in list_checkpoints(output):
        if whole and path not in whole[:keep] and _step(path) < _step(whole[0]):
            shutil.rmtree(path)


def find_resume_point(output: Path, chosen: Path | None, digest: str) -> ResumePoint:
    """The newest whole checkpoint in `output`, or `chosen`. Raises CheckpointError saying why there is none."""
    candidates = [chosen] if chosen is not None else list_checkpoints(output)
    skipped: list[str] = []
    for folder in candidates:
        try:
            mark = _read_mark(folder)
        except CheckpointError as exc:
            skipped.append(str(exc))
            continue
        if mark["digest"] != digest:
            raise CheckpointError(
                f"{folder}: the recipe or the data differ from those of this checkpoint; "
                f"resume with the recipe in {output / RECIPE_NAME}, or start anew with --overwrite"
            )
        return ResumePoint(folder, mark["step"], tuple(skipped))
    reasons = "".join(f"\n  {reason}" for reason in skipped)
    if chosen is not None:
        raise CheckpointError(f"{chosen} is not a whole checkpoint; {describe_newest(output)}{reasons}")
    raise CheckpointError(
        f"{output}: no whole checkpoint to resume from; start anew with --overwrite{reasons}"
    )


def _read_mark(folder: Path) -> dict[str, Any]:
    """The mark of a checkpoint whose files are all there with their sizes."""
    if not (folder / MARK_NAME).is_file():
        raise CheckpointError(f"{folder}: incomplete (no {MARK_NAME})")
    mark = read_json(folder / MARK_NAME, CheckpointError)
    types = {"step": int, "digest": str, "files": dict}
    if not isinstance(mark, dict) or any(not isinstance(mark.get(k), kind) for k, kind in types.items()):
        raise CheckpointError(f"{folder / MARK_NAME}: not a mark that coop wrote")
    for name, size in mark["files"].items():
        path = folder / Path(name).name
        if not path.is_file() or path.stat().st_size != size:
            found = path.stat().st_size if path.is_file() else "none"
            raise CheckpointError(f"{path}: {found} bytes, the mark says {size}")
    return mark


def check_output(output: Path, *, is_resuming: bool, is_overwriting: bool) -> None:
    """Refuse an output folder whose contents would be mixed up or lost. Raises RecipeError saying what to type."""
    try:
        _refuse_file(output)
        _check_contents(output, is_resuming, is_overwriting)
    except OSError as exc:
        raise RecipeError(f"output: {exc.filename or output}: {exc.strerror or exc}") from exc


def _refuse_file(output: Path) -> None:
    nearest = next(path for path in (output, *output.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise RecipeError(f"output: {nearest} is not a folder; choose another with output=FOLDER")


def _check_contents(output: Path, is_resuming: bool, is_overwriting: bool) -> None:
    if not output.exists() or not any(output.iterdir()):
        if is_resuming:
            raise RecipeError(f"{output}: nothing to resume; start without --resume")
        return
    if not (output / RECIPE_NAME).is_file():
        raise RecipeError(f"{output} is not empty and not of a coop run; choose another with output=FOLDER")
    if is_overwriting:
        return
    if (output / SUMMARY_NAME).is_file():
        again = "add --overwrite to train anew, or choose another with output=FOLDER"
        raise RecipeError(f"{output} holds a finished run; {again}")
    if not is_resuming:
        raise RecipeError(
            f"{output} holds an unfinished run; add --resume to go on, or --overwrite to train anew"
        )


def clear_output(output: Path) -> None:
    """Delete the contents of an output folder that `check_output` let pass."""
    for path in output.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
