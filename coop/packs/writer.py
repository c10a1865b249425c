"""Packing: a checkpoint, its adapter merged, written as a pack.

Owns the writing; promises that a pack appears whole or not at all, that an interrupted run goes on where it
stopped and ends with the same bytes, and that the experts are those which attach would serve (or their nearest in
the smaller type). Called by the command line `coop.pack`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from coop.adapters.attach import (
    load_config,
    load_dense,
    load_profile,
    open_store,
    quiet_loading,
    served_dtype,
    weight_paths,
)
from coop.adapters.transformers import ExpertsModule, build_on_meta, find_experts
from coop.checkpoint import ADAPTER_WEIGHTS, Checkpoint, open_checkpoint
from coop.errors import CheckpointError, RequestError
from coop.files import contained_file, read_json, write_atomic
from coop.layout import Field
from coop.packs.format import (
    BITS,
    PACK_MANIFEST,
    Manifest,
    Measured,
    PackedExpert,
    PackedFile,
    PackedLayer,
    expert_file_name,
    file_sha256,
    lay_out,
    packed_fields,
    read_manifest,
)
from coop.packs.image import Images
from coop.packs.journal import Journal, disk_faults_as_sentences
from coop.plan import format_bytes
from coop.profile import Profile
from coop.store import ExpertStore, bytes_of, stamp_of

SYNC_BYTES = 2**28  # an interrupted run does at most this much again
SPARE_BYTES = 2**26  # for the small files, and so that the disk is not filled to the last block
SHARD_SIZE = "5GB"
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_COPIED_ENDINGS = ("*.model", "*.tiktoken")
_FILE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackRequest:
    """What to pack: `kind` is bf16, int8 or int4, `dense` bf16 or int8; `order` model, profile, or "" for either."""

    ckpt: Path
    out: Path
    base: str | None = None
    kind: str = "bf16"
    dense: str = "bf16"
    order: str = ""
    is_overwriting: bool = False


@dataclass(frozen=True, slots=True)
class _Target:
    """The shape of the pack: fields and slot bytes of each layer, and where each expert goes."""

    slots: tuple[tuple[tuple[Field, ...], int], ...]
    experts: list[PackedExpert]
    files: list[PackedFile]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


@dataclass(slots=True)
class Packer:
    """One run of the packer, opened by `Packer.open`; a context manager that closes the source.

    `order` and `profile_status` say what became of the profile; `num_resumed` counts experts that an earlier run
    had finished.
    """

    request: PackRequest
    checkpoint: Checkpoint
    config: Any
    store: ExpertStore
    modules: list[ExpertsModule]
    dense: Any
    profile: Profile | None
    profile_status: str
    order: str
    source_dtype: torch.dtype
    num_resumed: int = 0
    _open_files: dict[int, int] = field(default_factory=dict)

    @classmethod
    def open(cls, request: PackRequest) -> Packer:
        """Read headers, dense weights and profile; refuse what cannot be packed. CoopError."""
        checkpoint = _open_source(request)
        config = load_config(checkpoint.weights)
        source_dtype = served_dtype("auto", config, checkpoint.weights)
        # codes are chosen from the weights as they are, not from their roundings
        work = source_dtype if request.kind in BITS else torch.bfloat16
        stamps = {path: stamp_of(path.stat()) for path in weight_paths(checkpoint)}
        store = open_store(checkpoint, config, work)
        try:
            dense = load_dense(checkpoint, config, torch.bfloat16)
            store.check_unchanged(stamps)
            profile, status = load_profile(checkpoint, dense, True)
            if request.order == "profile" and profile is None:
                raise RequestError(f"--order profile: there is none to order by ({status})")
        except BaseException:
            store.close()
            raise
        order = request.order or ("profile" if profile is not None else "model")
        modules = find_experts(build_on_meta(config))
        return cls(request, checkpoint, config, store, modules, dense, profile, status, order, source_dtype)

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    @property
    def dense_bytes(self) -> int:
        """Bytes of the weights that are no experts."""
        return sum(p.nbytes for p in self.dense.state_dict().values()) if self.dense is not None else 0

    def target(self) -> _Target:
        """Where everything will lie."""
        slots = tuple(packed_fields(entry, self.request.kind, torch.bfloat16) for entry in self.modules)
        orders = [self._expert_order(entry) for entry in self.modules]
        return _Target(slots, *lay_out(slots, orders))

    def _expert_order(self, entry: ExpertsModule) -> list[int]:
        """The experts of a layer as they shall lie: hottest in answers first, then in prompts, or as they are."""
        if self.order == "model" or self.profile is None:
            return list(range(entry.num_experts))
        answers, prompts = self.profile.hot_answer[entry.layer], self.profile.hot_prompt[entry.layer]
        return sorted(range(entry.num_experts), key=lambda e: (-answers[e], -prompts[e], e))

    def journal(self) -> Journal:
        """The hidden folder to write to, with what an earlier run has finished."""
        return Journal(self.request.out, self._facts(), self.request.is_overwriting)

    def _facts(self) -> dict[str, Any]:
        """What must be the same for a run to go on: options, and the source's files by size and time."""
        paths = [*weight_paths(self.checkpoint), self.checkpoint.weights / "config.json"]
        if self.checkpoint.adapter:
            paths.append(self.checkpoint.folder / ADAPTER_WEIGHTS)
        stamps = {str(p.resolve()): [p.stat().st_size, p.stat().st_mtime_ns] for p in paths}
        request = self.request
        choices = {"dtype": request.kind, "dense": request.dense, "order": self.order}
        return {"version": 1, **choices, "source": stamps}

    def write(self, journal: Journal, target: _Target, advance: Advance) -> Manifest:
        """Write everything but the name of the folder; `advance` takes bytes of experts as they are finished.

        CoopError for a disk that is full: what was written stays, to be gone on with.
        """
        with disk_faults_as_sentences(self.request.out):
            _check_room(journal, target, self.dense_bytes)
            if not journal.written.dense_sha256:
                journal.note_dense(self._write_dense(journal.folder))
            self.dense = None
            self._write_experts(journal, target, advance)
            manifest = self._manifest(journal, target, file_sha256(journal.folder / "config.json"))
            write_atomic(journal.folder / PACK_MANIFEST, manifest.to_json())
        return manifest

    def _write_dense(self, folder: Path) -> dict[str, str]:
        """Dense weights, config, tokenizer and profile; the digests of the weight files."""
        with quiet_loading():
            self.dense.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        write_atomic(folder / "config.json", _config_json(self.checkpoint.weights))
        (folder / "generation_config.json").unlink(missing_ok=True)
        copy_companions(self.checkpoint, folder)
        if self.profile is not None:
            identity = replace(self.profile.identity, adapter_digest="")  # the adapter is in the weights now
            replace(self.profile, identity=identity).save(folder)
        digests = {}
        for path in sorted(folder.glob("*.safetensors")):
            if path.name.startswith("model"):
                path.chmod((folder / "config.json").stat().st_mode)  # the library makes it private
                digests[path.name] = file_sha256(path)
        for path in folder.iterdir():
            _fsync(path)
        return digests

    def _write_experts(self, journal: Journal, target: _Target, advance: Advance) -> None:
        try:
            self._create_files(journal.folder, target)
            self._keep_only_what_is_there(journal, target, advance)
            self.num_resumed = len(journal.written.experts)
            left = [p for p in target.experts if (p.layer, p.expert) not in journal.written.experts]
            unsynced = 0
            with closing(self._images(target).made(left)) as images:
                for place, image in images:
                    _write_at(self._open_files[place.file], bytes_of(image.memory), place.offset)
                    journal.note_expert(place.layer, place.expert, image.written)
                    unsynced += place.nbytes
                    advance(place.nbytes)
                    if unsynced >= SYNC_BYTES:
                        journal.sync(self._flush)
                        unsynced = 0
        except KeyboardInterrupt:
            journal.sync(self._flush)
            raise
        finally:
            self._close_files()
        journal.sync(lambda: None)

    def _images(self, target: _Target) -> Images:
        is_transposed = [bool(entry.module.is_transposed) for entry in self.modules]
        return Images(self.store, target.slots, is_transposed, BITS.get(self.request.kind, 0))

    def _create_files(self, folder: Path, target: _Target) -> None:
        """Every file at its full size, with its header; extents that were written stay as they are."""
        for index, file in enumerate(target.files):
            path = folder / expert_file_name(index, len(target.files))
            self._open_files[index] = os.open(path, _FILE_FLAGS, 0o666)
            os.ftruncate(self._open_files[index], file.nbytes)
            _write_at(self._open_files[index], memoryview(file.header), 0)

    def _keep_only_what_is_there(self, journal: Journal, target: _Target, advance: Advance) -> None:
        """Read again what the journal says is finished; what differs is forgotten, and so is written anew."""
        said, journal.written.experts = journal.written.experts, {}
        for place in target.experts:
            written = said.get((place.layer, place.expert))
            if written is None:
                continue
            data = os.pread(self._open_files[place.file], place.nbytes, place.offset)
            if hashlib.sha256(data).hexdigest() == written.sha256:
                journal.written.experts[place.layer, place.expert] = written
                advance(place.nbytes)

    def _flush(self) -> None:
        """Put what was written on the disk, and leave nothing of it in the page cache."""
        for number in self._open_files.values():
            os.fsync(number)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)

    def _close_files(self) -> None:
        self._flush()
        for number in self._open_files.values():
            os.close(number)
        self._open_files.clear()

    def _manifest(self, journal: Journal, target: _Target, config_sha256: str) -> Manifest:
        experts = journal.written.experts
        layers = tuple(
            PackedLayer(
                name=entry.name,
                num_experts=entry.num_experts,
                top_k=entry.top_k,
                sha256=tuple(experts[entry.layer, e].sha256 for e in range(entry.num_experts)),
            )
            for entry in self.modules
        )
        squares = math.fsum(e.squares for e in experts.values())
        rms = math.sqrt(math.fsum(e.squared_error for e in experts.values()) / squares) if squares else 0.0
        return Manifest(
            dtype=self.request.kind,  # type: ignore[arg-type]
            dense=self.request.dense,  # type: ignore[arg-type]
            order=self.order,  # type: ignore[arg-type]
            source=self._describe_source(),
            expert_files=len(target.files),
            layers=layers,
            dense_sha256=journal.written.dense_sha256,
            config_sha256=config_sha256,
            measured=Measured(relative_rms=rms, expert_bytes=(self.store.stored_bytes, target.nbytes)),
        )

    def _describe_source(self) -> str:
        """Names without their places, which mean nothing elsewhere."""
        kind = f"{self.config.model_type} in {str(self.source_dtype).removeprefix('torch.')}"
        adapter = f", with the adapter {self.checkpoint.folder.resolve().name} merged"
        return (
            f"{self.checkpoint.weights.resolve().name} ({kind}){adapter if self.checkpoint.adapter else ''}"
        )


