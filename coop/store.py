"""ExpertStore: read-only bytes of experts, and the slots they are read into.

Owns the open files of a checkpoint (or the live weights of a training model); promises that a slot holds
exactly the expert asked for when `load` returns, or that `load` raises. Called by the prefetcher's threads.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from coop.adapters.transformers import ExpertsModule
from coop.devices import Fence
from coop.errors import ClosedError, StoreError
from coop.ids import ExpertId
from coop.layout import Extent, Field, Layout, Piece
from coop.staging import Window

PAGE = (
    4096  # O_DIRECT wants offset, length and memory aligned to the device's block; a page covers all in use
)
RETRY_SECONDS = 0.01
PAGES_FROM_BYTES = 2**20
Stamp = tuple[int, int, int]


class MergeAdapter(Protocol):
    """Adds an adapter's update to an expert's weights, in place."""

    @property
    def nbytes(self) -> int:
        """Memory it holds."""

    def __call__(self, expert: ExpertId, weights: dict[str, torch.Tensor]) -> None: ...


class Slot:
    """Memory for one expert: `buffer` uint8 [slot_bytes], `weights` views into it by parameter name.

    `generation` counts how often the slot was given up. `last_read` is behind every kernel that read the slot
    on a device, set before the expert is released: the next bytes are not written before it is done. `jobs` is
    what execution derives from where the weights lie, None until then.
    """

    __slots__ = ("buffer", "generation", "jobs", "last_read", "nbytes", "weights")

    def __init__(self, buffer: torch.Tensor, weights: dict[str, torch.Tensor]) -> None:
        self.buffer, self.weights, self.nbytes = buffer, weights, buffer.numel()
        self.generation = 0
        self.last_read: Fence | None = None
        self.jobs: Any = None


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One MoE layer in numbers; slots of layers with the same `kind` are interchangeable."""

    num_experts: int
    top_k: int
    slot_bytes: int
    kind: int
    runs_alone: bool = False

    @property
    def at_once(self) -> int:
        """Experts that the smallest budget must hold: those of one token, or one where each runs alone."""
        return 1 if self.runs_alone else min(self.top_k, self.num_experts)


class Store(Protocol):
    """What residency and the prefetcher ask of a source of experts."""

    @property
    def geometry(self) -> tuple[LayerGeometry, ...]:
        """One entry for each MoE layer."""

    def new_slot(self, layer: int) -> Slot:
        """An empty slot for an expert of `layer`."""

    @property
    def window_bytes(self) -> int:
        """The largest read, in whole pages."""

    def load(self, expert: ExpertId, slot: Slot, window: Window | None = None) -> int:
        """Fill `slot` with `expert`, through `window`; returns the bytes read. Raises StoreError."""

    def disk_order(self, expert: ExpertId) -> tuple[str, int]:
        """Sort key of where the expert lies."""

    def close(self) -> None:
        """Give back files and memory."""


@dataclass(frozen=True, slots=True)
class SampleRead:
    """The largest contiguous run of one expert: what the topology probe reads to measure the disk."""

    file: DirectFile
    offset: int
    nbytes: int
    tensor: str
    windows: threading.local  # one for each thread that samples

    @property
    def is_direct(self) -> bool:
        """Whether the read bypasses the page cache."""
        return self.file.is_direct

    @property
    def file_system(self) -> int:
        """Number of the file system that the bytes lie on."""
        return self.file.file_system

    def read(self, limit_bytes: int) -> int:
        """Read the run, or its first `limit_bytes`, and drop it; returns the bytes read. Raises StoreError."""
        nbytes = min(self.nbytes, limit_bytes)
        window: Window | None = getattr(self.windows, "window", None)
        if window is None or len(window.memory) < nbytes + 2 * PAGE:
            window = self.windows.window = Window(nbytes + 2 * PAGE)
        return len(self.file.read(self.offset, nbytes, self.tensor, window))


