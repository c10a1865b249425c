"""Profile: what a training run learned about how its experts are used, as one file in the checkpoint.

Owns the schema; promises that a profile which exists is whole, bounded and consistent, and that a damaged,
foreign or hostile file is refused by name. Training writes it, the runtime loads it, `python -m coop.profile` shows it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coop.errors import ProfileError
from coop.files import contained_file, parse_json, write_atomic

PROFILE_NAME = "coop_profile.safetensors"
SCHEMA_VERSION = 2  # 1 knew neither load times nor where the next warm-up goes on; it is read without them
READ_VERSIONS = (1, 2)
MAX_FILE_BYTES = 64 * 2**20
MAX_HEADER_BYTES = 2**20
MAX_DENSE_EXPERTS = 256  # above this the transition tables would not fit the file; they are left empty
MAX_SAMPLE_TOKENS = 2048
_MAX_LAYERS = 1024
_MAX_EXPERTS = 2**16 - 1
_MAX_TOKENS = 2**40  # with at most 2**16 experts, no int64 sum below can overflow
_MAX_NAME = 256
_METADATA_KEY = "coop"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileIdentity:
    """The model that a profile belongs to. A digest that is "" is not known and is not compared."""

    architecture: str
    layers: tuple[str, ...]
    num_experts: int
    top_k: int
    router_digest: str
    adapter_digest: str
    tokenizer_digest: str


def adapter_digest(folder: Path) -> str:
    """SHA-256 of the adapter weights in `folder`, or "" when it holds no adapter."""
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# name -> (dtype, shape); L layers, P pairs of neighbouring layers, E experts, D experts of dense tables,
# K experts per token, R row counts, T sampled tokens
_SCHEMA: dict[str, tuple[type, tuple[str | int, ...]]] = {
    "hot_prompt": (np.int64, ("L", "E")),
    "hot_answer": (np.int64, ("L", "E")),
    "train_prompt": (np.int64, ("L", "E")),
    "train_answer": (np.int64, ("L", "E")),
    "recent_answer": (np.float32, ("L", "E")),
    "same_layer": (np.int32, ("L", "D", "D")),
    "next_layer": (np.int32, ("P", "D", "D")),
    "rows": (np.int32, ("L", 3)),
    "sample": (np.uint16, ("T", "L", "K")),
    "row_counts": (np.int32, ("R",)),
    "compute_ms": (np.float32, ("L", "E", "R")),
    "load_ms": (np.float32, ("L",)),
}
_FACT_TYPES: dict[str, Any] = {
    "is_refreshed": bool,
    "fingerprint": str,
    "warmup_seconds": (int, float),
    "train_seconds": (int, float),
    "identity": dict,
}
_NEW_FACTS: dict[str, Any] = {
    "warmups": 0,
    "warmup_next": 0,
    "train_seconds": 0.0,
}  # what version 1 did not say
_COUNTS = (
    ("hot_prompt", "tokens_prompt"),
    ("hot_answer", "tokens_answer"),
    ("train_prompt", "train_tokens_prompt"),
    ("train_answer", "train_tokens_answer"),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Profile:
    """Counts and timings of the experts of one model; checked at birth, so that an inconsistent one cannot exist.

    hot_prompt, hot_answer: int64 [layers, experts], what the runtime seeds from: a pass with the final weights
        if `is_refreshed`, else the training counts. Every row sums to tokens x top_k.
    train_prompt, train_answer: int64 [layers, experts], cumulative over training, same invariant.
    recent_answer: float32 [layers, experts], exponentially decayed answer counts of training.
    same_layer: int32 [layers, experts, experts], from an expert of one token to one of the next token.
    next_layer: int32 [layers-1, experts, experts], from an expert in a layer to one in the next, same token.
        Both are [*, 0, 0] above 256 experts.
    rows: int32 [layers, 3], rows per used expert per call: median, 95th percentile, maximum.
    sample: uint16 [tokens, layers, top_k], consecutive tokens as they were routed.
    row_counts: int32 [r], and compute_ms: float32 [layers, experts, r], NaN where not measured, on the
        hardware named by `fingerprint`.
    load_ms: float32 [layers], one expert from disk while training, NaN where experts were not loaded.
    warmups, warmup_seconds: how often experts were timed, and what that has cost in total, beside the
        train_seconds of all steps; warmup_next: index into the warm-up's order where the next one goes on.
    Raises ProfileError naming the field.
    """

    identity: ProfileIdentity
    step: int
    is_refreshed: bool
    hot_prompt: NDArray[np.int64]
    hot_answer: NDArray[np.int64]
    tokens_prompt: int
    tokens_answer: int
    train_prompt: NDArray[np.int64]
    train_answer: NDArray[np.int64]
    train_tokens_prompt: int
    train_tokens_answer: int
    recent_answer: NDArray[np.float32]
    same_layer: NDArray[np.int32]
    next_layer: NDArray[np.int32]
    rows: NDArray[np.int32]
    sample: NDArray[np.uint16]
    row_counts: NDArray[np.int32]
    compute_ms: NDArray[np.float32]
    load_ms: NDArray[np.float32]
    fingerprint: str
    warmups: int
    warmup_seconds: float
    warmup_next: int
    train_seconds: float

    def __post_init__(self) -> None:
        _check_identity(self.identity)
        _check_arrays(self)
        _check_counts(self)
        _check_values(self)

    @property
    def num_layers(self) -> int:
        """Number of mixture-of-experts layers."""
        return len(self.identity.layers)

    def check(self, identity: ProfileIdentity) -> None:
        """Raise ProfileError, saying what differs, unless this profile belongs to the model `identity` describes."""
        mine, other = self.identity, identity
        for field, what in (
            ("architecture", "architecture"),
            ("layers", "mixture-of-experts layers"),
            ("num_experts", "number of experts"),
            ("top_k", "experts per token"),
        ):
            if getattr(mine, field) != getattr(other, field):
                facts = f"profile {_short(getattr(mine, field))}, model {_short(getattr(other, field))}"
                raise ProfileError(f"{what} differ: {facts}")
        for field, what in (
            ("router_digest", "router weights"),
            ("adapter_digest", "adapter weights"),
            ("tokenizer_digest", "tokenizers"),
        ):
            pair = (getattr(mine, field), getattr(other, field))
            if all(pair) and pair[0] != pair[1]:
                raise ProfileError(f"{what} differ")

    def save(self, path: Path) -> Path:
        """Write the profile into the folder `path`, or as that file, replacing an old one at once; returns the file."""
        from safetensors.numpy import save

        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _SCHEMA}
        facts = {name: getattr(self, name) for name in _scalar_fields()}
        facts |= {"schema": SCHEMA_VERSION, "identity": dataclasses.asdict(self.identity)}
        data = save(arrays, metadata={_METADATA_KEY: json.dumps(facts, sort_keys=True, allow_nan=False)})
        if len(data) > MAX_FILE_BYTES:
            raise ProfileError(f"{len(data)} bytes, more than the limit of {MAX_FILE_BYTES}")
        file = path / PROFILE_NAME if path.is_dir() else path
        write_atomic(file, data)
        return file

    @staticmethod
    def load(path: Path) -> Profile:
        """The profile in the folder or file `path`. Raises ProfileError naming the file and the reason."""
        try:
            folder, name = (path, PROFILE_NAME) if path.is_dir() else (path.parent, path.name)
            file = contained_file(folder, name, lambda reason: ProfileError(f"{folder / name}: {reason}"))
            data = _read_bounded(file)
        except (OSError, RuntimeError, ValueError) as exc:  # pathlib calls a loop of links a RuntimeError
            reason = exc.strerror if isinstance(exc, OSError) else None
            raise ProfileError(f"{path}: cannot be read: {reason or exc}"[:400]) from exc
        try:
            return _parse(data)
        except (ProfileError, RecursionError) as exc:
            raise ProfileError(f"{file}: {exc}") from exc


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} ({value[0]} ... {value[-1]})" if value else "none"
    return str(value)


def _scalar_fields() -> list[str]:
    return [f.name for f in dataclasses.fields(Profile) if f.name not in _SCHEMA and f.name != "identity"]


def _read_bounded(file: Path) -> bytes:
    size = file.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ProfileError(f"{file}: {size} bytes, more than the limit of {MAX_FILE_BYTES}")
    return file.read_bytes()


def _parse(data: bytes) -> Profile:
    """Profile from the bytes of a file; every surprise is a ProfileError."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    facts = _parse_facts(data)
    try:
        arrays = load(data)
    except (SafetensorError, KeyError, TypeError, ValueError) as exc:
        raise ProfileError(f"not a safetensors file: {exc}"[:300]) from exc
    identity = _parse_identity(facts.pop("identity"))
    if facts.pop("schema") == 1:
        _expect_names("arrays", arrays, [name for name in _SCHEMA if name != "load_ms"])
        arrays["load_ms"] = np.full(len(identity.layers), np.nan, dtype=np.float32)
    _expect_names("arrays", arrays, _SCHEMA)
    return Profile(identity=identity, **facts, **arrays)


