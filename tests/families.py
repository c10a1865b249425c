"""Tiny random models of every family that exactness is proven on, saved as their real checkpoints are.

Owns the table of configs; promises models of a few hundred kilobytes whose experts differ. Called by tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

HIDDEN = 32
COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MLA = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
SHARED: dict[str, Any] = {"moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1}
GROUPS: dict[str, Any] = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24, "head_dim": 8},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24},
    "deepseek_v2": {
        **MLA,
        **SHARED,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
        "num_key_value_heads": 4,
    },
    "deepseek_v3": {
        **MLA,
        **SHARED,
        **GROUPS,
        "q_lora_rank": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "head_dim": 8,
        "sliding_window": 64,
    },
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24},
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "intermediate_size": 48,
        "decoder_sparse_step": 1,
    },
    "glm4_moe": {
        **SHARED,
        **GROUPS,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["attention", "moe", "attention", "moe"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "n_shared_experts": 1,
        "intermediate_size": 48,
        "head_dim": 8,
        "n_group": 2,
        "topk_group": 1,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
    },
}


def build_family(
    folder: Path, family: str, dtype: torch.dtype = torch.float32, shard: str = "5GB", **over: Any
) -> Any:
    """Save a tiny random model of `family` in its Hub layout; returns the live model in eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **over})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # larger than the usual 0.02: routing must depend on the token and experts must differ visibly
            parameter.normal_(0.0, 0.2) if parameter.ndim > 1 else parameter.add_(
                0.1 * torch.randn_like(parameter)
            )
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
