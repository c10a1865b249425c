"""The compiled kernels against float64, against themselves, and against torch's own bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import coop
from coop import kernels
from coop.quantise import dequantise
from tests.families import FAMILIES, build_family

LIBRARY, REASON = kernels.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=f"no kernels: {REASON}")
TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=range(len(kernels.SIMD_NAMES)), ids=kernels.SIMD_NAMES)
def library(request: pytest.FixtureRequest) -> Iterator[kernels.Kernels]:
    """The kernels at one instruction set; skipped where this machine has not got it."""
    assert LIBRARY is not None
    address = kernels.parallel_region()
    assert address is not None
    found = kernels.start(LIBRARY.library, address, request.param)
    try:
        if found.simd != kernels.SIMD_NAMES[request.param]:
            pytest.skip(f"this machine has no {kernels.SIMD_NAMES[request.param]}")
        yield found
    finally:
        kernels.start(LIBRARY.library, address, len(kernels.SIMD_NAMES) - 1)


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(library: kernels.Kernels, weight: torch.Tensor, x: torch.Tensor, **settings: Any) -> torch.Tensor:
    job = kernels.job_of(weight, x.dtype, **settings)
    assert job is not None
    out = torch.full((x.shape[0], job.outputs), torch.nan, dtype=x.dtype)
    job.bind(x, out)
    library.products(job, 1)
    return out


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a few roundings of the type at the scale of the whole."""
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error < 8 * torch.finfo(got.dtype).eps, error


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("columns", [1, 15, 16, 33, 64, 127, 200, 1024])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_product_is_float64s_within_rounding_for_any_width(
    library: kernels.Kernels, dtype: torch.dtype, columns: int, is_transposed: bool
) -> None:
    weight, x = random(70, columns, dtype=dtype), random(3, columns, dtype=dtype, seed=1)
    stored = weight.t().contiguous() if is_transposed else weight
    got = product(library, stored, x, is_transposed=is_transposed)
    assert_close(got, x.double() @ weight.double().t())


@pytest.mark.parametrize("dtype", TYPES)
def test_bias_and_gate_are_rounded_where_transformers_rounds(
    library: kernels.Kernels, dtype: torch.dtype
) -> None:
    weight, bias, x = random(48, 96, dtype=dtype), random(48, dtype=dtype), random(2, 96, dtype=dtype)
    plain = product(library, weight, x)
    assert torch.equal(product(library, weight, x, bias=bias), plain + bias)
    gate, up = product(library, weight, x, bias=bias).chunk(2, -1)
    got = product(library, weight, x, bias=bias, is_gated=True)
    assert_close(got, (torch.nn.functional.silu(gate) * up).double())


