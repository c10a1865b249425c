"""Experts in nn.ModuleLists, served under a budget: the bits of the plain model, or a refusal that says why.

Owns three small models (a vision MoE, a detector's block, and variants that must be refused). Run with all tests.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import coop
from coop.adapters import modulelist
from coop.adapters.absent import AbsentWeight
from coop.errors import BudgetError, CheckpointError, ClosedError, CoopError, LayoutError, RoutingError
from coop.ids import ExpertId
from coop.scheduler import Scheduler
from coop.strategy import STRATEGIES

TOP_K = 2


class MlpExpert(nn.Module):
    """Two layers with biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


def conv_expert(width: int, inner: int) -> nn.Sequential:
    """Convolution, batch norm (with its buffers, one of them a scalar of int64), convolution."""
    return nn.Sequential(
        nn.Conv2d(width, inner, 3, padding=1, bias=False),
        nn.BatchNorm2d(inner),
        nn.SiLU(),
        nn.Conv2d(inner, width, 1),
    )


class TokenBlock(nn.Module):
    """A router for each token, and MLP experts over the rows that chose them."""

    def __init__(self, width: int, inner: int, count: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(MlpExpert(width, inner) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, width, height, width]
        rows = self.norm(x.flatten(2).transpose(1, 2)).flatten(0, 1)  # [tokens, width]
        scores, chosen = self.gate(rows).softmax(-1).topk(TOP_K)
        total = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            if token.numel():
                total.index_add_(0, token, expert(rows[token]) * scores[token, place, None])
        return x + total.unflatten(0, (x.shape[0], -1)).transpose(1, 2).reshape(x.shape)


class ImageBlock(nn.Module):
    """As detectors have it: a gate over pooled features of each image, and experts that are convolutions."""

    def __init__(self, width: int, inner: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, count))
        self.experts = nn.ModuleList(conv_expert(width, inner) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(TOP_K)  # [images, k]
        images = []
        for image, weights, ids in zip(x, scores, chosen, strict=True):
            parts = [w * self.experts[int(e)](image[None]) for w, e in zip(weights, ids, strict=True)]
            images.append(torch.stack(parts).sum(0))
        return x + torch.cat(images)


class VisionMoE(nn.Module):
    """A patch stem, blocks of two kinds, and a head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(
            [TokenBlock(width, 24, 6), ImageBlock(width, 12, 4), TokenBlock(width, 40, 12)]
        )
        self.head = nn.Linear(width, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixels)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class YoloBlock(nn.Module):
    """One block at the root of its model: the list has no module around it but the model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU())
        self.moe = ImageBlock(8, 8, 5)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.moe(self.stem(pixels))


