"""Formats: a row in one of the five shapes that people have, as a conversation or as a text.

Owns what each shape must hold; promises that a row in no known shape says which keys it has. Pure; `train.data.load`
calls it between reading and masking.

    messages           {"messages": [{"role": "user", "content": "..."}, ...]}
    sharegpt           {"conversations": [{"from": "human", "value": "..."}, ...]}
    alpaca             {"instruction": "...", "input": "...", "output": "..."}
    prompt_completion  {"prompt": "...", "completion": "..."}, both texts or both lists of messages
    text               {"text": "..."}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from train.data.records import RowError

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "tool": "tool",
    "observation": "tool",
}
MAX_TEXT_CHARACTERS = 16 * 2**20
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
PASSED_KEYS = ("name", "tool_calls", "tool_call_id", *REASONING_KEYS)
SWITCH_KEYS = ("train", "training", "train_on_turn", "loss")  # with false, other trainers leave a turn out
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation; the first `context` messages are never trained. `tools` are for the chat template."""

    format: str
    messages: list[Message]
    context: int = 0
    tools: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text without a chat template: `answer` follows `prompt` at once."""

    format: str
    prompt: str
    answer: str


def parse_row(value: Any, format: str, columns: Mapping[str, str]) -> Chat | Text:
    """The row `value` in `format` (auto: by its keys), its columns renamed. Raises RowError saying what is wrong."""
    if not isinstance(value, dict):
        raise RowError("format", f"not an object with keys but {_kind(value)}")
    row = {
        str(name): inner for name, inner in value.items() if inner is not None
    }  # Arrow fills gaps with null
    for ours, theirs in columns.items():
        if theirs in row:
            row[ours] = row[theirs]
    name = detect(row) if format == "auto" else format
    missing = [key for key in REQUIRED[name] if key not in row]
    if missing:
        raise RowError("format", f"{name} needs {' and '.join(missing)}; the row has {_keys(row)}")
    _refuse_untrained(row, "")
    return _PARSERS[name](row)


REQUIRED = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}


def detect(row: Mapping[str, Any]) -> str:
    """The one format whose keys are all in `row`. Raises RowError for none or several."""
    fitting = [name for name, keys in REQUIRED.items() if all(key in row for key in keys)]
    if len(fitting) == 1:
        return fitting[0]
    known = "; ".join(f"{name} has {' and '.join(keys)}" for name, keys in REQUIRED.items())
    if fitting:
        raise RowError(
            "format", f"the keys {_keys(row)} fit {' and '.join(fitting)}; say which with data.format"
        )
    raise RowError("format", f"the keys {_keys(row)} fit no format; {known}; rename with columns")


def _keys(row: Mapping[str, Any]) -> str:
    names = [name if len(name) <= 40 else name[:40] + "..." for name in list(row)[:12]]
    names = [name.encode(errors="backslashreplace").decode() for name in names]
    return ", ".join(names) + (", ..." if len(row) > 12 else "") if names else "no key"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    if isinstance(value, float) and value != value:
        return "NaN"
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _text(value: Any, name: str) -> str:
    """`value` if it is text that can be tokenised."""
    if not isinstance(value, str):
        raise RowError("field", f"{name} is not text but {_kind(value)}")
    if len(value) > MAX_TEXT_CHARACTERS:
        raise RowError(
            "field", f"{name} has {len(value):,} characters, at most {MAX_TEXT_CHARACTERS:,} are read"
        )
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise RowError("field", f"{name} holds half of a surrogate pair at {exc.start}") from exc
    return value


def _some_text(value: Any, name: str) -> str:
    if not _text(value, name).strip():
        raise RowError("field", f"{name} is empty")
    return str(value)


def _content(value: Any, name: str) -> str:
    """Text, or the texts of a list of parts joined; a part that is no text is refused."""
    if not isinstance(value, list):
        return _text(value, name)
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text":
            raise RowError("field", f"{name}[{index}] is of type {kind!r:.40}; only text can be trained")
        texts.append(_text(part.get("text") if isinstance(part, dict) else part, f"{name}[{index}]"))
    return "".join(texts)


def _refuse_untrained(holder: Mapping[str, Any], prefix: str) -> None:
    """Refuse what a row or a turn says of its weight in the loss, unless it is the whole one."""
    if str(holder.get("weight", 1)).lower() not in ("1", "1.0", "true"):
        raise RowError("field", f"{prefix}weight is {holder['weight']!r:.40}; all answers are trained alike")
    for key in SWITCH_KEYS:
        if str(holder.get(key, True)).lower() in ("false", "0", "0.0", "no"):
            raise RowError("field", f"{prefix}{key} is {holder[key]!r:.40}; all answers are trained alike")


def _tools(row: Mapping[str, Any]) -> list[Any]:
    """The tools of a row, for the chat template."""
    tools = row.get("tools", [])
    if not isinstance(tools, list):
        raise RowError("field", f"tools is not a list but {_kind(tools)}")
    return tools


def _with_system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """`messages` behind the row's own `system`, if it has one."""
    if not row.get("system"):
        return messages
    system = {"role": "system", "content": _text(row["system"], "system")}
    if messages and messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] != system["content"]:
            raise RowError("field", "system is there twice: beside the messages, and as the first of them")
        return messages
    return [system, *messages]


