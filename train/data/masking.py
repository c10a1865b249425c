"""Masker: a conversation or a text as tokens, with labels on what is to be learned and nowhere else.

Owns the tokenizer's chat template; promises that what the assistant wrote is trained, the token that ends its
turn included, and that a row of which this cannot be told is refused. `train.data.load` calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coop.errors import DataError
from train.data.formats import Chat, Message, Text
from train.data.records import RowError
from train.data.rows import IGNORED_LABEL, Row

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
Tokens = tuple[list[int], NDArray[np.bool_]]


class Masker:
    """Turns examples into rows.

    A template with `{% generation %}` marks the assistant's text itself. For any other, the text that each
    assistant message adds to the rendered conversation is found by rendering the conversation up to it and
    through it. Where these are not prefixes of the whole, as with templates that drop earlier reasoning, TRL's
    training variant of the template is taken if TRL has one; else the row is refused.

    Args:
        tokenizer: a fast one.
        loss_on: assistant, or all for whole rows.
    """

    def __init__(self, tokenizer: Any, loss_on: str = "assistant") -> None:
        if not tokenizer.is_fast:
            raise DataError(f"{tokenizer.name_or_path}: needs a fast tokenizer, to map text to tokens")
        self._tokenizer, self._is_all = tokenizer, loss_on == "all"
        template = tokenizer.chat_template
        self._template = template if isinstance(template, str) else ""
        self._has_marks = bool(_GENERATION_TAG.search(self._template))
        self._variant: str | None = None  # TRL's; "" if it has none
        self._ends = {tokenizer.eos_token_id, *tokenizer.get_added_vocab().values()}
        self.variant_rows = 0  # rows rendered with TRL's variant
        self.endless_rows = 0  # rows whose last trained token is no end mark

    def tokenize(self, example: Chat | Text) -> Row:
        """Ids and labels. Raises RowError for this row, DataError if the tokenizer has no chat template."""
        ids, is_trained = self._plain(example) if isinstance(example, Text) else self._chat(example)
        if self._is_all:
            is_trained = np.ones(len(ids), dtype=np.bool_)
        row = Row.masked(ids, is_trained)
        if not row.trained_tokens:
            raise RowError("nothing to train", "no token of it is trained")
        trained = row.input_ids[row.labels != IGNORED_LABEL]
        if isinstance(example, Chat) and not self._is_all and int(trained[-1]) not in self._ends:
            self.endless_rows += 1
        return row

    def _plain(self, text: Text) -> Tokens:
        """The text as the tokenizer takes it, and an end token; trained from the answer on."""
        encoded = self._tokenizer(text.prompt + text.answer, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        is_trained = offsets[:, 1] > len(text.prompt)  # a token across the border holds text of the answer
        end = self._tokenizer.eos_token_id
        if end is not None and ids[-1:] == [end]:
            is_trained[-1] = True
        elif end is not None:
            ids.append(end)
            is_trained = np.append(is_trained, True)
        return ids, is_trained

    def _chat(self, chat: Chat) -> Tokens:
        if not self._template:
            raise DataError(
                f"{self._tokenizer.name_or_path}: the tokenizer has no chat template, which {chat.format} rows need; "
                "take a model whose tokenizer has one, or rows of the formats text or prompt_completion"
            )
        answers = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant" and i >= chat.context]
        if not answers and not self._is_all:
            raise RowError("nothing to train", "no message of the assistant: nothing to train on")
        if self._has_marks and not chat.context:
            return self._by_marks(chat)
        try:
            return self._by_prefixes(chat, answers, self._template)
        except RowError:
            variant = self._training_variant()
            if not variant:
                raise
            tokens = self._by_prefixes(chat, answers, variant)
            self.variant_rows += 1
            return tokens

    def _by_marks(self, chat: Chat) -> Tokens:
        if any("tool_calls" in message for message in chat.messages):
            _refuse_lost_calls(chat, self._render(chat, chat.messages, self._template))
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = self._apply(chat, chat.messages, **options)
        return list(encoded["input_ids"]), np.array(encoded["assistant_masks"], dtype=np.bool_)

    def _by_prefixes(self, chat: Chat, answers: list[int], template: str) -> Tokens:
        text = self._render(chat, chat.messages, template)
        _refuse_lost_calls(chat, text)
        spans = [] if self._is_all else [self._span(chat, text, index, template) for index in answers]
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        is_trained = np.zeros(len(offsets), dtype=np.bool_)
        for begin, end in spans:
            is_trained |= (offsets[:, 0] >= begin) & (offsets[:, 0] < end)
        return list(encoded["input_ids"]), is_trained & (offsets[:, 1] > offsets[:, 0])

    def _span(self, chat: Chat, text: str, index: int, template: str) -> tuple[int, int]:
        """Characters of `text` that the assistant message `index` wrote, its end mark included."""
        if index == 0:
            raise RowError(
                "chat template", "it begins with the assistant; put a user or system message before it"
            )
        is_last = index == len(chat.messages) - 1
        before = self._render(chat, chat.messages[:index], template, add_generation_prompt=True)
        through = text if is_last else self._render(chat, chat.messages[: index + 1], template)
        if not (text.startswith(through) and through.startswith(before)):
            raise RowError(
                "chat template",
                f"the chat template renders messages[{index}] differently when others follow, so what the assistant "
                "wrote cannot be told apart; use a template with {% generation %} marks",
            )
        return len(before), len(through.rstrip())

    def _render(self, chat: Chat, messages: list[Message], template: str, **options: Any) -> str:
        return str(self._apply(chat, messages, tokenize=False, chat_template=template, **options))

    def _apply(self, chat: Chat, messages: list[Message], **options: Any) -> Any:
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(messages, tools=chat.tools or None, **options)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as exc:
            raise RowError("chat template", f"the chat template refuses it: {exc}"[:200]) from exc

    def _training_variant(self) -> str:
        if self._variant is None:
            import jinja2
            from trl.chat_template_utils import get_training_chat_template

            try:
                self._variant = get_training_chat_template(self._tokenizer) or ""
            except (ValueError, TypeError, LookupError, jinja2.TemplateError):
                self._variant = ""  # TRL knows this template not
        return self._variant


def _refuse_lost_calls(chat: Chat, text: str) -> None:
    """A template that knows no tools leaves calls out, and the row would teach silence."""
    for index, message in enumerate(chat.messages):
        for call in message.get("tool_calls", []):
            function = call.get("function", call) if isinstance(call, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            if not isinstance(name, str) or name not in text:
                raise RowError(
                    "chat template", f"the chat template leaves out the tool_calls of messages[{index}]"
                )


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
    for token, label in zip(
        row.input_ids[:max_tokens].tolist(), row.labels[:max_tokens].tolist(), strict=True
    ):
        is_trained = label != IGNORED_LABEL
        if run and is_trained != was_trained:
            yield was_trained, run
            run = []
        run.append(token)
        was_trained = is_trained
    if run:
        yield was_trained, run
