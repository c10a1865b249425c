"""Rates: the file that keeps what the topology probe measured, so that only the first start pays for it.

Owns `coop/topology.json` in the user's cache folder; promises that nothing in it is trusted: it is bounded, every
number lies within what hardware can do, and anything else reads as an empty file. A folder that cannot be
written is no error. Called by topology.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coop.files import read_json, write_atomic

VERSION = 1
MAX_FILE_BYTES = 2**16
MAX_ENTRIES = 64
MAX_KEY_CHARACTERS = 100
MAX_RATES = 4
SLOWEST, FASTEST = 1e5, 1e13  # bytes per second: below any disk in use, above any memory


def rates_file() -> Path:
    """Where the rates are kept; OSError where there is no home folder."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(folder):  # the XDG specification has relative paths ignored
        return Path(folder) / "coop" / "topology.json"
    try:
        return Path.home() / ".cache" / "coop" / "topology.json"
    except RuntimeError as exc:
        raise OSError(str(exc)) from exc


def load_rates() -> dict[str, tuple[float, ...]]:
    """Bytes per second by what was measured; empty where the file is absent, damaged or out of bounds."""
    try:
        path = rates_file()
        if not path.is_file():  # a pipe or a device of that name would never end
            return {}
        return _checked(read_json(path, ValueError, MAX_FILE_BYTES))
    except (OSError, ValueError):
        return {}


def save_rates(rates: Mapping[str, tuple[float, ...]]) -> None:
    """Replace the file by the newest entries; where that is not possible, the next start measures again."""
    # what reading would refuse is left out, or one absurd measurement would cost all the others
    kept = [(key, list(entry)) for key, entry in rates.items() if _is_sane(entry)]
    newest = dict(kept[-MAX_ENTRIES:])
    with contextlib.suppress(OSError):
        path = rates_file()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"version": VERSION, "rates": newest}, indent=1).encode())


def _checked(content: Any) -> dict[str, tuple[float, ...]]:
    """The rates in a parsed file; ValueError for anything that was not written by `save_rates`."""
    if (
        not isinstance(content, dict)
        or content.keys() != {"version", "rates"}
        or content["version"] != VERSION
    ):
        raise ValueError("not a file of rates")
    entries = content["rates"]
    if not isinstance(entries, dict) or len(entries) > MAX_ENTRIES:
        raise ValueError("no rates, or too many")
    return {_checked_key(key): _checked_rates(rates) for key, rates in entries.items()}


def _checked_key(key: str) -> str:
    if len(key) > MAX_KEY_CHARACTERS:
        raise ValueError("a key that is too long")
    return key


def _checked_rates(rates: Any) -> tuple[float, ...]:
    if not isinstance(rates, list) or not _is_sane(rates):
        raise ValueError("rates that no hardware has")
    return tuple(float(rate) for rate in rates)


def _is_sane(rates: Sequence[Any]) -> bool:
    # True is an int, but 1 byte per second is too slow; NaN fails every comparison
    is_each = all(isinstance(rate, int | float) and SLOWEST <= rate <= FASTEST for rate in rates)
    return is_each and 1 <= len(rates) <= MAX_RATES
