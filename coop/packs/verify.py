"""Pack verify: a finished pack read again, as the runtime reads it, and compared with its digests.

Owns nothing; promises that one changed byte of an expert, of its padding or of the dense weights is named by the
expert or the file. Called by the packer's command line for `--verify`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from coop.adapters.attach import load_config, open_store
from coop.checkpoint import open_checkpoint
from coop.errors import CheckpointError
from coop.files import contained_file
from coop.ids import ExpertId
from coop.packs.format import read_manifest
from coop.packs.writer import file_sha256
from coop.shards import shard_paths
from coop.store import bytes_of


def differing(folder: Path, advance: Callable[[int], None]) -> list[str]:
    """Read a whole pack as the runtime does; what is not as its manifest says: experts by name, files by name.

    Raises CheckpointError and StoreError for headers that are wrong.
    """
    manifest = read_manifest(folder)
    store = open_store(open_checkpoint(folder), load_config(folder), torch.bfloat16)
    found = []
    for name in sorted({path.name for path in shard_paths(folder)} | manifest.dense_sha256.keys()):
        path = contained_file(folder, name, CheckpointError)
        if file_sha256(path) != manifest.dense_sha256.get(name):
            found.append(name)
    try:
        for index, layer in enumerate(manifest.layers):
            slot = store.new_slot(index)
            for expert, digest in enumerate(layer.sha256):
                store.load(ExpertId(index, expert), slot)
                if hashlib.sha256(bytes_of(slot.buffer)).hexdigest() != digest:
                    found.append(f"layer {index} ({layer.name}) expert {expert}")
                advance(slot.nbytes)
    finally:
        store.close()
    return found
