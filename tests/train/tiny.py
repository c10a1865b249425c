"""A tiny model with a chat tokenizer, tiny chat data and a recipe for them, for tests of training.

Owns nothing; promises byte-level tokens, so that any text can be tokenised. Called by tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.families import build_family
from train.recipe import load_recipe
from train.saving.checkpoint import METRICS_NAME
from train.schema import Recipe
from train.watching.progress import read_metrics

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]


def build_tokenizer(template: str = CHATML, padding_side: str = "right") -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: 256 bytes and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        padding_side=padding_side,
    )
    wrapped.chat_template = template
    return wrapped


def build_model(folder: Path, family: str = "mixtral", **over: Any) -> Path:
    """A tiny model of `family` with the tokenizer above, saved in `folder`."""
    tokenizer = build_tokenizer()
    common = {"vocab_size": len(tokenizer), "attention_dropout": 0.1}
    build_family(folder, family, torch.float32, **{**common, **over})
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: int, seed: int = 0) -> Path:
    """Chat rows of different lengths with a pattern that can be learned."""
    lines = []
    for i in range(rows):
        word = "abcdefgh"[(i + seed) % 8] * (2 + i % 5)
        messages = [
            {"role": "user", "content": f"say {word}"},
            {"role": "assistant", "content": f"{word} {word}!"},
        ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


def build_recipe(folder: Path, *overrides: str, family: str = "mixtral") -> Recipe:
    """A recipe in `folder`, with its model and data, and `key=value` overrides; full tuning drops its adapters."""
    bare = ("tune.lora={}",) if "tune.method=full" in overrides else ()
    return load_recipe(write_recipe(folder, family), (*bare, *overrides))


def write_recipe(folder: Path, family: str = "mixtral") -> Path:
    """The recipe file of `build_recipe`."""
    folder.mkdir(exist_ok=True)
    if not (folder / "model").exists():
        build_model(folder / "model", family)
        write_rows(folder / "train.jsonl", 24)
        write_rows(folder / "eval.jsonl", 6, seed=3)
    keys = {
        "output": str(folder / "out"),
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "max_length": 96},
        "tune": {"lora": {"r": 4, "alpha": 8}},
        "coop": {
            "warmup": {"every_steps": 3, "row_counts": [1, 4], "repeats": 1},
            "profile": {"refresh_rows": 4},
        },
        "train": {"steps": 6, "batch_size": 2, "learning_rate": 0.01},
        "checkpoint": {"every_steps": 2},
        "logging": {"wandb": {"mode": "disabled"}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(keys))
    return folder / "recipe.yaml"


def read_losses(output: Path) -> list[dict[str, Any]]:
    """The metrics of training steps that a run wrote into `output`."""
    return [record for record in read_metrics(output / METRICS_NAME) if "loss" in record]
