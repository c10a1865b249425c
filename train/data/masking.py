"""Masker: a conversation or a text as tokens, with labels on what is to be learned and nowhere else.

Owns the tokenizer's chat template; promises that what the assistant wrote is trained, the token that ends its
turn included, and that a row of which this cannot be told is refused. `train.data.load` calls it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coop.errors import DataError
from train.data.fidelity import refuse_header, refuse_lost, refuse_untrue
from train.data.formats import Chat, Message, Text
from train.data.records import RowError
from train.data.rows import IGNORED_LABEL, Row

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
MAX_TOKEN_CHARACTERS = 64  # a text is not tokenised beyond so many for each token that is used
Tokens = tuple[list[int], NDArray[np.bool_]]


class Masker:
    """Turns examples into rows.

    A template with `{% generation %}` marks the assistant's text itself. For any other, and where its marks are on
    something else, the text that each
    assistant message adds to the rendered conversation is found by rendering the conversation up to it and
    through it. Where these are not prefixes of the whole, as with templates that drop earlier reasoning, TRL's
    training variant of the template is taken if TRL has one; else the row is refused.

    Args:
        tokenizer: a fast one.
        loss_on: assistant, or all for whole rows.
        max_length: tokens after which rows are cut or dropped, so that a long text is not tokenised to its end; 0:
            tokenise all of it.
    """

    def __init__(self, tokenizer: Any, loss_on: str = "assistant", max_length: int = 0) -> None:
        if not tokenizer.is_fast:
            raise DataError(f"{tokenizer.name_or_path}: needs a fast tokenizer, to map text to tokens")
        self._tokenizer, self._is_all = tokenizer, loss_on == "all"
        template = tokenizer.chat_template
        self._template = template if isinstance(template, str) else ""
        self._has_marks = bool(_GENERATION_TAG.search(self._template))
        self._max_length = max_length
        self._variant: str | None = None  # TRL's; "" if it has none
        self._ends = {tokenizer.eos_token_id, *tokenizer.get_added_vocab().values()}
        self._headers: dict[str, str] = {}
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
        encoded = self._encode(text.prompt + text.answer)
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

    def _encode(self, text: str) -> Any:
        """All tokens of `text`, or more than are used of it."""
        most = MAX_TOKEN_CHARACTERS * self._max_length
        if 0 < most < len(text):
            encoded = self._tokenizer(text[:most], return_offsets_mapping=True)
            if len(encoded["input_ids"]) > self._max_length:
                return encoded
        return self._tokenizer(text, return_offsets_mapping=True)

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
            with contextlib.suppress(RowError):  # the marks are wrong, or the template is: prefixes will tell
                return self._by_marks(chat, answers)
        try:
            return self._by_prefixes(chat, answers, self._template)
        except RowError:
            variant = self._training_variant()
            if not variant:
                raise
            tokens = self._by_prefixes(chat, answers, variant)
            self.variant_rows += 1
            return tokens

    def _by_marks(self, chat: Chat, answers: list[int]) -> Tokens:
        self._refuse_lost(chat, self._template)
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = self._apply(chat, chat.messages, **options)
        ids, is_trained = list(encoded["input_ids"]), np.array(encoded["assistant_masks"], dtype=np.bool_)
        header = self._header(self._template)
        _unmark(self._tokenizer(header, add_special_tokens=False)["input_ids"], ids, is_trained)
        runs = _runs(Row.masked(ids, is_trained), len(ids))
        refuse_header((self._decode(run) for is_on, run in runs if is_on), header)
        return self._checked(chat, answers, (ids, is_trained), self._template)

    def _by_prefixes(self, chat: Chat, answers: list[int], template: str) -> Tokens:
        text = self._render(chat, chat.messages, template)
        self._refuse_lost(chat, template)
        spans = [] if self._is_all else [self._span(chat, text, index, template) for index in answers]
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        is_trained = np.zeros(len(offsets), dtype=np.bool_)
        for begin, end in spans:
            is_trained |= (offsets[:, 0] >= begin) & (offsets[:, 0] < end)
        is_trained &= offsets[:, 1] > offsets[:, 0]
        return self._checked(chat, answers, (list(encoded["input_ids"]), is_trained), template)

    def _refuse_lost(self, chat: Chat, template: str) -> None:
        """Refuse what the template knows nothing of: the row would teach silence."""
        refuse_lost(chat, lambda messages: self._render(chat, messages, template))
        if chat.tools:
            bare = Chat(chat.format, chat.messages)
            if self._render(chat, chat.messages, template) == self._render(bare, chat.messages, template):
                raise RowError("chat template", "the chat template leaves out the tools")

    def _checked(self, chat: Chat, answers: list[int], tokens: Tokens, template: str) -> Tokens:
        """The tokens, if they are what the messages say."""
        ids, is_trained = tokens
        whole = self._decode(ids)
        trained = whole if self._is_all else self._decode(np.asarray(ids)[is_trained].tolist())
        refuse_untrue(chat, answers, whole, trained, self._header(template), self._again)
        return tokens

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _again(self, text: str) -> str:
        return self._decode(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _header(self, template: str) -> str:
        """What the template writes before an answer; "" if it cannot be told."""
        if template not in self._headers:
            question = Chat("messages", [{"role": "user", "content": "?"}])
            try:
                bare = self._render(question, question.messages, template)
                asked = self._render(question, question.messages, template, add_generation_prompt=True)
            except RowError:
                bare = asked = ""
            self._headers[template] = asked[len(bare) :] if asked.startswith(bare) else ""
        return self._headers[template]

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
        end = len(through.rstrip())
        span = text[len(before) : end]
        head = span[: max(0, span.find(chat.messages[index]["content"].strip()))]
        if head.strip() and not self._header(template):
            raise RowError(
                "chat template",
                f"the chat template has no generation prompt, so {head.strip()!r:.60} before messages[{index}] cannot "
                "be told from what the assistant wrote",
            )
        return len(before), end

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


def _unmark(header: list[int], ids: list[int], is_trained: NDArray[np.bool_]) -> None:
    """Take `header` out of the start of every run of `is_trained`: some templates of TRL mark it too."""
    starts = np.flatnonzero(is_trained & ~np.concatenate([[False], is_trained[:-1]]))
    for start in starts.tolist():
        if header and ids[start : start + len(header)] == header:
            is_trained[start : start + len(header)] = False


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
