"""Data: what is read, left out, mixed, held out and counted on the way from a recipe's sources to rows."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from coop.errors import DataError, RecipeError
from tests.train.tiny import CHATML, build_recipe, build_tokenizer
from train.data import load as data_module
from train.data.load import LoadedData, load_data
from train.data.masking import Masker
from train.data.mixture import hold_out, mix, mix_counts, pick
from train.data.rows import IGNORED_LABEL, Row, digest_rows, to_dataset
from train.opening import show_data
from train.schema import DataSection

ANSWER = [{"role": "assistant", "content": "b"}]


def text(i: int, name: str = "row") -> dict[str, str]:
    return {"text": f"{name} {i}"}


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def load(seed: int = 0, **keys: Any) -> LoadedData:
    return load_data(DataSection.model_validate(keys), build_tokenizer(), seed)


def texts(rows: list[Row]) -> list[str]:
    tokenizer = build_tokenizer()
    return [str(tokenizer.decode(row.input_ids.tolist())).removesuffix("<|im_end|>") for row in rows]


def make_rows(*values: str) -> list[Row]:
    masker = Masker(build_tokenizer())
    return [masker.tokenize(data_module.parse_row({"text": value}, "auto", {})) for value in values]


def test_strict_reading_names_file_and_line_of_bad_rows_and_counts_them_by_kind(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", text(0), "nonsense", "", {"messages": []}, {"text": 3}, {"txt": "a"})
    with pytest.raises(DataError) as caught:
        load(train=path)
    message = str(caught.value)
    assert (
        f"{path}: 4 bad rows (field: 2, unreadable: 1, format: 1); repair them, or set data.strict=false"
        in message
    )
    for place, reason in (
        (2, "not valid JSON"),
        (4, "messages is not"),
        (5, "text is not"),
        (6, "the keys txt"),
    ):
        assert f"\n  {path}:{place}: {reason}" in message


def test_lenient_reading_counts_bad_rows_and_goes_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", text(0), "nonsense", *[{"no": 1}] * 9)
    loaded = load(train=path, strict=False)
    summary = loaded.train[0]
    assert texts(loaded.train_rows) == ["row 0"] and (summary.read, summary.faults.total()) == (11, 10)
    assert (
        f"10 bad rows (format: 9, unreadable: 1) left out, first {path}:2: not valid JSON"
        in summary.describe()
    )
    assert len(summary.first_faults) == 5, "a file of bad rows does not fill memory"


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_bad_row_of_a_table_is_named_by_its_number(tmp_path: Path, name: str) -> None:
    import pandas

    frame = pandas.DataFrame({"instruction": ["a", "b", None], "output": ["c", float("nan"), "d"]})
    frame.to_csv(tmp_path / name, index=False) if name == "a.csv" else frame.to_parquet(tmp_path / name)
    with pytest.raises(DataError, match=r"2 bad rows") as caught:
        load(train=str(tmp_path / name))
    second = "output is empty" if name == "a.csv" else "the keys instruction fit no format"
    assert f"{tmp_path / name}: row 2: {second}" in str(caught.value)


def test_long_rows_are_cut_and_dropped_when_no_answer_is_left(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"instruction": "q", "output": "short"},
        {"instruction": "q", "output": "a long answer " * 9},
        {"instruction": "a long question " * 9, "output": "short"},
    )
    loaded = load(train=path, max_length=60)
    assert [len(row.input_ids) == 60 for row in loaded.train_rows] == [False, True]
    summary = loaded.train[0]
    assert (summary.used, summary.cut, summary.without_answer, summary.dropped) == (2, 2, 1, 0)
    assert summary.tokens == sum(len(row.input_ids) for row in loaded.train_rows)
    assert "2 rows cut to length; 1 rows dropped because no trained token was left" in summary.describe()


def test_long_rows_are_dropped_whole_when_the_recipe_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", text(0), text(1, "r" * 90), text(2))
    loaded = load(train=path, max_length=60, truncation="drop")
    assert texts(loaded.train_rows) == ["row 0", "row 2"]
    assert (loaded.train[0].cut, loaded.train[0].dropped) == (0, 1)
    assert "1 rows dropped because they are too long" in loaded.train[0].describe()


def test_reading_stops_at_the_wanted_number_of_usable_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "nonsense", *[text(i) for i in range(9)], "nonsense")
    loaded = load(train=path, eval={"path": path, "max_rows": 2}, max_train_rows=4, strict=False)
    assert texts(loaded.train_rows) == [f"row {i}" for i in range(4)] and loaded.train[0].read == 5
    assert len(loaded.eval_rows) == 2


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_source_without_rows_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"a\.jsonl: no usable rows \(0 rows read, 0 bad, 0 too long"):
        load(train=str(tmp_path / "a.jsonl"))


def test_source_with_only_bad_rows_shows_one_even_when_lenient(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "nonsense")
    with pytest.raises(DataError, match=r"no usable rows \(1 rows read, 1 bad.*\n  .*:1: not valid JSON"):
        load(train=path, strict=False)


def test_renamed_column_that_no_row_has_is_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", {"question": "a", "answer": "b"}, {"question": "c", "answer": "d", "more": "e"}
    )
    columns = {"instruction": "question", "output": "answer", "input": "more"}
    assert len(load(train={"path": path, "columns": columns}).train_rows) == 2
    with pytest.raises(
        DataError, match=r"columns\.input: no row has 'mor'; the last one has question, answer, more"
    ):
        load(train={"path": path, "columns": {**columns, "input": "mor"}})


def test_format_of_a_source_goes_before_that_of_all(tmp_path: Path) -> None:
    row = {"text": "a", "instruction": "b", "output": "c"}
    path = write(tmp_path / "a.jsonl", row)
    loaded = load(train=[path and {"path": path}, {"path": path, "format": "alpaca"}], format="text")
    assert [list(summary.formats) for summary in loaded.train] == [["text"], ["alpaca"]]


@pytest.mark.parametrize(
    ("available", "weights", "counts"),
    [
        ([100, 100], [1, 1], [100, 100]),
        ([100, 10], [1, 1], [10, 10]),
        ([100, 10], [9, 1], [90, 10]),
        ([1000, 1000], [0.9, 0.1], [1000, 111]),
        ([7, 5, 3], [2, 2, 1], [5, 5, 2]),
        ([1000, 1000], [3, 2], [1000, 666]),
        ([10, 1], [1, 100], [0, 1]),
        ([3, 3, 3], [0.1, 0.1, 0.1], [3, 3, 3]),
    ],
)
def test_mixture_takes_as_many_rows_as_the_shares_allow(
    available: list[int], weights: list[float], counts: list[int]
) -> None:
    assert mix_counts(available, weights) == counts


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.01, 100)), min_size=1, max_size=6))
def test_mixture_uses_the_scarcest_source_whole_and_none_twice(sources: list[tuple[int, float]]) -> None:
    available, weights = [count for count, _ in sources], [weight for _, weight in sources]
    counts = mix_counts(available, weights)
    assert all(count <= most for count, most in zip(counts, available, strict=True))
    assert any(count == most for count, most in zip(counts, available, strict=True))


def test_weights_decide_the_rows_and_the_seed_which_ones(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *[text(i, "a") for i in range(30)])
    b = write(tmp_path / "b.jsonl", *[text(i, "b") for i in range(10)])
    sources = [{"path": a, "weight": 1.0}, {"path": b, "weight": 2.0}]
    first, second = (texts(load(train=sources, seed=seed).train_rows) for seed in (0, 1))
    assert [name[0] for name in first] == ["a"] * 5 + ["b"] * 10 and len(set(first)) == 15
    assert first != second and first == texts(load(train=sources).train_rows)
    assert [summary.used for summary in load(train=sources).train] == [5, 10]
    with pytest.raises(DataError, match=r"a\.jsonl: with weight 0\.01 no row of it is used"):
        load(train=[{"path": a, "weight": 0.01}, {"path": b, "weight": 2.0}])


def test_sources_without_weights_are_used_whole_in_their_order(tmp_path: Path) -> None:
    paths = [{"path": write(tmp_path / f"{name}.jsonl", *[text(i, name) for i in range(3)])} for name in "ba"]
    assert texts(load(train=paths).train_rows) == ["b 0", "b 1", "b 2", "a 0", "a 1", "a 2"]


def test_picked_rows_do_not_depend_on_the_order_of_the_rest() -> None:
    rows = make_rows(*[f"row {i}" for i in range(40)])
    shuffled = random.Random(0).sample(rows, len(rows))
    assert set(texts(pick(rows, 10, 3))) == set(texts(pick(shuffled, 10, 3)))
    assert texts(pick(rows, 10, 3)) == sorted(texts(pick(rows, 10, 3)), key=texts(rows).index)
    assert [len(part) for part in mix([rows, rows[:5]], [2, 1], ["a", "b"], 0)] == [10, 5]


def test_held_out_rows_are_the_same_in_any_order_and_duplicates_are_on_one_side() -> None:
    rows = make_rows(*[f"row {i % 60}" for i in range(120)])
    kept, held_out = hold_out(rows, 0.25, 7)
    assert set(texts(kept)).isdisjoint(texts(held_out)) and len(kept) + len(held_out) == 120
    assert 5 <= len(held_out) // 2 <= 27, "about a quarter of 60"
    again = hold_out(random.Random(1).sample(rows, len(rows)), 0.25, 7)
    assert sorted(texts(again[1])) == sorted(texts(held_out))
    assert set(texts(hold_out(rows, 0.4, 7)[1])) >= set(texts(held_out)), (
        "a larger share holds out more, not others"
    )
    assert texts(hold_out(rows, 0.25, 8)[1]) != texts(held_out)


def test_equal_tokens_are_on_one_side_whatever_of_them_is_trained() -> None:
    rows = make_rows(*[f"row {i}" for i in range(60)])
    others = [
        Row(row.input_ids, np.where(row.input_ids == row.input_ids[-1], row.labels, -100)) for row in rows
    ]
    sides = [hold_out(each, 0.4, 7) for each in (rows, others)]
    assert texts(sides[0][1]) == texts(sides[1][1]) and 0 < len(sides[0][1]) < 60
    assert texts(pick(rows, 10, 3)) == texts(pick(others, 10, 3))


def test_share_of_the_training_rows_is_held_out_after_mixing(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *[text(i, "a") for i in range(200)])
    b = write(tmp_path / "b.jsonl", *[text(i, "b") for i in range(100)])
    sources = [{"path": a, "weight": 1.0}, {"path": b, "weight": 1.0}]
    loaded = load(train=sources, eval_fraction=0.2)
    train, held_out = texts(loaded.train_rows), texts(loaded.eval_rows)
    assert len(train) + len(held_out) == 200 and set(train).isdisjoint(held_out)
    assert 20 <= len(held_out) <= 60 and {name[0] for name in held_out} == {"a", "b"}
    assert [summary.used for summary in loaded.train] == [sum(n[0] == s for n in train) for s in "ab"]
    assert loaded.notes == [f"held out: {len(held_out)} of 200 rows by data.eval_fraction"]
    few = load(train=sources, eval_fraction=0.2, max_eval_rows=3)
    assert texts(few.eval_rows) == held_out[:3] and texts(few.train_rows) == train
    assert few.notes[0].endswith("data.eval_fraction, 3 of them used")


def test_share_that_holds_out_nothing_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", text(0), text(1))
    with pytest.raises(
        DataError, match=r"data.eval_fraction: 1e-06 of 2 rows leaves 0 held out and 2 to train"
    ):
        load(train=path, eval_fraction=1e-6)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("data.eval_fraction=0.1", "data.eval_fraction: must be 0 with data.eval"),
        ("data.eval_fraction=0.6", "less than or equal to 0.5"),
        ("data.train=[]", "at least 1 item"),
        ("data.train={path: a, weight: 2}", "data.train: weight needs a list of several sources"),
        ("data.train=[{path: a, weight: 1.0},{path: b}]", "data.train: b has no weight"),
        (
            "data.train=[{path: a, weight: 0},{path: b, weight: 1}]",
            "`data.train.0.weight` is 0: .*greater than 0",
        ),
        ("data.train={path: a, split: 'train[:'}", "`data.train.0.split` is 'train\\[:'"),
        (
            "data.train=[{path: a}, {pth: b}]",
            "unknown key `data.train.1.pth`; did you mean `data.train.path`",
        ),
        ("data.train=3", "`data.train` is 3: input should be a valid list"),
        (
            "data.format=sharegtp",
            "`data.format` is 'sharegtp': input should be 'auto', 'messages', 'sharegpt'",
        ),
    ],
)
def test_wrong_keys_of_data_are_refused_by_name(tmp_path: Path, override: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        build_recipe(tmp_path, override)


def test_first_rows_of_several_sources_are_asked_of_each(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data.max_train_rows: needs one source; set max_rows of each"):
        build_recipe(tmp_path, "data.train=[{path: a}, {path: b}]", "data.max_train_rows=3")


def test_held_out_share_satisfies_what_needs_held_out_rows(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, "data.eval=null", "data.eval_fraction=0.2", "eval.every_steps=2")
    assert recipe.data.has_eval and recipe.data.eval_names == f"0.2 of {tmp_path / 'train.jsonl'}"
    with pytest.raises(RecipeError, match=r"eval.every_steps: needs data.eval or data.eval_fraction"):
        build_recipe(tmp_path, "data.eval=null", "coop.profile.enabled=false", "eval.every_steps=2")


def test_digest_sees_tokens_labels_order_and_packing() -> None:
    rows = make_rows("abc", "def")
    other = Row(rows[0].input_ids, rows[0].labels * 0 + IGNORED_LABEL)
    packed = Row(rows[0].input_ids, rows[0].labels, (2, len(rows[0].input_ids) - 2))
    lists = [rows, rows[::-1], rows[:1], [other, rows[1]], [packed, rows[1]], []]
    assert len({digest_rows(each) for each in lists}) == len(lists)
    assert digest_rows(make_rows("abc", "def")) == digest_rows(rows)


def test_dataset_has_the_columns_that_trl_pads() -> None:
    rows = make_rows("abc", "d")
    made = to_dataset(rows)
    assert made.column_names == ["input_ids", "labels"]
    assert made[0] == {"input_ids": rows[0].input_ids.tolist(), "labels": rows[0].labels.tolist()}


def test_opening_shows_each_source_the_mixture_and_a_sample_of_each_format(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *[{"instruction": "[b]", "output": "yes"}] * 6, "nonsense")
    b = write(
        tmp_path / "b.jsonl",
        *[{"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "no"}]}] * 3,
    )
    sources = [{"path": a, "weight": 1.0}, {"path": b, "weight": 1.0}]
    loaded = load(train=sources, eval=a, strict=False, packing=True, max_length=64)
    console = Console(record=True, width=100, file=io.StringIO())
    show_data(console, loaded, build_tokenizer())
    shown = console.export_text()
    assert (
        f"train: {a}: 3 rows, " in shown
        and f"train: {b}: 3 rows, " in shown
        and f"eval: {a}: 6 rows" in shown
    )
    assert f"1 bad rows (unreadable: 1) left out, first {a}:7: not valid JSON" in shown
    assert "│ 1 a.jsonl │    7 │   1 │       0 │    3 │" in shown
    assert "packing: 6 rows in " in shown
    assert shown.count("(only the bold part is trained)") == 2 and "[b]" in shown


def test_what_the_chat_template_does_unasked_is_said_at_the_start(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "a"}], "completion": ANSWER})
    tokenizer = build_tokenizer(CHATML.replace("+ '<|im_end|>' + '\n' }}{% endfor", "}}{% endfor"))
    notes = load_data(DataSection.model_validate({"train": path}), tokenizer, 0).notes
    assert notes == [
        "chat template: 1 rows end without a trained end token, so the model does not learn from them when to stop"
    ]
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant") * 2]
    path = write(tmp_path / "b.jsonl", {"messages": turns})
    tokenizer = build_tokenizer((Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text())
    notes = load_data(DataSection.model_validate({"train": path}), tokenizer, 0).notes
    assert len(notes) == 1 and "1 rows are rendered with TRL's training variant" in notes[0]


def test_long_reading_shows_its_progress_on_a_terminal_and_short_reading_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", *[text(i) for i in range(300)])
    section = DataSection.model_validate({"train": path})
    shown = {}
    for seconds in (0.0, -1.0):
        monkeypatch.setattr(data_module, "QUIET_SECONDS", 3600.0 if seconds == 0.0 else seconds)
        console = Console(force_terminal=True, record=True, width=200, file=io.StringIO())
        load_data(section, build_tokenizer(), 0, console)
        shown[seconds] = console.file.getvalue()
    assert "rows/s" in shown[-1.0] and f"reading {path}: " in shown[-1.0] and "rows/s" not in shown[0.0]
