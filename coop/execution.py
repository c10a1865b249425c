"""L1, execution: the arithmetic of experts, through two entries: few rows of many experts, many rows of one.

Owns nothing; promises the same bits for the same rows and weights, wherever they lie and whatever runs beside
them. Called by the scheduler for units that are ready. Flags, gate and activation are the model's own, so
every family's arithmetic is its own; compiled kernels take the products of few rows where there are any.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from coop import kernels
from coop.quantise import GROUP, dequantise, padded
from coop.store import Slot

Weights = Mapping[str, torch.Tensor]
SCALE = "_scale"
_memory = threading.local()


def run_decode(
    experts: Any,
    slots: Sequence[Slot],
    spans: Sequence[int],
    hidden: torch.Tensor,
    tokens: np.ndarray,
    outputs: torch.Tensor,
) -> None:
    """Several experts of one layer, a few rows each: outputs[r] = expert i of hidden[tokens[r]].

    Expert i, whose weights are in slots[i], takes rows spans[2i] to spans[2i + 1]. hidden [tokens, width],
    tokens int64 [rows], outputs [rows, width].
    """
    library, _ = kernels.load()
    pairs = [_pair_of(experts, slot, hidden.dtype) for slot in slots] if library is not None else []
    fits = all(pairs) and pairs[0].takes_width(hidden.shape[1]) if pairs else False
    if library is not None and fits and hidden.stride(1) == 1:
        if pairs[0].up.is_gated and not experts.has_post_expert_norm:
            library.experts(pairs, spans, hidden, tokens, outputs)
        else:
            _run_in_steps(library, experts, pairs, spans, hidden, tokens, outputs)
        return
    for slot, start, stop in zip(slots, spans[::2], spans[1::2], strict=True):
        rows = (
            hidden if hidden.shape[0] == 1 else hidden[torch.from_numpy(tokens[start:stop]).to(hidden.device)]
        )
        run_prefill(experts, slot.weights, rows, outputs[start:stop])


def token_pairs(
    experts: Any, slots: Sequence[Slot], hidden: torch.Tensor, weights: torch.Tensor
) -> list[Any]:
    """What `run_token` needs of the slots' experts; empty where one token takes several steps through them."""
    library, _ = kernels.load()
    if library is None or hidden.dtype != weights.dtype or not weights.is_contiguous():
        return []
    pairs = [_pair_of(experts, slot, hidden.dtype) for slot in slots]
    fits = all(pairs) and pairs[0].takes_width(hidden.shape[1])
    is_one_step = fits and pairs[0].up.is_gated and not experts.has_post_expert_norm
    return pairs if is_one_step else []


def run_token(
    pairs: Sequence[kernels.Pair], hidden: torch.Tensor, weights: torch.Tensor, order: np.ndarray
) -> torch.Tensor:
    """One token through its experts, and their sum in the order of `pairs`: [1, width].

    hidden [1, width], weights [1, k], order int64 [k]: which of the weights is each expert's.
    """
    return kernels.loaded().layer(pairs, hidden.contiguous(), weights, order)


def run_prefill(experts: Any, weights: Weights, rows: torch.Tensor, out: torch.Tensor) -> None:
    """One expert, many rows: out[:] = down(activation(up(rows))), with the biases, gate and norm of the module.

    rows [n, hidden], out [n, hidden]; weights are one expert's, shaped as the module's stacks without their
    first dimension, input-major where `is_transposed`.
    """
    activated = _activate(experts, _project(rows, weights, _up_name(experts), experts.is_transposed))
    if experts.has_post_expert_norm:
        projected = _project(activated, weights, "down_proj", experts.is_transposed)
        out.copy_(experts.post_expert_norm(projected))
        return
    _project(activated, weights, "down_proj", experts.is_transposed, out)