class ExpertStore:
    """Experts of a Hub-layout checkpoint, read in place by positional reads that bypass the page cache.

    Args:
        layout: where each expert lies.
        merge_adapter: applied to a slot's weights after its bytes have arrived (LoRA on experts), or None.
    """

    def __init__(self, layout: Layout, merge_adapter: MergeAdapter | None = None) -> None:
        self.layout = layout
        self._merge_adapter = merge_adapter
        self._files: dict[Path, DirectFile] = {}
        try:
            for path in {p.path for layer in layout.layers for e in layer.pieces for p in e}:
                self._files[path] = DirectFile(path)
        except BaseException:
            self.close()
            raise

    @property
    def geometry(self) -> tuple[LayerGeometry, ...]:
        """One entry for each MoE layer."""
        kinds = [layer.fields for layer in self.layout.layers]
        return tuple(
            LayerGeometry(
                len(layer.pieces), layer.top_k, layer.slot_bytes, kinds.index(layer.fields), layer.runs_alone
            )
            for layer in self.layout.layers
        )

    def new_slot(self, layer: int) -> Slot:
        """An empty slot; the allocator aligns it to 64 bytes, and so does the layout every field in it.

        Where the disk reads straight into it, it is whole pages.
        """
        wanted = self.layout.layers[layer]
        return self.slot_over(layer, host_memory(wanted.slot_bytes, is_paged=bool(wanted.extents)))

    def slot_over(self, layer: int, buffer: torch.Tensor) -> Slot:
        """A slot for an expert of `layer` in memory of the caller's, uint8 [slot_bytes], on any device."""
        with torch.inference_mode(False):  # loader threads may not write to an inference tensor
            return Slot(buffer, field_views(self.layout.layers[layer].fields, buffer))

    def load(self, expert: ExpertId, slot: Slot, window: Window | None = None) -> int:
        """Read `expert` into `slot`, by one read for each contiguous run of pieces; returns the bytes read.

        Where the file has the slot as it is, that is one read straight into the slot, and nothing is copied.
        """
        layer = self.layout.layers[expert.layer]
        if layer.extents:
            nbytes = self._load_extent(layer.extents[expert.expert], slot, window)
        else:
            nbytes = self._load_pieces(expert, slot, window)
        if self._merge_adapter is not None:
            self._merge_adapter(expert, slot.weights)
        return nbytes

    def _load_extent(self, extent: Extent, slot: Slot, window: Window | None) -> int:
        self._files[extent.path].read_into(bytes_of(slot.buffer), extent.offset, extent.tensor, window)
        return extent.nbytes

    def _load_pieces(self, expert: ExpertId, slot: Slot, window: Window | None) -> int:
        nbytes = 0
        for run in _contiguous_runs(self.layout.layers[expert.layer].pieces[expert.expert]):
            start, end = run[0].offset, run[-1].offset + run[-1].nbytes
            data = self._files[run[0].path].read(start, end - start, run[0].tensor, window)
            for piece in run:
                _place(piece, data[piece.offset - start : piece.offset - start + piece.nbytes], slot)
            nbytes += end - start
        return nbytes

    @property
    def window_bytes(self) -> int:
        """The largest read that is staged, in whole pages: the size of a window; 0 where none is."""
        staged = [layer for layer in self.layout.layers if not layer.extents]
        runs = (run for layer in staged for e in layer.pieces for run in _contiguous_runs(e))
        return max((_span(run)[1] + 2 * PAGE for run in runs), default=0)

    def check_unchanged(self, stamps: Mapping[Path, Stamp]) -> None:
        """Every file is still the one at its path, with the stamp it had before its header was read. StoreError."""
        for path, file in self._files.items():
            if not stamps[path] == file.stamp == stamp_of(path.stat()):
                raise StoreError(path, "", "changed while it was being opened; start again with the new file")

    @property
    def paths(self) -> list[Path]:
        """The files that experts are read from."""
        return sorted(self._files)

    def sample_reads(self) -> list[SampleRead]:
        """One read for each expert, at the size and place where the runtime will read."""
        samples, windows = [], threading.local()
        for layer in self.layout.layers:
            for read in layer.extents or [_largest_run(pieces) for pieces in layer.pieces]:
                file = self._files[read.path]
                samples.append(SampleRead(file, read.offset, read.nbytes, read.tensor, windows))
        return samples

    @property
    def stored_bytes(self) -> int:
        """Bytes of all experts as they are stored, which is what has to be read."""
        return sum(
            sum(e.nbytes for e in layer.extents) or sum(p.nbytes for pieces in layer.pieces for p in pieces)
            for layer in self.layout.layers
        )

    @property
    def adapter_bytes(self) -> int:
        """Memory of the adapter's factors."""
        return self._merge_adapter.nbytes if self._merge_adapter is not None else 0

    def disk_order(self, expert: ExpertId) -> tuple[str, int]:
        """Sort key of where the expert lies."""
        return self.layout.disk_order(expert)

    def close(self) -> None:
        """Close every shard."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class ModuleStore:
    """Experts of a live model: a slot is a view of the module's own weights, so loading copies nothing."""

    def __init__(self, experts: Sequence[ExpertsModule]) -> None:
        self._experts = list(experts)

    @property
    def geometry(self) -> tuple[LayerGeometry, ...]:
        """One entry for each MoE layer."""
        return tuple(
            LayerGeometry(
                e.num_experts, e.top_k, sum(s.nbytes for s in self._stacks(e).values()) // e.num_experts, i
            )
            for i, e in enumerate(self._experts)
        )

    @staticmethod
    def _stacks(experts: ExpertsModule) -> dict[str, torch.Tensor]:
        return {name: getattr(experts.module, name) for name in experts.parameters}

    def new_slot(self, layer: int) -> Slot:
        """A slot without memory of its own."""
        return Slot(torch.empty(0, dtype=torch.uint8), {})

    window_bytes = 0

    def load(self, expert: ExpertId, slot: Slot, window: Window | None = None) -> int:
        """Point the slot at the expert's rows of each stack."""
        stacks = self._stacks(self._experts[expert.layer])
        slot.weights = {name: stack.detach()[expert.expert] for name, stack in stacks.items()}
        slot.jobs = None
        return 0

    def disk_order(self, expert: ExpertId) -> tuple[str, int]:
        """Memory has no order."""
        return ("", expert.expert)

    def close(self) -> None:
        """The model owns its weights."""


