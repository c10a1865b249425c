"""Checkpoint: what a folder is, and where its weights, adapter, tokenizer and profile are.

Owns nothing; promises that whatever it returns exists, is safetensors, and asks for no remote code. Called
by attach and by the command lines.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coop.errors import CheckpointError
from coop.files import read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PACK_MANIFEST = "coop_pack.json"
MAX_EXPERTS = 65_535
MAX_LAYERS = 1_000
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_HARMLESS = ("_name_or_path", "_attn_implementation_autoset", "_commit_hash")
_BUILT_IN = (None, "eager", "sdpa", "flash_attention_2", "flex_attention", "grouped_mm", "batched_mm")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that coop can run: `weights` holds config and shards; `adapter` is "" for a full model.

    `is_pack`: the experts lie as `coop.pack` writes them, and `weights` has only the rest in Hub layout.
    """

    folder: Path
    weights: Path
    adapter: str
    tokenizer: Path
    is_pack: bool = False


def open_checkpoint(path: str | Path, base: str | Path | None = None) -> Checkpoint:
    """Say what `path` is: a full model, or an adapter with its base.

    The base is `base`, or what the adapter's config names: a folder (tried as written, then beside the
    adapter) or a Hub id. Raises CheckpointError with what to type next.
    """
    folder = _folder(path)
    if not (folder / ADAPTER_CONFIG).exists():
        if base is not None:
            kind = "a pack, whose adapter is merged" if is_pack(folder) else "not an adapter"
            raise CheckpointError(f"{folder} is {kind}, so --base has nothing to do: leave it out")
        check_config(folder)
        return Checkpoint(
            folder=folder, weights=folder, adapter="", tokenizer=folder, is_pack=is_pack(folder)
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(f"{folder} has {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS}")
    weights = _folder(base) if base is not None else _named_base(folder)
    if (weights / ADAPTER_CONFIG).exists() and not (weights / "config.json").exists():
        raise CheckpointError(
            f"the base {weights} is itself an adapter; merge it first and pass the merged folder"
        )
    if is_pack(weights):
        raise CheckpointError(
            f"the base {weights} is a pack: give the checkpoint that it was made from, or pack the adapter with that"
        )
    check_config(weights)
    tokenizer = folder if (folder / "tokenizer_config.json").exists() else weights
    return Checkpoint(folder=folder, weights=weights, adapter=ADAPTER_WEIGHTS, tokenizer=tokenizer)


def is_pack(folder: Path) -> bool:
    """Whether the folder says that it is a pack."""
    return (folder / PACK_MANIFEST).exists()


def check_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json, refused if it asks for code, is quantised, or has sizes out of bounds."""
    config = read_json(folder / "config.json", CheckpointError)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{folder / 'config.json'} names no model_type")
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        _check_asks_for_nothing(folder, part)
    if config.get("quantization_config"):
        settings = config["quantization_config"]
        method = str(settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings)[:40]
        raise CheckpointError(
            f"{folder} is quantised ({method}); coop serves BF16, F16 and F32 experts: dequantise it first "
            "(from_pretrained with the quantiser's dequantize option, then save_pretrained)"
        )
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    _check_sizes(folder, text or config)
    return config


def _check_asks_for_nothing(folder: Path, config: dict[str, Any]) -> None:
    """No code, no kernels from a hub, no private switches: a config describes a model and nothing else."""
    if "auto_map" in config:
        raise CheckpointError(f"{folder}: the config asks for code from the model's author; coop runs none")
    private = next((key for key in config if key.startswith("_") and key not in _HARMLESS), "")
    if private:
        raise CheckpointError(f"{folder}: the config sets the private key {private[:60]!r}")
    for key in ("attn_implementation", "experts_implementation"):
        if config.get(key) not in _BUILT_IN:
            raise CheckpointError(
                f"{folder}: {key} is {str(config[key])[:60]!r}, not one that transformers has"
            )


def _check_sizes(folder: Path, config: dict[str, Any]) -> None:
    layers = config.get("num_hidden_layers", 1)
    if not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
        raise CheckpointError(
            f"{folder}: num_hidden_layers is {layers!r}, not a number from 1 to {MAX_LAYERS}"
        )
    for key in _EXPERT_COUNTS:
        experts = config.get(key)
        if experts is None:
            continue
        if not isinstance(experts, int) or not 0 < experts <= MAX_EXPERTS:
            raise CheckpointError(f"{folder}: {key} is {experts!r}, not a number from 1 to {MAX_EXPERTS}")
        top_k = config.get("num_experts_per_tok")
        if top_k is not None and (type(top_k) is not int or not 0 < top_k <= experts):
            raise CheckpointError(
                f"{folder}: {top_k!r} experts per token of {experts}; the config is not of a model"
            )


def _folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; give the folder that holds config.json")
    if _HUB_ID.fullmatch(str(path)):
        return _from_hub(str(path))
    raise CheckpointError(f"{folder} does not exist; give a folder that holds config.json, or a Hub id")


def _named_base(folder: Path) -> Path:
    config = read_json(folder / ADAPTER_CONFIG, CheckpointError)
    name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{folder / ADAPTER_CONFIG} names no base model: pass --base DIR")
    for candidate in (Path(name), folder / name, *(parent / name for parent in folder.resolve().parents)):
        if candidate.is_dir() and (candidate / "config.json").exists():
            return candidate
    if _HUB_ID.fullmatch(name):
        try:
            return _from_hub(name)
        except CheckpointError as exc:
            raise CheckpointError(
                f"the adapter's base {name!r} is not here: pass --base DIR ({exc})"
            ) from exc
    raise CheckpointError(f"the adapter's base {name!r} is not here: pass --base DIR")


def _from_hub(name: str) -> Path:
    """A snapshot in the local Hub cache, downloaded if the Hub may be asked."""
    from huggingface_hub import snapshot_download

    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=offline))
    except Exception as exc:
        raise CheckpointError(
            f"{name!r} is neither a folder nor to be had from the Hub ({type(exc).__name__})"
        ) from exc
