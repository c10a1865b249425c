"""attach_modulelist: serve the experts of any model that keeps them in nn.ModuleLists, under a budget.

Owns the search for the experts, the check of the model against its checkpoint, and the runtime; promises that
everything that can be refused is refused before the model gives up a weight, and that each expert's own forward
runs as it is written, with the bits it would have with all weights in memory. Public, as `coop.attach_modulelist`.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from coop.adapters.absent import AbsentWeight
from coop.adapters.attach import Runtime
from coop.adapters.lender import Lender, ModuleExpert, Place, Routes
from coop.errors import CheckpointError, CoopError, LayoutError
from coop.ids import ExpertId
from coop.layout import LayerLayout, Layout, Piece, slot_fields
from coop.plan import Plan
from coop.scheduler import Scheduler
from coop.shards import TensorEntry, read_checkpoint_tensors, read_header
from coop.store import ExpertStore
from coop.strategy import Strategy, get_strategy
from coop.topology import measure

OUTPUT_ROW_BYTES = 64  # experts of this kind write no rows into the ring: the smallest there is
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they are never called
_OWN_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class ExpertList:
    """One nn.ModuleList of experts: a layer. `block` is the nearest module around it that is called."""

    name: str
    experts: tuple[ModuleExpert, ...]
    block: nn.Module


class ModuleListRuntime(Runtime):
    """A model whose experts are modules, and the scheduler that lends them their weights."""

    def __init__(
        self, model: nn.Module, scheduler: Scheduler, plan: Plan, lender: Lender, source: Path
    ) -> None:
        super().__init__(model, scheduler, plan, "none: experts that are modules have no profile", source)
        self._lender = lender

    def _note_phase(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Phases come from the routers here; a call of the whole model clears what an interrupted one left."""
        self._lender.settle()
        self.scheduler.end_announcement()

    def close(self) -> None:
        """Stop threads, free slots, close files; the model keeps no expert. Safe to call twice."""
        self._lender.close()
        super().close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The model's hooks lead here when it is copied or pickled."""
        raise CoopError("an attached model cannot be copied or saved whole: close its runtime first")


def attach_modulelist(
    model: nn.Module,
    ckpt: str | Path,
    *,
    experts: str | Sequence[str],
    router: str | Sequence[str] = (),
    routes: Routes | None = None,
    top_k: int = 1,
    budget: str | int = "auto",
    strategy: str = "Balanced",
    prefix: str = "",
    prefetch: bool = True,
) -> ModuleListRuntime:
    """Serve the experts of a live model from its checkpoint; the model gives up their weights.

    Args:
        model: in eval mode, on the CPU, its dense weights loaded. Expert weights may be on the meta device: only
            their names, shapes and dtypes are looked at.
        ckpt: a safetensors file, or a folder with model.safetensors or its index.
        experts: pattern over module names, e.g. "blocks.*.experts" ("*" stands for one part of a name), or
            several; what matches must be nn.ModuleLists whose entries agree in names, shapes and dtypes.
        router: pattern over the modules that choose, one for each list in the same order; then all that a layer
            misses is asked for at once. Without it each expert is fetched when it is called.
        routes: makes whole numbers [tokens, k] of what a router returns; without it the `top_k` largest of the
            last dimension of a tensor of scores. A wrong answer costs time, never a bit.
        top_k: experts that one token uses.
        budget: bytes, "6GiB", "50%" of the experts, or "auto"; at least one expert.
        strategy: "SpeedFirst", "Balanced" or "MemoryFirst".
        prefix: what the checkpoint's tensor names have before the model's.
        prefetch: load experts before they are asked for. The results are the same without.

    While attached, state_dict(), to(), and any other use of an expert weight outside its own call raise CoopError.
    Raises BudgetError, CheckpointError, StoreError, and CoopError for names that match nothing.
    """
    chosen = get_strategy(strategy)
    lists = find_expert_lists(model, _patterns(experts))
    routers = _find_routers(model, _patterns(router), lists)
    if not 1 <= top_k <= min(len(entry.experts) for entry in lists):
        raise CoopError(f"top_k is {top_k}: not from 1 to the number of experts of {lists[0].name}")
    store = ExpertStore(_layout(lists, Path(ckpt).expanduser(), prefix, top_k))
    try:
        plan = _plan(model, lists, store, budget, chosen, prefetch)
        scheduler = Scheduler(
            [],
            store,
            budget_bytes=plan.budget_bytes,
            strategy=plan.strategy,
            ring_bytes=plan.ring_bytes,
            loader_threads=plan.loader_threads,
            guess_threads=plan.guess_threads,
            has_prefetch=plan.has_prefetch,
        )
    except BaseException:
        store.close()
        raise
    # from here on nothing is refused: the model now gives up its expert weights
    lender = Lender([expert for entry in lists for expert in entry.experts], scheduler)
    for layer, (entry, module) in enumerate(zip(lists, routers, strict=False)):
        choose = routes or partial(largest_scores, layer, len(entry.experts), top_k)
        lender.listen(layer, module, entry.block, choose)
    return ModuleListRuntime(model, scheduler, plan, lender, Path(ckpt))


