"""Kernels: compiled products of a few rows, for what a decode step does most.

Owns the loaded library and the threads it runs on, which are torch's own OpenMP threads; promises bits that
depend on a row and its weights alone, not on threads or on what else is in the call. Called by execution (experts)
and by the dense modules. Where there is no library, `load` says why and torch does the same work more slowly.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

MOST_HEAD_WIDTH = 512  # MAX_HEAD in kernels.cpp
MOST_ROWS = 8  # above this many rows a matrix product that reuses weights from cache is faster
SIMD_NAMES = ("portable", "AVX2", "AVX-512", "AVX-512 BF16")
SIMD_VARIABLE = (
    "COOP_SIMD"  # bounds the instruction set: 0 to 3, or "off" for torch; for tests and comparisons
)
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}
TYPES = (torch.float32, torch.bfloat16)
_OPENMP_NAMES = ("libgomp", "libiomp5", "libomp")

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "coop_start": (_POINTER, ctypes.c_int),
    "coop_products": (_POINTER, _COUNT, ctypes.c_int),
    "coop_experts": (
        *(_POINTER, _POINTER, _POINTER, _COUNT),
        *(_POINTER, _COUNT, _COUNT, _POINTER),
        *(_POINTER, _COUNT, ctypes.c_int),
    ),
    "coop_layer": (
        *(_POINTER, _POINTER, _POINTER, _COUNT, _POINTER),
        *(_COUNT, _COUNT, _POINTER, _POINTER, _POINTER),
        *(_COUNT, _COUNT, _POINTER, ctypes.c_int),
    ),
    "coop_attention_begin": (
        *(_POINTER, _POINTER, _COUNT, _POINTER),
        *(_POINTER, _COUNT, _POINTER, ctypes.c_int),
    ),
    "coop_attention_end": (
        *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_COUNT, _COUNT, _POINTER, _POINTER, _POINTER, ctypes.c_int),
    ),
    "coop_dequantise": (
        *(_POINTER, _POINTER, ctypes.c_int),
        *(_COUNT, _COUNT, _POINTER, ctypes.c_int, ctypes.c_int),
    ),
    "coop_rms_norm": (_POINTER, _POINTER, _POINTER, _COUNT, _COUNT, ctypes.c_float, ctypes.c_int),
    "coop_combine": (
        *(_POINTER, _COUNT, _POINTER, _POINTER, _POINTER),
        *(_COUNT, _COUNT, _COUNT, _POINTER, ctypes.c_int),
    ),
}


class Job(ctypes.Structure):
    """One product, mirrored by `Job` in kernels.cpp: output [rows, outputs] = source [rows, columns] x weight."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("weight", "scales", "bias", "source", "tokens", "output", "input")
        ),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "outputs")),
        *((name, ctypes.c_int64) for name in ("source_pitch", "output_pitch", "pitch")),
        *((name, ctypes.c_int32) for name in ("kind", "type", "is_transposed", "is_gated")),
    ]

    def bind(self, source: torch.Tensor, output: torch.Tensor) -> None:
        """Inputs [rows, columns] and outputs [rows, outputs], of one dtype, each row contiguous."""
        self.rows, self.columns = source.shape
        itemsize = source.element_size()
        self.source, self.source_pitch = source.data_ptr(), source.stride(0) * itemsize
        self.output, self.output_pitch = output.data_ptr(), output.stride(0) * itemsize


class AttentionBlock(ctypes.Structure):
    """What stays of an attention step between calls, mirrored by `AttentionBlock` in kernels.cpp."""

    _fields_ = [
        *((name, Job) for name in ("query", "key", "value", "output")),
        *((name, ctypes.c_void_p) for name in ("norm", "next_norm", "query_norm", "key_norm")),
        ("head_width", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("epsilon", "next_epsilon", "head_epsilon", "scale")),
        *((name, ctypes.c_int32) for name in ("type", "is_normed_whole")),
    ]


