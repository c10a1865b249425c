"""Tiny checkpoints with a tokenizer, and a runtime that is none, for the tests of the inference command.

Owns the byte-level tokenizer; promises folders that transformers itself wrote. Called by tests/infer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
VOCABULARY = 260  # three special tokens, 256 bytes, one to spare


def byte_tokenizer(chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token for each byte, so that many characters need several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: 3 + n for n, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = chat_template or None
    return fast


def dense_model(context: int = 512) -> LlamaForCausalLM:
    """A random model without experts: what the fake runtime runs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


@dataclass
class FakeStats:
    """Counters with a phase that never came."""

    bytes_read: int = 1000
    bytes_speculative: int = 400
    bytes_wasted: int = 100
    waits: dict[str, float] = field(default_factory=lambda: {"load": 0.25, "ring": 0.0})
    budget_bytes: int = 4096
    resident_bytes_max: int = 2048
    hit_rate_prefill: float = 0.5
    hit_rate_decode: float = float("nan")


class FakePlan:
    """Renders as one line."""

    def render(self) -> str:
        return "the plan"


class FakeRuntime:
    """Stands in for coop's Runtime around a model without experts."""

    def __init__(self, model: Any, tokenizer_source: Path) -> None:
        self.model, self.tokenizer_source = model, tokenizer_source
        self.plan, self.profile_status, self.is_closed = FakePlan(), "none: a fake", False

    def stats(self) -> FakeStats:
        return FakeStats()

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> FakeRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def strict_json(text: str) -> dict[str, Any]:
    """Parsed JSON in which NaN and Infinity are errors."""

    def refuse(token: str) -> None:
        raise ValueError(token)

    return json.loads(text, parse_constant=refuse)
