"""Offload: a model for training whose frozen experts stay on disk and are served under a budget.

Owns the scheduler of one such model until it is closed; promises that expert weights are never in the model (what
stands for them is NaN and takes no memory), that they are those of the checkpoint bit for bit, and that a budget
that cannot work is refused before anything is loaded. Called by training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from coop.adapters.attach import load_config, open_store, start_scheduler, weight_paths
from coop.adapters.training import placeholder, refuse_unknown
from coop.adapters.transformers import build_on_meta, find_experts, load_without_experts
from coop.checkpoint import Checkpoint, open_checkpoint
from coop.devices import Device, Memory, open_device
from coop.errors import CheckpointError
from coop.passes import PassForecast
from coop.plan import Plan
from coop.scheduler import Scheduler
from coop.store import ExpertStore, stamp_of
from coop.strategy import get_strategy
from coop.topology import measure


@dataclass(slots=True)
class Offloaded:
    """A model with placeholders where its experts were, and the scheduler that has them; close it after training."""

    model: nn.Module
    scheduler: Scheduler
    plan: Plan

    def close(self) -> None:
        """Stop the threads, free the slots, close the files; the model can no longer run. Safe to call twice."""
        self.scheduler.close()

    def __enter__(self) -> Offloaded:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def plan_offload(path: str | Path, *, budget: str, dtype: torch.dtype, device: str = "cpu") -> Plan:
    """What training under `budget` would use, from the headers alone. Raises as `open_offloaded` does."""
    checkpoint = _open(path)
    config = load_config(checkpoint.weights)
    store = open_store(checkpoint, config, dtype)
    try:
        return _plan(store, build_on_meta(config), budget, dtype, open_device(device))
    finally:
        store.close()


def open_offloaded(
    path: str | Path,
    *,
    budget: str,
    dtype: torch.dtype,
    attention: str | None = None,
    device: str = "cpu",
    poison: bool = False,
) -> Offloaded:
    """The model of a Hub-layout folder or Hub id, without its experts, and a scheduler that reads them on demand.

    Args:
        budget: bytes, "6GiB", or a share of all experts such as "50%".
        dtype: of weights and computation.
        attention: how transformers computes it; None: as the model prefers.
        device: where the model computes.
        poison: overwrite every slot that is given up with NaN (for tests).

    Raises BudgetError, CheckpointError, StoreError.
    """
    checkpoint, place = _open(path), open_device(device)
    config = load_config(checkpoint.weights)
    stamps = {file: stamp_of(file.stat()) for file in weight_paths(checkpoint)}
    store = open_store(checkpoint, config, dtype)
    try:
        skeleton = build_on_meta(config)
        plan = _plan(store, skeleton, budget, dtype, place)
        model = load_without_experts(checkpoint.weights, config, dtype, attention).to(place.torch_device)
        _stand_in(model, skeleton, dtype, place.torch_device)
        store.check_unchanged(stamps)
        forecast = PassForecast.of(store.geometry, plan.strategy)
        scheduler = start_scheduler(find_experts(model), store, plan, place, forecast, poison=poison)
    except BaseException:
        store.close()
        raise
    return Offloaded(model, scheduler, plan)


def _open(path: str | Path) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    if checkpoint.adapter or checkpoint.is_pack:
        kind = "an adapter" if checkpoint.adapter else "a pack"
        raise CheckpointError(f"model.path: {path} is {kind}; training starts from a model in Hub layout")
    return checkpoint


def _plan(store: ExpertStore, skeleton: nn.Module, budget: str, dtype: torch.dtype, place: Device) -> Plan:
    experts = find_experts(skeleton)
    for entry in experts:
        refuse_unknown(entry)
    served = {id(entry.module._parameters[name]) for entry in experts for name in entry.parameters}
    dense = sum(p.numel() for p in skeleton.parameters() if id(p) not in served) * dtype.itemsize
    return Plan.derive(
        budget,
        geometry=store.geometry,
        topology=measure(store.sample_reads(), None if place.memory is Memory.HOST else place),
        strategy=get_strategy("Balanced"),
        profile=None,
        dense_bytes=dense,
        kv_cache_bytes=0,
        max_context=1,
        row_bytes=dtype.itemsize,
        memory=place.memory,
        stored_bytes=store.stored_bytes,
        window_bytes=store.window_bytes,
    )


def _stand_in(model: nn.Module, skeleton: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Shapes and types where the experts were, so that PEFT, tables and counts find what they look for."""
    for entry, shape in zip(find_experts(model), find_experts(skeleton), strict=True):
        for name in shape.parameters:
            like = torch.empty_like(shape.module._parameters[name], dtype=dtype)  # type: ignore[arg-type]
            entry.module._parameters[name] = placeholder(like, device)