def lively(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in eval mode with every parameter and buffer at a value that matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            spread = torch.rand(tensor.shape, generator=generator)
            tensor.copy_(spread + 0.5 if "var" in name else spread - 0.5)
        else:
            tensor.fill_(7)
    return model.eval()


def images(count: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def saved(model: nn.Module, folder: Path) -> Path:
    path = folder / "model.safetensors"
    save_file(model.state_dict(), path)
    return path


@torch.inference_mode()
def outputs(model: Any) -> list[torch.Tensor]:
    return [model(images(3, 1)), model(images(1, 2)), model(images(2, 3))]


VISION = {"experts": "blocks.*.experts", "router": "blocks.*.gate", "top_k": TOP_K}


@pytest.fixture
def vision(tmp_path: Path) -> tuple[nn.Module, Path, list[torch.Tensor]]:
    """A plain model, its checkpoint, and what it answers."""
    model = lively(VisionMoE())
    return model, saved(model, tmp_path), outputs(model)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slot that is given up is filled with NaN."""
    monkeypatch.setattr(modulelist, "Scheduler", partial(Scheduler, poison=True))


def one_expert(model: nn.Module, path: Path) -> int:
    """The smallest budget, as the refusal of a smaller one tells it."""
    with pytest.raises(BudgetError, match="one expert at a time; the smallest that runs is") as refused:
        coop.attach_modulelist(model, path, budget=1, **VISION)
    return int(str(refused.value).split("the smallest that runs is ")[1].split()[0])


def assert_same_bits(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> None:
    assert len(expected) == len(actual)
    for wanted, got in zip(expected, actual, strict=True):
        assert torch.equal(wanted, got)


# exactness


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("has_router", [True, False], ids=["router", "no router"])
@pytest.mark.parametrize("budget", ["100%", "50%", "one expert"])
def test_a_vision_model_has_the_bits_of_the_plain_one_at_every_budget(
    budget: str, has_router: bool, strategy: str, vision: Any
) -> None:
    model, path, expected = vision
    size = one_expert(model, path) if budget == "one expert" else budget
    options = VISION if has_router else {"experts": VISION["experts"]}
    with coop.attach_modulelist(model, path, budget=size, strategy=strategy, **options) as runtime:
        for _ in range(2):
            assert_same_bits(expected, outputs(runtime.model))
            assert runtime.scheduler.residency.leased() == 0
        assert runtime.stats().resident_bytes_max <= runtime.plan.budget_bytes
        if budget != "100%":
            assert runtime.scheduler.residency.evictions > 0


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("budget", ["100%", "40%"])
def test_a_detectors_block_routed_by_image_has_the_bits_of_the_plain_one(
    budget: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model: Any = lively(YoloBlock().to(dtype))
    model.stem[1].to(torch.float32)  # the dense part is no business of coop's
    model.stem = nn.Sequential(model.stem[0], nn.SiLU())
    path, pixels = saved(model, tmp_path), images(6).to(dtype)
    with torch.no_grad():
        expected = [model(pixels[:n]) for n in (6, 1, 3)]
    names = {"experts": "moe.experts", "router": "moe.gate", "top_k": TOP_K}
    with coop.attach_modulelist(model, path, budget=budget, **names) as runtime, torch.no_grad():
        assert_same_bits(expected, [model(pixels[:n]) for n in (6, 1, 3)])
        assert runtime.scheduler.residency.leased() == 0


def test_the_checkpoint_may_be_an_index_of_shards_with_a_prefix_and_the_experts_on_meta(
    tmp_path: Path, vision: Any
) -> None:
    model, _, expected = vision
    tensors = {f"backbone.{name}": t for name, t in model.state_dict().items()}
    halves = [dict(list(tensors.items())[:70]), dict(list(tensors.items())[70:])]
    folder = tmp_path / "shards"
    folder.mkdir()
    index = {}
    for number, half in enumerate(halves):
        save_file(half, folder / f"part-{number}.safetensors")
        index.update(dict.fromkeys(half, f"part-{number}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(str({"weight_map": index}).replace("'", '"'))
    for block in model.blocks:
        block.experts.to("meta")
    with coop.attach_modulelist(model, folder, budget="50%", prefix="backbone.", **VISION):
        assert_same_bits(expected, outputs(model))


def test_two_attached_models_take_turns_and_keep_their_bits(tmp_path: Path) -> None:
    models = [lively(VisionMoE(), seed) for seed in (0, 5)]
    expected = [outputs(model) for model in models]
    (tmp_path / "other").mkdir()
    paths = [saved(models[0], tmp_path), saved(models[1], tmp_path / "other")]
    with (
        coop.attach_modulelist(models[0], paths[0], budget="50%", **VISION),
        coop.attach_modulelist(models[1], paths[1], budget="25%", **VISION),
        torch.inference_mode(),
    ):
        for count, seed, turn in ((3, 1, 0), (1, 2, 1), (2, 3, 2)):
            for model, wanted in zip(models, expected, strict=True):
                assert torch.equal(wanted[turn], model(images(count, seed)))


def test_a_closed_model_can_be_attached_again(vision: Any) -> None:
    model, path, expected = vision
    for budget in ("50%", "100%"):
        with coop.attach_modulelist(model, path, budget=budget, **VISION):
            assert_same_bits(expected, outputs(model))


# what is read, and what is held


def test_an_announced_layer_call_reads_no_expert_twice(vision: Any) -> None:
    model, path, expected = vision
    with coop.attach_modulelist(model, path, budget="100%", prefetch=False, **VISION) as runtime:
        assert_same_bits(expected, outputs(model))
        loads = runtime.scheduler.loads["demand_loads"]
        assert 0 < loads <= 6 + 4 + 12
        assert loads == runtime.stats().misses_prefill + runtime.stats().misses_decode


def test_in_a_short_budget_too_an_announced_call_reads_no_expert_twice(vision: Any) -> None:
    model, path, _ = vision
    largest = one_expert(model, path)
    with coop.attach_modulelist(model, path, budget=3 * largest, prefetch=False, **VISION) as runtime:
        read: list[ExpertId] = []
        store, real = runtime.scheduler._store, runtime.scheduler._store.load

        def counted(expert: ExpertId, slot: Any, window: Any = None) -> int:
            read.append(expert)
            return real(expert, slot, window)

        store.load = counted  # type: ignore[method-assign]
        with torch.inference_mode():
            model(images(3))
        tokens = [
            expert for expert in read if expert.layer != 1
        ]  # layer 1 calls an expert once for each image
        assert len(tokens) == len(set(tokens)) > 12


def test_misses_of_an_announced_layer_are_asked_for_at_once_in_disk_order(vision: Any) -> None:
    model, path, _ = vision
    with coop.attach_modulelist(model, path, budget="100%", prefetch=False, **VISION) as runtime:
        batches: list[list[ExpertId]] = []
        prefetcher, real = runtime.scheduler._prefetcher, runtime.scheduler._prefetcher.demand

        def noted(batch: Any) -> None:
            batches.append([expert for expert, _ in batch])
            real(batch)

        prefetcher.demand = noted  # type: ignore[method-assign]
        with torch.inference_mode():
            model(images(3))
        asked = [batch for batch in batches if batch]
        assert [batch[0].layer for batch in asked] == [0, 1, 2]
        for batch in asked:
            assert batch == sorted(batch, key=runtime.scheduler._store.disk_order)
        assert len(asked[2]) > 4


def test_an_expert_computes_with_views_of_its_slot_and_the_models_own_weights_are_gone(vision: Any) -> None:
    model, path, _ = vision
    block: Any = model.blocks[0]
    old = [weakref.ref(p) for p in block.experts.parameters()]
    seen = []
    block.experts[0].up.register_forward_hook(lambda m, a, r: seen.append(m.weight))
    with coop.attach_modulelist(model, path, budget="100%", **VISION) as runtime:
        assert all(ref() is None for ref in old)
        outputs(model)
        slot = runtime.scheduler.residency._slots[ExpertId(0, 0)]
        assert seen[0].untyped_storage().data_ptr() == slot.buffer.untyped_storage().data_ptr()
        assert isinstance(block.experts[0].up.weight, AbsentWeight)


def test_a_router_that_announces_others_than_are_called_costs_no_bit_and_no_wait(vision: Any) -> None:
    model, path, expected = vision
    smallest = one_expert(model, path)

    def backwards(scores: torch.Tensor) -> torch.Tensor:
        return (-scores).reshape(-1, scores.shape[-1]).topk(1).indices

    for budget in (smallest, 2 * smallest):
        with coop.attach_modulelist(model, path, budget=budget, routes=backwards, **VISION) as runtime:
            assert_same_bits(expected, outputs(model))
            assert runtime.scheduler.residency.leased() == 0


@pytest.mark.parametrize("room", [1, 2, 3])
def test_announced_experts_may_be_called_in_any_order_in_any_room(room: int, vision: Any) -> None:
    model, path, _ = vision
    block: Any = copy.deepcopy(model.blocks[2])
    rows = torch.randn(4, 16)
    with torch.inference_mode():
        plain = [expert(rows) for expert in block.experts]
    smallest = one_expert(model, path)
    with coop.attach_modulelist(model, path, budget=room * smallest, **VISION) as runtime:
        scheduler = runtime.scheduler
        for order in ([11, 3, 10, 0], [0, 11, 0, 3, 3, 10], [7, 1]):
            scheduler.announce(2, np.array([[0, 3, 10, 11]]))
            with torch.inference_mode():
                for index in order:
                    assert torch.equal(plain[index], model.blocks[2].experts[index](rows))
        scheduler.end_announcement()
        assert scheduler.residency.leased() == 0


# faults


class Explodes(nn.Module):
    """An activation that raises when told to."""

    error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_exception_inside_an_expert_leaves_no_lease_and_the_next_call_is_right(
    error: BaseException, tmp_path: Path
) -> None:
    model: Any = lively(YoloBlock())
    for expert in model.moe.experts:
        expert[2] = Explodes().eval()
    path, names = saved(model, tmp_path), {"experts": "moe.experts", "router": "moe.gate", "top_k": TOP_K}
    expected = outputs(model)
    with coop.attach_modulelist(model, path, budget="50%", **names) as runtime, torch.inference_mode():
        for expert in model.moe.experts:
            expert[2].error = error
        with pytest.raises(type(error)):
            model(images())
        if isinstance(error, Exception):
            assert runtime.scheduler.residency.leased() == 0
            assert all(isinstance(p, AbsentWeight) for p in model.moe.experts.parameters())
        for expert in model.moe.experts:
            expert[2].error = None
        assert_same_bits(expected, outputs(model))
        assert runtime.scheduler.residency.leased() == 0


def test_an_interrupt_of_one_expert_is_tidied_up_when_another_is_called(tmp_path: Path) -> None:
    model: Any = lively(YoloBlock())
    first, second = model.moe.experts[:2]
    first[2] = Explodes().eval()
    first[2].error = KeyboardInterrupt()
    features = torch.zeros(1, 8, 4, 4)
    with coop.attach_modulelist(model, saved(model, tmp_path), experts="moe.experts") as runtime:
        with torch.inference_mode():
            with pytest.raises(KeyboardInterrupt):
                first(features)
            assert runtime.scheduler.residency.leased() == 1
            second(features)
        assert runtime.scheduler.residency.leased() == 0
        assert all(isinstance(p, AbsentWeight) for p in model.moe.experts.parameters())


def test_an_interrupt_then_close_leaves_no_weight_in_the_model(tmp_path: Path) -> None:
    model: Any = lively(YoloBlock())
    for expert in model.moe.experts:
        expert[2] = Explodes().eval()
        expert[2].error = KeyboardInterrupt()
    runtime = coop.attach_modulelist(model, saved(model, tmp_path), experts="moe.experts")
    with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
        model(images())
    runtime.close()
    assert all(isinstance(p, AbsentWeight) for p in model.moe.experts.parameters())


def uses_outside(model: Any) -> Iterator[Callable[[], object]]:
    """Uses of an expert's weights that are not a call of the expert."""
    expert = model.blocks[0].experts[1]
    yield lambda: expert.up(torch.zeros(1, 16))
    yield lambda: expert.forward(torch.zeros(1, 16))
    yield lambda: model.blocks[1].experts[0][1](torch.zeros(1, 12, 4, 4))
    yield lambda: expert.up.weight + 1
    yield lambda: torch.stack([expert.up.weight, expert.up.weight])
    yield lambda: expert.up.weight.clone()
    yield lambda: expert.up.weight.tolist()
    yield lambda: model.state_dict()
    yield lambda: model.double()
    yield lambda: copy.deepcopy(expert.up)


@pytest.mark.parametrize("which", range(10))
def test_absent_weights_are_never_computed_with_saved_moved_or_copied(which: int, vision: Any) -> None:
    model, path, _ = vision
    lent = r"blocks\.[01]\.experts\.\d\.\S+ is not in the model"
    with coop.attach_modulelist(model, path, **VISION), pytest.raises(CoopError, match=lent):
        list(uses_outside(model))[which]()
    gone = r"blocks\.[01]\.experts\.\d\.\S+ is gone: the runtime .* was closed"
    with pytest.raises(ClosedError, match=gone):
        list(uses_outside(model))[which]()


def test_an_absent_weight_still_tells_its_shape_and_place_and_a_closed_model_says_that_its_experts_are_gone(
    vision: Any,
) -> None:
    model, path, _ = vision
    runtime = coop.attach_modulelist(model, path, **VISION)
    weight = model.blocks[0].experts[0].up.weight
    assert (weight.shape, weight.dtype, weight.numel()) == ((24, 16), torch.float32, 24 * 16)
    assert weight.device == torch.device("cpu")
    assert repr(weight) == "AbsentWeight('blocks.0.experts.0.up.weight', (24, 16), torch.float32)"
    runtime.close()
    runtime.close()
    with pytest.raises(ClosedError, match="attach it again, or load it anew"):
        outputs(model)


def test_gradients_and_training_mode_are_refused(vision: Any) -> None:
    model, path, expected = vision
    with coop.attach_modulelist(model, path, budget="50%", **VISION) as runtime:
        with pytest.raises(CoopError, match=r"blocks\.0\.experts\.\d gives a result that needs gradients"):
            model(images())
        model.blocks[1].experts[2][1].train()
        with torch.no_grad(), pytest.raises(CoopError, match=r"blocks\.1\.experts\.2 is in training mode"):
            model.blocks[1].experts[2](torch.zeros(1, 16, 8, 8))
        model.eval()
        assert runtime.scheduler.residency.leased() == 0
        assert_same_bits(expected, outputs(model))


class Counts(nn.Module):
    """An expert that does what no served expert may."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        if self.kind == "writes":
            self.calls += 1
        if self.kind == "replaces":
            self.calls = self.calls + 1
        return {"scale": [self.scale[:2]]} if self.kind == "returns" else x * self.scale


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("writes", "changes its own weights"),
        ("replaces", "changes its own weights"),
        ("returns", "view of its own"),
    ],
)
def test_an_expert_that_changes_or_keeps_its_weights_is_refused_and_what_it_wrote_is_dropped(
    kind: str, message: str, tmp_path: Path
) -> None:
    model = nn.Sequential()
    model.experts = nn.ModuleList([Counts(kind), Counts(kind)]).eval()
    with coop.attach_modulelist(model, saved(model, tmp_path), experts="experts", budget="100%") as runtime:
        with torch.inference_mode():
            for _ in range(2):
                with pytest.raises(CoopError, match=message):
                    model.experts[0](torch.ones(4))
        for kept in model.experts:
            kept.kind = "behaves"
        with runtime.scheduler.lend(ExpertId(0, 0)) as weights:
            assert weights["calls"].item() == 0
        assert runtime.scheduler.residency.leased() == 0


# refusals


def attach_fails(model: nn.Module, path: Path, error: type[CoopError], match: str, **changes: Any) -> None:
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(error, match=match):
        coop.attach_modulelist(model, path, **{**VISION, **changes})
    assert before == {name: id(p) for name, p in model.named_parameters()}


def test_names_that_match_nothing_or_the_wrong_thing_are_refused_with_the_nearest(vision: Any) -> None:
    model, path, _ = vision
    attach_fails(
        model, path, CoopError, r"matches no module; .* blocks\.0\.experts", experts="blocks.*.expert"
    )
    attach_fails(model, path, CoopError, r"router 'blocks\.\*\.router' matches no", router="blocks.*.router")
    attach_fails(model, path, CoopError, "1 modules .* for 3 lists", router="blocks.0.gate")
    attach_fails(
        model, path, CoopError, r"blocks\.0\.gate is a Linear, not an nn.Mod", experts="blocks.0.gate"
    )
    attach_fails(model, path, CoopError, "top_k is 5", top_k=5)
    attach_fails(model, path, CoopError, "strategy 'Fast' is none of", strategy="Fast")


def test_weights_that_are_missing_or_of_another_shape_or_dtype_are_refused(
    tmp_path: Path, vision: Any
) -> None:
    model, path, _ = vision
    attach_fails(model, tmp_path / "none", CheckpointError, "neither a folder nor")
    attach_fails(
        model, path, LayoutError, r"missing, first x\.blocks.*the nearest name there is", prefix="x."
    )
    tensors = dict(model.state_dict())
    name = "blocks.2.experts.7.up.weight"
    for changed, match in (
        (tensors[name].half(), "is torch.float16"),
        (tensors[name][:3], r"\(3, 16\), the"),
    ):
        save_file({**tensors, name: changed.contiguous()}, path)
        attach_fails(model, path, LayoutError, match)
    del tensors[name]
    save_file(tensors, path)
    attach_fails(model, path, LayoutError, "1 expert tensors are missing, first " + name)


def test_experts_that_share_nest_or_differ_are_refused_by_name(vision: Any) -> None:
    model, path, _ = vision
    experts = model.blocks[0].experts
    third = experts[3]
    experts[3] = experts[1]
    attach_fails(model, path, CoopError, r"blocks\.0\.experts\.3 is the same module as blocks\.0\.experts\.1")
    experts[3] = MlpExpert(16, 23).eval()
    attach_fails(model, path, CoopError, r"experts\.3 differs from blocks\.0\.experts\.0 in up\.weight")
    experts[3] = third
    own = third.up.weight
    third.up.weight = experts[2].up.weight
    attach_fails(
        model, path, CoopError, r"2\.up\.weight and blocks\.0\.experts\.3\.up\.weight are one tensor"
    )
    third.up.weight = own
    third.cache = [own]
    attach_fails(model, path, CoopError, r"blocks\.0\.experts\.3\.cache keeps weights .* a second time")
    del third.cache
    model.blocks[0].experts[3] = nn.ModuleList([MlpExpert(16, 24)])
    attach_fails(model, path, CoopError, r"blocks\.0\.experts\.3 is a ModuleList")
    model.blocks[0].experts[3] = third
    third.experts = nn.ModuleList([MlpExpert(16, 24)])
    patterns = ["blocks.*.experts", "blocks.*.experts.*.experts"]
    attach_fails(model, path, CoopError, r"0\.experts\.3\.experts is inside an expert", experts=patterns)
    third.experts = nn.ModuleList()
    attach_fails(
        model, path, CoopError, r"experts\.3\.experts is empty", experts="blocks.0.experts.3.experts"
    )


def test_weights_whose_bits_would_not_be_the_same_are_refused(vision: Any) -> None:
    model, path, _ = vision
    model.to(memory_format=torch.channels_last)
    attach_fails(model, path, CoopError, "not contiguous")
    model.blocks[0].experts[0] = nn.LazyLinear(3)
    attach_fails(model, path, CoopError, r"experts\.0\.weight has no shape yet")


def test_a_model_is_attached_once_at_a_time(vision: Any) -> None:
    model, path, expected = vision
    with coop.attach_modulelist(model, path, **VISION):
        with pytest.raises(CoopError, match="cannot be copied or saved whole"):
            copy.deepcopy(model)
        with pytest.raises(CoopError, match="served by an attached runtime: close that first"):
            coop.attach_modulelist(model, path, **VISION)
        assert_same_bits(expected, outputs(model))


def test_routes_that_are_no_experts_are_refused_when_they_come(vision: Any) -> None:
    model, path, _ = vision
    bad = [
        (lambda scores: scores, CoopError, "not whole numbers"),
        (lambda scores: torch.full((1, 1), 99), RoutingError, "chose expert 99"),
    ]
    for routes, error, match in bad:
        with coop.attach_modulelist(model, path, routes=routes, **VISION) as runtime:
            with pytest.raises(error, match=match):
                outputs(model)
            assert runtime.scheduler.residency.leased() == 0
    refused = pytest.raises(CoopError, match=r"not scores \[\.\.\., 6\]: pass routes=")
    with coop.attach_modulelist(model, path, **{**VISION, "router": "blocks.*"}), refused:
        outputs(model)
