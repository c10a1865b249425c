"""Layout: which bytes of which file make up each expert, and where they land in a slot.

Owns the map from ExpertId to pieces; promises that every expert of the model is covered exactly once, with
the shapes the model expects, before anything is read. The map is resolved through transformers' own weight
conversion, so per-expert and fused storage are the same to the rest of coop. Called by the store.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coop.adapters.transformers import ExpertsModule, build_on_meta, find_experts
from coop.errors import LayoutError
from coop.ids import ExpertId
from coop.shards import TensorEntry

SLOT_ALIGNMENT = 64
READABLE = {torch.bfloat16, torch.float16, torch.float32}


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes in a shard that becomes one block of one parameter of one expert.

    The block is `shape` as stored; it lands in the parameter at `start` along `dim`, transposed first if asked.
    """

    path: Path
    tensor: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    parameter: str
    dim: int = 0
    start: int = 0
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor inside a slot: `offset` bytes from its start, 64-byte aligned."""

    name: str
    shape: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of whole pages in a file that is, byte for byte, what a slot holds; `tensor` is the first in it."""

    path: Path
    tensor: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The experts of one layer: the fields of a slot, its size in bytes, and the pieces of each expert.

    `runs_alone`: experts are modules that run one after another, so a budget for one of them is enough.
    `extents`: of each expert, where the file has slots as they are (packs); a slot is then filled by one read.
    """

    name: str
    fields: tuple[Field, ...]
    slot_bytes: int
    pieces: tuple[tuple[Piece, ...], ...]  # [experts][pieces in file order]
    top_k: int
    runs_alone: bool = False
    extents: tuple[Extent, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """All MoE layers of one checkpoint."""

    layers: tuple[LayerLayout, ...]

    @property
    def num_experts(self) -> int:
        """The largest number of experts in a layer."""
        return max(len(layer.pieces) for layer in self.layers)

    @property
    def expert_bytes(self) -> int:
        """Bytes of every expert's slot, together."""
        return sum(layer.slot_bytes * len(layer.pieces) for layer in self.layers)

    def disk_order(self, expert: ExpertId) -> tuple[str, int]:
        """Sort key: where on disk the expert begins."""
        first = self.layers[expert.layer].pieces[expert.expert][0]
        return (first.path.name, first.offset)