def _messages(value: Any, name: str) -> list[Message]:
    """The messages in `value`, each with role, content and what templates know besides."""
    if not isinstance(value, list) or not value:
        raise RowError("field", f'{name} is not a list of {{"role": ..., "content": ...}}')
    return [_message(message, f"{name}[{index}]") for index, message in enumerate(value)]


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, dict):
        raise RowError("field", f"{name} is not an object")
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise RowError("field", f"{name}.role is {role!r:.40}, not one of {', '.join(ROLES)}")
    _refuse_untrained(message, f"{name}.")
    kept = {key: message[key] for key in PASSED_KEYS if key in message}
    if not isinstance(kept.get("tool_calls", []), list):
        raise RowError("field", f"{name}.tool_calls is not a list but {_kind(kept['tool_calls'])}")
    for key in PASSED_KEYS:
        if key in kept and key != "tool_calls":
            _text(kept[key], f"{name}.{key}")
    content = message.get("content", "" if kept.get("tool_calls") else None)
    return {"role": role, "content": _content(content, f"{name}.content"), **kept}


def _from_messages(row: dict[str, Any]) -> Chat:
    messages = _with_system(row, _messages(row["messages"], "messages"))
    return Chat("messages", messages, tools=_tools(row))


def _from_sharegpt(row: dict[str, Any]) -> Chat:
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise RowError("field", 'conversations is not a list of {"from": ..., "value": ...}')
    messages: list[Message] = []
    for index, turn in enumerate(turns):
        name = f"conversations[{index}]"
        if not isinstance(turn, dict):
            raise RowError("field", f"{name} is not an object")
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            raise RowError("field", f"{name}.from is {speaker!r:.40}, not one of {', '.join(SHAREGPT_ROLES)}")
        _refuse_untrained({key: value for key, value in turn.items() if value is not None}, f"{name}.")
        content = _text(turn.get("value"), f"{name}.value")
        messages.append({"role": SHAREGPT_ROLES[speaker], "content": content})
    return Chat("sharegpt", _with_system(row, messages), tools=_tools(row))


def _from_alpaca(row: dict[str, Any]) -> Chat:
    if row.get("history"):
        raise RowError("field", "history of alpaca is not supported; write the row as messages")
    question = _some_text(row["instruction"], "instruction")
    context = _text(row.get("input", ""), "input")
    messages = [{"role": "user", "content": f"{question}\n\n{context}" if context.strip() else question}]
    messages.append({"role": "assistant", "content": _some_text(row["output"], "output")})
    return Chat("alpaca", _with_system(row, messages), tools=_tools(row))


def _from_prompt_completion(row: dict[str, Any]) -> Chat | Text:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = _with_system(row, _messages(prompt, "prompt")), _messages(completion, "completion")
        return Chat("prompt_completion", [*before, *after], context=len(before), tools=_tools(row))
    if isinstance(prompt, str) != isinstance(completion, str):
        raise RowError("field", "prompt and completion must both be text, or both lists of messages")
    for key in ("system", "tools"):
        if row.get(key):
            raise RowError(
                "field", f"{key} needs prompt and completion as lists of messages, for a chat template"
            )
    return Text("prompt_completion", _text(prompt, "prompt"), _some_text(completion, "completion"))


def _from_text(row: dict[str, Any]) -> Text:
    return Text("text", "", _some_text(row["text"], "text"))


_PARSERS: dict[str, Callable[[dict[str, Any]], Chat | Text]] = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "prompt_completion": _from_prompt_completion,
    "text": _from_text,
}