def host_memory(nbytes: int, is_paged: bool = False) -> torch.Tensor:
    """Memory for a slot, uint8 [nbytes]: pages of its own where it is large, so that giving it up frees them.

    An allocator would keep what a lowered budget gives up for later. `is_paged`: pages of its own in any case.
    """
    with torch.inference_mode(False):  # whoever gives the slot up may write to it from another mode
        if is_paged or nbytes >= PAGES_FROM_BYTES:
            return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def bytes_of(memory: torch.Tensor) -> memoryview:
    """The bytes of a uint8 tensor in host memory, to be read into or written from."""
    array: Any = memory.numpy()
    return memoryview(array)


def stamp_of(status: os.stat_result) -> Stamp:
    """What tells two versions of a file apart: size, time of the last write, inode."""
    return (status.st_size, status.st_mtime_ns, status.st_ino)


class DirectFile:
    """One shard, open for positional reads that leave nothing in the page cache.

    O_DIRECT where the file system has it, F_NOCACHE on macOS, else pages are dropped after each read.

    A file that changed since it was opened is refused at the next read: weights of two versions must never mix.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_direct = True
        try:
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0) | os.O_CLOEXEC)
            self.is_direct = hasattr(os, "O_DIRECT")
        except OSError:
            self._fd, self.is_direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
        if not hasattr(os, "O_DIRECT") and hasattr(fcntl, "F_NOCACHE"):
            fcntl.fcntl(self._fd, fcntl.F_NOCACHE, 1)
        self.stamp = self._current_stamp()
        self._lock = threading.Lock()
        self._users = 0
        self._is_closed = False

    def _current_stamp(self) -> Stamp:
        return stamp_of(os.fstat(self._fd))

    @property
    def file_system(self) -> int:
        """Number of the file system that the file lies on."""
        return os.fstat(self._fd).st_dev

    def read(self, offset: int, nbytes: int, tensor: str, staged: Window | None = None) -> memoryview:
        """`nbytes` at `offset`, read into `staged` or memory of its own; valid until that is used again.

        Raises StoreError, and ClosedError after `close`.
        """
        first = offset - offset % PAGE
        whole_pages = -(-(offset + nbytes - first) // PAGE) * PAGE
        staged = staged or Window(whole_pages)
        window = staged.memory[:whole_pages]
        assert len(window) == whole_pages, f"{whole_pages} bytes do not fit a window of {len(window)}"
        with self._in_use():
            self._read(window, first, offset + nbytes - first, tensor, staged)
        return window[offset - first : offset - first + nbytes]

    def read_into(self, memory: memoryview, offset: int, tensor: str, timed: Window | None = None) -> None:
        """Fill `memory`, which begins on a page and is whole pages, from `offset`, which is one too.

        `timed` notes the seconds. Raises StoreError, and ClosedError after `close`.
        """
        assert offset % PAGE == 0 == len(memory) % PAGE, f"{len(memory)} bytes at {offset} are not pages"
        with self._in_use():
            self._read(memory, offset, len(memory), tensor, timed)

    def _read(self, pages: memoryview, first: int, wanted: int, tensor: str, timed: Window | None) -> None:
        """Fill whole pages from `first`, of which the file must have the first `wanted` bytes."""
        self._check_unchanged(tensor)
        began = time.perf_counter()
        try:
            self._fill(pages, first, wanted, tensor)
        except OSError:
            time.sleep(RETRY_SECONDS)  # one retry: a transient EIO must not lose a request
            try:
                self._fill(pages, first, wanted, tensor)
            except OSError as exc:
                raise StoreError(self.path, tensor, f"cannot be read: {exc.strerror}") from exc
        self._check_unchanged(tensor)
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, first, len(pages), os.POSIX_FADV_DONTNEED)
        if timed is not None:
            timed.read_seconds += time.perf_counter() - began

    def _fill(self, window: memoryview, first: int, wanted: int, tensor: str) -> None:
        done = 0
        while done < wanted:
            # a direct read resumes on a page boundary; no progress means that the file has ended
            at = done - done % PAGE if self.is_direct else done
            count = self._read_into(window[at:], first + at)
            if at + count <= done:
                raise StoreError(self.path, tensor, f"ends at byte {first + done}, {first + wanted} needed")
            done = at + count

    def _read_into(self, memory: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._fd, [memory], offset)
        data = os.pread(self._fd, len(memory), offset)  # macOS before 11 knows only this
        memory[: len(data)] = data
        return len(data)

    def _check_unchanged(self, tensor: str) -> None:
        """Before a read, and after it: a write in the middle would leave bytes of both versions."""
        if self._current_stamp() != self.stamp:
            raise StoreError(self.path, tensor, "the file changed since start; start again with the new file")

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """A descriptor that is read from stays open: its number could else become another file's."""
        with self._lock:
            if self._is_closed:
                raise ClosedError(f"{self.path} is closed")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._is_closed and not self._users:
                    os.close(self._fd)

    def close(self) -> None:
        """Close the descriptor, or leave that to the last read under way. Safe to call twice."""
        with self._lock:
            if not self._is_closed and not self._users:
                os.close(self._fd)
            self._is_closed = True


