"""Row: one sequence of tokens and what of it is trained.

Owns the arrays; promises eight bytes a token, and that the first token, which nothing predicts, has no label.
`train.data.masking` makes rows, `train.data.packing` joins them, TRL gets them as a dataset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """int32 [tokens] each: labels equal the ids where the token is trained and are -100 elsewhere.

    `lengths` are the tokens of the rows that were packed into this one; () for a row of its own.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    lengths: tuple[int, ...] = ()

    @classmethod
    def masked(cls, input_ids: Sequence[int], is_trained: NDArray[np.bool_]) -> Row:
        """The row whose labels are its ids where `is_trained`, the first token left out."""
        ids = np.asarray(input_ids, dtype=np.int32)
        labels = np.where(is_trained, ids, np.int32(IGNORED_LABEL))
        labels[:1] = IGNORED_LABEL
        return cls(ids, labels)

    @property
    def trained_tokens(self) -> int:
        """Tokens with a label."""
        return int((self.labels != IGNORED_LABEL).sum())

    def cut(self, max_length: int) -> Row:
        """The first `max_length` tokens."""
        return Row(self.input_ids[:max_length].copy(), self.labels[:max_length].copy())

    def digest(self) -> bytes:
        """32 bytes that depend on the tokens, the labels and the packing alone."""
        digest = hashlib.sha256(f":{self.lengths}:".encode())
        digest.update(self.input_ids.astype("<i4").tobytes())
        digest.update(self.labels.astype("<i4").tobytes())
        return digest.digest()

    def token_digest(self, salt: str) -> bytes:
        """32 bytes that depend on the tokens and `salt` alone, whatever of the row is trained."""
        return hashlib.sha256(f"{salt}:".encode() + self.input_ids.astype("<i4").tobytes()).digest()


def digest_rows(rows: Iterable[Row]) -> str:
    """SHA-256 of rows in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.digest())
    return digest.hexdigest()


def to_dataset(rows: Sequence[Row]) -> Any:
    """A `datasets.Dataset` as TRL's collator takes it: input_ids, labels and, of packed rows, seq_lengths."""
    from datasets import Dataset

    columns: dict[str, Any] = {
        "input_ids": [row.input_ids for row in rows],
        "labels": [row.labels for row in rows],
    }
    if any(row.lengths for row in rows):
        columns["seq_lengths"] = [list(row.lengths or (len(row.input_ids),)) for row in rows]
    return Dataset.from_dict(columns)
