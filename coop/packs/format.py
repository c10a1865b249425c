"""Pack format: a checkpoint laid out for coop, every expert one aligned run of bytes that is its slot's image.

Owns names, manifest and header of a pack; promises that a pack which opens has every expert of the model its
config describes, where one read fetches it, and that a damaged or hostile one is refused by name. Written by
the packer; read by the checkpoint, by attach, and by `--verify`. Every file is ordinary safetensors.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coop.adapters.transformers import ExpertsModule, build_on_meta, find_experts
from coop.checkpoint import PACK_MANIFEST, is_pack
from coop.errors import CheckpointError, LayoutError, StoreError
from coop.files import contained_file, read_json
from coop.layout import Extent, LayerLayout, Layout, Piece, slot_fields
from coop.layout import Field as SlotField
from coop.quantise import GROUP, padded
from coop.shards import TensorEntry, read_header
from coop.store import PAGE

VERSION = 1
FILE_BYTES = 2**32
FILE_EXPERTS = 4096  # keeps the header of a file of tiny experts under the format's limit
KINDS = ("bf16", "int8", "int4")
BITS = {"int8": 8, "int4": 4}
_STORED_AS = {torch.bfloat16: "BF16", torch.int8: "I8", torch.uint8: "U8"}

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)


class PackedLayer(BaseModel):
    """One MoE layer: `sha256` is of each expert's extent, in the order of the model."""

    model_config = _STRICT
    name: Text
    num_experts: Annotated[int, Field(ge=1, le=65_535)]
    top_k: Annotated[int, Field(ge=1, le=65_535)]
    sha256: tuple[Digest, ...]


class Measured(BaseModel):
    """What packing has cost: `perplexity` and `tokens_per_s` are of (source, pack), both 0 if not measured.

    relative_rms: root of the squared error of all weights over their squares. expert_bytes: on disk,
    of (source, pack). tokens: that perplexity was taken over. tokens_per_s is a rough figure of a few greedy tokens.
    """

    model_config = _STRICT
    relative_rms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    expert_bytes: tuple[int, int] = (0, 0)
    tokens: Annotated[int, Field(ge=0)] = 0
    perplexity: tuple[float, float] = (0.0, 0.0)
    tokens_per_s: tuple[float, float] = (0.0, 0.0)


