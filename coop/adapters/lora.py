"""LoRA adapters served without their training wrappers.

Owns the factors of expert adapters; promises that an expert's weights after `merge` equal PEFT's own
`merge_and_unload` in the same dtype. Adapters on dense layers are merged once, by PEFT itself. Called by
attach (dense) and by the store after an expert's bytes have arrived.

PEFT's layout of a stacked parameter with E experts and rank r: lora_A [r * E, in] is expert-major, lora_B
[out, r * E] is rank-major. Of several stacked parameters of one module the last registered is the outer wrapper.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coop.adapters.transformers import EXPERT_PARAMETERS, PEFT_PREFIX, ExpertsModule
from coop.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coop.errors import CheckpointError
from coop.files import read_json
from coop.ids import ExpertId
from coop.shards import read_header

MERGE_ROWS = 256  # a block of float32 rows of common widths fits a second-level cache


@dataclass(frozen=True, slots=True)
class Factors:
    """One stacked parameter's adapter: lora_a [experts, rank, in], lora_b [experts, out, rank], float32.

    Each expert's factors are contiguous: PEFT stores lora_B with the expert fastest, and a product of that
    stride takes three times as long.
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    scaling: float

    def merge_into(self, weight: torch.Tensor, expert: int, is_transposed: bool) -> None:
        """Add one expert's update to `weight` [out, in], or [in, out] where the class stores it so.

        The update is rounded to the weight's dtype before the sum, as PEFT does. It is made in blocks of rows,
        so that it stays in cache: the blocks' bits are those of the whole product.
        """
        lora_a, lora_b = self.lora_a[expert], self.lora_b[expert]
        for start in range(0, weight.shape[0], MERGE_ROWS):
            rows = slice(start, start + MERGE_ROWS)
            product = (lora_b @ lora_a[:, rows]).t() if is_transposed else lora_b[rows] @ lora_a
            weight[rows] += (product * self.scaling).to(weight.dtype)


class ExpertLora:
    """Adapters on experts, by layer and parameter; call it with an expert's weights to merge them in place."""

    def __init__(self, factors: Mapping[tuple[int, str], Factors], experts: Sequence[ExpertsModule]) -> None:
        self._factors = dict(factors)
        self._is_transposed = [bool(e.module.is_transposed) for e in experts]

    def __len__(self) -> int:
        return len(self._factors)

    @property
    def nbytes(self) -> int:
        """Memory of all factors."""
        return sum(f.lora_a.nbytes + f.lora_b.nbytes for f in self._factors.values())

    def __call__(self, expert: ExpertId, weights: dict[str, torch.Tensor]) -> None:
        """Add the expert's update to each adapted weight."""
        for name, weight in weights.items():
            factors = self._factors.get((expert.layer, name))
            if factors is not None:
                factors.merge_into(weight, expert.expert, self._is_transposed[expert.layer])


def read_expert_lora(folder: Path, experts: Sequence[ExpertsModule]) -> ExpertLora:
    """The expert part of an adapter folder. CheckpointError for a kind of adapter that cannot be merged so."""
    config = _read_config(folder)
    targets = _expert_targets(config, folder)
    tensors = _read_tensors(folder)
    factors = {}
    for entry in experts:
        for name, prefix in _wrapper_prefixes(entry, targets, tensors).items():
            rank, scaling = _rank_and_scaling(config, f"{entry.name}.{name}")
            factors[entry.layer, name] = _factors(entry, prefix, tensors, rank, scaling)
    left = [key for key in tensors if ".experts." in key and not _is_used(key, experts, targets)]
    if left:
        raise CheckpointError(
            f"{folder}: {left[0]} adapts experts in a form coop cannot serve; merge the adapter with PEFT "
            "(merge_and_unload, save_pretrained) and run the merged folder"
        )
    return ExpertLora(factors, experts)


def merge_dense_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """Let PEFT merge the adapter's dense part into a model whose experts are absent; returns the plain model."""
    from peft import LoraConfig, PeftModel
    from safetensors.torch import save_file

    config = _read_config(folder)
    tensors = {key: value for key, value in _read_tensors(folder).items() if ".experts." not in key}
    if not tensors:
        return model
    settings = LoraConfig.from_pretrained(folder)
    settings.target_parameters = [
        p for p in config.get("target_parameters") or [] if not _names_experts(p)
    ] or None
    settings.inference_mode = True
    with tempfile.TemporaryDirectory(prefix="coop-adapter-") as place, warnings.catch_warnings():
        # PEFT 0.21 reads transformers properties by names that are on their way out
        warnings.simplefilter("ignore", FutureWarning)
        # the rank of experts, whose part of the adapter is not given to PEFT here
        warnings.filterwarnings("ignore", message="The following rank_pattern", category=RuntimeWarning)
        settings.save_pretrained(place)
        save_file(tensors, Path(place) / ADAPTER_WEIGHTS)
        wrapped: Any = PeftModel.from_pretrained(model, place, config=settings)
    _check_all_loaded(wrapped, tensors)
    return wrapped.merge_and_unload()