def largest_scores(layer: int, num_experts: int, top_k: int, output: Any) -> torch.Tensor:
    """Routes of a router that returns scores [..., experts]: the `top_k` largest, int64 [tokens, top_k]."""
    if not isinstance(output, torch.Tensor) or output.ndim == 0 or output.shape[-1] != num_experts:
        what = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise CoopError(
            f"layer {layer}: the router returned {what}, not scores [..., {num_experts}]: pass routes="
        )
    return output.detach().reshape(-1, num_experts).topk(top_k).indices


def find_expert_lists(model: nn.Module, patterns: Sequence[str]) -> list[ExpertList]:
    """Every nn.ModuleList that a pattern names, in `named_modules` order; CoopError for what cannot be served."""
    named = dict(model.named_modules())
    found = _matching(named, patterns, "experts")
    tensor_names = _names_by_tensor(model)
    lists = []
    for layer, name in enumerate(found):
        if not isinstance(named[name], nn.ModuleList):
            raise CoopError(f"{name} is a {type(named[name]).__name__}, not an nn.ModuleList of experts")
        inner = next((other for other in found if other.startswith(f"{name}.")), "")
        if inner:
            raise CoopError(f"{inner} is inside an expert of {name}: experts within experts are not served")
        lists.append(_expert_list(named, layer, name, tensor_names))
    return lists


# finding


def _patterns(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _matching(named: Mapping[str, nn.Module], patterns: Sequence[str], argument: str) -> list[str]:
    """Names of modules that a pattern fits, part by part; CoopError for a pattern that fits none."""
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in named):
            near = difflib.get_close_matches(pattern, [name for name in named if name], 3, 0.3)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise CoopError(f"{argument} {pattern!r} matches no module{hint}")
    return [name for name in named if any(_fits(name, pattern) for pattern in patterns)]


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _find_routers(model: nn.Module, patterns: Sequence[str], lists: Sequence[ExpertList]) -> list[nn.Module]:
    named = dict(model.named_modules())
    found = _matching(named, patterns, "router")
    if patterns and len(found) != len(lists):
        raise CoopError(
            f"router matches {len(found)} modules ({', '.join(found[:3])}) for {len(lists)} lists of experts"
        )
    return [named[name] for name in found]


def _expert_list(
    named: Mapping[str, nn.Module],
    layer: int,
    name: str,
    tensor_names: Mapping[int, list[str]],
) -> ExpertList:
    listed: Any = named[name]
    if not len(listed):
        raise CoopError(f"{name} is empty")
    for index, module in enumerate(listed):
        full_name = f"{name}.{index}"
        if isinstance(module, _CONTAINERS):
            raise CoopError(
                f"{full_name} is a {type(module).__name__}: a list of lists holds no experts to call"
            )
        first = next(other for other, entry in named.items() if entry is module)
        if first != full_name:
            raise CoopError(f"{full_name} is the same module as {first}: shared experts are not served")
    experts = [
        _expert(ExpertId(layer, index), f"{name}.{index}", module, tensor_names)
        for index, module in enumerate(listed)
    ]
    for expert in experts[1:]:
        _check_like(experts[0], expert)
    if not experts[0].places:
        raise CoopError(f"{experts[0].name} has no weights to serve")
    return ExpertList(name, tuple(experts), _block(named, name))