def _open_source(request: PackRequest) -> Checkpoint:
    checkpoint = open_checkpoint(request.ckpt, request.base)
    if request.out.resolve() in (checkpoint.folder.resolve(), checkpoint.weights.resolve()):
        raise RequestError(f"--out {request.out} is the source itself: name another folder")
    if checkpoint.is_pack and (kind := read_manifest(checkpoint.folder).dtype) != "bf16":
        raise CheckpointError(
            f"{checkpoint.folder} is a pack of {kind}, whose weights are rounded already: pack the checkpoint that "
            "it was made from"
        )
    return checkpoint


def _config_json(weights: Path) -> bytes:
    """The source's config, whose weights are bfloat16 from now on."""
    config = read_json(weights / "config.json", CheckpointError)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        if "torch_dtype" in part or "dtype" in part or part is config:
            part.pop("torch_dtype", None)
            part["dtype"] = "bfloat16"
    return (json.dumps(config, indent=2) + "\n").encode()


def copy_companions(checkpoint: Checkpoint, folder: Path) -> None:
    """What a model needs beside its weights and its config: how to generate, and the tokenizer."""
    _copy(checkpoint.weights, folder, ["generation_config.json"])
    tokenizer = checkpoint.tokenizer
    found = [path.name for ending in _COPIED_ENDINGS for path in sorted(tokenizer.glob(ending))]
    _copy(tokenizer, folder, [*_COPIED, *found])


