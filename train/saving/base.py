"""Base: which weights a run starts from, cheaply, so that a resumed run is refused on others.

Owns the identity of a base model: a digest of each of its files, or its revision on the hub; promises that it reads
no more than 2 MiB and the header of a file where all together are larger than 1 GiB. `train.run` asks for it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from coop.errors import CheckpointError

WHOLE_BYTES = 2**30  # weights up to this size are read whole: about a second
EDGE_BYTES = 2**20
_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "config.json")
_PROFILE_ENDING = "profile.safetensors"  # coop's own file beside a base: it decides nothing


def identify_base(path: str, config: Any) -> dict[str, str]:
    """What tells the base at `path` from another: by file name, or its commit if it is a model of the hub.

    Args:
        config: the loaded model's; it knows the commit.

    Raises CheckpointError for a file that cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        return {"commit": str(getattr(config, "_commit_hash", None))}
    found = sorted({file for pattern in _PATTERNS for file in folder.glob(pattern)})
    files = [file for file in found if not file.name.endswith(_PROFILE_ENDING)]
    try:
        is_small = sum(file.stat().st_size for file in files) <= WHOLE_BYTES
        return {file.name: _digest(file, is_small) for file in files}
    except OSError as exc:
        raise CheckpointError(f"model.path: {exc.filename or folder}: {exc.strerror or exc}") from exc


def _digest(path: Path, is_whole: bool) -> str:
    """Of the whole file; else of its size, its first MiB with a safetensors header however long, and its last MiB."""
    with path.open("rb") as file:
        if is_whole:
            return hashlib.file_digest(file, "sha256").hexdigest()
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        head = file.read(EDGE_BYTES)
        digest.update(head)
        if path.suffix == ".safetensors":
            header_bytes = min(int.from_bytes(head[:8], "little"), 64 * EDGE_BYTES)
            digest.update(file.read(max(0, 8 + header_bytes - len(head))))
        file.seek(max(file.tell(), size - EDGE_BYTES))
        digest.update(file.read(EDGE_BYTES))
        return digest.hexdigest()