def _parse_facts(data: bytes) -> dict[str, Any]:
    """The JSON of the header's metadata, with exactly the expected keys and simple types, and `schema`."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(len(data) - 8, MAX_HEADER_BYTES):
        raise ProfileError("not a safetensors file: the header is cut short or too long")
    header = parse_json(data[8 : 8 + size], ProfileError, MAX_HEADER_BYTES)
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    text = metadata.get(_METADATA_KEY) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise ProfileError("not a coop profile: its metadata has no 'coop' entry")
    facts = parse_json(text.encode("utf-8", "surrogatepass"), ProfileError, MAX_HEADER_BYTES)
    if not isinstance(facts, dict):
        raise ProfileError("not a coop profile: its metadata is not an object")
    version = facts.get("schema")
    if type(version) is not int or version not in READ_VERSIONS:
        raise ProfileError(f"schema version {_clip(version)}; this coop reads versions 1 and 2")
    new = _NEW_FACTS if version == 1 else {}
    _expect_names("facts", facts, {"schema", "identity", *_scalar_fields()} - set(new))
    facts |= new
    for name, value in facts.items():
        _expect_type(name, value, _FACT_TYPES.get(name, int))
    for name in ("warmup_seconds", "train_seconds"):
        try:
            facts[name] = float(facts[name])
        except OverflowError as exc:
            raise ProfileError(f"{name} is {_clip(facts[name])}") from exc
    return facts


def _parse_identity(facts: dict[str, Any]) -> ProfileIdentity:
    fields = [f.name for f in dataclasses.fields(ProfileIdentity)]
    _expect_names("identity", facts, fields)
    for name, value in facts.items():
        _expect_type(
            f"identity.{name}", value, {"layers": list, "num_experts": int, "top_k": int}.get(name, str)
        )
    if not all(isinstance(layer, str) for layer in facts["layers"]):
        raise ProfileError("identity.layers is not a list of names")
    return ProfileIdentity(**{**facts, "layers": tuple(facts["layers"])})


def _clip(value: Any) -> str:
    return repr(value)[:80]


def _expect_names(what: str, found: Iterable[str], expected: Iterable[str]) -> None:
    missing, extra = set(expected) - set(found), set(found) - set(expected)
    if missing or extra:
        name = min(missing) if missing else min(extra)
        raise ProfileError(f"{what}: {_clip(name)} is {'missing' if missing else 'not expected'}")


def _expect_type(name: str, value: Any, kind: type | tuple[type, ...]) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ProfileError(f"{name} is {_clip(value)}, of the wrong type")


def _check_identity(identity: ProfileIdentity) -> None:
    _expect_plain("architecture", identity.architecture)
    for field in ("router_digest", "adapter_digest", "tokenizer_digest"):
        _expect_plain(field, getattr(identity, field) or "unknown")
    if not 1 <= len(identity.layers) <= _MAX_LAYERS:
        raise ProfileError(f"{len(identity.layers)} layers, not 1 to {_MAX_LAYERS}")
    if not 1 <= identity.num_experts <= _MAX_EXPERTS:
        raise ProfileError(f"{_clip(identity.num_experts)} experts, not 1 to {_MAX_EXPERTS}")
    if not 1 <= identity.top_k <= identity.num_experts:
        raise ProfileError(f"{_clip(identity.top_k)} experts per token of {identity.num_experts}")
    for layer in identity.layers:
        _expect_plain("the name of a layer", layer)


def _expect_plain(what: str, text: str) -> None:
    """A name that can be printed as it is: not empty, not long, no control characters and no surrogates."""
    if not (0 < len(text) <= _MAX_NAME and text.isprintable()):
        raise ProfileError(f"{what} is {text[:80]!a}, not 1 to {_MAX_NAME} printable characters")


def _check_arrays(profile: Profile) -> None:
    identity = profile.identity
    is_dense = identity.num_experts <= MAX_DENSE_EXPERTS
    sizes = {
        "L": len(identity.layers),
        "P": len(identity.layers) - 1,
        "E": identity.num_experts,
        "D": identity.num_experts if is_dense else 0,
        "K": identity.top_k,
        "R": profile.row_counts.size,
        "T": len(profile.sample) if profile.sample.ndim else 0,
    }
    for name, (dtype, dims) in _SCHEMA.items():
        array = getattr(profile, name)
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in dims)
        if array.dtype != dtype or array.shape != shape:
            expected = f"{np.dtype(dtype)} {list(shape)}"
            raise ProfileError(f"{name} is {array.dtype} {list(array.shape)}, expected {expected}")
    if sizes["T"] > MAX_SAMPLE_TOKENS:
        raise ProfileError(f"sample has {sizes['T']} tokens, more than {MAX_SAMPLE_TOKENS}")


def _check_counts(profile: Profile) -> None:
    """Every layer's counts sum to tokens x top_k exactly, and no expert is used more than once by a token."""
    for counts_name, tokens_name in _COUNTS:
        counts, tokens = getattr(profile, counts_name), getattr(profile, tokens_name)
        if not 0 <= tokens <= _MAX_TOKENS:
            raise ProfileError(f"{tokens_name} is {_clip(tokens)}, not 0 to {_MAX_TOKENS}")
        if (counts < 0).any() or (counts > tokens).any():
            raise ProfileError(
                f"{counts_name} has an expert used less than never or more than once by a token"
            )
        wrong = np.flatnonzero(counts.sum(axis=1) != tokens * profile.identity.top_k)
        if wrong.size:
            layer = int(wrong[0])
            facts = f"{int(counts[layer].sum())}, not {tokens} tokens x {profile.identity.top_k}"
            raise ProfileError(f"{counts_name} of layer {layer} sums to {facts}")


