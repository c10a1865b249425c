"""Quantise: weights as whole numbers of 8 or 4 bits with one bfloat16 scale for each 32 of them, and back.

Owns the arithmetic of the two formats; promises the same codes for the same weights everywhere, and values that
are off by at most half a step where a code is not the outermost. Called by the packer, by the execution of
quantised experts, and by tests of kernels, which read the same bytes.

A weight is [out, in], the product sums over `in`; groups of 32 follow each other along it, the last padded.
"""

from __future__ import annotations

import torch

GROUP = 32
BLOCK_WEIGHTS = 2**16  # searched at once: a few float32 arrays of this many fit a second-level cache
_LIMITS = {8: (-127, 127), 4: (-8, 7)}
# the largest weight of a group becomes this code, before rounding: its own sign for 4 bits, whose range is lopsided
_CANDIDATES = {
    8: (127.0, 126.0, 125.0, 124.0),
    4: (-8.0, -8.6, -8.3, -7.7, -7.4, -7.1, -6.7, -6.3, 7.5, 7.2, 6.9, 6.5, 6.1),
}


def padded(columns: int) -> int:
    """`columns` rounded up to whole groups."""
    return -(-columns // GROUP) * GROUP


def quantise(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a finite float32 weight [out, in], by the smallest squared error in each group.

    bits 8: int8 codes [out, padded], from -127 to 127. bits 4: uint8 [out, padded / 2]; byte j of a group of 16
    holds column j in its low half and column 16 + j in its high half, as the code plus 8. Scales bfloat16
    [out, padded / 32], negative ones too. value = code x scale, and |value - weight| <= |scale| / 2 unless the
    code is the first or last one, where the search may have cut the largest weights for the sake of the others.
    Padding has code 0. The search tries a few scales, each rounded to bfloat16 first (llama.cpp's Q4_0 has the
    first of them alone); of equal ones the first wins.
    """
    rows, columns = weight.shape
    groups = torch.nn.functional.pad(weight, (0, padded(columns) - columns)).reshape(rows, -1, GROUP)
    codes = torch.empty(groups.shape, dtype=torch.int8)
    scales = torch.empty(groups.shape[:2], dtype=torch.bfloat16)
    at_once = max(1, BLOCK_WEIGHTS // padded(columns))
    for start in range(0, rows, at_once):
        part = slice(start, start + at_once)
        codes[part], scales[part] = _search(groups[part], bits)
    if bits == 8:
        return codes.reshape(rows, -1), scales
    nibbles = (codes + 8).view(torch.uint8)
    low, high = nibbles[..., : GROUP // 2], nibbles[..., GROUP // 2 :]
    return (low | (high << 4)).reshape(rows, -1), scales


def _search(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes [n, groups, 32] and bfloat16 scales [n, groups] of float32 [n, groups, 32]."""
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))  # [n, groups, 1], with its sign
    if bits == 8:
        largest = largest.abs()
    size = largest.abs().clamp_min(torch.finfo(torch.float32).tiny)
    unit = groups / size  # within -1 and 1, so that no square leaves the range
    best = torch.full_like(largest, torch.inf)
    codes, scales = torch.zeros_like(groups), torch.zeros_like(largest)
    for code in _CANDIDATES[bits]:
        scale = (largest / code).bfloat16().float()
        step = scale / size
        inverse = torch.where(step == 0, 0.0, 1 / step)
        tried = (unit * inverse).round_().clamp_(*_LIMITS[bits])
        error = (tried * step).sub_(unit).square_().sum(2, keepdim=True)
        is_better = error < best
        best = torch.where(is_better, error, best)
        codes = torch.where(is_better, tried, codes)
        scales = torch.where(is_better, scale, scales)
    return codes.to(torch.int8), scales.squeeze(2).bfloat16()


def dequantise(codes: torch.Tensor, scales: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, columns] in `dtype`: code x scale, rounded once. int8 codes are of 8 bits, uint8 of 4.

    The product has at most 16 significant bits: exact in float32, and in bfloat16 torch's own product is this
    one rounded, so that both ways to it have the same bits.
    """
    rows, groups = scales.shape
    work = dtype if dtype == torch.bfloat16 else torch.float32
    if codes.dtype == torch.uint8:
        halves = codes.view(rows, groups, GROUP // 2)
        numbers = torch.cat((halves & 15, halves >> 4), 2).to(work) - 8
    else:
        numbers = codes.view(rows, groups, GROUP).to(work)
    values = numbers * scales.to(work).unsqueeze(2)
    return values.view(rows, -1)[:, :columns].to(dtype)
