"""Fidelity: whether a chat template renders a conversation whole, and whether the mask trains the assistant alone.

Owns what may not be lost and what may not be trained; promises that a row of which the template drops tool calls,
tools, reasoning or a message, or whose trained tokens are others than the assistant's, is refused by the name of
what is wrong. Pure; `train.data.masking` calls it for every conversation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from train.data.formats import REASONING_KEYS, Chat, Message
from train.data.records import RowError

MIN_LEAK_CHARACTERS = 12  # shorter texts of others also stand in end marks, such as "end" in <|im_end|>
Render = Callable[[list[Message]], str]


def refuse_lost(chat: Chat, render: Render) -> None:
    """Refuse tool calls and reasoning that do not reach the text: each is replaced by a mark that must show up."""
    messages: list[Message] = []
    marks: dict[str, str] = {}
    for index, message in enumerate(chat.messages):
        message = dict(message)
        if message.get("tool_calls"):
            message["tool_calls"] = [
                _marked_call(call, index, number, marks) for number, call in enumerate(message["tool_calls"])
            ]
        for key in REASONING_KEYS:
            if message.get(key, "").strip() and index >= chat.context:
                message[key] = f"zq{key.replace('_', '')}{index}zq"
                marks[message[key]] = f"the {key} of messages[{index}]"
        messages.append(message)
    text = render(messages) if marks else ""
    for mark, what in marks.items():
        if mark not in text:
            raise RowError("chat template", f"the chat template leaves out {what}")


def _marked_call(call: object, index: int, number: int, marks: dict[str, str]) -> object:
    """The call with a name of its own and one more argument."""
    what = f"the tool_calls of messages[{index}]"
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or "name" not in function:
        raise RowError("chat template", f"the chat template leaves out {what}: a call has no name")
    name, argument = f"zqcall{index}x{number}zq", f"zqargument{index}x{number}zq"
    marks[name] = what
    function = {**function, "name": name}
    if isinstance(function.get("arguments"), dict):
        function["arguments"] = {**function["arguments"], argument: 1}
        marks[argument] = f"arguments in {what}"
    return {**call, "function": function} if "function" in call else function


def refuse_untrue(
    chat: Chat, answers: Sequence[int], whole: str, trained: str, header: str, again: Callable[[str], str]
) -> None:
    """Refuse a row whose tokens are not what its messages say; white space does not matter.

    Args:
        answers: indices of the assistant's messages that are trained.
        whole, trained: the decoded row, and what of it is trained; the same for whole rows.
        header: what the template writes before an answer, which may hold its beginning, such as <think>.
        again: a text after encoding and decoding, which a tokenizer may change.
    """
    kept, learned = _squeeze(whole), _squeeze(trained)
    said = _squeeze("\0".join(_said(chat.messages[index]) for index in answers))
    for index, message in enumerate(chat.messages):
        content = _squeeze(message["content"])
        is_answer = index in answers
        if is_answer or message["role"] in ("system", "developer", "user"):
            place = learned if is_answer else kept
            shorter = _after(_squeeze(header), content) if is_answer else content
            if shorter not in place and _squeeze(again(message["content"])) not in place:
                raise RowError("chat template", _describe_lost(index, message, is_answer))
        if is_answer or trained == whole or len(content) < MIN_LEAK_CHARACTERS:
            continue
        if content in learned and content not in said:
            raise RowError(
                "chat template",
                f"the chat template marks messages[{index}] of the {message['role']} as trained",
            )


def refuse_header(runs: Iterable[str], header: str) -> None:
    """Refuse a row of which a run of trained tokens begins with what the template writes before an answer."""
    head = _squeeze(header)
    if head and any(_squeeze(run).startswith(head) for run in runs):
        raise RowError(
            "chat template", f"the chat template marks {header.strip()!r:.60} before an answer as trained"
        )


def _after(header: str, content: str) -> str:
    """`content` without what the end of `header` already holds of it."""
    sizes = range(min(len(header), len(content)), 0, -1)
    return content[next((size for size in sizes if header.endswith(content[:size])), 0) :]


def _describe_lost(index: int, message: Message, is_answer: bool) -> str:
    if is_answer:
        return f"the trained tokens do not hold what messages[{index}] of the assistant says: the template changes it"
    return f"the chat template leaves out or changes messages[{index}] of the {message['role']}"


def _said(message: Message) -> str:
    """Everything that the assistant wrote in a message."""
    calls = message.get("tool_calls", [])
    texts = [message["content"], *(message.get(key, "") for key in REASONING_KEYS), *_strings(calls)]
    return "\0".join([*texts, json.dumps(calls, ensure_ascii=False, default=str)])


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for item in inner for text in _strings(item)]


def _squeeze(text: str) -> str:
    """`text` without white space, which templates and tokenizers trim and add."""
    return "".join(text.split())
