"""Output: whether a folder is a run's own, which names in it a run writes, and which process writes there now.

Owns those names and the lock; promises that nothing of the user's is deleted or uploaded, that no run writes into its
own model or data, and that two never write into one folder. `train.run` asks it first, `train.saving.push` for names.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coop.errors import RecipeError
from train.saving.checkpoint import METRICS_NAME, RECIPE_NAME, SUMMARY_NAME, has_whole, leftovers
from train.schema import Recipe

LOCK_NAME = ".lock"
HEADER = (
    b"# the recipe of a coop run, every key spelled out; --overwrite deletes what that run wrote beside it\n"
)
SHOWN = 8  # names of what is in the way
# what transformers, PEFT, tokenizers and coop save of a model; shards are numbered
RESULT_NAMES = re.compile(
    r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors|(model|adapter_model)\.safetensors\.index\.json"
    r"|coop_profile\.safetensors|selected_experts\.json|README\.md|report\.png|recipe\.yaml|metrics\.jsonl"
    r"|(config|generation_config|adapter_config|tokenizer|tokenizer_config|processor_config)\.json"
    r"|(special_tokens_map|added_tokens|vocab)\.json|chat_template\.jinja|merges\.txt|vocab\.(txt|model)"
    r"|(tokenizer|spiece|spm|sentencepiece\.bpe)\.model|tiktoken\.model|[\w.-]+\.tiktoken"
)
_BESIDE = re.compile(
    r"summary\.json|report\.html|wandb_run\.json|training_args\.bin|wandb|merged|pack|checkpoint-\d+|\.saving|\.lock"
    r"|\.pack\.(packing|old)|additional_chat_templates"
)


def is_own_name(name: str) -> bool:
    """Whether a run writes a file or folder of this name into its output folder."""
    return bool(RESULT_NAMES.fullmatch(name) or _BESIDE.fullmatch(name))


def check_output(recipe: Recipe, recipe_path: Path, *, is_resuming: bool, is_overwriting: bool) -> None:
    """Refuse an output folder whose contents would be mixed up or lost. Raises RecipeError saying what to type."""
    output = Path(recipe.output)
    try:
        _refuse_file(output)
        _check_contents(output, is_resuming, is_overwriting)
        _refuse_overlap(recipe, recipe_path, output, is_resuming or is_overwriting)
    except OSError as exc:
        raise RecipeError(f"output: {exc.filename or output}: {exc.strerror or exc}") from exc


def _refuse_file(output: Path) -> None:
    nearest = next(path for path in (output, *output.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise RecipeError(f"output: {nearest} is not a folder; choose another with output=FOLDER")


def _check_contents(output: Path, is_resuming: bool, is_overwriting: bool) -> None:
    if not output.exists() or not set(output.iterdir()) - {*leftovers(output), output / LOCK_NAME}:
        if is_resuming:
            raise RecipeError(f"{output}: nothing to resume; start without --resume")
        return
    if not _is_run(output):
        raise RecipeError(f"{output} is not empty and not of a coop run; choose another with output=FOLDER")
    if is_overwriting:
        _refuse_foreign(output)
        return
    if (output / SUMMARY_NAME).is_file():
        again = "add --overwrite to train anew, or choose another with output=FOLDER"
        raise RecipeError(f"{output} holds a finished run; {again}")
    if not is_resuming:
        raise RecipeError(
            f"{output} holds an unfinished run; add --resume to go on, or --overwrite to train anew"
        )


def _is_run(output: Path) -> bool:
    """A recipe alone may be the user's: that of a run has its first line, or what earlier versions wrote beside it."""
    recipe = output / RECIPE_NAME
    if not recipe.is_file():
        return False
    with recipe.open("rb") as file:
        is_written_by_us = file.read(len(HEADER)) == HEADER
    return is_written_by_us or (output / METRICS_NAME).is_file() or has_whole(output)


def _foreign(output: Path) -> list[Path]:
    ours = set(leftovers(output))
    return sorted(path for path in output.iterdir() if path not in ours and not is_own_name(path.name))


def _refuse_foreign(output: Path) -> None:
    names = [path.name for path in _foreign(output)]
    if names:
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        raise RecipeError(
            f"{output} holds what no run of coop writes, so --overwrite deletes nothing: {shown}; move it away, or "
            "choose another with output=FOLDER"
        )


def _refuse_overlap(recipe: Recipe, recipe_path: Path, output: Path, may_hold_recipe: bool) -> None:
    """What a run reads may neither be below what it writes nor around it."""
    place = output.resolve()
    for key, path in _read_paths(recipe, recipe_path):
        real = path.resolve()
        if key == "the recipe" and may_hold_recipe and real == place / RECIPE_NAME:
            continue
        if real.is_relative_to(place) or (real.is_dir() and place.is_relative_to(real)):
            where = "holds" if real.is_relative_to(place) else "is inside"
            raise RecipeError(f"output: {output} {where} {key} ({path}); choose another with output=FOLDER")


def _read_paths(recipe: Recipe, recipe_path: Path) -> Iterator[tuple[str, Path]]:
    """What of the recipe is a file or folder here; whatever else the names mean is on the hub."""
    sources = [*recipe.data.train, *(recipe.data.eval or [])]
    named = [("model.path", recipe.model.path), *(("a source of data", source.path) for source in sources)]
    if recipe.tune.experts.profile is not None:
        named.append(("tune.experts.profile", recipe.tune.experts.profile))
    for key, name in [*named, ("the recipe", str(recipe_path))]:
        path = Path(name).expanduser()
        if path.exists():
            yield key, path


def clear_output(output: Path) -> None:
    """Delete what a run has written, last what says that it was one. Raises RecipeError if anything else is there."""
    _refuse_foreign(output)
    paths = [path for path in output.iterdir() if path.name != LOCK_NAME]
    for path in sorted(paths, key=lambda path: (path.name == METRICS_NAME, path.name == RECIPE_NAME)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Keep other runs out of `output` while the block runs; the kernel lets go when the process ends, however it ends.

    Raises RecipeError if another process is writing there. A file system that knows no locks keeps nobody out.
    """
    was_there = output.is_dir()
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = os.open(output / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else None
        raise RecipeError(f"output: {output}: {reason or exc}") from exc
    try:
        _take(file, output)
        try:
            yield
        finally:
            (output / LOCK_NAME).unlink(missing_ok=True)
            if not was_there and not any(output.iterdir()):
                output.rmdir()
    finally:
        os.close(file)


def _take(file: int, output: Path) -> None:
    again = "wait for its end, or choose another with output=FOLDER"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return
        holder = os.pread(file, 32, 0).decode("ascii", "replace").strip() or "of unknown number"
        raise RecipeError(f"{output}: process {holder} is training into it now; {again}") from exc
    if os.fstat(file).st_nlink == 0:  # the run before us has just taken the file away
        raise RecipeError(f"{output}: another run has just ended there; type the same command again")
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