def grouped(kind: torch.dtype, outputs: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and the float64 matrix that they mean, in the layout of `coop.quantise`."""
    groups = -(-columns // 32)
    generator = torch.Generator().manual_seed(2)
    scales = (torch.rand(outputs, groups, generator=generator) - 0.3).bfloat16()
    low, high = (-8, 8) if kind == torch.uint8 else (-127, 128)
    codes = torch.randint(low, high, (outputs, groups, 32), generator=generator)
    codes.view(outputs, -1)[:, columns:] = 0
    matrix = (codes * scales.double()[..., None]).reshape(outputs, -1)[:, :columns]
    if kind == torch.int8:
        return codes.to(torch.int8).reshape(outputs, -1), scales, matrix
    nibbles = (codes + 8).to(torch.uint8)
    packed = nibbles[..., :16] | (nibbles[..., 16:] << 4)
    return packed.reshape(outputs, -1).contiguous(), scales, matrix


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [torch.int8, torch.uint8], ids=["int8", "int4"])
@pytest.mark.parametrize("columns", [5, 32, 33, 96, 512, 544, 1000])
def test_a_product_of_integer_codes_is_float64s_within_rounding(
    library: kernels.Kernels, kind: torch.dtype, dtype: torch.dtype, columns: int
) -> None:
    codes, scales, matrix = grouped(kind, 40, columns)
    x = random(2, columns, dtype=dtype)
    assert_close(product(library, codes, x, scales=scales), x.double() @ matrix.t())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [torch.int8, torch.uint8], ids=["int8", "int4"])
def test_codes_become_the_numbers_that_quantise_says(kind: torch.dtype, dtype: torch.dtype) -> None:
    assert LIBRARY is not None
    codes, scales, _ = grouped(kind, 150, 77)
    got = torch.empty(150, 77, dtype=dtype)
    LIBRARY.dequantise(codes, scales, got)
    assert torch.equal(got, dequantise(codes, scales, 77, dtype))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8, torch.uint8])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_row_has_the_same_bits_alone_in_company_and_at_every_thread_count(
    library: kernels.Kernels, threads: Any, kind: torch.dtype, is_transposed: bool
) -> None:
    dtype = torch.float32 if kind == torch.float32 else torch.bfloat16
    settings: dict[str, Any] = {"is_transposed": is_transposed}
    if kind in TYPES:
        weight = random(*((300, 1000) if is_transposed else (1000, 300)), dtype=kind)
    elif is_transposed:
        pytest.skip("integer weights are always output-major")
    else:
        weight, settings["scales"], _ = grouped(kind, 1000, 300)
    x = random(8, 300, dtype=dtype)
    threads(1)
    alone = torch.cat([product(library, weight, row[None], **settings) for row in x])
    for count in (1, 2, 5):
        threads(count)
        for rows in range(1, 9):
            assert torch.equal(product(library, weight, x[:rows], **settings), alone[:rows])


@pytest.mark.parametrize("dtype", TYPES)
def test_the_sum_of_a_layer_has_the_bits_of_torchs_index_add(dtype: torch.dtype) -> None:
    assert LIBRARY is not None
    rows, tokens, width = 24, 3, 50
    outputs = torch.empty(rows, 64, dtype=dtype)[:, :width].copy_(random(rows, width, dtype=dtype))
    weights = random(rows, dtype=dtype, seed=3)
    order = np.random.default_rng(0).permutation(rows)
    token = order % tokens
    product = outputs * weights[torch.from_numpy(order)].unsqueeze(1)
    expected = torch.zeros(tokens, width).index_add_(0, torch.from_numpy(token), product.float()).to(dtype)
    got = torch.empty(tokens, width, dtype=dtype)
    LIBRARY.combine(outputs, weights, order, token, got)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_through_the_kernels(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_family(tmp_path, family, dtype)
    with coop.attach(tmp_path, budget="50%") as runtime, torch.inference_mode():
        runtime.model(torch.tensor([[5, 6, 7]]), use_cache=False)
        slots = [slot for slot in runtime.scheduler.residency._slots.values() if slot.jobs is not None]
        assert slots and all(isinstance(slot.jobs[1], kernels.Pair) for slot in slots)


def test_without_kernels_torch_computes_and_the_reason_is_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_family(tmp_path, "qwen3_moe")
    ids = torch.tensor([[5, 6, 7]])
    with coop.attach(tmp_path, budget="50%") as runtime, torch.inference_mode():
        quick = runtime.model(ids, use_cache=False).logits
    monkeypatch.setenv(kernels.SIMD_VARIABLE, "off")
    kernels.load.cache_clear()
    try:
        assert kernels.load() == (None, "switched off by COOP_SIMD")
        with coop.attach(tmp_path, budget="50%") as runtime, torch.inference_mode():
            slow = runtime.model(ids, use_cache=False).logits
            assert not any(type(m).__module__ == "coop.adapters.dense" for m in runtime.model.modules())
    finally:
        monkeypatch.undo()
        kernels.load.cache_clear()
        kernels.load()
    assert torch.allclose(quick, slow, atol=1e-4)