def _check_values(profile: Profile) -> None:
    _expect_plain("fingerprint", profile.fingerprint)
    if not 0 <= profile.step <= _MAX_TOKENS:
        raise ProfileError(f"step is {_clip(profile.step)}, not 0 to {_MAX_TOKENS}")
    for name in ("warmups", "warmup_next"):
        if not 0 <= getattr(profile, name) <= _MAX_TOKENS:
            raise ProfileError(f"{name} is {_clip(getattr(profile, name))}, not 0 to {_MAX_TOKENS}")
    for name in ("warmup_seconds", "train_seconds"):
        if not (np.isfinite(getattr(profile, name)) and getattr(profile, name) >= 0):
            raise ProfileError(f"{name} is {getattr(profile, name)}")
    if not np.isfinite(profile.recent_answer).all() or (profile.recent_answer < 0).any():
        raise ProfileError("recent_answer has a value that is not a count")
    for name in ("same_layer", "next_layer", "rows"):
        if (getattr(profile, name) < 0).any():
            raise ProfileError(f"{name} has a negative count")
    if (np.diff(profile.rows, axis=1) < 0).any():
        raise ProfileError("rows must be ordered: median, 95th percentile, maximum")
    if profile.sample.size and int(profile.sample.max()) >= profile.identity.num_experts:
        raise ProfileError(
            f"sample names expert {int(profile.sample.max())} of {profile.identity.num_experts}"
        )
    if (profile.row_counts < 1).any() or (np.diff(profile.row_counts) <= 0).any():
        raise ProfileError("row_counts must be positive and rising")
    for name in ("compute_ms", "load_ms"):
        times = getattr(profile, name)
        measured = times[~np.isnan(times)]
        if not np.isfinite(measured).all() or (measured < 0).any():
            raise ProfileError(f"{name} has a value that is not a time")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m coop.profile DIR [--plot FILE.png] [--json]`, or one of its sub-commands."""
    from coop.profile_commands import main as command

    return command(argv)


if __name__ == "__main__":
    sys.exit(main())