def slot_fields(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> tuple[tuple[Field, ...], int]:
    """Fields of (shape, dtype) one after another, each 64-byte aligned, and the size of the slot in bytes."""
    fields, offset = [], 0
    for name, (shape, dtype) in tensors.items():
        fields.append(Field(name, shape, offset, dtype))
        offset += _round_up(math.prod(shape) * dtype.itemsize)
    return tuple(fields), offset


def _round_up(nbytes: int) -> int:
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def resolve_layout(config: Any, tensors: Mapping[str, TensorEntry], dtype: torch.dtype) -> Layout:
    """Find every expert of the model that `config` describes among the checkpoint's `tensors`.

    Raises LayoutError listing what is missing, or naming a conversion that cannot be read in place.
    """
    model = build_on_meta(config)
    sources = _sources_by_target(model, tensors)
    layers, missing = [], []
    for experts in find_experts(model):
        shapes = {name: tuple(experts.module._parameters[name].shape[1:]) for name in experts.parameters}  # type: ignore[union-attr]
        fields, slot_bytes = slot_fields({name: (shape, dtype) for name, shape in shapes.items()})
        pieces: list[list[Piece]] = [[] for _ in range(experts.num_experts)]
        for name, shape in shapes.items():
            missing += _add_pieces(
                pieces, experts, name, shape, sources.get(f"{experts.name}.{name}"), tensors
            )
        ordered = tuple(tuple(sorted(p, key=lambda piece: (piece.path.name, piece.offset))) for p in pieces)
        layers.append(LayerLayout(experts.name, fields, slot_bytes, ordered, experts.top_k))
    if missing:
        raise LayoutError(f"{len(missing)} expert tensors are missing, first {', '.join(missing[:3])}")
    return Layout(tuple(layers))


@dataclass(slots=True)
class _Source:
    """How one stacked parameter is stored: the converter's operations and the tensors of each source pattern."""

    operations: list[Any]
    patterns: list[str]
    tensors: dict[str, list[str]]


def _sources_by_target(model: Any, tensors: Mapping[str, TensorEntry]) -> dict[str, _Source]:
    """Send every checkpoint name through transformers' renaming, as its loader does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    found: dict[str, _Source] = {}
    for key in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if target not in state and key in state:
            target, pattern = key, None
        if target not in state:
            continue
        if pattern is None:
            found.setdefault(target, _Source([], [key], {})).tensors.setdefault(key, []).append(key)
        else:
            converter = by_pattern[pattern]
            source = found.setdefault(target, _Source(converter.operations, converter.source_patterns, {}))
            source.tensors.setdefault(pattern, []).append(key)
    return found


def _add_pieces(
    pieces: list[list[Piece]],
    experts: ExpertsModule,
    name: str,
    shape: tuple[int, ...],
    source: _Source | None,
    tensors: Mapping[str, TensorEntry],
) -> list[str]:
    """Append the pieces of parameter `name` to each expert; return the names of what is missing."""
    full_name = f"{experts.name}.{name}"
    if source is None:
        return [full_name]
    stored = next((tensors[keys[0]].shape for keys in source.tensors.values()), ())
    is_per_expert, concat_dim, is_transposed = _read_operations(full_name, source, stored[1:] != shape)
    covered = [0] * experts.num_experts
    missing = []
    for pattern in source.patterns:
        keys = source.tensors.get(pattern, [])
        expected = experts.num_experts if is_per_expert else 1
        if len(keys) != expected:
            missing.append(f"{full_name} from {pattern} ({len(keys)} of {expected})")
            continue
        for expert in range(experts.num_experts):
            entry = tensors[keys[expert if is_per_expert else 0]]
            piece = _piece(entry, expert, name, is_per_expert, concat_dim, covered[expert], is_transposed)
            pieces[expert].append(piece)
            placed = tuple(reversed(piece.shape)) if is_transposed else piece.shape
            covered[expert] += placed[concat_dim]
            _check_block(full_name, placed, shape, concat_dim)
    if not missing and any(extent != shape[concat_dim] for extent in covered):
        raise LayoutError(f"{full_name}: stored experts have {covered[0]} rows, the model expects {shape}")
    return missing


def _piece(
    entry: TensorEntry,
    expert: int,
    parameter: str,
    is_per_expert: bool,
    dim: int,
    start: int,
    is_transposed: bool,
) -> Piece:
    if entry.dtype not in READABLE:
        raise LayoutError(
            f"{entry.name} is stored as {entry.stored_as}; coop reads BF16, F16 and F32 experts"
        )
    shape = entry.shape if is_per_expert else entry.shape[1:]
    nbytes = math.prod(shape) * entry.dtype.itemsize
    offset = entry.offset if is_per_expert else entry.offset + expert * nbytes
    return Piece(
        entry.path, entry.name, offset, nbytes, entry.dtype, shape, parameter, dim, start, is_transposed
    )


def _check_block(name: str, placed: tuple[int, ...], shape: tuple[int, ...], dim: int) -> None:
    fits = len(placed) == len(shape) and all(
        a == b for i, (a, b) in enumerate(zip(placed, shape, strict=True)) if i != dim
    )
    if not fits:
        raise LayoutError(f"{name}: stored as {placed} for each expert, the model expects {shape}")


def _read_operations(name: str, source: _Source, is_other_shape: bool) -> tuple[bool, int, bool]:
    """(one tensor per expert, dimension of concatenation within an expert, transposed) from transformers' operations.

    Stacking is over dimension 0; dimension d of the stack is dimension d - 1 of one expert. A transpose that
    checks dimensions happens only where the stored shape is not the model's.
    """
    is_per_expert, concat_dim, is_transposed = False, 0, False
    for operation in source.operations:
        kind = type(operation).__name__
        if kind == "MergeModulelist" and operation.dim == 0:
            is_per_expert = True
        elif kind == "Concatenate" and operation.dim >= 1:
            concat_dim = operation.dim - 1
        elif kind == "Transpose" and {operation.dim0, operation.dim1} == {1, 2}:
            is_transposed = is_other_shape or not operation.check_dims
        else:
            raise LayoutError(
                f"{name} is stored through {kind}, which cannot be read one expert at a time; load the model with "
                "transformers and save it again with save_pretrained(DIR, save_original_format=False)"
            )
    return is_per_expert, concat_dim, is_transposed
