"""Merge: an adapter into its base, written as a folder in Hub layout that any program can load.

Owns the folder while it is written; promises the base's own tensor names, weights that equal PEFT's
`merge_and_unload` in the same dtype, and never more in memory than the dense part and the experts of one layer. Called
by `train.saving.export`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coop.adapters.attach import load_config, load_dense, open_store, quiet_loading, served_dtype
from coop.adapters.transformers import model_identity
from coop.checkpoint import Checkpoint, open_checkpoint
from coop.errors import RequestError
from coop.files import write_atomic
from coop.ids import ExpertId
from coop.packs.writer import SHARD_SIZE, copy_companions
from coop.plan import format_bytes
from coop.profile import PROFILE_NAME, Profile
from coop.shards import read_checkpoint_tensors, shard_paths
from coop.store import ExpertStore

INDEX_NAME = "model.safetensors.index.json"


def merge_adapter(adapter: Path, out: Path, base: str | Path | None = None) -> None:
    """Write the model of `adapter`, merged, with tokenizer and profile, into the empty folder `out`.

    Raises RequestError for a folder that is no adapter or a disk without room, CheckpointError for an adapter that
    cannot be merged.
    """
    checkpoint = open_checkpoint(adapter, base)
    if not checkpoint.adapter:
        raise RequestError(f"{adapter} holds no adapter: there is nothing to merge")
    _check_room(checkpoint, out)
    config = load_config(checkpoint.weights)
    dtype = served_dtype("auto", config, checkpoint.weights)
    dense: Any = load_dense(checkpoint, config, dtype)
    with quiet_loading():
        dense.save_pretrained(out, max_shard_size=SHARD_SIZE)
    _write_profile(checkpoint, dense, out)
    store = open_store(checkpoint, config, dtype)
    try:
        for layer, tensors in enumerate(_merged_layers(store, checkpoint.weights)):
            _save(tensors, out / f"experts-{layer}.safetensors")
    finally:
        store.close()
    _number_shards(out)
    shutil.copyfile(checkpoint.weights / "config.json", out / "config.json")
    copy_companions(checkpoint, out)


def _check_room(checkpoint: Checkpoint, out: Path) -> None:
    needed = sum(path.stat().st_size for path in shard_paths(checkpoint.weights))
    free = shutil.disk_usage(out).free
    if needed > free:
        raise RequestError(
            f"{out}: the merged model needs {format_bytes(needed)}, {format_bytes(free)} are free: make room"
        )


def _merged_layers(store: ExpertStore, base: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Of each layer, its experts' tensors by the names and in the shapes that the base has them in."""
    stored = read_checkpoint_tensors(base)
    for layer, layout in enumerate(store.layout.layers):
        tensors: dict[str, torch.Tensor] = {}
        slot = store.new_slot(layer)
        for expert, pieces in enumerate(layout.pieces):
            store.load(ExpertId(layer, expert), slot)
            for piece in pieces:
                weight = slot.weights[piece.parameter]
                extent = piece.shape[1 - piece.dim] if piece.is_transposed else piece.shape[piece.dim]
                block = weight.narrow(piece.dim, piece.start, extent)
                block = block.transpose(0, 1) if piece.is_transposed else block
                shape = stored[piece.tensor].shape
                if shape == piece.shape:
                    tensors[piece.tensor] = block.clone(memory_format=torch.contiguous_format)
                else:  # a stack of all experts
                    tensors.setdefault(piece.tensor, torch.empty(shape, dtype=weight.dtype))[expert] = block
        yield tensors


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def _number_shards(out: Path) -> None:
    """Give all weight files the names of one sharded model, and write its index."""
    (out / INDEX_NAME).unlink(missing_ok=True)
    files = sorted(path for path in out.glob("*.safetensors") if path.name != PROFILE_NAME)
    places: dict[str, str] = {}
    total = 0
    for number, path in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(out / f"{name}.new")  # the dense part may have a name of the new ones
        for tensor in read_names(out / f"{name}.new"):
            places[tensor] = name
        total += (out / f"{name}.new").stat().st_size
    for path in out.glob("*.new"):
        path.rename(path.with_suffix(""))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_atomic(out / INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode())


def read_names(path: Path) -> list[str]:
    """The tensors in a safetensors file."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _write_profile(checkpoint: Checkpoint, dense: Any, out: Path) -> None:
    """The adapter's profile, which belongs to the merged weights from now on."""
    if not (checkpoint.folder / PROFILE_NAME).exists():
        return
    profile = Profile.load(checkpoint.folder)
    identity = replace(profile.identity, adapter_digest="", router_digest=model_identity(dense).router_digest)
    replace(profile, identity=identity).save(out)