def field_views(fields: Sequence[Field], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that lie in `buffer`, uint8 [slot_bytes], by name."""
    views = {}
    for field in fields:
        part = buffer[field.offset : field.offset + math.prod(field.shape) * field.dtype.itemsize]
        views[field.name] = part.view(field.dtype).view(field.shape)
    return views


def _contiguous_runs(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces in file order, grouped where one begins at the byte the last one ended."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        if last is not None and last.path == piece.path and last.offset + last.nbytes == piece.offset:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _span(run: Sequence[Piece]) -> tuple[int, int]:
    """Offset and bytes of a contiguous run."""
    return run[0].offset, run[-1].offset + run[-1].nbytes - run[0].offset


def _largest_run(pieces: Sequence[Piece]) -> Extent:
    run = max(_contiguous_runs(pieces), key=lambda run: _span(run)[1])
    return Extent(run[0].path, run[0].tensor, *_span(run))


def _place(piece: Piece, data: memoryview, slot: Slot) -> None:
    """Copy a piece's bytes into its block of the slot, cast and transposed as the model wants it."""
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if raw.data_ptr() % piece.dtype.itemsize:
        raw = raw.clone()
    block = raw.view(piece.dtype).view(piece.shape)
    if piece.is_transposed:
        block = block.transpose(0, 1)
    slot.weights[piece.parameter].narrow(piece.dim, piece.start, block.shape[piece.dim]).copy_(block)
