"""Durable: a checkpoint is written in a hidden folder and appears in its place whole, or not at all.

Owns the hidden folder of an output folder; promises that a kill at any moment loses no checkpoint that had appeared,
and that what it left behind is cleared, or put in its place if it was whole, at the next start. `train.trainer`
saves through it, `train.run` recovers with it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from coop.errors import CheckpointError, SaveError
from coop.files import fsync_folder
from coop.plan import format_bytes
from train.saving.checkpoint import CHECKPOINT_FOLDER, describe_newest, leftovers, list_checkpoints, read_mark

STAGING_NAME = ".saving"
ROOM_FACTOR = 1.2  # of the size of the checkpoint before: optimizer states and metrics grow a little
_OLD = "old-"


def begin_staging(output: Path) -> None:
    """An empty hidden folder for the next checkpoint."""
    discard_staging(output)
    (output / STAGING_NAME).mkdir()


def discard_staging(output: Path) -> None:
    """Delete the hidden folder and whatever is in it."""
    shutil.rmtree(output / STAGING_NAME, ignore_errors=True)


def sync_files(folder: Path) -> None:
    """Put every file and folder below `folder` on the disk, files first."""
    folders = [folder]
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            folders.append(path)
        elif path.is_file():
            _sync_file(path)
    for inner in reversed(folders):
        fsync_folder(inner)


def _sync_file(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def publish(output: Path, name: str) -> None:
    """Move the marked and synced checkpoint `name` out of the hidden folder into its place, then delete the folder.

    One of the same name, as when a run went on from an older checkpoint, makes room first; `recover` puts the new
    one in its place after a kill in between.
    """
    staged, place = output / STAGING_NAME / name, output / name
    if place.exists():
        place.rename(staged.with_name(_OLD + name))
    staged.rename(place)
    fsync_folder(output)
    discard_staging(output)


def retire(path: Path) -> None:
    """Delete a checkpoint so that it is never seen half deleted."""
    hidden = path.parent / STAGING_NAME
    hidden.mkdir(exist_ok=True)
    path.rename(hidden / (_OLD + path.name))
    discard_staging(path.parent)


def recover(output: Path) -> list[str]:
    """Clear what a kill left in `output`; a whole checkpoint whose move was cut off takes its place. Says so."""
    said = []
    for name in _whole_in_staging(output):
        publish(output, name)
        said.append(f"put in its place: {output / name}, which was whole when an earlier run was killed")
    if (output / STAGING_NAME).exists():
        discard_staging(output)
        said.append(f"cleared: {output / STAGING_NAME}, a checkpoint that an earlier run did not finish")
    for path in leftovers(output):
        path.unlink()
    return said


def _whole_in_staging(output: Path) -> Iterator[str]:
    hidden = output / STAGING_NAME
    for path in sorted(hidden.iterdir()) if hidden.is_dir() else []:
        if CHECKPOINT_FOLDER.match(path.name):
            try:
                read_mark(path)
            except CheckpointError:
                continue
            yield path.name


def checkpoint_bytes(model: nn.Module) -> int:
    """About what a checkpoint of `model` takes: the weights that are saved, and the two moments of AdamW."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    saved = trained if hasattr(model, "peft_config") else list(model.parameters())
    return sum(p.nbytes for p in saved) + 2 * sum(p.nbytes for p in trained)


def check_room(output: Path, estimate_bytes: int) -> None:
    """Refuse to begin a checkpoint that will not fit: `estimate_bytes`, or the one before and a fifth. SaveError."""
    before = list_checkpoints(output)
    needed = int(ROOM_FACTOR * folder_bytes(before[0])) if before else estimate_bytes
    free = shutil.disk_usage(output).free
    if free < needed:
        raise SaveError(
            f"{output}: no space for a checkpoint: {format_bytes(needed)} needed, {format_bytes(free)} free: make "
            f"room, or lower checkpoint.keep; {describe_newest(output)}"
        )


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
