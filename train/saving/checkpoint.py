"""Checkpoint: which checkpoint of a run is whole, and whether the run can go on from it.

Owns the mark that is written last into a checkpoint; promises that a run resumes only from a checkpoint whose every
byte is as it was written and that is, unless forced, of the same recipe, base model, data and number of processes.
`train.trainer` writes the mark, `train.run` decides with it.
"""

from __future__ import annotations

import errno
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

from coop.errors import CheckpointError, SaveError
from coop.files import read_json, write_atomic

MARK_NAME = "coop_checkpoint.json"
SUMMARY_NAME = "summary.json"
RECIPE_NAME = "recipe.yaml"
DATA_KEY = "rows of the data"
BASE_KEY = "files of the base model"
METRICS_NAME = "metrics.jsonl"
CHECKPOINT_FOLDER = re.compile(r"^checkpoint-(\d+)$")
FULL_BYTES = 2**20  # a disk with less than this free is full
_MARK_VERSION = 1
_MARK_TYPES = {"version": int, "step": int, "deciding": dict, "files": dict, "sha256": dict}
_ABSENT = "(absent)"
# what a checkpoint fixes: the optimizer's state is of one kind, and the selection of experts is that of its masks
_UNFORCEABLE = ("train.optimizer", "tune.method", "tune.experts.")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint to go on from, what was passed over on the way to it, and which deciding keys differ."""

    folder: Path
    step: int
    skipped: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()


def run_facts(deciding: dict[str, Any], data_digest: str, world: int, base: dict[str, str]) -> dict[str, Any]:
    """What a resumed run must agree with: deciding keys of the recipe, rows, processes, and the base by file name."""
    return {**deciding, "processes": world, DATA_KEY: data_digest, BASE_KEY: base}


def follow_umask(folder: Path) -> None:
    """Give every regular file in `folder` the mode the umask asks for; safetensors writes 0600."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~umask)