def _check_all_loaded(wrapped: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Every dense tensor of the adapter must have found its module: a silent miss would serve the base."""
    present = {
        name.replace(".default.", ".") for name, _ in wrapped.named_parameters() if ".lora_" in name
    } | {name.replace(".default", "") for name, _ in wrapped.named_parameters() if "lora_embedding" in name}
    lost = [key for key in tensors if "lora_" in key and key not in present]
    if lost:
        raise CheckpointError(
            f"the adapter's {lost[0]} and {len(lost) - 1} more match nothing in the base model"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / ADAPTER_CONFIG, CheckpointError)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CheckpointError(f"{folder}: coop serves LoRA adapters, this is {config.get('peft_type')!r}")
    if config.get("use_dora") or config.get("alora_invocation_tokens"):
        raise CheckpointError(f"{folder}: DoRA and aLoRA adapters must be merged with PEFT first")
    return config


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All adapter tensors; headers are checked first, so a truncated file is named and nothing is mapped from it."""
    from safetensors import safe_open

    path = folder / ADAPTER_WEIGHTS
    read_header(path)
    with safe_open(path, framework="pt", backend="pread") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict


def _names_experts(target: str) -> bool:
    return target.rpartition(".")[2] in EXPERT_PARAMETERS


def _expert_targets(config: dict[str, Any], folder: Path) -> list[str]:
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise CheckpointError(f"{folder / ADAPTER_CONFIG}: target_parameters is not a list of names")
    return [t for t in targets if _names_experts(t)]


def _matched(entry: ExpertsModule, targets: Sequence[str]) -> list[str]:
    """Parameters that the adapter targets, in order of registration; PEFT matches whole names or dotted suffixes."""
    names = {p: f"{entry.name}.{p}" for p in entry.module._parameters if p in EXPERT_PARAMETERS}
    return [p for p, name in names.items() if any(name == t or name.endswith(f".{t}") for t in targets)]


def _wrapper_prefixes(
    entry: ExpertsModule, targets: Sequence[str], tensors: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Key prefix of each adapted parameter.

    PEFT wraps in the order of registration, so the last registered is outermost and has the shortest key.
    """
    prefix, prefixes = f"{PEFT_PREFIX}{entry.name}.", {}
    for name in reversed(_matched(entry, targets)):
        if f"{prefix}lora_A.weight" in tensors:
            prefixes[name] = prefix
        prefix += "base_layer."
    return prefixes


def _is_used(key: str, experts: Sequence[ExpertsModule], targets: Sequence[str]) -> bool:
    for entry in experts:
        if key.startswith(f"{PEFT_PREFIX}{entry.name}."):
            rest = key.removeprefix(f"{PEFT_PREFIX}{entry.name}.")
            depth = rest.count("base_layer.")
            return depth < len(_matched(entry, targets)) and rest.replace("base_layer.", "") in (
                "lora_A.weight",
                "lora_B.weight",
            )
    return ".shared_experts." in key or ".shared_expert." in key


def _factors(
    entry: ExpertsModule, prefix: str, tensors: Mapping[str, torch.Tensor], rank: int, scaling: float
) -> Factors:
    lora_a, lora_b = tensors[f"{prefix}lora_A.weight"].float(), tensors.get(f"{prefix}lora_B.weight")
    if lora_b is None or lora_a.shape[0] != rank * entry.num_experts or lora_b.shape[1] != lora_a.shape[0]:
        raise CheckpointError(f"{prefix}lora_A/lora_B do not fit {entry.num_experts} experts at rank {rank}")
    return Factors(
        lora_a.reshape(entry.num_experts, rank, -1),
        lora_b.float().reshape(lora_b.shape[0], rank, entry.num_experts).permute(2, 0, 1).contiguous(),
        scaling,
    )


def _rank_and_scaling(config: dict[str, Any], name: str) -> tuple[int, float]:
    """Rank, and alpha / r or alpha / sqrt(r) for rank-stabilised LoRA, with PEFT's per-name patterns."""
    rank = _pattern(config.get("rank_pattern"), name, config["r"])
    alpha = _pattern(config.get("alpha_pattern"), name, config["lora_alpha"])
    return int(rank), alpha / rank**0.5 if config.get("use_rslora") else alpha / rank


def _pattern(patterns: Any, name: str, default: float) -> float:
    """The value of the first pattern that matches `name`; PEFT reads the patterns as regular expressions."""
    from peft.utils.other import get_pattern_key

    patterns = patterns or {}
    return float(patterns.get(get_pattern_key(patterns.keys(), name), default))
