"""Data: chat rows from jsonl files, tokenised, with labels on what the assistant wrote and nowhere else.

Owns reading, checking and masking; promises that a bad row is named by file and line and that the token that
ends an assistant's turn is trained. `train.finetune` loads it; TRL gets it ready-made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coop.errors import DataError
from coop.files import parse_json

IGNORED_LABEL = -100
MAX_LINE_BYTES = 16 * 2**20
MAX_FAULTS_SHOWN = 5
ROLES = ("system", "user", "assistant", "tool")
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Row:
    """One tokenised conversation: labels equal the ids where the assistant writes and are -100 elsewhere."""

    input_ids: list[int]
    labels: list[int]


@dataclass(slots=True)
class DataSummary:
    """What reading a file came to."""

    path: str
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    truncated: int = 0
    without_answer: int = 0
    faults: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """One line for the start of a run."""
        share = 100 * self.trained_tokens / max(1, self.tokens)
        parts = [f"{self.path}: {self.rows:,} rows, {self.tokens:,} tokens, {share:.0f}% trained"]
        if self.truncated:
            parts.append(f"{self.truncated:,} rows cut to length")
        if self.without_answer:
            parts.append(
                f"{self.without_answer:,} rows dropped because no trained token was left after the cut"
            )
        if self.faults:
            parts.append(f"{len(self.faults):,} bad rows left out, first {self.faults[0]}")
        return "; ".join(parts)


def load_rows(
    path: Path, tokenizer: Any, *, max_length: int, max_rows: int = 0, strict: bool = True
) -> tuple[list[Row], DataSummary]:
    """Read and tokenise `path`.

    Args:
        max_length: tokens; longer rows are cut at their end, and dropped if no trained token is left.
        max_rows: stop after so many usable rows; 0 reads all.
        strict: refuse bad rows instead of leaving them out.

    Raises DataError naming the file, and file:line of bad rows.
    """
    summary = DataSummary(str(path))
    rows: list[Row] = []
    masker = Masker(tokenizer)
    for number, line in _lines(path):
        try:
            row = masker.tokenize(parse_messages(line))
        except DataError as exc:
            summary.faults.append(f"{path}:{number}: {exc}")
            continue
        if _cut(row, max_length, summary):
            rows.append(row)
        if max_rows and len(rows) == max_rows:
            break
    if strict and summary.faults:
        shown = "\n  ".join(summary.faults[:MAX_FAULTS_SHOWN])
        hint = "repair them, or set data.strict=false to leave them out"
        raise DataError(f"{len(summary.faults)} bad rows; {hint}\n  {shown}")
    if not rows:
        raise DataError(f"{path}: no usable rows ({summary.describe()})")
    summary.rows = len(rows)
    summary.tokens = sum(len(row.input_ids) for row in rows)
    summary.trained_tokens = sum(label != IGNORED_LABEL for row in rows for label in row.labels)
    return rows, summary


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1 and the bytes of every line that is not blank."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise DataError(
                        f"{path}:{number}: longer than {MAX_LINE_BYTES} bytes; this is not a jsonl file"
                    )
                if line.strip():
                    yield number, line
    except OSError as exc:
        raise DataError(f"{path}: {exc.strerror}") from exc


def _cut(row: Row, max_length: int, summary: DataSummary) -> bool:
    """Shorten `row` in place; False if nothing trained is left of it."""
    if len(row.input_ids) > max_length:
        summary.truncated += 1
        del row.input_ids[max_length:], row.labels[max_length:]
    # the first token has no predecessor, so its label is never used
    if all(label == IGNORED_LABEL for label in row.labels[1:]):
        summary.without_answer += 1
        return False
    return True


def parse_messages(line: bytes) -> list[dict[str, Any]]:
    """The messages of one jsonl line. Raises DataError saying what is wrong with it."""
    data = parse_json(line, DataError, MAX_LINE_BYTES)
    messages = data.get("messages") if isinstance(data, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError('expected {"messages": [{"role": ..., "content": ...}, ...]}')
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise DataError(f"messages[{index}] is not an object")
        if message.get("role") not in ROLES:
            raise DataError(
                f"messages[{index}].role is {message.get('role')!r:.40}, not one of {', '.join(ROLES)}"
            )
        if not isinstance(message.get("content"), str):
            raise DataError(f"messages[{index}].content is not text")
    if all(message["role"] != "assistant" for message in messages):
        raise DataError("no message of the assistant: nothing to train on")
    return messages


class Masker:
    """Turns messages into ids and labels with the tokenizer's own chat template.

    A template with `{% generation %}` marks the assistant's text itself. For any other, the text that each
    assistant message adds to the rendered conversation is found by rendering the conversation up to it and
    through it; a template for which these are not prefixes of the whole is refused for that row.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not isinstance(tokenizer.chat_template, str):
            raise DataError(f"{tokenizer.name_or_path}: the tokenizer has no chat template")
        if not tokenizer.is_fast:
            raise DataError(f"{tokenizer.name_or_path}: needs a fast tokenizer, to map text to tokens")
        self._tokenizer = tokenizer
        self._has_marks = bool(_GENERATION_TAG.search(tokenizer.chat_template))

    def tokenize(self, messages: list[dict[str, Any]]) -> Row:
        """Ids and labels of a conversation. Raises DataError if the template refuses it or is not prefix-stable."""
        if self._has_marks:
            ids, is_trained = self._by_marks(messages)
        else:
            ids, is_trained = self._by_prefixes(messages)
        labels = [token if trained else IGNORED_LABEL for token, trained in zip(ids, is_trained, strict=True)]
        if not any(is_trained):
            raise DataError("the chat template marks nothing of it as the assistant's")
        return Row(ids, labels)

    def _by_marks(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        encoded = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]

    def _by_prefixes(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        text = self._apply(messages, tokenize=False)
        spans = [
            self._span(text, messages, index)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        is_trained = [
            any(begin <= first < end for begin, end in spans) and last > first
            for first, last in encoded["offset_mapping"]
        ]
        return list(encoded["input_ids"]), is_trained

    def _span(self, text: str, messages: list[dict[str, Any]], index: int) -> tuple[int, int]:
        """Characters of `text` that the assistant message `index` wrote, its end mark included."""
        before = self._apply(messages[:index], tokenize=False, add_generation_prompt=True)
        through = self._apply(messages[: index + 1], tokenize=False)
        if not (text.startswith(through) and through.startswith(before)):
            raise DataError(
                f"the chat template renders messages[{index}] differently when others follow, so what the assistant "
                "wrote cannot be told apart; use a template with {% generation %} marks"
            )
        return len(before), len(through.rstrip())

    def _apply(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except (jinja2.TemplateError, TypeError, KeyError, IndexError) as exc:
            raise DataError(f"the chat template refuses it: {exc}"[:200]) from exc


def describe_sample(tokenizer: Any, row: Row, max_tokens: int = 120) -> str:
    """The start of a row as rich markup: what is not trained is dim, what is trained is bold."""
    from rich.markup import escape

    parts: list[str] = []
    for is_trained, ids in _runs(row, max_tokens):
        style = "bold" if is_trained else "dim"
        parts.append(f"[{style}]{escape(tokenizer.decode(ids))}[/{style}]")
    return "".join(parts) + (" …" if len(row.input_ids) > max_tokens else "")


def _runs(row: Row, max_tokens: int) -> Iterator[tuple[bool, list[int]]]:
    run: list[int] = []
    was_trained = False
    for token, label in list(zip(row.input_ids, row.labels, strict=True))[:max_tokens]:
        is_trained = label != IGNORED_LABEL
        if run and is_trained != was_trained:
            yield was_trained, run
            run = []
        run.append(token)
        was_trained = is_trained
    if run:
        yield was_trained, run


def to_dataset(rows: list[Row]) -> Any:
    """A `datasets.Dataset` with the columns that TRL's collator pads: input_ids and labels."""
    from datasets import Dataset

    return Dataset.from_dict(
        {"input_ids": [row.input_ids for row in rows], "labels": [row.labels for row in rows]}
    )