def _expert(
    expert: ExpertId, name: str, module: nn.Module, tensor_names: Mapping[int, list[str]]
) -> ModuleExpert:
    places = dict(_places(module))
    for own_name, place in places.items():
        tensor = place.table[place.name]
        _check_tensor(f"{name}.{own_name}", tensor)
        names = tensor_names[_key(tensor)]
        if len(names) > 1:
            raise CoopError(f"{names[0]} and {names[1]} are one tensor: tied expert weights are not served")
    _check_kept_once(name, module, {_key(place.table[place.name]) for place in places.values()})
    absent = {n: AbsentWeight.of(f"{name}.{n}", p.table[p.name]) for n, p in places.items()}
    return ModuleExpert(expert, name, module, places, absent)


def _places(module: nn.Module) -> Iterator[tuple[str, Place]]:
    """Parameters and saved buffers of a module and all inside it, by their names in its state dict."""
    for prefix, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                is_saved = table is owner._parameters or name not in owner._non_persistent_buffers_set
                if tensor is not None and is_saved and (is_lazy(tensor) or tensor.numel()):
                    yield f"{prefix}.{name}" if prefix else name, Place(table, name)


def _block(named: Mapping[str, nn.Module], name: str) -> nn.Module:
    while name:
        name = name.rpartition(".")[0]
        if not isinstance(named[name], _CONTAINERS):
            break
    return named[name]


# refusing


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise CoopError(f"{name} has no shape yet: call the model once before it is attached")
    if type(tensor) not in (nn.Parameter, torch.Tensor, AbsentWeight):
        raise CoopError(f"{name} is a {type(tensor).__name__}: coop serves plain tensors")
    if isinstance(tensor, AbsentWeight):
        if not tensor.coop_is_closed:
            raise CoopError(f"{name} is served by an attached runtime: close that first")
        return
    if tensor.device.type not in ("cpu", "meta"):
        raise CoopError(f"{name} is on {tensor.device}: experts that are modules are served on the CPU")
    if not tensor.is_contiguous():
        raise CoopError(
            f"{name} is not contiguous in memory (channels_last?): its bits would not be the same"
        )


def _check_like(first: ModuleExpert, other: ModuleExpert) -> None:
    def shapes(expert: ModuleExpert) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(t.shape), t.dtype) for name, t in expert.absent.items()}

    wanted, own = shapes(first), shapes(other)
    if wanted != own:
        name = next(n for n in [*wanted, *own] if wanted.get(n) != own.get(n))
        raise CoopError(
            f"{other.name} differs from {first.name} in {name}: {_shown(own.get(name))} against "
            f"{_shown(wanted.get(name))}; experts of one list must have the same weights"
        )