class Manifest(BaseModel):
    """What `coop_pack.json` says. `dense`: how linear layers that are no experts are held once they are loaded.

    `dense_sha256` is by file name; `config_sha256` is of config.json, "" in packs from before it was kept.
    """

    model_config = _STRICT
    version: Literal[1] = 1
    dtype: Literal["bf16", "int8", "int4"]
    group_size: Literal[32] = 32
    dense: Literal["bf16", "int8"] = "bf16"
    order: Literal["model", "profile"]
    source: Text
    expert_files: Annotated[int, Field(ge=1, le=99_999)]
    layers: Annotated[tuple[PackedLayer, ...], Field(min_length=1, max_length=1000)]
    dense_sha256: dict[Text, Digest]
    config_sha256: Digest | Literal[""] = ""
    measured: Measured = Measured()

    def to_json(self) -> bytes:
        """The file's bytes."""
        return (json.dumps(self.model_dump(), indent=1, allow_nan=False) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a pack. CheckpointError names the first thing that is wrong with it."""
    if not is_pack(folder):
        raise CheckpointError(
            f"{folder} is not a pack: it has no {PACK_MANIFEST}; coop pack makes one with --out"
        )
    path = contained_file(folder, PACK_MANIFEST, CheckpointError)
    facts = read_json(path, CheckpointError)
    if isinstance(facts, dict) and facts.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: version {str(facts.get('version'))[:40]}; this coop reads version {VERSION}"
        )
    try:
        # strict, from JSON: its arrays become tuples, and no text a number
        manifest = Manifest.model_validate_json(json.dumps(facts))
    except ValidationError as exc:
        first = exc.errors()[0]
        place = ".".join(str(part)[:60] for part in first["loc"])
        raise CheckpointError(f"{path}: {place or 'the manifest'}: {first['msg'][:200]}") from exc
    for layer in manifest.layers:
        if len(layer.sha256) != layer.num_experts:
            raise CheckpointError(
                f"{path}: {layer.name[:200]} has {layer.num_experts} experts and {len(layer.sha256)} digests"
            )
    return manifest


def expert_file_name(index: int, count: int) -> str:
    """The name of the file with this index, from 0."""
    return f"experts-{index + 1:05d}-of-{count:05d}.safetensors"


def expert_paths(folder: Path, manifest: Manifest) -> list[Path]:
    """The files with experts, each a regular file of the folder. CheckpointError names one that is not."""

    def refused(reason: str) -> CheckpointError:
        return CheckpointError(f"{folder}: {reason}: copy the pack again")

    names = (expert_file_name(i, manifest.expert_files) for i in range(manifest.expert_files))
    return [contained_file(folder, name, refused) for name in names]


def read_experts_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file of experts, without its padding. StoreError names the expert or the file."""
    try:
        entries = read_header(path)
    except StoreError as exc:
        if exc.tensor.startswith("pad."):
            raise StoreError(path, "", f"{exc.what}: copy the file or pack again") from exc
        raise
    return {name: entry for name, entry in entries.items() if not name.startswith("pad.")}


def file_sha256(path: Path) -> str:
    """The digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_config_of(folder: Path, manifest: Manifest) -> bool:
    """Whether the folder's config.json is the one that was packed, as far as the manifest knows."""
    path = contained_file(folder, "config.json", CheckpointError)
    return manifest.config_sha256 in ("", file_sha256(path))


def pack_hint(folder: Path) -> str:
    """What to add to a refusal of a folder that is no pack but has the files of one."""
    if is_pack(folder) or not any(folder.glob("experts-*-of-*.safetensors")):
        return ""
    return f"; {folder} looks like a pack without its {PACK_MANIFEST}: copy the pack again"


# slots


def packed_tensors(
    experts: ExpertsModule, kind: str, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of one expert: the model's own in `dtype`, or codes and scales.

    Quantised weights are output-major, [out, in] rounded up to groups, whatever the class does.
    """
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name in experts.parameters:
        parameter = experts.module._parameters[name]
        assert parameter is not None
        shape = tuple(parameter.shape[1:])
        if kind not in BITS or name.endswith("_bias"):
            found[name] = (shape, dtype)
            continue
        out, columns = reversed(shape) if experts.module.is_transposed else shape
        width = padded(columns)
        is_half = BITS[kind] == 4
        found[name] = ((out, width // 2 if is_half else width), torch.uint8 if is_half else torch.int8)
        found[f"{name}_scale"] = ((out, width // GROUP), torch.bfloat16)
    return found


def packed_fields(experts: ExpertsModule, kind: str, dtype: torch.dtype) -> tuple[tuple[SlotField, ...], int]:
    """The fields of one expert's slot, and its size in whole pages."""
    fields, nbytes = slot_fields(packed_tensors(experts, kind, dtype))
    return fields, -(-nbytes // PAGE) * PAGE


def tensor_name(layer: int, expert: int, parameter: str) -> str:
    """The name under which a pack keeps one tensor of one expert."""
    return f"layers.{layer}.experts.{expert}.{parameter}"


# writing


@dataclass(frozen=True, slots=True)
class PackedExpert:
    """Where one expert goes: the file by index, and its first byte there."""

    layer: int
    expert: int
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One file to be: its header, padded to a page, and its size."""

    header: bytes
    nbytes: int


def lay_out(
    layers: Sequence[tuple[tuple[SlotField, ...], int]], orders: Sequence[Sequence[int]]
) -> tuple[list[PackedExpert], list[PackedFile]]:
    """Where each expert of each layer goes, in the order of writing, and the files that hold them.

    layers: fields and slot bytes of each; orders: the experts of each layer as they shall lie.
    """
    wanted = [(layer, expert) for layer, order in enumerate(orders) for expert in order]
    groups: list[list[tuple[int, int]]] = [[]]
    room = FILE_BYTES
    for layer, expert in wanted:
        if groups[-1] and (layers[layer][1] > room or len(groups[-1]) == FILE_EXPERTS):
            groups.append([])
            room = FILE_BYTES
        groups[-1].append((layer, expert))
        room -= layers[layer][1]
    places, files, pads = [], [], 0
    for index, group in enumerate(groups):
        table, pads = _header_table(layers, group, pads)
        header = _header_bytes(table)
        offset = len(header)
        for layer, expert in group:
            places.append(PackedExpert(layer, expert, index, offset, layers[layer][1]))
            offset += layers[layer][1]
        files.append(PackedFile(header, offset))
    return places, files


def _header_table(
    layers: Sequence[tuple[tuple[SlotField, ...], int]], group: Sequence[tuple[int, int]], pads: int
) -> tuple[dict[str, Any], int]:
    """The entries of one file, tensors and what lies between them, and the number of the next padding."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0

    def add(name: str, stored_as: str, shape: Sequence[int], nbytes: int) -> None:
        nonlocal end
        table[name] = {"dtype": stored_as, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes

    for layer, expert in group:
        fields, slot_bytes = layers[layer]
        start = end
        for field in fields:
            gap = start + field.offset - end
            if gap:
                add(f"pad.{pads}", "U8", [gap], gap)
                pads += 1
            nbytes = math.prod(field.shape) * field.dtype.itemsize
            add(tensor_name(layer, expert, field.name), _STORED_AS[field.dtype], field.shape, nbytes)
        gap = start + slot_bytes - end
        if gap:
            add(f"pad.{pads}", "U8", [gap], gap)
            pads += 1
    return table, pads


def _header_bytes(table: Mapping[str, Any]) -> bytes:
    """Length and JSON, with spaces behind it so that the data begins on a page."""
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


# reading


def pack_layout(config: Any, folder: Path, dtype: torch.dtype) -> Layout:
    """Where every expert of the model that `config` describes lies in a pack, for slots served in `dtype`.

    Slots are the files' own bytes if `dtype` is what the pack holds (always where it is quantised, whose
    products are in the type of what goes in); else each tensor is cast. Raises CheckpointError and StoreError.
    """
    manifest = read_manifest(folder)
    if not is_config_of(folder, manifest):
        raise CheckpointError(
            f"{folder / 'config.json'} is not the one that was packed: copy the pack again, or pack the checkpoint "
            "again"
        )
    experts = find_experts(build_on_meta(config))
    _check_same_model(folder, manifest, experts)
    entries: dict[str, TensorEntry] = {}
    for path in expert_paths(folder, manifest):
        for name, entry in read_experts_header(path).items():
            if name in entries:
                raise StoreError(path, name[:200], f"is also in {entries[name].path.name}")
            entries[name] = entry
    layers = tuple(_packed_layer(e, manifest, entries, dtype) for e in experts)
    if entries:
        left = next(iter(entries.values()))
        raise StoreError(left.path, left.name[:200], "is no tensor of the model that config.json describes")
    return Layout(layers)


def _check_same_model(folder: Path, manifest: Manifest, experts: Sequence[ExpertsModule]) -> None:
    if len(manifest.layers) != len(experts):
        raise CheckpointError(
            f"{folder / PACK_MANIFEST} has {len(manifest.layers)} MoE layers, config.json {len(experts)}"
        )
    for entry, layer in zip(experts, manifest.layers, strict=True):
        mine = (layer.name, layer.num_experts, layer.top_k)
        if mine != (entry.name, entry.num_experts, entry.top_k):
            raise CheckpointError(
                f"{folder / PACK_MANIFEST}: {layer.name[:200]} has {layer.num_experts} experts, top-{layer.top_k}; "
                f"config.json says {entry.name} with {entry.num_experts}, top-{entry.top_k}"
            )


def _packed_layer(
    experts: ExpertsModule, manifest: Manifest, entries: dict[str, TensorEntry], dtype: torch.dtype
) -> LayerLayout:
    """One layer, whose tensors are taken out of `entries`."""
    stored, slot_bytes = packed_fields(experts, manifest.dtype, torch.bfloat16)
    is_image = manifest.dtype in BITS or dtype == torch.bfloat16
    pieces, extents = [], []
    for expert in range(experts.num_experts):
        own = tuple(_packed_piece(experts.layer, expert, field, entries) for field in stored)
        pieces.append(own)
        extents.append(_extent(own, stored, slot_bytes))
    if is_image:
        return LayerLayout(
            experts.name, stored, slot_bytes, tuple(pieces), experts.top_k, extents=tuple(extents)
        )
    fields, slot_bytes = packed_fields(experts, manifest.dtype, dtype)
    return LayerLayout(experts.name, fields, slot_bytes, tuple(pieces), experts.top_k)


def _packed_piece(layer: int, expert: int, field: SlotField, entries: dict[str, TensorEntry]) -> Piece:
    name = tensor_name(layer, expert, field.name)
    entry = entries.pop(name, None)
    if entry is None:
        raise LayoutError(f"the pack has no {name}; pack the checkpoint again")
    if (entry.shape, entry.stored_as) != (field.shape, _STORED_AS[field.dtype]):
        raise StoreError(
            entry.path,
            name,
            f"is {entry.stored_as} {entry.shape}, the model needs {_STORED_AS[field.dtype]} {field.shape}",
        )
    return Piece(entry.path, name, entry.offset, entry.nbytes, entry.dtype, entry.shape, field.name)


def _extent(pieces: Sequence[Piece], fields: Sequence[SlotField], slot_bytes: int) -> Extent:
    """The run of bytes that is this expert's slot. StoreError where its tensors do not lie as in a slot."""
    first = pieces[0]
    if first.offset % PAGE:
        raise StoreError(first.path, first.tensor, f"begins at byte {first.offset}, not on a page of {PAGE}")
    for piece, field in zip(pieces, fields, strict=True):
        if piece.path != first.path or piece.offset != first.offset + field.offset:
            raise StoreError(
                piece.path,
                piece.tensor,
                f"begins at byte {piece.offset}, its slot at {first.offset} has it {field.offset} bytes on",
            )
    size = first.path.stat().st_size
    if first.offset + slot_bytes > size:
        raise StoreError(
            first.path,
            first.tensor,
            f"its slot ends at byte {first.offset + slot_bytes}, the file has {size}",
        )
    return Extent(first.path, first.tensor, first.offset, slot_bytes)


def with_measured(manifest: Manifest, **facts: Any) -> Manifest:
    """The manifest with some facts about the cost of packing replaced."""
    return manifest.model_copy(update={"measured": manifest.measured.model_copy(update=facts)})
