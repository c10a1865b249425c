"""Data: from the sources of a recipe to the rows that are trained and held out.

Owns the order of reading, checking, masking, mixing, holding out and packing, and what is counted on the way;
promises that a bad row is named by file and line and that every process gets the same rows. `train.run` calls it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from coop.errors import DataError
from train.data.formats import Chat, Text, parse_row
from train.data.masking import Masker
from train.data.mixture import hold_out, mix
from train.data.packing import pack_rows
from train.data.records import Record, RowError
from train.data.rows import Row, digest_rows
from train.data.sources import read_records
from train.schema import DataSection, SourceSection

MAX_FAULTS_SHOWN = 5
QUIET_SECONDS = 2.0  # reading that takes longer shows how far it is


@dataclass(slots=True)
class SourceSummary:
    """What reading one source came to; `used`, `tokens` and `trained_tokens` are of the rows that are used."""

    name: str
    formats: Counter[str] = field(default_factory=Counter)
    read: int = 0
    cut: int = 0
    dropped: int = 0
    without_answer: int = 0
    used: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    first_faults: list[str] = field(default_factory=list)
    samples: dict[str, Row] = field(default_factory=dict)  # the first row of each format

    def note(self, place: str, exc: RowError) -> None:
        """Count a bad row, and keep the first few."""
        self.faults[exc.kind] += 1
        if len(self.first_faults) < MAX_FAULTS_SHOWN:
            self.first_faults.append(f"{place}: {exc}")

    def describe_faults(self) -> str:
        """How many bad rows of which kind, as a part of a sentence."""
        kinds = ", ".join(f"{kind}: {count:,}" for kind, count in self.faults.most_common())
        return f"{self.faults.total():,} bad rows ({kinds})"

    def describe(self) -> str:
        """One line for the start of a run."""
        share = 100 * self.trained_tokens / max(1, self.tokens)
        parts = [
            f"{self.name}: {self.used:,} rows, {self.tokens:,} tokens, {share:.0f}% trained, {', '.join(self.formats)}"
        ]
        if self.cut:
            parts.append(f"{self.cut:,} rows cut to length")
        if self.dropped:
            parts.append(f"{self.dropped:,} rows dropped because they are too long")
        if self.without_answer:
            parts.append(
                f"{self.without_answer:,} rows dropped because no trained token was left after the cut"
            )
        if self.faults:
            parts.append(f"{self.describe_faults()} left out, first {self.first_faults[0]}")
        return "; ".join(parts)

    def count(self, rows: Sequence[Row]) -> None:
        """Note what is used."""
        self.used = len(rows)
        self.tokens = sum(len(row.input_ids) for row in rows)
        self.trained_tokens = sum(row.trained_tokens for row in rows)


@dataclass(slots=True)
class LoadedData:
    """Rows to train, packed if the recipe says so, rows that are held out, and what was counted."""

    train_rows: list[Row]
    eval_rows: list[Row]
    train: list[SourceSummary]
    eval: list[SourceSummary]
    notes: list[str]

    def digest(self) -> str:
        """SHA-256 of all rows as they are trained and evaluated."""
        return f"{digest_rows(self.train_rows)}{digest_rows(self.eval_rows)}"


def load_data(data: DataSection, tokenizer: Any, seed: int, console: Console | None = None) -> LoadedData:
    """Everything that the recipe's `data` section asks for. Raises DataError naming file, line or key."""
    reader = _Reader(data, Masker(tokenizer, data.loss_on, data.max_length), console or Console(quiet=True))
    notes: list[str] = []
    by_source, train = reader.read_all(data.train, data.max_train_rows, seed)
    held_out, held_summaries = reader.read_all(data.eval or [], data.max_eval_rows, seed)
    eval_rows = [row for rows in held_out for row in rows]
    if data.eval_fraction:
        sides = [hold_out(rows, data.eval_fraction, seed) for rows in by_source]
        by_source, eval_rows = [kept for kept, _ in sides], [row for _, rows in sides for row in rows]
        notes.append(_describe_held_out(data, sum(map(len, by_source)), len(eval_rows)))
        eval_rows = eval_rows[: data.max_eval_rows or None]
        for summary, kept in zip(train, by_source, strict=True):
            summary.count(kept)
    rows = [row for kept in by_source for row in kept]
    if data.packing:
        count, tokens = len(rows), sum(len(row.input_ids) for row in rows)
        rows = pack_rows(rows, data.max_length)
        fill = tokens / (len(rows) * data.max_length)
        notes.append(
            f"packing: {count:,} rows in {len(rows):,} sequences, {fill:.1%} of {data.max_length} full"
        )
    notes += _describe_masking(reader.masker)
    return LoadedData(rows, eval_rows, train, held_summaries, notes)


def _describe_masking(masker: Masker) -> list[str]:
    """What the chat template does that its user should know."""
    notes = []
    if masker.variant_rows:
        notes.append(
            f"chat template: {masker.variant_rows:,} rows are rendered with TRL's training variant, because the "
            "model's own template rewrites earlier turns"
        )
    if masker.endless_rows:
        notes.append(
            f"chat template: {masker.endless_rows:,} rows end without a trained end token, so the model does not learn "
            "from them when to stop"
        )
    return notes


