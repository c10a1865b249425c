"""Packing for tests: a pack of a folder through the packer itself, and what may be done to its files.

Owns nothing; promises the shipping code at every step, without its command line. Called by tests of packs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coop.packs.format import Manifest
from coop.packs.writer import Packer, PackRequest


def pack(
    ckpt: Path,
    out: Path,
    kind: str = "bf16",
    advance: Callable[[int], None] = lambda nbytes: None,
    **over: Any,
) -> Manifest:
    """Pack `ckpt` to `out`; returns the manifest."""
    with Packer.open(PackRequest(ckpt=ckpt, out=out, kind=kind, **over)) as packer:
        target = packer.target()
        with packer.journal() as journal:
            manifest = packer.write(journal, target, advance)
            journal.publish()
    return manifest


def read_table(path: Path) -> dict[str, Any]:
    """The header of a safetensors file."""
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def replace_table(path: Path, table: dict[str, Any]) -> None:
    """Put another header in place, of the same length so that no offset moves."""
    data = path.read_bytes()
    room = int.from_bytes(data[:8], "little")
    text = json.dumps(table, separators=(",", ":")).encode()
    assert len(text) <= room
    path.write_bytes(data[:8] + text.ljust(room) + data[8 + room :])


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON object in a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
