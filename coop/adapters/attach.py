"""attach: from a folder or a live model to a model whose experts coop serves.

Owns the Runtime, which closes what it opened; promises that `model.generate` then just works, and that what
could not be used (a profile of another model) is said, not guessed. The one public call of coop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from coop.adapters.dense import quicken
from coop.adapters.linear import round_linears
from coop.adapters.lora import merge_dense_adapter, read_expert_lora
from coop.adapters.transformers import (
    IMPLEMENTATION,
    ExpertsModule,
    build_on_meta,
    find_experts,
    load_without_experts,
    make_absent,
    model_identity,
    register,
    routers_of,
    serve,
)
from coop.blockdevice import BlockDevice
from coop.checkpoint import Checkpoint, open_checkpoint
from coop.devices import Device, Memory, open_device
from coop.errors import CheckpointError, CoopError, LayoutError, ProfileError
from coop.forecast import Forecast
from coop.layout import Layout, resolve_layout
from coop.packs.format import expert_paths, pack_hint, pack_layout, read_manifest
from coop.plan import Plan
from coop.policy import PriorityPolicy
from coop.pressure import PressureGuard
from coop.profile import PROFILE_NAME, Profile, adapter_digest
from coop.scheduler import CallCounters, Scheduler
from coop.shards import read_checkpoint_tensors, shard_paths
from coop.store import ExpertStore, Store, stamp_of
from coop.strategy import get_strategy
from coop.tiers import HostTier
from coop.topology import measure

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class RuntimeStats:
    """Counters since attach or `reset_stats`: requests for experts by phase, bytes, and seconds of waiting.

    waits: seconds by cause: `load` (a demanded read), `guess` (a read that a guess had begun), `room` (no slot
    could be freed), `ring` (outputs that wait for an earlier expert's). bytes_speculative: of `bytes_read`,
    read on a guess. bytes_wasted: of experts that were guessed and evicted unused. times_pressed: how often
    the guard held guesses back, since attach.
    """

    hits_prefill: int
    misses_prefill: int
    hits_decode: int
    misses_decode: int
    bytes_read: int
    budget_bytes: int
    resident_bytes_max: int
    wait_seconds: float
    waits: Mapping[str, float]
    bytes_speculative: int
    bytes_wasted: int
    evictions: int
    ring_overflows: int
    times_pressed: int

    @property
    def hit_rate_prefill(self) -> float:
        """Share of prefill requests that were resident when asked for; NaN without any."""
        return _rate(self.hits_prefill, self.misses_prefill)

    @property
    def hit_rate_decode(self) -> float:
        """Share of decode requests that were resident when asked for; NaN without any."""
        return _rate(self.hits_decode, self.misses_decode)


class Runtime:
    """A model and the scheduler that serves its experts; a context manager that closes both ends."""

    def __init__(
        self, model: nn.Module, scheduler: Scheduler, plan: Plan, profile_status: str, tokenizer_source: Path
    ) -> None:
        self.model: Any = model
        self.scheduler = scheduler
        self._plan = plan
        self.profile_status = profile_status
        self.tokenizer_source = tokenizer_source
        self._loads_before = dict.fromkeys(scheduler.loads, 0)
        self._overflows_before = 0
        self._hook = model.register_forward_pre_hook(self._note_phase, with_kwargs=True)

    def _note_phase(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        if tokens is not None:
            self.scheduler.is_prefill = tokens.shape[1] > 1

    @property
    def plan(self) -> Plan:
        """The plan in force: the budget and the strategy are those of now."""
        return replace(self._plan, strategy=self.scheduler.strategy)

    def stats(self) -> RuntimeStats:
        """What has happened so far."""
        counters, residency, guard = (
            self.scheduler.counters,
            self.scheduler.residency,
            self.scheduler.guard,
        )
        loads = self.scheduler.loads
        return RuntimeStats(
            hits_prefill=counters.hits_prefill,
            misses_prefill=counters.misses_prefill,
            hits_decode=counters.hits_decode,
            misses_decode=counters.misses_decode,
            bytes_read=loads["bytes_read"] - self._loads_before["bytes_read"],
            budget_bytes=residency.budget_bytes,
            resident_bytes_max=residency.used_bytes_max,
            wait_seconds=counters.waits.total,
            waits=asdict(counters.waits),
            bytes_speculative=loads["bytes_speculative"] - self._loads_before["bytes_speculative"],
            bytes_wasted=residency.wasted_bytes,
            evictions=residency.evictions,
            ring_overflows=self.scheduler.ring.overflows - self._overflows_before,
            times_pressed=guard.times_pressed if guard is not None else 0,
        )

    def reset_stats(self) -> None:
        """Count from here: for a second request with the same runtime."""
        self.scheduler.counters = CallCounters()
        self.scheduler.residency.reset_counters()
        self._loads_before = self.scheduler.loads
        self._overflows_before = self.scheduler.ring.overflows

    def set_budget(self, budget: str | int) -> None:
        """Lower or raise the budget of a running model, in the forms that `attach` takes; it stays there.

        BudgetError leaves it as it was. What is leased at this moment goes when the call that uses it ends.
        """
        planned = self.plan.with_budget(budget, self.scheduler.geometry)
        self.scheduler.resize(planned.budget_bytes)
        self._plan = planned

    def close(self) -> None:
        """Stop threads, free slots, close files; the model can no longer run. Safe to call twice."""
        self._hook.remove()
        self.scheduler.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def attach(
    model_or_path: Any,
    ckpt: str | Path | None = None,
    *,
    budget: str | int = "auto",
    strategy: str = "Balanced",
    profile: bool | Profile = True,
    prefetch: bool = True,
    base: str | Path | None = None,
    dtype: str | torch.dtype = "auto",
    max_context: int = 4096,
    device: str | Device = "cpu",
    guard: bool = True,
    policy: PriorityPolicy | None = None,
    poison: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Runtime:
    """Serve a model's experts from its checkpoint under a budget.

    Args:
        model_or_path: a checkpoint folder or Hub id (full model or adapter), or a live transformers model
            whose dense weights are loaded; its expert weights are dropped.
        ckpt: the folder that a live model's experts are read from. Must be left out with a path.
        budget: bytes, "6GiB", "50%" of the experts, or "auto".
        strategy: "SpeedFirst", "Balanced" or "MemoryFirst".
        profile: use the checkpoint's profile (True), none (False), or this one.
        prefetch: load experts before they are asked for. The tokens are the same without.
        base: the base model of an adapter, if not the one its config names.
        dtype: "auto" (the checkpoint's), "bfloat16", "float16" or "float32".
        max_context: tokens the plan reserves KV cache for.
        device: where experts and the rest of the model compute: "cpu", "cuda", "mps". A live model is where it is.
        guard: stop guessing while others use the disk. The tokens are the same without.
        policy: a signal from outside that moves eviction and prefetch; see docs/external-priority.md.
        poison: fill every freed slot with NaN, so that a read of it shows; for tests, it costs time.
        say: takes the guard's log lines.

    Raises BudgetError, CheckpointError, StoreError, and CoopError for a strategy or dtype that does not exist.
    """
    _check_arguments(strategy=strategy, dtype=dtype, max_context=max_context, device=device, say=say)
    chosen = get_strategy(strategy)
    place = open_device(device) if isinstance(device, str) else device
    checkpoint = _checkpoint(model_or_path, ckpt, base)
    config = load_config(checkpoint.weights)
    is_live = isinstance(model_or_path, nn.Module)
    served = _live_dtype(model_or_path) if is_live else served_dtype(dtype, config, checkpoint.weights)
    stamps = {path: stamp_of(path.stat()) for path in weight_paths(checkpoint)}
    store = open_store(checkpoint, config, served)
    try:
        model = model_or_path if is_live else load_dense(checkpoint, config, served).to(place.torch_device)
        _check_place(model, place)
        experts = find_experts(model)
        _check_same_experts(experts, store.layout)
        found, status = load_profile(checkpoint, model, profile)
        plan = Plan.derive(
            budget,
            geometry=store.geometry,
            topology=measure(store.sample_reads(), None if place.memory is Memory.HOST else place),
            strategy=chosen,
            profile=found,
            dense_bytes=_dense_bytes(model, experts),
            kv_cache_bytes=_kv_cache_bytes(config, served, max_context),
            max_context=max_context,
            row_bytes=int(config.hidden_size) * served.itemsize,
            memory=place.memory,
            stored_bytes=store.stored_bytes,
            window_bytes=store.window_bytes,
            adapter_bytes=store.adapter_bytes,
            has_prefetch=prefetch,
        )
        store.check_unchanged(
            stamps
        )  # the dense weights were read by path, the experts are read by descriptor
        watch = _guard(store, plan, say) if guard and prefetch else None
        scheduler = _hand_over(model, experts, store, plan, found, place, watch, policy, poison)
    except BaseException:
        store.close()
        raise
    return Runtime(model, scheduler, plan, status, checkpoint.tokenizer)


def _check_arguments(**given: Any) -> None:
    """Types that would fail later, somewhere else. CoopError names the argument."""
    is_device = isinstance(given["device"], str) or hasattr(given["device"], "torch_device")
    fits = {
        "strategy": isinstance(given["strategy"], str),
        "dtype": isinstance(given["dtype"], str | torch.dtype),
        "max_context": type(given["max_context"]) is int,
        "device": is_device,
        "say": callable(given["say"]),
    }
    for name, does_fit in fits.items():
        if not does_fit:
            raise CoopError(f"attach: {name}={given[name]!r} is of a type that it cannot be")


def _guard(store: ExpertStore, plan: Plan, say: Callable[[str], None]) -> PressureGuard:
    disk = BlockDevice(store.paths[0])
    return PressureGuard(
        disk.read,
        name=disk.name or "disk",
        bandwidth_bytes_per_s=plan.topology.disk.bytes_per_second,
        say=say,
    )


def _check_place(model: Any, device: Device) -> None:
    """Dense weights must be where the experts will be: a model spread by a device map is not served."""
    places = {p.device.type for p in model.parameters() if not p.is_meta}
    if places - {device.torch_device.type}:
        raise CoopError(
            f"the model is on {', '.join(sorted(places))} and the experts would be on {device.name}: "
            f"move it there first, or pass device= with where it is"
        )


def _hand_over(
    model: Any,
    experts: list[ExpertsModule],
    store: ExpertStore,
    plan: Plan,
    profile: Profile | None,
    device: Device,
    guard: PressureGuard | None,
    policy: PriorityPolicy | None,
    poison: bool,
) -> Scheduler:
    """Start the scheduler, drop the stacks, and point the model at it: what is refused leaves the model as it was."""
    forecast = Forecast.of(store.geometry, plan.strategy)
    scheduler = start_scheduler(
        experts, store, plan, device, forecast, profile=profile, guard=guard, policy=policy, poison=poison
    )
    for entry in experts:
        make_absent(entry)
    model.requires_grad_(False)
    register()
    model.set_experts_implementation(IMPLEMENTATION)
    serve(experts, scheduler)
    quicken(model, [router for entry in experts for router in routers_of(model, entry.name)])
    return scheduler


def start_scheduler(
    experts: list[ExpertsModule],
    store: ExpertStore,
    plan: Plan,
    device: Device,
    forecast: Forecast,
    **options: Any,
) -> Scheduler:
    """A scheduler with the numbers of `plan`; `options` go to it as they are."""
    return Scheduler(
        experts,
        _tiered(store, device, plan, forecast),
        budget_bytes=plan.budget_bytes,
        strategy=plan.strategy,
        ring_bytes=plan.ring_bytes,
        loader_threads=plan.loader_threads,
        queue_depth=plan.topology.disk.queue_depth,
        guess_threads=plan.guess_threads,
        has_prefetch=plan.has_prefetch,
        forecast=forecast,
        device=device,
        **options,
    )


def _tiered(store: ExpertStore, device: Device, plan: Plan, forecast: Forecast) -> Store:
    """The store itself where its reads end in a slot, or behind pinned RAM where they are copied once more."""
    if device.memory is Memory.HOST:
        return store
    loaders = plan.loader_threads + plan.guess_threads
    smallest = loaders * max(layer.slot_bytes for layer in store.geometry)
    return HostTier(
        store,
        device,
        budget_bytes=max(plan.host_tier_bytes, smallest),
        loader_threads=loaders,
        likelihood=forecast.likelihood,
    )


def _rate(hits: int, misses: int) -> float:
    return hits / (hits + misses) if hits + misses else float("nan")


def _checkpoint(model_or_path: Any, ckpt: str | Path | None, base: str | Path | None) -> Checkpoint:
    if not isinstance(model_or_path, nn.Module):
        if ckpt is not None:
            raise CoopError("attach(path, ckpt): give one folder; ckpt belongs to a live model")
        return open_checkpoint(model_or_path, base)
    if ckpt is None:
        raise CoopError("attach(model): say where its experts are read from: attach(model, ckpt=DIR)")
    checkpoint = open_checkpoint(ckpt, base)
    if checkpoint.adapter:
        raise CoopError(f"{ckpt} is an adapter: attach it by its path, and coop loads base and adapter")
    if checkpoint.is_pack and read_manifest(checkpoint.folder).dtype != "bf16":
        raise CoopError(f"{ckpt} is a quantised pack: attach it by its path, not for a live model")
    return checkpoint


def load_config(weights: Path) -> Any:
    """The text part of a folder's config. CheckpointError for one that its class refuses."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(weights, local_files_only=True, trust_remote_code=False)
    except Exception as exc:  # a stranger's config can make a config class raise anything
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        raise CheckpointError(f"{weights / 'config.json'}: {reason[:200]}") from exc
    return config.get_text_config(decoder=True)


def served_dtype(dtype: str | torch.dtype, config: Any, weights: Path) -> torch.dtype:
    """The type to compute in; "auto" is the checkpoint's. CoopError for one that does not exist."""
    if isinstance(dtype, torch.dtype):
        wanted = dtype
    elif dtype == "auto":
        wanted = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    elif dtype in DTYPES:
        wanted = DTYPES[dtype]
    else:
        raise CoopError(f"dtype {dtype!r} is none of auto, {', '.join(DTYPES)}")
    if wanted not in DTYPES.values():
        raise CheckpointError(f"{weights} is of dtype {wanted}; coop runs {', '.join(DTYPES)}")
    return wanted


def _live_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a live model's experts. CheckpointError where a quantiser has changed them.

    A quantised dense part stays as it is; but experts are served as the checkpoint has them, so experts that
    are quantised in the live model would silently become others.
    """
    for entry in find_experts(model):
        for name in entry.parameters:
            weight = entry.module._parameters[name]
            if weight is None:
                raise CheckpointError(
                    f"{entry.name} has no weights: this model is or was attached; load it again"
                )
            kind = type(weight)
            if kind is not nn.Parameter or weight.dtype not in DTYPES.values():
                raise CheckpointError(
                    f"{entry.name}.{name} is quantised ({kind.__module__.partition('.')[0]} {kind.__name__}, "
                    f"{weight.dtype}); coop would serve the checkpoint's own experts: attach the folder itself, or "
                    "quantise the model without its experts"
                )
    weight = find_experts(model)[0].module._parameters["down_proj"]
    assert weight is not None
    return weight.dtype


def weight_paths(checkpoint: Checkpoint) -> list[Path]:
    """Every file that weights are read from, of experts and of the rest."""
    paths = shard_paths(checkpoint.weights)
    if checkpoint.is_pack:
        paths += expert_paths(checkpoint.weights, read_manifest(checkpoint.weights))
    return paths


def open_store(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> ExpertStore:
    """The checkpoint's experts, with the adapter's part merged into each as it is loaded."""
    if checkpoint.is_pack:
        return ExpertStore(pack_layout(config, checkpoint.weights, dtype))
    try:
        layout = resolve_layout(config, read_checkpoint_tensors(checkpoint.weights), dtype)
    except LayoutError as exc:
        raise LayoutError(f"{exc}{pack_hint(checkpoint.weights)}") from exc
    if not checkpoint.adapter:
        return ExpertStore(layout)
    lora = read_expert_lora(checkpoint.folder, find_experts(build_on_meta(config)))
    return ExpertStore(layout, lora if len(lora) else None)


def load_dense(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> nn.Module:
    """The model without its experts, with the adapter's dense part merged."""
    with quiet_loading():
        model = load_without_experts(checkpoint.weights, config, dtype)
    if checkpoint.is_pack and read_manifest(checkpoint.weights).dense == "int8":
        round_linears(model)
    return merge_dense_adapter(model, checkpoint.folder).eval() if checkpoint.adapter else model


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Expert tensors are unexpected to the pruned class by design; transformers' reports of them would alarm."""
    from transformers.utils import logging

    level, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bar:
            logging.enable_progress_bar()


def _check_same_experts(experts: list[ExpertsModule], layout: Layout) -> None:
    """A live model must be the model that the checkpoint describes, in names, numbers and shapes."""
    for entry, layer in zip_longest(experts, layout.layers):
        if entry is None or layer is None or entry.name != layer.name:
            raise CheckpointError(
                f"the model has {len(experts)} MoE layers, the checkpoint {len(layout.layers)}, and they differ "
                f"at {(entry or layer).name}"
            )
        shapes = {f.name: f.shape for f in layer.fields}
        own = {n: p.shape[1:] for n, p in entry.module._parameters.items() if n in shapes and p is not None}
        same = all(tuple(shape) == shapes[name] for name, shape in own.items())
        if not same or (entry.num_experts, entry.top_k) != (len(layer.pieces), layer.top_k):
            raise CheckpointError(
                f"{entry.name}: the model has {entry.num_experts} experts (top-{entry.top_k}), the checkpoint "
                f"{len(layer.pieces)} (top-{layer.top_k}) or other shapes"
            )


def load_profile(
    checkpoint: Checkpoint, model: nn.Module, profile: bool | Profile
) -> tuple[Profile | None, str]:
    """The profile to seed from, and what to tell the user about it. A profile is never a reason to fail."""
    if not isinstance(profile, bool | Profile):
        raise CoopError(f"profile is True, False or a Profile, not {type(profile).__name__}")
    if profile is False:
        return None, "not used: switched off"
    if profile is True and not (checkpoint.folder / PROFILE_NAME).exists():
        return None, f"none: no {PROFILE_NAME} in {checkpoint.folder}"
    try:
        found = Profile.load(checkpoint.folder) if profile is True else profile
        # a digest of "" is not compared: the tokenizer is the caller's and may not be loaded here
        found.check(model_identity(model, None, adapter_digest(checkpoint.folder)))
    except ProfileError as exc:
        return None, f"ignored: {exc}"
    tokens = found.tokens_prompt + found.tokens_answer
    return found, f"used (step {found.step}, {tokens:,} tokens)"


def _dense_bytes(model: nn.Module, experts: list[ExpertsModule]) -> int:
    stacked = {id(e.module._parameters[name]) for e in experts for name in e.parameters}
    held = (*model.parameters(), *model.buffers())
    return sum(tensor.nbytes for tensor in held if id(tensor) not in stacked)


def _kv_cache_bytes(config: Any, dtype: torch.dtype, tokens: int) -> int:
    """Keys and values of one sequence: 2 x layers x key-value heads x head size, an upper estimate for windows."""
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return 2 * int(config.num_hidden_layers) * heads * head_size * tokens * dtype.itemsize
