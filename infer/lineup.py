"""Line-up: which arms a comparison has, and which it cannot have and why.

Owns the rules for memory limits and for packs, which must be of the checkpoint's model; promises that baselines get
the limits that coop gets, and that a baseline that is asked for and cannot run here is named. Called by
`infer.bench`.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coop.checkpoint import PACK_MANIFEST, is_pack
from coop.errors import BudgetError, RequestError
from coop.files import read_json
from infer.contest import Arm

BASELINES = {
    "transformers": ("transformers",),
    "accelerate": ("accelerate",),
    "llamacpp": ("llama_cpp", "gguf"),
}
INSTALLS = {"llamacpp": "pip install llama-cpp-python gguf"}
GGUF_DTYPES = ("bf16", "q4_0")
GGUF_FAMILIES = ("qwen3_moe", "mixtral")
HEADROOM = 0.25  # of dense weights and budget, for activations, cached keys and values, and the page cache
PROCESS_BYTES = 768 * 2**20  # and at least this: Python, torch and its threads take over half of it
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
SIZES = "auto, none or a size, such as 900MB or 1.5GiB"
NEEDS_CHECKPOINT = "reads full checkpoints, and --ckpt is a pack"
_EXPERT = re.compile(r"\.experts\.(\d+\.|gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class Weights:
    """A folder with weights: bytes outside and inside experts, and how they are stored."""

    folder: Path
    dense_bytes: int
    expert_bytes: int
    dtype: str

    def limit_bytes(self, fraction: float) -> int:
        """The memory that a process gets with `fraction` of the experts as its budget."""
        weights_bytes = self.dense_bytes + fraction * self.expert_bytes
        return math.ceil(weights_bytes + max(HEADROOM * weights_bytes, PROCESS_BYTES))


@dataclass(frozen=True, slots=True)
class Shape:
    """What a pack shares with the model it was made of, whatever its dtype."""

    moe_layers: int
    experts: int
    top_k: int
    hidden: int

    @classmethod
    def of(cls, folder: Path, config: Any) -> Shape:
        """Of the checkpoint or pack in `folder`; config: its text model's, from transformers."""
        if is_pack(folder):
            moe_layers = len(read_json(folder / PACK_MANIFEST, RequestError)["layers"])
        else:
            from coop.shards import read_checkpoint_tensors

            names = [entry.name for entry in read_checkpoint_tensors(folder).values()]
            moe_layers = len({name[: found.start()] for name in names if (found := _EXPERT.search(name))})
        return cls(moe_layers, num_experts(config), config.num_experts_per_tok, config.hidden_size)

    def __str__(self) -> str:
        return (
            f"{self.moe_layers} MoE layers of {self.experts} experts, top-{self.top_k}, "
            f"hidden size {self.hidden}"
        )


@dataclass(frozen=True, slots=True)
class Absent:
    """An arm that was asked for and is not there."""

    engine: str
    dtype: str
    reason: str


@dataclass(slots=True)
class Lineup:
    """Files to write first, arms to measure, and what is absent."""

    preparations: list[Arm] = field(default_factory=list)
    arms: list[Arm] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)


def check_baselines(names: Sequence[str]) -> None:
    """RequestError for a baseline that nobody knows."""
    for name in names:
        if name not in BASELINES:
            raise RequestError(
                f"--baseline {name}: pass one of {', '.join(BASELINES)}, or several with commas"
            )