def mark_complete(folder: Path, step: int, deciding: dict[str, Any], eval_loss: float | None = None) -> None:
    """Write the mark, with size and digest of every file; the last thing that is written into a checkpoint."""
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    mark = {
        "version": _MARK_VERSION,
        "step": step,
        **({} if eval_loss is None else {"eval_loss": eval_loss}),
        "deciding": deciding,
        "files": sizes,
        "sha256": {name: _digest(path) for name, path in paths.items()},
    }
    write_atomic(folder / MARK_NAME, json.dumps(mark, indent=1).encode())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_checkpoints(output: Path) -> list[Path]:
    """Checkpoint folders in `output`, newest first."""
    found = [path for path in output.iterdir() if path.is_dir() and CHECKPOINT_FOLDER.match(path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def has_whole(output: Path) -> bool:
    """Whether a run in `output` can be resumed."""
    return bool(_whole(output))


def describe_newest(output: Path) -> str:
    """Which checkpoint of `output` is the newest whole one, as a part of a sentence."""
    whole = _whole(output)
    return f"the last whole checkpoint is {whole[0]}" if whole else "there is no whole checkpoint"


def _whole(output: Path) -> list[Path]:
    folders = list_checkpoints(output) if output.is_dir() else []
    return [path for path in folders if (path / MARK_NAME).is_file()]


@contextmanager
def saving(output: Path, what: Path) -> Iterator[None]:
    """Turn whatever writing `what` into `output` raises, such as for a full disk, into a SaveError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as exc:
        raise SaveError(
            f"{what}: cannot be saved: {_reason(exc, output)}; {describe_newest(output)}"
        ) from exc


def _reason(exc: BaseException, output: Path) -> str:
    """What went wrong, in a line; torch's own words for a full disk do not say so."""
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    if isinstance(exc, RuntimeError) and output.is_dir() and shutil.disk_usage(output).free < FULL_BYTES:
        return os.strerror(errno.ENOSPC)
    return (str(exc).strip() or type(exc).__name__).splitlines()[0][:200]


def surplus(output: Path, keep: int, keeps_best: bool) -> list[Path]:
    """Whole checkpoints beyond the newest `keep` and the best, and incomplete ones older than the newest whole one."""
    whole = _whole(output)
    kept = whole[:keep]
    if keeps_best and (best := find_best(output)) is not None:
        kept.append(best.folder)
    return [p for p in list_checkpoints(output) if whole and p not in kept and _step(p) < _step(whole[0])]


@dataclass(frozen=True, slots=True)
class Best:
    """The whole checkpoint with the lowest eval loss."""

    folder: Path
    step: int
    eval_loss: float


def find_best(output: Path, *, is_thorough: bool = False) -> Best | None:
    """The checkpoint whose mark has the lowest eval loss, the earlier of two; None if no mark has one.

    is_thorough: read every file that is about to be used; else only sizes are compared.
    """
    found = []
    for folder in list_checkpoints(output):
        try:
            mark = read_mark(folder, is_thorough=is_thorough)
        except CheckpointError:
            continue
        if "eval_loss" in mark:
            found.append(Best(folder, mark["step"], float(mark["eval_loss"])))
    return min(found, key=lambda best: (best.eval_loss, best.step), default=None)


def find_resume_point(
    output: Path, chosen: Path | None, deciding: dict[str, Any], is_forced: bool = False
) -> ResumePoint:
    """The newest whole checkpoint in `output`, or `chosen`. Raises CheckpointError saying why there is none.

    One that was made by another recipe, base, data or number of processes is refused, unless forced; a few keys
    cannot be forced.
    """
    candidates = [chosen] if chosen is not None else list_checkpoints(output)
    skipped: list[str] = []
    for folder in candidates:
        try:
            mark = read_mark(folder)
        except CheckpointError as exc:
            skipped.append(str(exc))
            continue
        differences = tuple(describe_differences(mark["deciding"], deciding))
        if differences and not is_forced:
            raise CheckpointError(
                f"{folder}: what decides the weights is not as it was when this was saved:\n  "
                + "\n  ".join(differences)
                + f"\nresume with the recipe in {output / RECIPE_NAME}, go on anyway with --force, or start anew "
                "with --overwrite"
            )
        _refuse_unforceable(folder, mark["deciding"], deciding)
        return ResumePoint(folder, mark["step"], tuple(skipped), differences)
    reasons = "".join(f"\n  {reason}" for reason in skipped)
    if chosen is not None:
        raise CheckpointError(f"{chosen} is not a whole checkpoint; {describe_newest(output)}{reasons}")
    raise CheckpointError(
        f"{output}: no whole checkpoint to resume from; start anew with --overwrite{reasons}"
    )


def _refuse_unforceable(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    shared = old.keys() & new.keys()
    pairs = ({key: facts[key] for key in shared} for facts in (old, new))
    fixed = [line for line in describe_differences(*pairs) if line.startswith(_UNFORCEABLE)]
    if fixed:
        raise CheckpointError(
            f"{folder}: --force cannot change what this checkpoint fixes:\n  "
            + "\n  ".join(fixed)
            + "\nset it back, or start anew with --overwrite"
        )


def describe_differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """One line for each key whose value differs: `key: old -> new`."""
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if before == after or (
            key == BASE_KEY and before == _ABSENT
        ):  # earlier versions did not look at the base
            continue
        if key == BASE_KEY and isinstance(before, dict) and isinstance(after, dict):
            names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
            yield f"{key}: others than before: {_short(names)}"
        elif key == DATA_KEY and _ABSENT not in (before, after):
            yield f"{key}: others than before; a file, a source or the tokenizer has changed"
        else:
            yield f"{key}: {_short(before)} -> {_short(after)}"


def _short(value: Any) -> str:
    text = json.dumps(value) if value != _ABSENT else _ABSENT
    return text if len(text) <= 80 else text[:77] + "..."


def read_mark(folder: Path, *, is_thorough: bool = True) -> dict[str, Any]:
    """The mark of a checkpoint whose files are all there as they were written. Raises CheckpointError.

    is_thorough: compare every byte, by digest; else only sizes.
    """
    if not (folder / MARK_NAME).is_file():
        raise CheckpointError(f"{folder}: incomplete (no {MARK_NAME})")
    mark = read_json(folder / MARK_NAME, CheckpointError)
    is_mark = isinstance(mark, dict) and all(isinstance(mark.get(k), t) for k, t in _MARK_TYPES.items())
    if not is_mark or not isinstance(mark.get("eval_loss", 0.0), int | float):
        raise CheckpointError(f"{folder / MARK_NAME}: not a mark that this version of coop wrote")
    if CHECKPOINT_FOLDER.match(folder.name) and _step(folder) != mark["step"]:
        raise CheckpointError(f"{folder}: its mark is of step {mark['step']}, not of this folder")
    for name, size in mark["files"].items():
        path = _inside(folder, name)
        if not path.is_file() or path.stat().st_size != size:
            found = path.stat().st_size if path.is_file() else "none"
            raise CheckpointError(f"{path}: {found} bytes, the mark says {size}")
        expected = mark["sha256"].get(name) if is_thorough else None
        if expected is not None and _digest(path) != expected:
            raise CheckpointError(f"{path}: its bytes are not those that were written")
    return mark


def _inside(folder: Path, name: str) -> Path:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"{folder / MARK_NAME}: names a file outside the checkpoint")
    return folder / name


def leftovers(output: Path) -> list[Path]:
    """Temporary files in `output` of atomic writes, ours and those of safetensors, that a kill cut off."""
    return [path for pattern in (".*.tmp", ".tmp*") for path in output.glob(pattern) if path.is_file()]


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
