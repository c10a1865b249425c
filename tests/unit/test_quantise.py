"""Quantisation: half a step at most inside the range, never worse than the plainest scale, the byte layout as written.

Owns properties of the arithmetic; promises that each holds for odd widths, zeros, tiny and huge weights.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coop.quantise import GROUP, dequantise, padded, quantise

LIMITS = {8: (-127, 127), 4: (-8, 7)}


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 100))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(rows, columns, generator=generator)
    weight *= 10.0 ** draw(st.integers(-30, 30))
    weight[torch.rand(weight.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0
    if draw(st.booleans()):
        weight[0, draw(st.integers(0, columns - 1))] *= 1000
    return weight


def codes_of(codes: torch.Tensor, columns: int) -> torch.Tensor:
    """Whole numbers [out, columns], read by the written layout and nothing else."""
    if codes.dtype == torch.int8:
        return codes[:, :columns].long()
    rows = codes.shape[0]
    numbers = torch.zeros(rows, codes.shape[1] * 2, dtype=torch.int64)
    for byte in range(codes.shape[1]):
        group, j = divmod(byte, 16)
        numbers[:, 32 * group + j] = (codes[:, byte].long() & 15) - 8
        numbers[:, 32 * group + 16 + j] = (codes[:, byte].long() >> 4) - 8
    return numbers[:, :columns]


@settings(max_examples=150, deadline=None)
@given(weight=weights(), bits=st.sampled_from([8, 4]))
def test_a_value_is_code_times_scale_and_within_half_a_step(weight: torch.Tensor, bits: int) -> None:
    columns = weight.shape[1]
    codes, scales = quantise(weight, bits)
    assert codes.shape == (len(weight), padded(columns) * bits // 8) and scales.dtype == torch.bfloat16
    assert scales.shape == (len(weight), padded(columns) // GROUP)
    numbers = codes_of(codes, columns)
    low, high = LIMITS[bits]
    assert numbers.min() >= low and numbers.max() <= high
    steps = scales.double().repeat_interleave(GROUP, 1)[:, :columns]
    value = dequantise(codes, scales, columns, torch.float32)
    assert torch.equal(value.double(), numbers * steps)
    is_inner = (numbers > low) & (numbers < high)
    error = (value.double() - weight.double()).abs()
    assert (error <= 0.5 * (1 + 1e-6) * steps.abs())[is_inner].all()


@settings(max_examples=100, deadline=None)
@given(weight=weights(), bits=st.sampled_from([8, 4]))
def test_no_group_is_worse_than_with_the_scale_of_its_largest_weight(weight: torch.Tensor, bits: int) -> None:
    columns = weight.shape[1]
    codes, scales = quantise(weight, bits)
    value = dequantise(codes, scales, columns, torch.float32).double()
    low, high = LIMITS[bits]
    for group in range(padded(columns) // GROUP):
        part = slice(group * GROUP, min((group + 1) * GROUP, columns))
        for row in range(len(weight)):
            own = weight[row, part].double()
            largest = own[own.abs().argmax()]
            plain = (largest / -8 if bits == 4 else largest.abs() / 127).bfloat16().double()
            restored = (own / plain).round().clamp(low, high) * plain if plain else own * 0
            allowed = (restored - own).square().sum() * (1 + 1e-3)
            assert (value[row, part] - own).square().sum() <= allowed


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_in_another_type_are_the_exact_ones_rounded_once(bits: int, dtype: torch.dtype) -> None:
    weight = torch.randn(7, 75, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise(weight, bits)
    exact = dequantise(codes, scales, 75, torch.float32)
    assert torch.equal(dequantise(codes, scales, 75, dtype), exact.to(dtype))


@pytest.mark.parametrize("bits", [8, 4])
def test_padding_has_code_zero_and_zeros_stay_zeros(bits: int) -> None:
    codes, scales = quantise(torch.ones(2, 33), bits)
    assert (codes_of(codes, 64)[:, 33:] == 0).all()
    codes, scales = quantise(torch.zeros(2, 40), bits)
    assert torch.equal(dequantise(codes, scales, 40, torch.float32), torch.zeros(2, 40))


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_do_not_change_a_code(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 70, generator=torch.Generator().manual_seed(0))
    whole = quantise(weight, bits)
    monkeypatch.setattr("coop.quantise.BLOCK_WEIGHTS", 300)
    assert all(torch.equal(a, b) for a, b in zip(whole, quantise(weight, bits), strict=True))