def num_experts(config: Any) -> int:
    """Experts in each MoE layer, by whichever name the family gives them; 0 for none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((getattr(config, name) for name in names if getattr(config, name, 0)), 0)


def check_packs(shapes: Mapping[Path, Shape]) -> None:
    """RequestError for a pack, after the checkpoint, whose model has another shape."""
    (ckpt, own), *packs = shapes.items()
    for pack, shape in packs:
        if shape != own:
            raise RequestError(
                f"--pack {pack} is of another model than --ckpt {ckpt}: {shape}; not {own}: pass its own packs"
            )


def parse_memory_limit(text: str) -> int:
    """Bytes of a limit such as 900MB, 1.5GiB or 1073741824. RequestError for anything else."""
    from coop.plan import parse_budget

    refusal = RequestError(f"--memory-limit {text}: pass {SIZES}")
    if "%" in text:
        raise refusal
    try:
        limit_bytes = parse_budget(text, 0, 0)
    except BudgetError as exc:
        raise refusal from exc
    if limit_bytes < 1:
        raise refusal
    return limit_bytes


def weights_of(folder: Path) -> Weights:
    """What the checkpoint or pack in `folder` weighs, from the headers of its files."""
    from coop.shards import read_checkpoint_tensors

    if is_pack(folder):
        manifest = read_json(folder / PACK_MANIFEST, RequestError)
        dense = sum((folder / name).stat().st_size for name in manifest["dense_sha256"])
        experts = sum(path.stat().st_size for path in folder.glob("experts-*"))
        return Weights(folder, dense, experts, str(manifest["dtype"]))
    tensors = read_checkpoint_tensors(folder).values()
    experts = sum(entry.nbytes for entry in tensors if _EXPERT.search(entry.name))
    dense = sum(entry.nbytes for entry in tensors) - experts
    if not experts:
        raise RequestError(f"{folder}: no tensor of it is an expert's; pass a mixture of experts")
    return Weights(folder, dense, experts, _dtype(tensors))


def _dtype(tensors: Any) -> str:
    kinds = [str(entry.dtype).removeprefix("torch.") for entry in tensors if _EXPERT.search(entry.name)]
    return SHORT_DTYPES.get(kinds[0], kinds[0])


def line_up(
    template: Arm,
    folders: Sequence[Path],
    budgets: Sequence[str],
    baselines: Sequence[str],
    memory_limit: str,
    family: str,
    gguf_dir: Path,
) -> Lineup:
    """The arms: coop on each folder (checkpoint first) at each budget, then each baseline at coop's limits.

    template: what all arms share. memory_limit: auto, none, or a size for every arm.
    """
    lineup = Lineup()
    everything = [weights_of(folder) for folder in folders]
    for weights in everything:
        for budget in budgets:
            lineup.arms.append(_coop_arm(template, weights, budget, memory_limit))
    source = str(folders[0])
    limits = _limits(lineup.arms, [source], memory_limit)
    every_limit = _limits(lineup.arms, [arm.path for arm in lineup.arms], memory_limit)
    for name in baselines:
        missing = [package for package in BASELINES[name] if importlib.util.find_spec(package) is None]
        if missing:
            install = INSTALLS.get(name, f"pip install {name}")
            lineup.absent.append(Absent(name, "", f"{missing[0]} is not installed: {install}"))
        elif template.replay:
            lineup.absent.append(Absent(name, "", "--replay routes coop only"))
        elif is_pack(folders[0]):
            lineup.absent.append(Absent(name, "", NEEDS_CHECKPOINT))
        elif name == "llamacpp":
            by_dtype = {"bf16": limits, "q4_0": every_limit}  # 4 bits meet packs at the packs' limits too
            _add_llamacpp(lineup, template, Path(source), by_dtype, family, gguf_dir)
        else:
            _add_torch(lineup, replace(template, engine=name, path=source, dtype=everything[0].dtype), limits)
    return lineup


def _limits(arms: Sequence[Arm], paths: Sequence[str], memory_limit: str) -> list[int]:
    """The limits of the arms on `paths`, falling; 0, for none, comes first unless one limit holds for all."""
    limits = sorted(
        {arm.memory_bytes for arm in arms if arm.path in paths and arm.memory_bytes}, reverse=True
    )
    return [0, *limits] if memory_limit in ("auto", "none") else limits


def _coop_arm(template: Arm, weights: Weights, budget: str, memory_limit: str) -> Arm:
    from coop.plan import parse_budget

    fraction = min(
        1.0, parse_budget(budget, weights.expert_bytes, weights.expert_bytes) / weights.expert_bytes
    )
    memory = 0
    if memory_limit == "auto" and fraction < 1:
        memory = weights.limit_bytes(fraction)
    elif memory_limit not in ("auto", "none"):
        memory = parse_memory_limit(memory_limit)
    return replace(
        template,
        engine="coop",
        path=str(weights.folder),
        dtype=weights.dtype,
        budget=budget,
        budget_fraction=round(fraction, 6),
        memory_bytes=memory,
    )


def _add_torch(lineup: Lineup, arm: Arm, limits: Sequence[int]) -> None:
    """transformers at every limit; accelerate where there is one, since without it would be transformers again."""
    wanted = [limit for limit in limits if limit or arm.engine == "transformers"]
    lineup.arms += [replace(arm, memory_bytes=limit) for limit in wanted]
    if not wanted:
        lineup.absent.append(
            Absent(arm.engine, arm.dtype, "offloads only under a memory limit, and there is none")
        )


def _add_llamacpp(
    lineup: Lineup,
    template: Arm,
    source: Path,
    limits: Mapping[str, Sequence[int]],
    family: str,
    gguf_dir: Path,
) -> None:
    if family not in GGUF_FAMILIES:
        known = ", ".join(GGUF_FAMILIES)
        lineup.absent.append(Absent("llamacpp", "", f"the GGUF writer knows {known}, not {family}"))
        return
    for dtype in GGUF_DTYPES:
        path = gguf_dir / f"{source.resolve().name}-{dtype}.gguf"
        arm = replace(template, engine="gguf", path=str(path), source=str(source), dtype=dtype)
        if not path.is_file() or path.stat().st_mtime < _newest(source):
            lineup.preparations.append(arm)
        lineup.arms += [replace(arm, engine="llamacpp", memory_bytes=limit) for limit in limits[dtype]]


def _newest(folder: Path) -> float:
    return max(path.stat().st_mtime for path in folder.glob("*.safetensors"))
