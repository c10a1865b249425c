"""Pack image: the bytes of an expert's slot, made from the source's expert.

Owns a pool of threads for as long as images are taken from it; promises each image in the order asked for, with
zeros wherever no weight is, the same bytes on every machine, and only a few images in memory at once. Called by
the packer.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from coop.errors import StoreError
from coop.ids import ExpertId
from coop.layout import Field
from coop.packs.format import PackedExpert
from coop.packs.journal import WrittenExpert
from coop.quantise import dequantise, quantise
from coop.store import ExpertStore, bytes_of, field_views, host_memory

MAX_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Image:
    """One expert: `memory` uint8 [slot_bytes], and what the journal keeps of it."""

    memory: torch.Tensor
    written: WrittenExpert


class Images:
    """Makes images.

    Args:
        store: the source, its adapter merged on load.
        slots: fields and bytes of the slots to be, one for each layer.
        is_transposed: whether each layer's class stores its weights input-major.
        bits: 8 or 4, or 0 for weights as they are.
    """

    def __init__(
        self,
        store: ExpertStore,
        slots: Sequence[tuple[tuple[Field, ...], int]],
        is_transposed: Sequence[bool],
        bits: int,
    ) -> None:
        self._store, self._slots, self._is_transposed, self._bits = store, slots, is_transposed, bits

    def made(self, places: Sequence[PackedExpert]) -> Generator[tuple[PackedExpert, Image], None, None]:
        """Each place with its image, in this order. Raises StoreError where the source cannot be read."""
        workers = min(os.cpu_count() or 1, MAX_WORKERS)
        before = torch.get_num_threads()
        # one thread of torch's for each: its own teams wait for each other wherever the machine is shared
        pool = ThreadPoolExecutor(workers, "coop-pack", initializer=lambda: torch.set_num_threads(1))
        waiting: deque[tuple[PackedExpert, Future[Image]]] = deque()
        try:
            for place in places:
                waiting.append((place, pool.submit(self._make, place)))
                if len(waiting) > workers:
                    done, image = waiting.popleft()
                    yield done, image.result()
            while waiting:
                done, image = waiting.popleft()
                yield done, image.result()
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)  # what a thread sets, those that start after it begin with

    def _make(self, place: PackedExpert) -> Image:
        fields, slot_bytes = self._slots[place.layer]
        memory = host_memory(slot_bytes, is_paged=True)  # of zeros
        source = self._store.new_slot(place.layer)
        self._store.load(ExpertId(place.layer, place.expert), source)
        views = field_views(fields, memory)
        error = squares = 0.0
        for name, weight in source.weights.items():
            if self._bits and not name.endswith("_bias"):
                added = self._quantise(place, name, weight, views)
                error, squares = error + added[0], squares + added[1]
            else:
                views[name].copy_(weight)
        digest = hashlib.sha256(bytes_of(memory)).hexdigest()
        return Image(memory, WrittenExpert(digest, error, squares))

    def _quantise(
        self, place: PackedExpert, name: str, weight: torch.Tensor, views: Mapping[str, torch.Tensor]
    ) -> tuple[float, float]:
        """Put codes and scales of one weight into the image; squared error, and the sum of the squares."""
        values = weight.float()
        if self._is_transposed[place.layer]:
            values = values.t().contiguous()
        if not bool(torch.isfinite(values).all()):
            what = f"expert {place.expert} has a {name} that is not finite, so it cannot be quantised"
            raise self._refused(place, what)
        codes, scales = quantise(values, self._bits)
        views[name].copy_(codes)
        views[f"{name}_scale"].copy_(scales)
        restored = dequantise(codes, scales, values.shape[1], torch.float32)
        if not bool(torch.stack(restored.aminmax()).bfloat16().isfinite().all()):  # as it may be served
            largest = float(values.abs().max())
            what = (
                f"expert {place.expert} has a {name} that reaches {largest:.3g}, which {self._bits} bits round to "
                "infinity: pack it as bf16"
            )
            raise self._refused(place, what)
        return _squares(restored.sub_(values)), _squares(values)

    def _refused(self, place: PackedExpert, what: str) -> StoreError:
        piece = self._store.layout.layers[place.layer].pieces[place.expert][0]
        return StoreError(piece.path, piece.tensor, what)


def _squares(values: torch.Tensor) -> float:
    """The sum of the squares; in float64, as the square of what float32 holds may be more than it holds."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
