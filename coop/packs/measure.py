"""Pack measure: what packing costs in quality, and roughly what it gains, on text of the user's own.

Owns nothing; promises that source and pack see the same tokens, in the same calls, through the same runtime.
Called by the packer's command line for `--eval`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coop.adapters.attach import Runtime, attach
from coop.errors import CheckpointError, DataError, NumberError
from coop.files import parse_json

MAX_LINE_BYTES = 2**20
MAX_ROW_TOKENS = 1024  # a row's logits take this times the vocabulary
BATCH_TOKENS = 1024  # rows that share one reading of the experts, padding included
SPEED_PROMPT_TOKENS = 32
SPEED_NEW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Measurement:
    """Perplexity over `tokens` predicted tokens, and a rough speed of a few greedy ones at `budget_bytes`."""

    perplexity: float
    tokens: int
    tokens_per_s: float
    budget_bytes: int


def read_texts(path: Path, tokenizer_folder: Path, max_tokens: int) -> list[list[int]]:
    """Token ids of the rows of a JSONL file, {"messages": [...]} or {"text": ...}.

    At most `max_tokens` in all, and of each row at most its first 1024.
    Raises DataError with file and line, CheckpointError without a tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(tokenizer_folder), trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as exc:
        raise CheckpointError(
            f"{tokenizer_folder}: no tokenizer can be loaded from here, so --eval cannot read text"
        ) from exc
    found: list[list[int]] = []
    left = max_tokens
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                if left < 2:
                    break
                if line.strip():
                    ids = _encode(tokenizer, line, f"{path}:{number}")[: min(left, MAX_ROW_TOKENS)]
                    found += [ids] if len(ids) > 1 else []
                    left -= len(ids)
    except OSError as exc:
        raise DataError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    if not found:
        raise DataError(f"{path} has no row of at least two tokens")
    return found


def _encode(tokenizer: Any, line: bytes, place: str) -> list[int]:
    row = parse_json(line, lambda reason: DataError(f"{place}: {reason}"), MAX_LINE_BYTES)
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return list(tokenizer(row["text"])["input_ids"])
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise DataError(f"{place}: has neither messages nor text")
    if not tokenizer.chat_template:
        raise DataError(
            f'{place}: has messages and the tokenizer no chat template; give rows {{"text": ...}}'
        )
    try:
        return list(
            tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]
        )
    except Exception as exc:  # a template raises what its author chose
        raise DataError(f"{place}: the chat template refuses it: {str(exc)[:200]}") from exc


def measure_model(
    ckpt: Path, base: str | None, texts: Sequence[Sequence[int]], advance: Callable[[int], None]
) -> Measurement:
    """Perplexity and rough speed of a checkpoint or a pack, with what memory allows resident.

    `advance` takes the tokens that were read. Raises NumberError for logits that are no numbers.
    """
    longest = max(len(ids) for ids in texts)
    context = max(longest, SPEED_PROMPT_TOKENS + SPEED_NEW_TOKENS)
    with attach(ckpt, base=base, budget="auto", max_context=context) as runtime:
        losses = []
        for rows in _batches(texts):
            losses += _losses(runtime, rows)
            advance(sum(map(len, rows)))
        tokens = sum(len(ids) - 1 for ids in texts)
        mean = math.fsum(losses) / tokens
        if not math.isfinite(mean):
            raise NumberError(f"{ckpt}: the logits are not finite numbers, so there is no perplexity")
        speed = _speed(runtime, texts[0])
        return Measurement(math.exp(min(mean, 700.0)), tokens, speed, runtime.plan.budget_bytes)


def _batches(texts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Rows in their order, as many at once as fit when padded to the longest."""
    rows: list[Sequence[int]] = []
    for ids in texts:
        if rows and max(map(len, [*rows, ids])) * (len(rows) + 1) > BATCH_TOKENS:
            yield rows
            rows = []
        rows.append(ids)
    yield rows


@torch.no_grad()
def _losses(runtime: Runtime, rows: Sequence[Sequence[int]]) -> list[float]:
    """Negative log likelihood of each row, summed over its tokens but the first.

    Rows are padded behind their ends, where no token of theirs looks.
    """
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    logits = runtime.model(input_ids=tokens, use_cache=False).logits  # [rows, tokens, vocabulary]
    losses = []
    for row, own, ids in zip(tokens, logits, rows, strict=True):
        end = len(ids)
        loss = torch.nn.functional.cross_entropy(own[: end - 1].float(), row[1:end], reduction="sum")
        losses.append(float(loss))
    return losses


@torch.no_grad()
def _speed(runtime: Runtime, ids: Sequence[int]) -> float:
    """Greedy tokens per second after the first one: two generations, of which the shorter is taken off."""
    tokens = torch.tensor([list(ids[:SPEED_PROMPT_TOKENS])])

    def seconds(new_tokens: int) -> float:
        began = time.perf_counter()
        runtime.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
        )
        return time.perf_counter() - began

    seconds(SPEED_NEW_TOKENS)  # the experts of these tokens become resident
    first, all_of_them = seconds(1), seconds(SPEED_NEW_TOKENS)
    return (SPEED_NEW_TOKENS - 1) / max(all_of_them - first, 1e-9)
