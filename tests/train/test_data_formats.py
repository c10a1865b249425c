"""Formats and masking: five shapes of rows become what they say, and only what is to be learned is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st

from coop.errors import DataError
from tests.train.tiny import CHATML, build_tokenizer
from train.data import formats
from train.data.formats import Chat, Text, parse_row
from train.data.masking import Masker, describe_sample
from train.data.records import RowError
from train.data.rows import IGNORED_LABEL, Row

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = (  # drops what the assistant said before the last message, as templates of reasoning models do
    "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}{{ m['role'] + ':' + m['content'] + ';' }}"
    "{% else %}{{ 'assistant:;' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def chat(*turns: str) -> list[dict[str, Any]]:
    roles = ["user", "assistant"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


def trained_text(tokenizer: Any, row: Row) -> str:
    return str(tokenizer.decode(row.labels[row.labels != IGNORED_LABEL].tolist()))


def whole_text(tokenizer: Any, row: Row) -> str:
    return str(tokenizer.decode(row.input_ids.tolist()))


def tokenize(value: Any, template: str = CHATML, format: str = "auto", **options: Any) -> tuple[str, str]:
    """The whole text of a row, and what of it is trained."""
    tokenizer = build_tokenizer(template)
    row = Masker(tokenizer, **options).tokenize(parse_row(value, format, {}))
    return whole_text(tokenizer, row), trained_text(tokenizer, row)


CONVERSATION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"


@pytest.mark.parametrize(
    ("row", "whole", "trained"),
    [
        ({"messages": chat("hi", "yes")}, CONVERSATION.format("hi", "yes"), "yes<|im_end|>"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "h"}, "i"]},
                    *chat("", "yes")[1:],
                ]
            },
            CONVERSATION.format("hi", "yes"),
            "yes<|im_end|>",
        ),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
            CONVERSATION.format("hi", "yes"),
            "yes<|im_end|>",
        ),
        (
            {
                "system": "be brief",
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "function_call", "value": "f()"},
                    {"from": "observation", "value": "3"},
                    {"from": "gpt", "value": "yes"},
                ],
            },
            "<|im_start|>system\nbe brief<|im_end|>\n"
            + CONVERSATION.format("hi", "f()")
            + CONVERSATION.format("3", "yes").replace("user", "tool"),
            "f()<|im_end|>yes<|im_end|>",
        ),
        (
            {"instruction": "add", "input": "1 2", "output": "3"},
            CONVERSATION.format("add\n\n1 2", "3"),
            "3<|im_end|>",
        ),
        ({"instruction": "hi", "input": "", "output": "3"}, CONVERSATION.format("hi", "3"), "3<|im_end|>"),
        ({"instruction": "hi", "output": "3"}, CONVERSATION.format("hi", "3"), "3<|im_end|>"),
        ({"prompt": "1 + 1 =", "completion": " 2"}, "1 + 1 = 2<|im_end|>", " 2<|im_end|>"),
        (
            {"prompt": chat("a", "b", "c"), "completion": chat("", "d")[1:]},
            CONVERSATION.format("a", "b") + CONVERSATION.format("c", "d"),
            "d<|im_end|>",
        ),
        ({"text": "once upon"}, "once upon<|im_end|>", "nce upon<|im_end|>"),
    ],
)
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_every_format_is_rendered_and_its_answers_alone_are_trained(
    row: Any, whole: str, trained: str, template: str
) -> None:
    assert tokenize(row, template) == (whole, trained)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_loss_on_all_trains_everything_but_the_first_token_which_nothing_predicts(template: str) -> None:
    whole, trained = tokenize({"messages": chat("hi")}, template, loss_on="all")
    assert whole == "<|im_start|>" + trained


def test_text_that_ends_itself_gets_no_second_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokenize({"text": "once<|im_end|>"}) == ("once<|im_end|>", "nce<|im_end|>")


def test_text_needs_no_chat_template_and_a_conversation_says_that_it_does() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    masker = Masker(tokenizer)
    assert trained_text(tokenizer, masker.tokenize(Text("text", "", "abc"))) == "bc<|im_end|>"
    with pytest.raises(DataError, match="has no chat template, which alpaca rows need") as caught:
        masker.tokenize(Chat("alpaca", chat("a", "b")))
    assert not isinstance(caught.value, RowError), "it is no fault of a row"


def test_labels_are_the_ids_or_ignored() -> None:
    row = Masker(build_tokenizer()).tokenize(Chat("messages", chat("a", "héllo wörld")))
    assert set(row.labels[row.labels != row.input_ids].tolist()) == {IGNORED_LABEL}
    assert row.input_ids.dtype == row.labels.dtype == np.int32


def test_both_ways_of_masking_agree() -> None:
    messages = [{"role": "system", "content": "be brief"}, *chat("a", "b", "c", "d")]
    rows = [Masker(build_tokenizer(t)).tokenize(Chat("messages", messages)) for t in (CHATML, MARKED)]
    assert rows[0].digest() == rows[1].digest()


def test_template_that_rewrites_earlier_turns_is_refused() -> None:
    masker = Masker(build_tokenizer(FORGETFUL))
    masker.tokenize(Chat("messages", chat("one", "turn")))
    with pytest.raises(RowError, match=r"renders messages\[1\] differently when others follow"):
        masker.tokenize(Chat("messages", chat("a", "b", "c", "d")))


def test_template_that_trl_has_a_training_variant_of_is_used_with_it() -> None:
    tokenizer = build_tokenizer(QWEN3)
    masker = Masker(tokenizer)
    row = masker.tokenize(Chat("messages", chat("a", "b", "c", "d")))
    answers = [part.split("\n\n")[-1] for part in trained_text(tokenizer, row).split("<|im_end|>")]
    assert answers == ["b", "d", ""] and masker.variant_rows == 1
    masker.tokenize(Chat("messages", chat("a", "b")))
    assert masker.variant_rows == 1, "a row that the model's own template renders well is left to it"


def test_calls_of_tools_reach_the_template_and_are_refused_where_it_drops_them() -> None:
    messages = [
        *chat("1 + 1?"),
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
    ]
    row = {"messages": [*messages, {"role": "assistant", "content": "two"}], "tools": [CALL]}
    whole, trained = tokenize(row, QWEN3)
    assert whole.count('"name": "add"') == 2 and '"name": "add"' in trained and "two" in trained
    for template in (CHATML, MARKED):
        with pytest.raises(RowError, match=r"leaves out the tool_calls of messages\[1\]"):
            tokenize(row, template)


SHARED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "x"}]
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"messages": [*chat("q"), {"role": "assistant", "content": "x", "train": False}]},
            r"\[1\].train is False",
        ),
        ({"messages": chat("q", "x"), "weight": 0}, "^weight is 0; all answers are trained alike"),
        ({"conversations": [*SHARED, {**SHARED[1], "weight": 0}]}, r"conversations\[2\].weight is 0"),
        ({"prompt": chat("q"), "completion": [{**chat("", "x")[1], "weight": 0.5}]}, "weight is 0.5"),
        ({"instruction": "q", "output": "x", "weight": "0"}, "^weight is '0'"),
        ({"text": "q", "train": False}, "^train is False"),
    ],
)
def test_what_asks_not_to_be_trained_is_refused_and_not_trained_all_the_same(row: Any, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        tokenize(row)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": chat("q", "x")},
        {"conversations": SHARED},
        {"prompt": chat("q"), "completion": chat("", "x")[1:]},
        {"instruction": "q", "output": "x"},
    ],
)
def test_tools_and_system_beside_the_messages_reach_the_template_or_are_refused(row: Any) -> None:
    whole, trained = tokenize({**row, "tools": [CALL], "system": "be brief"}, TOOLS)
    system = "<|im_start|>system\nbe brief<|im_end|>\n"
    assert '"name": "add"' in whole and whole.endswith(system + CONVERSATION.format("q", "x"))
    assert trained == "x<|im_end|>"
    with pytest.raises(RowError, match="leaves out the tools"):
        tokenize({**row, "tools": [CALL]}, CHATML)


def test_text_takes_no_tools_and_a_second_system_is_refused() -> None:
    for key in ("tools", "system"):
        with pytest.raises(RowError, match=f"{key} needs prompt and completion as lists"):
            tokenize({"prompt": "a", "completion": "b", key: ["x"]})
    messages = [{"role": "system", "content": "be brief"}, *chat("q", "x")]
    assert tokenize({"messages": messages, "system": "be brief"}) == tokenize({"messages": messages})
    with pytest.raises(RowError, match="system is there twice"):
        tokenize({"messages": messages, "system": "be long"})


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_lost_call_is_noticed_though_its_name_stands_elsewhere(template: str) -> None:
    call = {"role": "assistant", "content": "add", "tool_calls": [CALL]}
    with pytest.raises(RowError, match=r"leaves out the tool_calls of messages\[1\]"):
        tokenize({"messages": [*chat("please add"), call]}, template)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_reasoning_that_the_template_drops_is_refused(key: str, template: str) -> None:
    answer = {"role": "assistant", "content": "x", key: "let me see"}
    with pytest.raises(RowError, match=rf"leaves out the {key} of messages\[1\]"):
        tokenize({"messages": [*chat("q"), answer]}, template)
    thoughtful = template.replace("m['content']", f"(m.get('{key}') or '') + m['content']")
    assert tokenize({"messages": [*chat("q"), answer]}, thoughtful)[1] == "let me seex<|im_end|>"


LYING = (
    MARKED.replace("m['role'] == 'assistant'", "m['role'] == 'user'"),
    MARKED.replace("m['role'] == 'assistant'", "m['role'] != 'system'"),
    "{% for m in messages %}{% generation %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
)


@pytest.mark.parametrize("template", LYING)
def test_marks_on_other_than_the_assistant_are_not_believed(template: str) -> None:
    row = {"messages": chat("what is the capital?", "x", "and now, what is it?", "y")}
    assert tokenize(row, template) == tokenize(row, CHATML)
    with pytest.raises(RowError, match="has no generation prompt"):
        tokenize(row, template.partition("{% if add")[0])


def test_reasoning_that_the_generation_prompt_begins_is_no_loss() -> None:
    opened = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    assert tokenize({"messages": chat("q", "<think>\nhm</think>x")}, opened)[1] == "hm</think>x<|im_end|>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CHATML.replace("+ m['content']", "+ (m['content'] | upper)"), r"changes messages\[0\] of the user"),
        (
            CHATML.replace("+ m['content']", "+ ('no' if m['role'] == 'assistant' else m['content'])"),
            r"do not hold what messages\[1\] of the assistant says",
        ),
        (CHATML.partition("{% if add")[0], "has no generation prompt, so '<|im_start|>assistant'"),
        (
            "{% for m in messages if m['role'] != 'user' %}{{ m['content'] }}{% endfor %}",
            "leaves out or changes",
        ),
    ],
)
def test_template_that_trains_other_than_what_the_assistant_says_is_refused(
    template: str, reason: str
) -> None:
    with pytest.raises(RowError, match=reason):
        tokenize({"messages": chat("what is the capital?", "the secret answer")}, template)


def test_long_text_is_tokenised_only_as_far_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer()
    long, short = Masker(tokenizer, max_length=8), Masker(tokenizer)
    for text in (Text("text", "", "ab " * 1000), Text("prompt_completion", "p" * 3000, "answer")):
        mine, whole = long.tokenize(text), short.tokenize(text)
        assert 8 < len(mine.input_ids) < 600 < len(whole.input_ids)
        assert mine.cut(8).digest() == whole.cut(8).digest()


@pytest.mark.parametrize(
    ("row", "format", "reason"),
    [
        ([], "auto", "not an object with keys but a list"),
        ({}, "auto", "the keys no key fit no format; messages has messages; sharegpt has"),
        ({"question": "a", "answer": "b"}, "auto", "the keys question, answer fit no format"),
        (
            {"text": "a", "instruction": "b", "output": "c"},
            "auto",
            "fit alpaca and text; say which with data.format",
        ),
        ({"text": "a"}, "alpaca", "alpaca needs instruction and output; the row has text"),
        ({"messages": []}, "auto", "messages is not a list of"),
        ({"messages": "[]"}, "auto", "messages is not a list of"),
        ({"messages": ["x"]}, "auto", r"messages\[0\] is not an object"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "auto", "role is 'bot', not one of system"),
        ({"messages": [{"role": ["a"], "content": "x"}]}, "auto", r"role is \['a'\], not one of system"),
        ({"messages": [{"role": "user", "content": 3}]}, "auto", r"content is not text but a number"),
        ({"messages": [{"role": "user"}]}, "auto", r"content is not text but null"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "auto",
            r"content\[0\] is of type 'image_url'; only text can be trained",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0}]},
            "auto",
            "weight is 0; all answers",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": "f"}]},
            "auto",
            "tool_calls is not a list but text",
        ),
        ({"messages": chat("a"), "tools": "[]"}, "auto", "tools is not a list but text"),
        ({"messages": chat("a")}, "auto", "no message of the assistant"),
        (
            {"conversations": [{"from": "alien", "value": "x"}]},
            "auto",
            "from is 'alien', not one of system, human",
        ),
        ({"conversations": [{"from": "gpt"}]}, "auto", r"conversations\[0\].value is not text but null"),
        ({"conversations": ["a"]}, "auto", r"conversations\[0\] is not an object"),
        ({"instruction": "", "output": "b"}, "auto", "instruction is empty"),
        ({"instruction": "a", "output": " "}, "auto", "output is empty"),
        ({"instruction": "a", "output": float("nan")}, "auto", "output is not text but NaN"),
        (
            {"instruction": "a", "output": "b", "history": [["c", "d"]]},
            "auto",
            "history of alpaca is not supported",
        ),
        ({"prompt": "a", "completion": chat("a")}, "auto", "must both be text, or both lists"),
        ({"prompt": "a", "completion": ""}, "auto", "completion is empty"),
        ({"prompt": chat("a", "b"), "completion": chat("c")}, "auto", "no message of the assistant"),
        (
            {"messages": chat("a", "b")[1:]},
            "auto",
            "begins with the assistant; put a user or system message before",
        ),
        ({"text": "\ud800"}, "auto", "half of a surrogate pair at 0"),
    ],
)
def test_bad_rows_are_explained(row: Any, format: str, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        tokenize(row, format=format)


def test_text_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_TEXT_CHARACTERS", 10)
    with pytest.raises(RowError, match="text has 11 characters, at most 10 are read"):
        tokenize({"text": "a" * 11})


def test_renamed_columns_are_found_and_null_columns_are_absent() -> None:
    row = {"question": "a", "context": None, "answer": "b", "text": None}
    example = parse_row(row, "auto", {"instruction": "question", "input": "context", "output": "answer"})
    assert example == Chat("alpaca", chat("a", "b"))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ '<|im_start|>' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}",
        MARKED.replace("m['content'] + '<|im_end|>' }}{% endgen", "m['content'] }}{% endgen"),
    ],
)
def test_rows_that_do_not_teach_when_to_stop_are_counted(template: str) -> None:
    masker = Masker(build_tokenizer(template))
    masker.tokenize(Chat("messages", chat("a", "b")))
    assert masker.endless_rows == 1
    masker = Masker(build_tokenizer(CHATML))
    masker.tokenize(Chat("messages", chat("a", "b")))
    assert masker.endless_rows == 0


def test_sample_shows_what_is_trained_in_bold_and_escapes_markup() -> None:
    tokenizer = build_tokenizer()
    row = Masker(tokenizer).tokenize(Chat("messages", chat("[red]x", "yes")))
    text = describe_sample(tokenizer, row)
    assert "[dim]<|im_start|>user\n\\[red]x" in text and "[bold]yes<|im_end|>[/bold]" in text
    assert describe_sample(tokenizer, row, 3).endswith(" …")


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
speakers = st.sampled_from(["user", "assistant", "tool", "system", "human", "gpt", "function_call"])
message_like = st.dictionaries(
    st.sampled_from(["role", "content", "from", "value", "tool_calls", "name", "weight", "thinking"]),
    speakers | json_values | st.text(),
    max_size=4,
)
row_like = st.dictionaries(
    st.sampled_from(
        ["messages", "conversations", "instruction", "input", "output", "prompt", "completion", "text"]
    )
    | st.sampled_from(["tools", "system", "history"]),
    st.lists(message_like, max_size=3) | st.text() | json_values,
    max_size=5,
)
MASKERS = {template: Masker(build_tokenizer(template)) for template in (CHATML, MARKED, QWEN3)}


@settings(max_examples=300, deadline=None)
@given(row_like | json_values, st.sampled_from(list(MASKERS)))
def test_no_row_raises_anything_but_a_row_error(value: Any, template: str) -> None:
    try:
        row = MASKERS[template].tokenize(parse_row(value, "auto", {}))
    except RowError as exc:
        str(exc).encode()  # it can be printed
    else:
        assert row.trained_tokens > 0 and len(row.labels) == len(row.input_ids)