def _run_in_steps(
    library: kernels.Kernels,
    experts: Any,
    pairs: Sequence[kernels.Pair],
    spans: Sequence[int],
    hidden: torch.Tensor,
    tokens: np.ndarray,
    outputs: torch.Tensor,
) -> None:
    """As `run_decode`, with the model's own activation and norm between and behind the kernels' products.

    Those run row by row: where in a tensor a number lies decides whether torch's vector or scalar code takes it,
    and the two round differently.
    """
    parts = [range(start, stop) for start, stop in zip(spans[::2], spans[1::2], strict=True)]
    rows = hidden[torch.from_numpy(np.concatenate([tokens[part.start : part.stop] for part in parts]))]
    sizes = [len(part) for part in parts]
    middle = _products(library, [pair.up for pair in pairs], rows.split(sizes))
    if not pairs[0].up.is_gated:
        middle = torch.cat([_activate(experts, row) for row in middle.split(1)])
    result = _products(library, [pair.down for pair in pairs], middle.split(sizes))
    if experts.has_post_expert_norm:
        result = torch.cat([experts.post_expert_norm(row) for row in result.split(1)])
    for part, rows_of_expert in zip(parts, result.split(sizes), strict=True):
        outputs[part.start : part.stop] = rows_of_expert


def _products(
    library: kernels.Kernels, templates: Sequence[kernels.Job], sources: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The product of each source [n_i, columns], one below another: [rows, outputs]."""
    jobs = (kernels.Job * len(templates))(*templates)
    counts = [source.shape[0] for source in sources]
    result = sources[0].new_empty(sum(counts), templates[0].outputs)
    for job, source, out in zip(jobs, sources, result.split(counts), strict=True):
        job.bind(source, out)
    library.products(jobs, len(templates))
    return result


def _up_name(experts: Any) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _activate(experts: Any, projected: torch.Tensor) -> torch.Tensor:
    activated: torch.Tensor = (
        experts._apply_gate(projected) if experts.has_gate else experts.act_fn(projected)
    )
    return activated


def _project(
    rows: torch.Tensor,
    weights: Weights,
    name: str,
    is_transposed: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if name + SCALE in weights:  # quantised weights are output-major in every class
        weight = _dequantised(weights[name], weights[name + SCALE], rows).t()
    else:
        weight = weights[name] if is_transposed else weights[name].t()  # [in, out]
    product = torch.mm(rows, weight, out=out)
    bias = weights.get(f"{name}_bias")
    # added after rounding, as transformers' grouped path does: the sum then has its bits
    return product if bias is None else product.add_(bias)


def _dequantised(codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[out, in] in the type of the rows, valid until this thread asks for the next."""
    library, _ = kernels.load()
    if library is None or not kernels.takes(rows):
        return dequantise(codes, scales, rows.shape[1], rows.dtype)
    shape = (codes.shape[0], rows.shape[1])
    assert padded(rows.shape[1]) == scales.shape[1] * GROUP, (
        f"rows of {rows.shape[1]} for {tuple(scales.shape)}"
    )
    output = _scratch(math.prod(shape) * rows.element_size()).view(rows.dtype).view(shape)
    library.dequantise(codes, scales, output)
    return output


def _scratch(nbytes: int) -> torch.Tensor:
    """Memory of this thread, uint8 [nbytes]: a new block for each expert of a prompt would stay with the allocator."""
    memory: torch.Tensor | None = getattr(_memory, "block", None)
    if memory is None or memory.numel() < nbytes:
        with torch.inference_mode(False):
            memory = _memory.block = torch.empty(nbytes, dtype=torch.uint8)
    return memory[:nbytes]


def _pair_of(experts: Any, slot: Slot, dtype: torch.dtype) -> Any:
    """The slot's two products for the kernels, made once for each slot; False where they cannot do them."""
    if slot.jobs is None or slot.jobs[0] != dtype:
        up = _job_of(experts, slot.weights, _up_name(experts), dtype, is_gated=_is_silu_gated(experts))
        down = _job_of(experts, slot.weights, "down_proj", dtype)
        slot.jobs = (dtype, kernels.Pair(up, down) if up is not None and down is not None else False)
    return slot.jobs[1]


def _job_of(
    experts: Any, weights: Weights, name: str, dtype: torch.dtype, is_gated: bool = False
) -> kernels.Job | None:
    return kernels.job_of(
        weights[name],
        dtype,
        scales=weights.get(name + SCALE),
        bias=weights.get(f"{name}_bias"),
        is_transposed=experts.is_transposed and name + SCALE not in weights,
        is_gated=is_gated,
    )


def _is_silu_gated(experts: Any) -> bool:
    """Whether the module's gate is transformers' own with SiLU, which the kernel has built in."""
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    is_silu = isinstance(getattr(experts, "act_fn", None), SiLUActivation | nn.SiLU)
    return bool(experts.has_gate and is_silu and type(experts)._apply_gate is _default_apply_gate)