def _copy(source: Path, target: Path, names: Sequence[str]) -> None:
    for name in names:
        if (source / name).exists():
            shutil.copyfile(contained_file(source, name, CheckpointError), target / name)


def _check_room(journal: Journal, target: _Target, dense_bytes: int) -> None:
    """Refuse before hours of work what the disk cannot hold; what is written already needs no room."""
    there = sum(path.stat().st_blocks * 512 for path in journal.folder.iterdir())
    needed = target.nbytes + dense_bytes + SPARE_BYTES - there
    free = shutil.disk_usage(journal.folder).free
    if needed > free:
        raise RequestError(
            f"the pack needs {format_bytes(needed)} more on the disk of {journal.out.parent}, "
            f"{format_bytes(SPARE_BYTES)} of it to spare, which has {format_bytes(free)} free: make room and run the "
            "same command again, or name a folder on another disk"
        )


def _write_at(number: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(number, data, offset)
        data, offset = data[done:], offset + done


def _fsync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def facts_of(manifest: Manifest) -> dict[str, Any]:
    """The numbers of a manifest, without its digests."""
    return {
        "dtype": manifest.dtype,
        "dense": manifest.dense,
        "order": manifest.order,
        "source": manifest.source,
        "layers": len(manifest.layers),
        "experts": sum(layer.num_experts for layer in manifest.layers),
        "expert_files": manifest.expert_files,
        "measured": manifest.measured.model_dump(),
    }
