"""Profiles with random but consistent counts, for tests.

Owns nothing; promises every invariant of `Profile`. Called by tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coop.profile import Profile, ProfileIdentity


def build_profile(
    *, layers: int = 3, experts: int = 8, top_k: int = 2, seed: int = 0, **changes: Any
) -> Profile:
    """A consistent profile; `changes` replace fields."""
    rng = np.random.default_rng(seed)
    identity = ProfileIdentity(
        architecture="MixtralForCausalLM",
        layers=tuple(f"model.layers.{i}.mlp.experts" for i in range(layers)),
        num_experts=experts,
        top_k=top_k,
        router_digest="r" * 64,
        adapter_digest="a" * 64,
        tokenizer_digest="t" * 64,
    )
    fields: dict[str, Any] = {
        "identity": identity,
        "step": 40,
        "is_refreshed": True,
        "fingerprint": "machine",
        "warmups": 2,
        "warmup_seconds": 1.5,
        "warmup_next": 5,
        "train_seconds": 100.0,
        "row_counts": np.array([1, 8], dtype=np.int32),
        "compute_ms": rng.random((layers, experts, 2), dtype=np.float32),
        "load_ms": np.full(layers, 0.5, dtype=np.float32),
        "recent_answer": rng.random((layers, experts), dtype=np.float32),
        "same_layer": rng.integers(0, 50, (layers, experts, experts), dtype=np.int32),
        "next_layer": rng.integers(0, 50, (layers - 1, experts, experts), dtype=np.int32),
        "rows": np.tile(np.array([2, 5, 9], dtype=np.int32), (layers, 1)),
        "sample": rng.integers(0, experts, (20, layers, top_k)).astype(np.uint16),
    }
    for name, tokens in {
        "hot_prompt": 30,
        "hot_answer": 20,
        "train_prompt": 300,
        "train_answer": 200,
    }.items():
        fields[name] = _counts(rng, layers, experts, top_k, tokens)
        fields[name.replace("hot_", "tokens_").replace("train_", "train_tokens_")] = tokens
    return Profile(**{**fields, **changes})


def _counts(
    rng: np.random.Generator, layers: int, experts: int, top_k: int, tokens: int
) -> NDArray[np.int64]:
    chosen = rng.random((layers, tokens, experts)).argsort(axis=2)[..., :top_k]
    return np.stack([np.bincount(layer.ravel(), minlength=experts) for layer in chosen]).astype(np.int64)