class Pair:
    """The two products of one expert, and where they lie in memory."""

    __slots__ = ("down", "down_address", "up", "up_address")

    def __init__(self, up: Job, down: Job) -> None:
        self.up, self.down = up, down
        self.up_address, self.down_address = ctypes.addressof(up), ctypes.addressof(down)

    def takes_width(self, width: int) -> bool:
        """Whether rows of this width are what the first product expects; codes are padded to whole groups."""
        return width == self.up.columns or (self.up.scales and 0 <= self.up.columns - width < 32)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The library, ready to run: `simd` names the instruction set in use."""

    library: Any
    simd: str

    def products(self, jobs: Any, count: int) -> None:
        """Run `count` jobs of a ctypes array in one parallel region of torch's threads."""
        self.library.coop_products(
            jobs if isinstance(jobs, ctypes.Array) else ctypes.byref(jobs), count, torch.get_num_threads()
        )

    def experts(
        self,
        pairs: Sequence[Pair],
        spans: Sequence[int],
        hidden: torch.Tensor,
        tokens: np.ndarray,
        outputs: torch.Tensor,
    ) -> None:
        """outputs[r] = expert i of hidden[tokens[r]], for rows r from spans[2i] to spans[2i + 1]; gated ones only.

        hidden [tokens, width], tokens int64 [rows], outputs [rows, width]; rows contiguous, one dtype.
        """
        count, itemsize = len(pairs), hidden.element_size()
        self.library.coop_experts(
            (_COUNT * count)(*[pair.up_address for pair in pairs]),
            (_COUNT * count)(*[pair.down_address for pair in pairs]),
            (_COUNT * (2 * count))(*spans),
            count,
            hidden.data_ptr(),
            hidden.stride(0) * itemsize,
            hidden.shape[1],
            tokens.ctypes.data,
            outputs.data_ptr(),
            outputs.stride(0) * itemsize,
            torch.get_num_threads(),
        )

    def layer(
        self, pairs: Sequence[Pair], hidden: torch.Tensor, weights: torch.Tensor, order: np.ndarray
    ) -> torch.Tensor:
        """One token's row [1, width] through each expert, and their sum: `experts` and `combine` in one step.

        weights [1, k], order int64 [k], which of them is each expert's.
        """
        count = len(pairs)
        result = torch.empty_like(hidden)
        spans, tokens = _token_spans(count)
        self.library.coop_layer(
            (_COUNT * count)(*[pair.up_address for pair in pairs]),
            (_COUNT * count)(*[pair.down_address for pair in pairs]),
            spans,
            count,
            hidden.data_ptr(),
            0,
            hidden.shape[1],
            tokens,
            weights.data_ptr(),
            order.ctypes.data,
            count,
            1,
            result.data_ptr(),
            torch.get_num_threads(),
        )
        return result

    def attention_begin(
        self, block: AttentionBlock, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [rows, heads x head_width], key and value [rows, key_heads, 1, head_width] of one new token each.

        hidden [rows, width], contiguous; cosine and sine [rows or 1, head_width], rows contiguous.
        """
        rows, width = hidden.shape[0], block.head_width
        edges = (block.query.outputs, block.key.outputs, block.value.outputs)
        heads = hidden.new_empty(rows * sum(edges))
        self.library.coop_attention_begin(
            ctypes.byref(block),
            hidden.data_ptr(),
            rows,
            cosine.data_ptr(),
            sine.data_ptr(),
            cosine.stride(0) * cosine.element_size() if cosine.shape[0] > 1 else 0,
            heads.data_ptr(),
            torch.get_num_threads(),
        )
        query, key, value = heads.split([rows * edge for edge in edges])
        shape = (rows, edges[1] // width, 1, width)
        return query, key.view(shape), value.view(shape)

    def attention_end(
        self,
        block: AttentionBlock,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention's output [rows, width]; with `residual`, its sum with that and the norm of the sum.

        keys and values [rows, key_heads, tokens, head_width], the last dimension contiguous.
        """
        itemsize, rows = query.element_size(), keys.shape[0]
        hidden, following = query.new_empty(2, rows, block.output.outputs)
        self.library.coop_attention_end(
            ctypes.byref(block),
            query.data_ptr(),
            keys.data_ptr(),
            (_COUNT * 3)(*[stride * itemsize for stride in keys.stride()[:3]]),
            values.data_ptr(),
            (_COUNT * 3)(*[stride * itemsize for stride in values.stride()[:3]]),
            rows,
            keys.shape[2],
            residual.data_ptr() if residual is not None else None,
            hidden.data_ptr(),
            following.data_ptr(),
            torch.get_num_threads(),
        )
        return hidden, following

    def dequantise(self, codes: torch.Tensor, scales: torch.Tensor, output: torch.Tensor) -> None:
        """output [rows, columns] = code * scale, rounded once; the layout is that of `coop.quantise`."""
        self.library.coop_dequantise(
            codes.data_ptr(),
            scales.data_ptr(),
            _KINDS[codes.dtype],
            *output.shape,
            output.data_ptr(),
            _KINDS[output.dtype],
            torch.get_num_threads(),
        )

    def rms_norm(
        self, source: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, rows: int, epsilon: float
    ) -> None:
        """output = rounded(source / sqrt(mean(source^2) + epsilon)) * weight; [rows, width], contiguous, one dtype."""
        self.library.coop_rms_norm(
            source.data_ptr(),
            weight.data_ptr(),
            output.data_ptr(),
            rows,
            weight.shape[0],
            epsilon,
            _KINDS[weight.dtype],
        )

    def combine(
        self,
        outputs: torch.Tensor,
        weights: torch.Tensor,
        order: np.ndarray,
        tokens: np.ndarray,
        result: torch.Tensor,
    ) -> None:
        """result[t] = sum over rows r of token t, in order and in float32, of rounded(outputs[r] * weights[order[r]]).

        outputs [rows, width], weights flat [rows], order and tokens int64 [rows], result [tokens, width].
        """
        rows, width = outputs.shape
        self.library.coop_combine(
            outputs.data_ptr(),
            outputs.stride(0) * outputs.element_size(),
            weights.data_ptr(),
            order.ctypes.data,
            tokens.ctypes.data,
            rows,
            result.shape[0],
            width,
            result.data_ptr(),
            _KINDS[result.dtype],
        )


@cache
def load() -> tuple[Kernels | None, str]:
    """The kernels, or None and the reason in words. Loaded once for each process."""
    bound = os.environ.get(SIMD_VARIABLE, str(len(SIMD_NAMES) - 1))
    if bound == "off":
        return None, f"switched off by {SIMD_VARIABLE}"
    path = _library_path()
    if path is None:
        return None, "not compiled; reinstall coop where gcc or clang is"
    address = parallel_region()
    if address is None:
        return None, "unusable: torch's OpenMP runtime was not found"
    try:
        library = ctypes.CDLL(str(path))
        for name, arguments in _ARGUMENTS.items():
            getattr(library, name).argtypes = arguments
    except (OSError, AttributeError) as exc:
        return None, f"unusable: {path.name} cannot be loaded: {exc}"
    return start(library, address, int(bound) if bound.isdigit() else len(SIMD_NAMES) - 1), ""


def loaded() -> Kernels:
    """The kernels, for who has seen that there are some."""
    found, why = load()
    assert found is not None, why
    return found


def describe() -> str:
    """What computes a decode step here, for a person."""
    found, why = load()
    return f"compiled kernels ({found.simd})" if found is not None else f"torch, more slowly (kernels {why})"


def start(library: Any, parallel_region: int, most_simd: int) -> Kernels:
    """Choose the instruction set, at most `most_simd`, for the whole process."""
    return Kernels(library, SIMD_NAMES[library.coop_start(parallel_region, most_simd)])


def job_of(
    weight: torch.Tensor,
    dtype: torch.dtype,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    is_transposed: bool = False,
    is_gated: bool = False,
) -> Job | None:
    """The part of a job that does not change from call to call; None where no kernel does such a product.

    Args:
        weight: [outputs, columns], or [columns, outputs] if transposed; float32, bfloat16, or integer codes as
            `coop.quantise` lays them out, with `scales`.
        dtype: of inputs, outputs and bias.
        is_gated: the outputs are silu(first half) * second half.
    """
    tensors = [t for t in (weight, scales, bias) if t is not None]
    is_plain = weight.dtype in TYPES
    if dtype not in TYPES or weight.dtype not in _KINDS or any(t.device.type != "cpu" for t in tensors):
        return None
    if not all(t.is_contiguous() for t in tensors) or (bias is not None and bias.dtype != dtype):
        return None
    if (
        (is_plain and weight.dtype != dtype)
        or (is_plain != (scales is None))
        or (is_transposed and not is_plain)
    ):
        return None
    outputs, columns = (weight.shape[1], weight.shape[0]) if is_transposed else weight.shape
    return Job(
        columns=2 * columns if weight.dtype == torch.uint8 else columns,
        weight=weight.data_ptr(),
        scales=scales.data_ptr() if scales is not None else None,
        bias=bias.data_ptr() if bias is not None else None,
        outputs=outputs // 2 if is_gated else outputs,
        kind=_KINDS[weight.dtype],
        type=_KINDS[dtype],
        is_transposed=is_transposed,
        is_gated=is_gated,
    )


@cache
def _token_spans(count: int) -> tuple[Any, Any]:
    """Rows 0 to 1, 1 to 2 ... for one token's experts, each of them the token's."""
    edges = [edge for row in range(count) for edge in (row, row + 1)]
    return (_COUNT * (2 * count))(*edges), (_COUNT * count)()


def type_of(dtype: torch.dtype) -> int:
    """The kernels' number of a type that they compute on."""
    return _KINDS[dtype]


def takes(tensor: torch.Tensor) -> bool:
    """Whether rows like these are what the kernels compute on."""
    return tensor.device.type == "cpu" and tensor.dtype in TYPES


def _library_path() -> Path | None:
    """Where the build left the library: beside this file."""
    found = importlib.util.find_spec("coop.kernels._native")
    return Path(found.origin) if found is not None and found.origin is not None else None


def parallel_region() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch has loaded; Intel's and LLVM's offer it as well."""
    for path in _openmp_paths():
        try:
            function = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _openmp_paths() -> list[Path]:
    """Runtimes that this process has mapped, torch's own first."""
    beside = [p for name in _OPENMP_NAMES for p in (Path(torch.__file__).parent / "lib").glob(f"{name}*")]
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return sorted(beside)
    mapped = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    found = [Path(p) for p in mapped if Path(p).name.startswith(_OPENMP_NAMES)]
    return sorted(found, key=lambda p: (p not in beside, p))
