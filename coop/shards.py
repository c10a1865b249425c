"""Shards: the safetensors headers of a checkpoint, checked against the files before anything is served.

Owns the map from tensor name to file, offset and shape; promises that every byte it names lies inside a
regular file of the folder. Called by the layout and the store. Offsets are what safetensors' own readers
hide and positional reads need, hence the parser here; it follows the format's specification.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from coop.errors import CheckpointError, StoreError
from coop.files import contained_file, parse_json, read_json

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_DTYPES = {
    "F64": (torch.float64, 8),
    "F32": (torch.float32, 4),
    "F16": (torch.float16, 2),
    "BF16": (torch.bfloat16, 2),
    "I64": (torch.int64, 8),
    "I32": (torch.int32, 4),
    "I16": (torch.int16, 2),
    "I8": (torch.int8, 1),
    "U8": (torch.uint8, 1),
    "BOOL": (torch.bool, 1),
    "F8_E4M3": (torch.float8_e4m3fn, 1),
    "F8_E5M2": (torch.float8_e5m2, 1),
    "F8_E8M0": (torch.uint8, 1),
    "U16": (torch.uint16, 2),
    "U32": (torch.uint32, 4),
    "U64": (torch.uint64, 8),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a file: absolute byte `offset`, `nbytes`, shape and dtype; `stored_as` is the format's name."""

    name: str
    path: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_as: str


def read_checkpoint_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of a Hub-layout folder, by name.

    Raises CheckpointError for a folder without safetensors weights and StoreError for a file that is not
    what its header or the index promises (truncated, duplicated, outside the folder).
    """
    tensors: dict[str, TensorEntry] = {}
    for path in shard_paths(folder):
        for name, entry in read_header(path).items():
            if name in tensors:
                raise StoreError(path, name, f"is also in {tensors[name].path.name}")
            tensors[name] = entry
    return tensors


def shard_paths(folder: Path) -> list[Path]:
    """The weight files of a folder: the single file, or the index's shards.

    The order is transformers' own, which loads the dense part: both must read the same files.
    """
    if (folder / SINGLE_NAME).exists():
        return [contained_file(folder, SINGLE_NAME, CheckpointError)]
    if (folder / INDEX_NAME).exists():
        return _indexed_paths(folder)
    other = next((p.name for p in sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))), "")
    if other:
        raise CheckpointError(f"{folder} holds {other}: coop reads safetensors only")
    raise CheckpointError(f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}")


def _indexed_paths(folder: Path) -> list[Path]:
    index = read_json(folder / INDEX_NAME, CheckpointError)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX_NAME}: weight_map is not a table of file names")
    names = sorted(set(weight_map.values()))
    if not names:
        raise CheckpointError(f"{folder / INDEX_NAME}: weight_map is empty")
    return [contained_file(folder, name, CheckpointError) for name in names]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, with absolute offsets; StoreError if the file does not hold them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise StoreError(path, "", f"{size} bytes, too short for a safetensors file")
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise StoreError(path, "", f"header says {header_bytes} bytes, the file has {size}")
        header = parse_json(
            file.read(header_bytes), lambda reason: StoreError(path, "header", reason), MAX_HEADER_BYTES
        )
    if not isinstance(header, dict):
        raise StoreError(path, "header", "is not a table")
    start = 8 + header_bytes
    entries = {
        name: _entry(path, name, value, start) for name, value in header.items() if name != "__metadata__"
    }
    _check_extents(path, entries, start, size)
    return entries


def _entry(path: Path, name: str, value: object, start: int) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise StoreError(path, name[:200], "header entry lacks dtype, shape or data_offsets")
    shape, offsets = value["shape"], value["data_offsets"]
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise StoreError(path, name[:200], "shape or offsets are not sizes")
    if value["dtype"] not in _DTYPES:
        raise StoreError(path, name[:200], f"dtype {str(value['dtype'])[:40]!r} is not known")
    dtype, itemsize = _DTYPES[value["dtype"]]
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * itemsize != nbytes:
        raise StoreError(path, name[:200], f"shape {shape} as {value['dtype']} is not {nbytes} bytes")
    return TensorEntry(name, path, start + offsets[0], nbytes, tuple(shape), dtype, value["dtype"])


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**48 for v in values)


def _check_extents(path: Path, entries: dict[str, TensorEntry], start: int, size: int) -> None:
    """Tensors must tile the data section exactly: no hole, no overlap, no byte missing or left over."""
    end = start
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != end:
            raise StoreError(path, entry.name, f"begins at byte {entry.offset}, expected {end}")
        end = entry.offset + entry.nbytes
        if end > size:
            raise StoreError(path, entry.name, f"header declares {end} bytes, the file has {size}")
    if end != size:
        raise StoreError(path, "", f"header declares {end} bytes, the file has {size}")
