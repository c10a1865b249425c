"""Routes: an ordered record of which experts tokens were sent to, as an .npz file.

Owns nothing; promises a file that is checked before it is unpacked, so that a hostile one cannot fill the memory.
`python -m coop.profile drift` compares a profile with one; `infer.bench --replay` reads the same format.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from coop.errors import DataError

MAX_UNPACKED_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Routes:
    """ids: int64 [tokens, layers, top_k], one token after another; num_experts: of each layer."""

    ids: NDArray[np.int64]
    num_experts: int

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read `ids` and `n_experts` from an .npz file. Raises DataError saying what is wrong with it."""
        try:
            _check_size(path)
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                ids, num_experts = arrays["ids"], int(arrays["n_experts"])
        except OSError as exc:
            raise DataError(f"{path}: {exc.strerror or 'cannot be read'}") from exc
        except DataError:
            raise
        except Exception as exc:  # a stranger's file can make the reader raise anything
            raise DataError(f"{path}: not an .npz trace with ids [tokens, layers, k] and n_experts") from exc
        if ids.ndim != 3 or 0 in ids.shape or ids.dtype.kind not in "iu":
            raise DataError(f"{path}: ids are not whole numbers [tokens, layers, k]")
        if not 0 <= int(ids.min()) <= int(ids.max()) < num_experts:
            raise DataError(f"{path}: ids outside 0 to {num_experts - 1}")
        return cls(ids.astype(np.int64), num_experts)

    @property
    def is_distinct(self) -> bool:
        """Whether no token names an expert twice in one layer, as no router does."""
        return not (np.diff(np.sort(self.ids, axis=2), axis=2) == 0).any()


def _check_size(path: Path) -> None:
    """An archive says what it unpacks to; what lies about it is cut off by the reader of the archive."""
    with zipfile.ZipFile(path) as archive:
        total = sum(entry.file_size for entry in archive.infolist())
    if total > MAX_UNPACKED_BYTES:
        raise DataError(f"{path}: {total} bytes when unpacked, more than the limit of {MAX_UNPACKED_BYTES}")
