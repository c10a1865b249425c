"""Export: the forms of a finished result besides the folder itself: merged, packed, and proven to load.

Owns the folders `merged` and `pack` inside an output folder; promises that each appears whole or not at all, and that
a fully tuned model, loaded back from its folder, has exactly the weights that were trained. `train.run` calls it last.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coop.errors import CoopError, SaveError
from coop.merge import merge_adapter
from coop.plan import format_bytes
from coop.topology import memory_available_bytes
from train.saving.checkpoint import follow_umask, saving
from train.saving.durable import STAGING_NAME, begin_staging, publish, sync_files
from train.schema import Recipe

MERGED_NAME, PACK_NAME = "merged", "pack"


def export_result(recipe: Recipe, model: nn.Module, say: Callable[[str], None]) -> dict[str, Any]:
    """Write what the recipe asks for; where it lies, for the summary. One process calls it.

    Raises CoopError, and what was saved before is untouched.
    """
    output, facts = Path(recipe.output), {}
    if recipe.tune.method == "full":
        say(check_reload(model, output))
    if recipe.checkpoint.final == "merged":
        facts["merged"] = str(write_merged(recipe))
    if recipe.checkpoint.pack != "none":
        facts["pack"] = str(write_pack(output, recipe.checkpoint.pack))
    return facts


def write_merged(recipe: Recipe) -> Path:
    """The whole model, adapter merged, in Hub layout; from the base's files, so offloaded experts are no obstacle."""
    output = Path(recipe.output)
    place, staged = output / MERGED_NAME, output / STAGING_NAME / MERGED_NAME
    with saving(output, place):
        begin_staging(output)
        staged.mkdir()
        merge_adapter(output, staged, recipe.model.path)
        follow_umask(staged)
        sync_files(staged)
        publish(output, MERGED_NAME)
    return place


def write_pack(output: Path, dtype: str) -> Path:
    """The result as a coop pack; it lies hidden beside its place until it is whole."""
    from coop.pack import Options, run

    out = output / PACK_NAME
    if run(Options(ckpt=output, out=out, dtype=dtype, is_overwriting=out.exists(), is_verified=True)):
        raise SaveError(f"{out}: the pack is not as it was written; run python -m coop.pack again")
    return out


def check_reload(model: nn.Module, output: Path) -> str:
    """Load a fully tuned model back from its folder and compare it with the live one; what came of it.

    It is left out if memory does not hold the model twice. Raises CoopError for a weight that differs.
    """
    live = model.state_dict()
    needed = sum(tensor.nbytes for tensor in live.values())
    if any(tensor.is_meta or hasattr(tensor, "full_tensor") for tensor in live.values()):
        return f"{output}: not loaded back: this process holds only a part of the weights"
    if needed > memory_available_bytes():
        return f"{output}: not loaded back: {format_bytes(needed)} of memory are needed for a second copy"
    loader: Any = type(model)
    again = loader.from_pretrained(str(output), dtype=next(model.parameters()).dtype).state_dict()
    for name, weight in live.items():
        if name not in again or not torch.equal(weight.cpu(), again[name]):
            raise CoopError(
                f"{output}: {name} is not what was trained when it is loaded back; this is a fault"
            )
    return f"{output}: loaded back, all {len(live)} weights equal"
