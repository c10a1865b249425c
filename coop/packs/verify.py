"""Pack verify: a finished pack read again, as the runtime reads it, and compared with its digests.

Owns nothing; promises that one changed byte of an expert, of its padding or of the dense weights is named by the
expert or the file. Called by the packer's command line for `--verify`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from coop.adapters.attach import load_config, open_store
from coop.checkpoint import open_checkpoint
from coop.errors import CheckpointError, StoreError
from coop.files import contained_file
from coop.ids import ExpertId
from coop.packs.format import (
    Manifest,
    expert_paths,
    file_sha256,
    is_config_of,
    read_experts_header,
    read_manifest,
)
from coop.shards import shard_paths
from coop.store import bytes_of


@dataclass(slots=True)
class Damage:
    """What is not as the manifest says: experts, files that hold experts and cannot be read, files beside them."""

    experts: list[str] = field(default_factory=list)
    expert_files: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """All of it."""
        return [*self.files, *self.expert_files, *self.experts]


def find_damage(folder: Path, advance: Callable[[int], None]) -> Damage:
    """Read a whole pack as the runtime does, and name what differs; `advance` takes bytes of experts.

    Experts are not read where config.json or a file of theirs is damaged: none could be found by it.
    Raises CheckpointError for files that are not there, StoreError for whole files with wrong headers.
    """
    manifest = read_manifest(folder)
    damage = Damage()
    if not is_config_of(folder, manifest):
        damage.files.append("config.json")
    for name in sorted({path.name for path in shard_paths(folder)} | manifest.dense_sha256.keys()):
        path = contained_file(folder, name, CheckpointError)
        if file_sha256(path) != manifest.dense_sha256.get(name):
            damage.files.append(name)
    damage.expert_files = [path.name for path in expert_paths(folder, manifest) if not _is_whole(path)]
    if not damage.expert_files and "config.json" not in damage.files:
        damage.experts = _differing_experts(folder, manifest, advance)
    return damage


def _is_whole(path: Path) -> bool:
    try:
        read_experts_header(path)
    except StoreError:
        return False
    return True


def _differing_experts(folder: Path, manifest: Manifest, advance: Callable[[int], None]) -> list[str]:
    store = open_store(open_checkpoint(folder), load_config(folder), torch.bfloat16)
    found = []
    try:
        for index, layer in enumerate(manifest.layers):
            slot = store.new_slot(index)
            for expert, digest in enumerate(layer.sha256):
                store.load(ExpertId(index, expert), slot)
                if hashlib.sha256(bytes_of(slot.buffer)).hexdigest() != digest:
                    found.append(f"layer {index} expert {expert}")
                advance(slot.nbytes)
    finally:
        store.close()
    return found