def _shown(tensor: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return f"{tensor[1]} {tensor[0]}" if tensor else "nothing"


def _check_kept_once(name: str, module: nn.Module, served: set[int]) -> None:
    """A weight that is also kept in an attribute (as nn.LSTM does) could not be taken away."""
    for prefix, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            values = value.values() if isinstance(value, dict) else value
            held = values if isinstance(value, dict | list | tuple) else [value]
            if attribute not in _OWN_TABLES and any(
                isinstance(item, torch.Tensor) and not is_lazy(item) and _key(item) in served for item in held
            ):
                place = ".".join(part for part in (name, prefix, attribute) if part)
                raise CoopError(
                    f"{place} keeps weights of the expert a second time: coop cannot take them away"
                )


def _names_by_tensor(model: nn.Module) -> Mapping[int, list[str]]:
    """Every name under which each tensor of the model is kept."""
    names = defaultdict(list)
    for prefix, owner in model.named_modules(remove_duplicate=False):
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None and not is_lazy(tensor):
                names[_key(tensor)].append(f"{prefix}.{name}" if prefix else name)
    return names


def _key(tensor: torch.Tensor) -> int:
    """Where its bytes are, or the tensor itself where it has none."""
    has_bytes = not tensor.is_meta and tensor.layout is torch.strided and tensor.numel()
    return tensor.data_ptr() if has_bytes else id(tensor)


# the checkpoint


def _layout(lists: Sequence[ExpertList], ckpt: Path, prefix: str, top_k: int) -> Layout:
    """Where each expert lies in the checkpoint. LayoutError for what is missing or of another shape or dtype."""
    tensors = _read_tensors(ckpt)
    wanted = [f"{prefix}{e.name}.{name}" for entry in lists for e in entry.experts for name in e.places]
    missing = [name for name in wanted if name not in tensors]
    if missing:
        near = difflib.get_close_matches(missing[0], tensors, 1, 0.3)
        hint = (
            f"; the nearest name there is {near[0]} (prefix= sets what comes before a name)" if near else ""
        )
        raise LayoutError(f"{ckpt}: {len(missing)} expert tensors are missing, first {missing[0]}{hint}")
    return Layout(tuple(_layer_layout(entry, tensors, prefix, top_k) for entry in lists))


def _read_tensors(ckpt: Path) -> dict[str, TensorEntry]:
    if ckpt.is_dir():
        return read_checkpoint_tensors(ckpt)
    if ckpt.is_file() and ckpt.suffix == ".safetensors":
        return read_header(ckpt)
    raise CheckpointError(f"{ckpt} is neither a folder nor a .safetensors file")


def _layer_layout(
    entry: ExpertList, tensors: Mapping[str, TensorEntry], prefix: str, top_k: int
) -> LayerLayout:
    first = entry.experts[0]
    fields, slot_bytes = slot_fields({n: (_stored_shape(t), t.dtype) for n, t in first.absent.items()})
    pieces = []
    for expert in entry.experts:
        own = [_piece(tensors[f"{prefix}{expert.name}.{name}"], name, t) for name, t in expert.absent.items()]
        pieces.append(tuple(sorted(own, key=lambda piece: (piece.path.name, piece.offset))))
    return LayerLayout(entry.name, fields, slot_bytes, tuple(pieces), top_k, runs_alone=True)


def _stored_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """A scalar lies in its slot as one row."""
    return tuple(tensor.shape) or (1,)


def _piece(stored: TensorEntry, name: str, wanted: torch.Tensor) -> Piece:
    if (stored.shape, stored.dtype) != (tuple(wanted.shape), wanted.dtype):
        raise LayoutError(
            f"{stored.path}: {stored.name} is {stored.dtype} {stored.shape}, the model has {wanted.dtype} "
            f"{tuple(wanted.shape)}: load the checkpoint's own weights, or save the model as it is"
        )
    return Piece(
        stored.path, stored.name, stored.offset, stored.nbytes, stored.dtype, _stored_shape(wanted), name
    )


def _plan(
    model: nn.Module,
    lists: Sequence[ExpertList],
    store: ExpertStore,
    budget: str | int,
    strategy: Strategy,
    prefetch: bool,
) -> Plan:
    served = {id(p.table[p.name]) for entry in lists for e in entry.experts for p in e.places.values()}
    dense = [t for t in [*model.parameters(), *model.buffers()] if id(t) not in served]
    return Plan.derive(
        budget,
        geometry=store.geometry,
        topology=measure(store.sample_reads()),
        strategy=strategy,
        profile=None,
        dense_bytes=sum(tensor.numel() * tensor.element_size() for tensor in dense),
        kv_cache_bytes=0,
        max_context=1,
        row_bytes=OUTPUT_ROW_BYTES,
        stored_bytes=store.stored_bytes,
        window_bytes=store.window_bytes,
        has_prefetch=prefetch,
    )
