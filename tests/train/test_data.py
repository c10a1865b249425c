"""Data: bad rows are named, and only what the assistant wrote is trained, its end mark included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coop.errors import DataError
from tests.train.tiny import CHATML, build_tokenizer
from train.data import IGNORED_LABEL, Masker, describe_sample, load_rows, parse_messages

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


def chat(*turns: str) -> list[dict[str, Any]]:
    roles = ["user", "assistant"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def trained_text(tokenizer: Any, row: Any) -> str:
    return str(tokenizer.decode([token for token in row.labels if token != IGNORED_LABEL]))


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_every_assistant_turn_and_its_end_mark_are_trained_and_nothing_else(template: str) -> None:
    tokenizer = build_tokenizer(template)
    row = Masker(tokenizer).tokenize(chat("hi", "héllo wörld", "more?", "ok"))
    assert trained_text(tokenizer, row) == "héllo wörld<|im_end|>ok<|im_end|>"
    assert all(
        label in (token, IGNORED_LABEL) for token, label in zip(row.input_ids, row.labels, strict=True)
    )


def test_both_ways_of_masking_agree() -> None:
    messages = [{"role": "system", "content": "be brief"}, *chat("a", "b", "c", "d")]
    assert Masker(build_tokenizer(CHATML)).tokenize(messages) == Masker(build_tokenizer(MARKED)).tokenize(
        messages
    )


def test_template_that_rewrites_earlier_turns_is_refused() -> None:
    masker = Masker(build_tokenizer(FORGETFUL))
    masker.tokenize(chat("one", "turn"))
    with pytest.raises(DataError, match=r"renders messages\[1\] differently when others follow"):
        masker.tokenize(chat("a", "b", "c", "d"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "not valid JSON"),
        ('{"messages": 1, "messages": 2}', "appears twice"),
        ({"prompt": "x"}, 'expected {"messages"'),
        ({"messages": []}, 'expected {"messages"'),
        ({"messages": ["x"]}, r"messages\[0\] is not an object"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "role is 'bot', not one of system"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "content is not text"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no message of the assistant"),
    ],
)
def test_bad_rows_are_explained(row: Any, reason: str) -> None:
    line = row if isinstance(row, str) else json.dumps(row)
    with pytest.raises(DataError, match=reason):
        parse_messages(line.encode())


def test_strict_reading_names_file_and_line_of_every_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": chat("a", "b")}, "nonsense", "", {"messages": []})
    with pytest.raises(DataError) as caught:
        load_rows(path, build_tokenizer(), max_length=64)
    assert "2 bad rows" in str(caught.value)
    assert f"{path}:2: not valid JSON" in str(caught.value) and f"{path}:4: expected" in str(caught.value)


def test_lenient_reading_counts_bad_rows_and_goes_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": chat("a", "b")}, "nonsense")
    rows, summary = load_rows(path, build_tokenizer(), max_length=64, strict=False)
    assert len(rows) == 1 and "1 bad rows left out, first" in summary.describe()


def test_long_rows_are_cut_and_dropped_when_no_answer_is_left(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"messages": chat("q", "short")},
        {"messages": chat("q", "a long answer " * 9)},
        {"messages": chat("a long question " * 9, "short")},
    )
    rows, summary = load_rows(path, build_tokenizer(), max_length=60)
    assert [len(row.input_ids) == 60 for row in rows] == [False, True]
    assert (summary.rows, summary.truncated, summary.without_answer) == (2, 2, 1)
    assert summary.tokens == sum(len(row.input_ids) for row in rows)


def test_reading_stops_at_the_wanted_number_of_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[{"messages": chat(str(i), "b")} for i in range(9)])
    assert len(load_rows(path, build_tokenizer(), max_length=64, max_rows=4)[0]) == 4


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_file_without_rows_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match="no usable rows"):
        load_rows(tmp_path / "a.jsonl", build_tokenizer(), max_length=64)


def test_missing_file_and_missing_template_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: No such file"):
        load_rows(tmp_path / "none.jsonl", build_tokenizer(), max_length=64)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        Masker(tokenizer)


def test_sample_shows_what_is_trained_in_bold_and_escapes_markup() -> None:
    tokenizer = build_tokenizer()
    text = describe_sample(tokenizer, Masker(tokenizer).tokenize(chat("[red]x", "yes")))
    assert "[dim]<|im_start|>user\n\\[red]x" in text and "[bold]yes<|im_end|>[/bold]" in text
