"""Sources: rows of jsonl, json, csv and parquet files, of folders of them, and of datasets of the hub.

Owns finding and reading; promises that every row comes with its file and line, in the same order in every
process, that memory is bounded by one line (of a .json file by the file), and that nothing is executed.
`train.data.load` reads with it.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import IO, Any

from coop.errors import DataError
from coop.files import parse_json
from train.data.records import Record, RowError
from train.schema import DataSection, SourceSection

MAX_LINE_BYTES = 16 * 2**20
MAX_JSON_FILE_BYTES = 2**30
MAX_FILES = 10_000
BATCH_ROWS = 1000
TEXT_KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
KINDS = (*TEXT_KINDS, *(f"{kind}.gz" for kind in TEXT_KINDS), ".parquet")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SPLIT = re.compile(r"([\w.-]+)(?:\[(.*):(.*)\])?")
_MAGIC = {
    b"\x1f\x8b": "compressed with gzip; name it with .gz at its end",
    b"PAR1": "a parquet file; name it with .parquet at its end",
    b"PK\x03\x04": "a zip file; unpack it first",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
}
Read = Callable[[], Iterator[Record]]


@dataclass(frozen=True, slots=True)
class Split:
    """A split and a slice of it: bounds as they are written, such as 10, -5, 20% or nothing."""

    name: str
    first: str
    last: str

    @classmethod
    def parse(cls, text: str | None) -> Split:
        """`train[10%:20%]` as the schema lets it through; None is everything."""
        match = _SPLIT.fullmatch(text or "")
        return cls(match[1], match[2] or "", match[3] or "") if match else cls("", "", "")

    def cut(self, read: Read) -> Iterator[Record]:
        """The records of the slice; a bound that counts from the end or is a share needs a pass that counts."""
        bounds = (self.first, self.last)
        total = 0
        if any(bound.startswith("-") or bound.endswith("%") for bound in bounds):
            total = sum(1 for _ in read())
        first, last = (_bound(bound, total) for bound in bounds)
        return islice(read(), first or 0, last)


def _bound(text: str, total: int) -> int | None:
    if not text:
        return None
    place = round(total * int(text[:-1]) / 100) if text.endswith("%") else int(text)
    return max(0, place + total) if place < 0 else place


def is_local(path: str) -> bool:
    """Whether `path` means a file or a folder here, not a dataset of the hub."""
    return (
        Path(path).expanduser().exists()
        or not _HUB_ID.fullmatch(path)
        or path.endswith(KINDS)
        or Path(path.split("/")[0]).is_dir()
    )


def needs_hub(data: DataSection) -> bool:
    """Whether any rows are in a dataset of the hub, so that the network may be asked."""
    return not all(is_local(source.path) for source in [*data.train, *(data.eval or [])])


def read_records(source: SourceSection) -> Iterator[Record]:
    """The rows of one source. Raises DataError for what is wrong with a whole file, folder or dataset."""
    if not is_local(source.path):
        return _read_hub(source)
    if source.subset is not None:
        raise DataError(f"{source.path}: subset is for datasets of the hub, this is a local path")
    split = Split.parse(source.split)
    files = find_files(Path(source.path).expanduser(), split.name)
    return split.cut(lambda: (record for path in files for record in read_file(path)))


def find_files(path: Path, split: str = "") -> list[Path]:
    """The data files at `path`, sorted; of a folder those of the split, all if it is "". Raises DataError."""
    if not path.exists():
        hint = "" if len(path.parts) > 1 else "; a dataset of the hub is written owner/name"
        raise DataError(f"{path}: no such file or folder{hint}")
    if not path.is_dir():
        if not path.name.endswith(KINDS):
            raise DataError(f"{path}: not a kind of file that can be read: {', '.join(KINDS)}")
        if split not in ("", "train"):
            raise DataError(f"{path}: split {split!r}: a single file has one split, train")
        return [path]
    names = sorted(islice((p.relative_to(path).as_posix() for p in path.rglob("*")), 100 * MAX_FILES))
    found = [name for name in names if name.endswith(KINDS) and not name.startswith(".") and "/." not in name]
    if any(f"{Path(name).parent.as_posix()}/state.json".removeprefix("./") in names for name in found):
        raise DataError(f"{path}: a folder of `save_to_disk`; write it again with `to_parquet`")
    if not found or len(found) > MAX_FILES:
        raise DataError(
            f"{path}: {len(found)} files of the kinds {', '.join(KINDS)}; 1 to {MAX_FILES} can be read"
        )
    word = re.compile(rf"(^|[^a-z0-9]){re.escape(split.lower())}([^a-z0-9]|$)")
    chosen = [path / name for name in found if not split or word.search(name.lower())]
    if not chosen:
        raise DataError(f"{path}: no file of the split {split!r}; there are {', '.join(found[:5])}")
    return chosen


def read_file(path: Path) -> Iterator[Record]:
    """The rows of one file, by the end of its name."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        return _read_parquet(path)
    if name.endswith((".csv", ".tsv")):
        return _read_csv(path, "\t" if name.endswith(".tsv") else ",")
    return _read_json(path) if name.endswith(".json") else _read_lines(path)


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a text file, unpacked if it is .gz; whatever the world does wrong is a DataError."""
    try:
        with path.open("rb") as packed:
            head = packed.read(4)
            packed.seek(0)
            is_packed = path.name.endswith(".gz")
            for magic, what in _MAGIC.items():
                if head.startswith(magic) and not (is_packed and magic == b"\x1f\x8b"):
                    raise DataError(f"{path}: {what}")
            if is_packed:
                with gzip.open(packed, "rb") as unpacked:
                    yield unpacked  # type: ignore[misc]
            else:
                yield packed
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        raise DataError(f"{path}: damaged gzip data: {exc}") from exc
    except OSError as exc:
        raise DataError(f"{path}: {exc.strerror or exc}") from exc


def _lines(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1 and bytes of every line, a mark of UTF-8 at the start of the file left out."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            kind = "csv" if ".csv" in path.name or ".tsv" in path.name else "jsonl"
            raise DataError(f"{path}:{number}: longer than {MAX_LINE_BYTES} bytes; this is not a {kind} file")
        yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _read_lines(path: Path) -> Iterator[Record]:
    with _open(path) as file:
        for number, line in _lines(path, file):
            if line.strip():
                yield Record(f"{path}:{number}", _parse(line))


def _parse(data: bytes) -> Any | RowError:
    try:
        return parse_json(data, DataError, MAX_LINE_BYTES)
    except DataError as exc:
        return RowError("unreadable", str(exc))


def _read_json(path: Path) -> Iterator[Record]:
    """A .json file: one array of rows, each parsed and named by its own line; else a row a line."""
    with _open(path) as file:
        data = file.read(MAX_JSON_FILE_BYTES + 1)
    if len(data) > MAX_JSON_FILE_BYTES:
        raise DataError(
            f"{path}: more than {MAX_JSON_FILE_BYTES} bytes; write one row a line in a .jsonl file"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise DataError(f"{path}: not UTF-8 text at byte {exc.start}") from exc
    del data
    if text.lstrip().startswith("["):
        yield from _array_items(path, text)
    else:
        yield from _read_lines(path)


def _array_items(path: Path, text: str) -> Iterator[Record]:
    decoder, space = json.JSONDecoder(), re.compile(r"\s*")
    at = text.index("[") + 1
    line, counted = 1, 0
    separator = ""
    while True:
        begin = space.match(text, at).end()  # type: ignore[union-attr]
        line, counted = line + text.count("\n", counted, begin), begin
        if text[begin : begin + 1] == "]" and separator != ",":
            break
        try:
            end = decoder.raw_decode(text, begin)[1]
        except (ValueError, RecursionError) as exc:
            raise DataError(f"{path}:{line}: not valid JSON: {exc}"[:300]) from exc
        yield Record(f"{path}:{line}", _parse(text[begin:end].encode("utf-8", "surrogatepass")))
        at = space.match(text, end).end()  # type: ignore[union-attr]
        separator = text[at : at + 1]
        if separator == ",":
            at += 1
        elif separator != "]":
            raise DataError(f"{path}:{line}: not valid JSON: expected , or ] after this row")
    if text[begin + 1 :].strip():
        raise DataError(f"{path}:{line}: not valid JSON: text after the array")


def _read_csv(path: Path, delimiter: str) -> Iterator[Record]:
    csv.field_size_limit(MAX_LINE_BYTES)
    try:
        with _open(path) as file:
            lines = (line.decode("utf-8") for _, line in _lines(path, file))
            rows = csv.reader(lines, delimiter=delimiter, strict=True)
            header = _read_header(path, rows)
            for number in count(1):
                try:
                    fields = next(rows)
                except StopIteration:
                    return
                except csv.Error as exc:
                    yield Record(f"{path}: row {number}", RowError("unreadable", f"not valid CSV: {exc}"))
                    continue
                if fields:
                    yield Record(f"{path}: row {number}", _name_fields(header, fields))
    except UnicodeDecodeError as exc:
        raise DataError(f"{path}: not UTF-8 text") from exc


def _read_header(path: Path, rows: Iterator[list[str]]) -> list[str]:
    try:
        header = next(rows, [])
    except csv.Error as exc:
        raise DataError(f"{path}: the header is not valid CSV: {exc}") from exc
    if header and (len(set(header)) < len(header) or not all(name.strip() for name in header)):
        raise DataError(f"{path}: the header has empty or equal names: {', '.join(header)[:200]}")
    return header


def _name_fields(header: list[str], fields: list[str]) -> dict[str, str] | RowError:
    if len(fields) != len(header):
        return RowError("unreadable", f"{len(fields)} fields, the header has {len(header)}")
    return dict(zip(header, fields, strict=True))


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise DataError(f"{path}: two columns have the same name: {', '.join(names)[:200]}")
            rows = (row for batch in file.iter_batches(BATCH_ROWS) for row in batch.to_pylist())
            yield from _numbered(f"{path}: row", rows)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as exc:
        raise DataError(f"{path}: not a whole parquet file: {_first_line(exc)}") from exc


def _read_hub(source: SourceSection) -> Iterator[Record]:
    from datasets import Dataset, load_dataset
    from datasets.exceptions import DatasetsError

    try:
        loaded = load_dataset(source.path, source.subset, split=source.split)
    except (DatasetsError, OSError, ValueError, RuntimeError, NotImplementedError) as exc:
        hint = "a local path is written ./NAME; without a network only what was downloaded before can be used"
        raise DataError(f"{source.path}: the hub gives no such dataset: {_first_line(exc)}; {hint}") from exc
    if not isinstance(loaded, Dataset):
        if len(loaded) > 1:
            names = ", ".join(str(name) for name in loaded)
            raise DataError(f"{source.path}: has the splits {names}; say which with split")
        loaded = next(iter(loaded.values()))
    batches = loaded.with_format("arrow").iter(BATCH_ROWS)  # as it is stored: no image or sound is decoded
    rows = (row for batch in batches for row in batch.to_pylist())
    place = f"{source.path}[{source.split}]" if source.split else source.path
    return _numbered(f"{place}: row", rows)


def _numbered(place: str, rows: Iterable[Any]) -> Iterator[Record]:
    return (Record(f"{place} {number}", row) for number, row in enumerate(rows, 1))


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0][:200]
