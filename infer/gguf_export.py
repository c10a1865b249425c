"""A checkpoint as GGUF, so that llama.cpp can be measured on the same weights.

Owns the names and the metadata; promises that no weight is changed in the bf16 file, that the Q4_0 file is made
by llama.cpp's own quantiser, and that a file appears whole or not at all. Called by `infer.arms` (engine `gguf`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coop.errors import CheckpointError
from coop.shards import TensorEntry, read_checkpoint_tensors
from infer.lineup import GGUF_DTYPES

EXPERT_NAMES = {
    "qwen3_moe": (
        "mlp.gate",
        "mlp.experts.{}.gate_proj",
        "mlp.experts.{}.up_proj",
        "mlp.experts.{}.down_proj",
    ),
    "mixtral": (
        "block_sparse_moe.gate",
        "block_sparse_moe.experts.{}.w1",
        "block_sparse_moe.experts.{}.w3",
        "block_sparse_moe.experts.{}.w2",
    ),
}
ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor of the GGUF file: its sources in the checkpoint, stacked if there are several.

    heads: the query or key heads whose halves llama.cpp wants interleaved, 0 for none. Norms and routers stay
    float32, as llama.cpp's own converter writes them.
    """

    name: str
    sources: tuple[str, ...]
    heads: int = 0
    is_float32: bool = False


def export(folder: Path, out: Path, kind: str) -> None:
    """Write `out`, a GGUF file of `kind` bf16 or q4_0. CheckpointError for a model that llama.cpp reads otherwise."""
    assert kind in GGUF_DTYPES
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as work:
        whole = Path(work) / "bf16.gguf"
        source = out.with_name(out.name.replace("q4_0", "bf16"))
        if kind == "q4_0" and source.is_file():
            whole = source
        else:
            _write_bf16(folder, whole)
        if kind == "q4_0":
            result = Path(work) / "q4_0.gguf"
            _quantise(whole, result)
        else:
            result = whole
        os.replace(result, out)


def _quantise(source: Path, target: Path) -> None:
    """llama.cpp's own Q4_0: matrices in Q4_0, the head in Q6_K, norms and routers in float32."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    params.nthread = os.cpu_count() or 1
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) != 0:
        raise CheckpointError(f"{source}: llama.cpp cannot quantise it to Q4_0")


def _write_bf16(folder: Path, out: Path) -> None:
    import gguf

    config = _config(folder)
    tensors = read_checkpoint_tensors(folder)
    writer = gguf.GGUFWriter(out, "llama" if config.model_type == "mixtral" else "qwen3moe")
    _add_metadata(writer, config)
    targets = list(_targets(config))
    for target in targets:
        shape = _shape(target, tensors)
        size = 4 if target.is_float32 else 2
        writer.add_tensor_info(
            target.name,
            (*shape[:-1], shape[-1] * size),
            np.dtype(np.uint8),
            int(np.prod(shape)) * size,
            raw_dtype=gguf.GGMLQuantizationType.F32 if target.is_float32 else gguf.GGMLQuantizationType.BF16,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for target in targets:
        writer.write_tensor_data(_bytes(target, tensors))
    writer.close()


def _config(folder: Path) -> Any:
    """The config, refused where llama.cpp would compute something else."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if config.model_type not in EXPERT_NAMES:
        raise CheckpointError(
            f"{folder}: the GGUF writer knows {', '.join(EXPERT_NAMES)}, not {config.model_type}"
        )
    rope = config.rope_parameters
    others = {
        "rope_type": rope.get("rope_type", "default") != "default",
        "norm_topk_prob": not getattr(config, "norm_topk_prob", True),
        "mlp_only_layers": bool(getattr(config, "mlp_only_layers", None)),
        "decoder_sparse_step": getattr(config, "decoder_sparse_step", 1) != 1,
        "sliding_window": bool(getattr(config, "sliding_window", None)),
        "attention_bias": bool(getattr(config, "attention_bias", False)),
    }
    for name, is_other in others.items():
        if is_other:
            raise CheckpointError(f"{folder}: the GGUF writer does not know this model's {name}")
    return config


def _add_metadata(writer: Any, config: Any) -> None:
    experts, head_dim = _num_experts(config), _head_dim(config)
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(width)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(32)  # mostly bf16
    writer.add_tokenizer_model("no_vocab")  # what is measured are token ids; no text comes or goes


def _num_experts(config: Any) -> int:
    return int(getattr(config, "num_experts", None) or config.num_local_experts)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _targets(config: Any) -> Iterator[Target]:
    """Every tensor of the file, in order."""
    yield Target("token_embd.weight", ("model.embed_tokens.weight",))
    yield Target("output_norm.weight", ("model.norm.weight",), is_float32=True)
    if not config.tie_word_embeddings:
        yield Target("output.weight", ("lm_head.weight",))
    is_llama = config.model_type == "mixtral"
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    router, *parts = EXPERT_NAMES[config.model_type]
    for layer in range(config.num_hidden_layers):
        source, block = f"model.layers.{layer}", f"blk.{layer}"
        for name, short in (NORMS if is_llama else NORMS | HEAD_NORMS).items():
            yield Target(f"{block}.{short}.weight", (f"{source}.{name}.weight",), is_float32=True)
        for name, short in ATTENTION.items():
            turned = heads.get(name, 0) if is_llama else 0
            yield Target(f"{block}.{short}.weight", (f"{source}.self_attn.{name}.weight",), turned)
        yield Target(f"{block}.ffn_gate_inp.weight", (f"{source}.{router}.weight",), is_float32=True)
        for short, part in zip(("gate", "up", "down"), parts, strict=True):
            experts = tuple(f"{source}.{part.format(e)}.weight" for e in range(_num_experts(config)))
            yield Target(f"{block}.ffn_{short}_exps.weight", experts)


def _shape(target: Target, tensors: dict[str, TensorEntry]) -> tuple[int, ...]:
    missing = [name for name in target.sources if name not in tensors]
    if missing:
        raise CheckpointError(f"no {missing[0]} in this checkpoint; the GGUF writer reads the Hub's layout")
    shape = tuple(tensors[target.sources[0]].shape)
    return (len(target.sources), *shape) if len(target.sources) > 1 else shape


def _bytes(target: Target, tensors: dict[str, TensorEntry]) -> np.ndarray:
    """The tensor as the file has it: uint8 [..., columns x bytes]."""
    from safetensors import safe_open

    parts = []
    for name in target.sources:
        with safe_open(tensors[name].path, framework="pt") as file:
            parts.append(file.get_tensor(name))
    whole = torch.stack(parts) if len(parts) > 1 else parts[0]
    if target.heads:
        rows, columns = whole.shape
        whole = whole.view(target.heads, 2, rows // target.heads // 2, columns).transpose(1, 2)
        whole = whole.reshape(rows, columns)
    dtype = torch.float32 if target.is_float32 else torch.bfloat16
    return whole.to(dtype).contiguous().view(torch.uint8).numpy()
