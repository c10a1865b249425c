"""Sources: every kind of file gives its rows with their places, and what is no such file is named."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

from coop.errors import DataError
from tests.train.tiny import write_recipe
from train import finetune
from train.data import sources
from train.data.records import Record, RowError
from train.data.sources import is_local, needs_hub, read_file, read_records
from train.schema import DataSection, SourceSection

ROWS = [{"text": f"row {i}, é"} for i in range(5)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def read(path: Path | str, **keys: Any) -> list[Record]:
    return list(read_records(SourceSection(path=str(path), **keys)))


def values(path: Path | str, **keys: Any) -> list[Any]:
    return [record.value for record in read(path, **keys)]


def write_parquet(path: Path, rows: list[Any] = ROWS) -> None:
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lambda path: path.write_text(LINES),
    "a.ndjson": lambda path: path.write_text(LINES),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "a.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "lines.json": lambda path: path.write_text(LINES),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "a.csv": lambda path: path.write_text("text\n" + "".join(f'"{row["text"]}"\n' for row in ROWS)),
    "a.csv.gz": lambda path: path.write_bytes(gzip.compress(b'text\n"row 0"\n')),
    "a.tsv": lambda path: path.write_text("text\n" + "".join(f"{row['text']}\n" for row in ROWS)),
    "a.parquet": write_parquet,
}


@pytest.mark.parametrize("name", list(WRITERS))
def test_every_kind_of_file_gives_its_rows_with_their_places(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    expected = [{"text": "row 0"}] if name == "a.csv.gz" else ROWS
    records = read(tmp_path / name)
    assert [record.value for record in records] == expected
    is_by_line = "json" in name
    first = f"{tmp_path / name}:" + ("2" if name == "a.json" else "1" if is_by_line else " row 1")
    assert records[0].place == first
    if name == "a.json":
        assert records[4].place.endswith(":14"), "the line of the array's item in the indented file"


def test_mark_of_utf8_carriage_returns_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    assert [(r.place[-1], r.value) for r in read(tmp_path / "a.jsonl")] == [
        ("1", {"text": "a"}),
        ("4", {"text": "b"}),
    ]
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbftext,n\r\n"a\r\nb",1\r\n\r\nc,2\r\n')
    assert values(tmp_path / "a.csv") == [{"text": "a\r\nb", "n": "1"}, {"text": "c", "n": "2"}]
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf[{"text": "a"}]\r\n')
    assert values(tmp_path / "a.json") == [{"text": "a"}]


@pytest.mark.parametrize(
    ("name", "data", "place", "reason"),
    [
        ("a.jsonl", b'{"text": "a"}\n{\n', ":2", "not valid JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', ":2", "not valid JSON: 'utf-8' codec can't decode"),
        ("a.jsonl", b'{"a": 1, "a": 2}\n', ":1", "key 'a' appears twice"),
        ("a.jsonl", b'{"a": NaN}\n', ":1", "NaN is not a number"),
        ("a.jsonl", b"[" * 100_000 + b"\n", ":1", "not valid JSON"),
        ("a.json", b'[{"text": "a"},\n{"a": 1, "a": 2}]', ":2", "key 'a' appears twice"),
        ("a.csv", b"a,b\n1,2\n1\n", ": row 2", "1 fields, the header has 2"),
        ("a.csv", b'a,b\n1,2\n"1"x,2\n3,4\n', ": row 2", "not valid CSV: ',' expected"),
        ("a.csv", b'a,b\n"1,2\n', ": row 1", "not valid CSV: unexpected end of data"),
    ],
)
def test_bad_row_is_a_record_that_says_what_is_wrong(
    tmp_path: Path, name: str, data: bytes, place: str, reason: str
) -> None:
    (tmp_path / name).write_bytes(data)
    bad = [record for record in read(tmp_path / name) if isinstance(record.value, RowError)]
    assert [record.place for record in bad] == [f"{tmp_path / name}{place}"]
    assert reason in str(bad[0].value)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.jsonl", b"\x1f\x8b\x08", "compressed with gzip; name it with .gz"),
        ("a.jsonl", b"PAR1....", "a parquet file; name it with .parquet"),
        ("a.csv", b"PK\x03\x04..", "a zip file; unpack it first"),
        ("a.jsonl", b"\xff\xfe{\x00", "UTF-16 text; save it as UTF-8"),
        ("a.jsonl.gz", b"plain", "[Nn]ot a gzipped file"),
        ("a.jsonl.gz", gzip.compress(LINES.encode())[:-9], "damaged gzip data"),
        ("a.jsonl.gz", gzip.compress(LINES.encode())[:30] + b"\0" * 40, "damaged gzip data"),
        ("a.json", b'[{"text": "a"}, {"text": ]', ":1: not valid JSON"),
        ("a.json", b'[{"text": "a"}\n{"text": "b"}]', ":1: not valid JSON: expected , or ]"),
        ("a.json", b'[{"text": "a"}', ":1: not valid JSON: expected , or ]"),
        ("a.json", b'[{"text": "a"},]', ":1: not valid JSON"),
        ("a.json", b'[{"text": "a"}] 3', "text after the array"),
        ("a.json", b'["\xff"]', "not UTF-8 text at byte 2"),
        ("a.csv", b"text\na\xff\n", "not UTF-8 text"),
        ("a.csv", b"text,text\n", "the header has empty or equal names: text, text"),
        ("a.csv", b"text,\n", "the header has empty or equal names"),
        ("a.csv", b'"a\n', "the header is not valid CSV"),
        ("a.parquet", b"PAR1", "not a whole parquet file"),
        ("a.parquet", b"", "not a whole parquet file"),
        ("a.txt", b"text", "not a kind of file that can be read: .jsonl"),
    ],
)
def test_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=reason) as caught:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_parquet_file_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: two columns have the same name: text, text"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz"])
def test_empty_file_has_no_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    assert read(tmp_path / name) == []


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz"])
def test_endless_line_is_not_read_to_its_end(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1000)
    data = b"x\n" + b"y" * 2000
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(DataError, match=r":2: longer than 1000 bytes; this is not a (jsonl|csv) file"):
        read(tmp_path / name)


def test_json_file_that_is_too_large_says_to_write_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_JSON_FILE_BYTES", 10)
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    with pytest.raises(DataError, match=r"more than 10 bytes; write one row a line in a \.jsonl file"):
        read(tmp_path / "a.json")


def test_file_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"a\.jsonl: Permission denied"):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("split", "rows"),
    [
        ("train", [0, 1, 2, 3, 4]),
        ("train[:2]", [0, 1]),
        ("train[3:]", [3, 4]),
        ("train[1:3]", [1, 2]),
        ("train[-2:]", [3, 4]),
        ("train[:-4]", [0]),
        ("train[40%:80%]", [2, 3]),
        ("train[50%:]", [2, 3, 4]),  # round(2.5) is 2
        ("train[:900]", [0, 1, 2, 3, 4]),
        ("train[-900:1]", [0]),
        ("train[4:2]", []),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_slices_take_the_rows_that_they_say(tmp_path: Path, split: str, rows: list[int], name: str) -> None:
    WRITERS[name](tmp_path / name)
    assert values(tmp_path / name, split=split) == [ROWS[i] for i in rows]


def test_folder_gives_its_files_in_the_order_of_their_names_and_splits_by_words(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, row in (("data/train-1.jsonl", 1), ("data/train-0.jsonl", 0), ("data/test-0.jsonl", 2)):
        (tmp_path / name).write_text(json.dumps({"text": str(row)}))
    for name in ("README.md", ".hidden/train.jsonl", "data/.train.jsonl"):
        (tmp_path / name).write_text("{}")
    assert [row["text"] for row in values(tmp_path)] == ["2", "0", "1"]
    assert [row["text"] for row in values(tmp_path, split="train[1:]")] == ["1"]
    with pytest.raises(
        DataError, match=r"no file of the split 'rain'; there are data/test-0.jsonl, data/train-0"
    ):
        read(tmp_path, split="rain")


def test_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"0 files of the kinds .jsonl, "):
        read(tmp_path)
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="a folder of `save_to_disk`; write it again with `to_parquet`"):
        read(tmp_path / "saved")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"subset": "en"}, "subset is for datasets of the hub"),
        ({"split": "test"}, "split 'test': a single file has one split, train"),
    ],
)
def test_keys_of_the_hub_are_refused_for_a_file(tmp_path: Path, keys: dict[str, str], reason: str) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    with pytest.raises(DataError, match=reason):
        read(tmp_path / "a.jsonl", **keys)


@pytest.mark.parametrize(
    "path", ["./a/b", "/a/b", "~/a", "a/b.jsonl", "a", "a/b/c", "here/b", "../b", "a/b.csv.gz"]
)
def test_path_is_never_asked_of_the_hub(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    assert is_local(path)
    with pytest.raises(DataError, match=r"no such file or folder|0 files of the kinds"):
        read(path)


def test_only_ids_of_the_hub_need_the_network(tmp_path: Path) -> None:
    assert not is_local("owner/name") and not is_local("owner/name-1.5")
    assert needs_hub(DataSection.model_validate({"train": "a.jsonl", "eval": "owner/name"}))
    assert not needs_hub(DataSection.model_validate({"train": "a.jsonl"}))


@pytest.mark.parametrize(("train", "is_offline"), [("owner/name", False), ("train.jsonl", True)])
def test_run_with_a_local_model_is_offline_unless_its_data_are_on_the_hub(
    tmp_path: Path, train: str, is_offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path)
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr("train.run.run", lambda *_: None)
    with warnings.catch_warnings():
        assert finetune.main([str(recipe), f"data.train={train}"]) == 0
    assert ("HF_HUB_OFFLINE" in environment) == is_offline


def stand_in(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[Any, ...]]:
    """Answer for the hub; returns what is asked of it."""
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str | None = None, *, split: str | None = None) -> Any:
        asked.append((path, name, split))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_dataset_of_the_hub_is_asked_for_with_subset_and_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch, Dataset.from_list(ROWS))
    records = read("owner/name", subset="en", split="train[:5]")
    assert asked == [("owner/name", "en", "train[:5]")]
    assert [record.value for record in records] == ROWS
    assert records[2].place == "owner/name[train[:5]]: row 3"


def test_only_split_of_a_dataset_is_taken_and_of_several_one_must_be_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Dataset.from_list(ROWS)
    stand_in(monkeypatch, DatasetDict(test=one))
    assert values("owner/name") == ROWS
    stand_in(monkeypatch, DatasetDict(train=one, test=one))
    with pytest.raises(DataError, match="has the splits train, test; say which with split"):
        read("owner/name")


@pytest.mark.parametrize(
    "fault",
    [
        ConnectionError("Couldn't reach 'owner/name' on the Hub"),
        ValueError("Unknown split 'x'"),
        datasets.exceptions.DatasetNotFoundError("is a gated dataset"),
        datasets.exceptions.DatasetGenerationError("An error occurred"),
    ],
)
def test_hub_that_gives_nothing_is_one_sentence(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, fault)
    with pytest.raises(DataError) as caught:
        read("owner/name")
    assert str(caught.value).startswith(
        f"owner/name: the hub gives no such dataset: {fault}; a local path is"
    )


def test_real_library_says_that_it_is_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"nobody/nothing: the hub gives no such dataset: .*; a local path is written"
    ):
        read("nobody/nothing")


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz"]),
    st.binary(max_size=60),
)
def test_no_bytes_raise_anything_but_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    for content in (data, b'[{"text": "' + data, b'text,"b"\n' + data, gzip.compress(data)):
        path.write_bytes(content)
        with contextlib.suppress(DataError):
            list(read_file(path))