def _describe_held_out(data: DataSection, kept: int, held_out: int) -> str:
    if not kept or not held_out:
        raise DataError(
            f"data.eval_fraction: {data.eval_fraction:g} of {kept + held_out} rows leaves {held_out} held out and "
            f"{kept} to train; change it, or give data.eval"
        )
    shown = f", {data.max_eval_rows:,} of them used" if 0 < data.max_eval_rows < held_out else ""
    return f"held out: {held_out:,} of {kept + held_out:,} rows by data.eval_fraction{shown}"


class _Reader:
    """Reads sources by the rules of one `data` section."""

    def __init__(self, data: DataSection, masker: Masker, console: Console) -> None:
        self._data, self.masker, self._console = data, masker, console

    def read_all(
        self, sources: Sequence[SourceSection], max_rows: int, seed: int
    ) -> tuple[list[list[Row]], list[SourceSummary]]:
        """The rows of each source that the weights let through."""
        read = [self.read(source, max_rows) for source in sources]
        by_source, summaries = [rows for rows, _ in read], [summary for _, summary in read]
        weights = [source.weight for source in sources if source.weight is not None]
        if weights:
            by_source = mix(by_source, weights, [summary.name for summary in summaries], seed)
        for summary, rows in zip(summaries, by_source, strict=True):
            summary.count(rows)
        return by_source, summaries

    def read(self, source: SourceSection, max_rows: int) -> tuple[list[Row], SourceSummary]:
        """The usable rows of one source."""
        summary = SourceSummary(source.path + (f"[{source.split}]" if source.split else ""))
        limit = min((bound for bound in (source.max_rows, max_rows) if bound), default=0)
        columns = _Columns(source.columns)
        rows: list[Row] = []
        for record in _watched(read_records(source), summary.name, self._console):
            summary.read += 1
            columns.see(record.value)
            row = self._usable(record, source, summary)
            if row is not None:
                rows.append(row)
            if limit and len(rows) == limit:
                break
        self._refuse(rows, summary, columns)
        return rows, summary

    def _usable(self, record: Record, source: SourceSection, summary: SourceSummary) -> Row | None:
        """The row of a record, shortened; None if it is bad, too long, or nothing trained is left of it."""
        try:
            example = self._parse(record, source)
            row = self.masker.tokenize(example)
        except RowError as exc:
            summary.note(record.place, exc)
            return None
        if len(row.input_ids) > self._data.max_length:
            if self._data.truncation == "drop":
                summary.dropped += 1
                return None
            summary.cut += 1
            row = row.cut(self._data.max_length)
        if not row.trained_tokens:
            summary.without_answer += 1
            return None
        summary.formats[example.format] += 1
        summary.samples.setdefault(example.format, row)
        return row

    def _parse(self, record: Record, source: SourceSection) -> Chat | Text:
        if isinstance(record.value, RowError):
            raise record.value
        return parse_row(record.value, source.format or self._data.format, source.columns)

    def _refuse(self, rows: list[Row], summary: SourceSummary, columns: _Columns) -> None:
        columns.refuse_unseen(summary.name)
        if self._data.strict and summary.faults:
            shown = "\n  ".join(summary.first_faults)
            hint = "repair them, or set data.strict=false to leave them out"
            raise DataError(f"{summary.name}: {summary.describe_faults()}; {hint}\n  {shown}")
        if not rows:
            counts = (
                f"{summary.read:,} rows read, {summary.faults.total():,} bad, {summary.dropped:,} too long, "
            )
            counts += f"{summary.without_answer:,} with nothing trained left after the cut"
            first = f"\n  {summary.first_faults[0]}" if summary.first_faults else ""
            raise DataError(f"{summary.name}: no usable rows ({counts}){first}")


class _Columns:
    """Watches that every renamed column is there at least once: a name that is misspelt would rename nothing."""

    def __init__(self, columns: dict[str, str]) -> None:
        self._unseen = {theirs: ours for ours, theirs in columns.items()}
        self._keys: list[str] = []

    def see(self, value: Any) -> None:
        """Note the keys of a row."""
        if self._unseen and isinstance(value, dict):
            self._keys = [str(key)[:40] for key in value][:12]
            for theirs in [name for name in self._unseen if name in value]:
                del self._unseen[theirs]

    def refuse_unseen(self, name: str) -> None:
        """Raise DataError for a column that no row had."""
        for theirs, ours in self._unseen.items():
            found = ", ".join(self._keys).encode(errors="backslashreplace").decode()
            raise DataError(
                f"{name}: columns.{ours}: no row has {theirs!r}; the last one has {found or 'no key'}"
            )


def _watched(
    records: Iterator[Record],
    name: str,
    console: Console,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Record]:
    """`records`; on a terminal with a line of progress once it takes long."""
    if not console.is_terminal:
        yield from records
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    began = clock()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", visible=False)
        for number, record in enumerate(records, 1):
            if number % 100 == 0 and (seconds := clock() - began) > QUIET_SECONDS:
                text = f"reading {name}: {number:,} rows, {number / seconds:,.0f} rows/s"
                progress.update(task, description=text, visible=True)
            yield record
