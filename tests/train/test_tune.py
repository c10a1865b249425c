"""Tuning: what matched is shown, freezes and expert selections hold bit for bit, adapters of any rank are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from coop.adapters.lora import read_expert_lora
from coop.adapters.transformers import find_experts
from coop.errors import CheckpointError, CoopError, ProfileError, RecipeError
from coop.ids import ExpertId
from coop.profile import Profile
from tests.families import FAMILIES, build_family
from tests.train.test_training import train, train_until_killed
from tests.train.tiny import build_recipe
from train.opening import count_patterns
from train.schema import LoraSection, TuneSection
from train.tuning.expert_mask import ExpertMask
from train.tuning.model import Groups, find_targets, load_model, make_trainable, trained_weights
from train.tuning.selection import Selection, choose_experts, count_uses, read_selection, smallest_cover

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
# group -> weights that LoRA adapts: name without layers, how many, shape
ATTENTION = {
    "model.layers.*.self_attn.q_proj.weight": (3, (32, 32)),
    "model.layers.*.self_attn.k_proj.weight": (3, (16, 32)),
    "model.layers.*.self_attn.v_proj.weight": (3, (16, 32)),
    "model.layers.*.self_attn.o_proj.weight": (3, (32, 32)),
}
LATENT = {
    "model.layers.*.self_attn.kv_a_proj_with_mqa.weight": (3, (24, 32)),
    "model.layers.*.self_attn.kv_b_proj.weight": (3, (64, 16)),
    "model.layers.*.self_attn.o_proj.weight": (3, (32, 32)),
}
NAMES: dict[str, dict[str, tuple[int, tuple[int, ...]]]] = {
    "qwen3_moe": {**ATTENTION, "model.layers.*.mlp.gate.weight": (3, (8, 32))},
    "mixtral": {**ATTENTION, "model.layers.*.mlp.gate.weight": (3, (8, 32))},
    "olmoe": {**ATTENTION, "model.layers.*.mlp.gate.weight": (3, (8, 32))},
    "gpt_oss": {**ATTENTION, "model.layers.*.mlp.router.weight": (3, (8, 32))},
    "granitemoe": {**ATTENTION, "model.layers.*.block_sparse_moe.router.weight": (3, (8, 32))},
    "phimoe": {**ATTENTION, "model.layers.*.mlp.router.weight": (3, (8, 32))},
    "qwen2_moe": {**ATTENTION, "model.layers.*.mlp.gate.weight": (3, (8, 32))},
    "glm4_moe": {**ATTENTION, "model.layers.*.mlp.gate.weight": (2, (8, 32))},
    "deepseek_v2": {
        **LATENT,
        "model.layers.*.self_attn.q_proj.weight": (3, (64, 32)),
        "model.layers.*.mlp.gate.weight": (2, (8, 32)),
    },
    "deepseek_v3": {
        **LATENT,
        "model.layers.*.self_attn.q_a_proj.weight": (3, (16, 32)),
        "model.layers.*.self_attn.q_b_proj.weight": (3, (64, 16)),
        "model.layers.*.mlp.gate.weight": (2, (8, 32)),
    },
    "nemotron_h": {
        "model.layers.*.mixer.q_proj.weight": (2, (32, 32)),
        "model.layers.*.mixer.k_proj.weight": (2, (16, 32)),
        "model.layers.*.mixer.v_proj.weight": (2, (16, 32)),
        "model.layers.*.mixer.o_proj.weight": (2, (32, 32)),
        "model.layers.*.mixer.gate.weight": (2, (8, 32)),
    },
}
STACKED = {
    "nemotron_h": ("mixer", 2, {"up_proj": (8, 24, 32), "down_proj": (8, 32, 24)}),
    "gpt_oss": ("mlp", 3, {"gate_up_proj": (8, 32, 48), "down_proj": (8, 24, 32)}),
    "granitemoe": ("block_sparse_moe", 3, {"gate_up_proj": (8, 48, 32), "down_proj": (8, 32, 24)}),
}
SHARED = {
    "qwen2_moe": ("mlp.shared_expert", 3, 40),
    "deepseek_v2": ("mlp.shared_experts", 2, 24),
    "deepseek_v3": ("mlp.shared_experts", 2, 24),
    "glm4_moe": ("mlp.shared_experts", 2, 24),
    "nemotron_h": ("mixer.shared_experts", 2, 40),
}


def expected(family: str) -> dict[str, tuple[int, tuple[int, ...]]]:
    layers = 2 if family in ("deepseek_v2", "deepseek_v3", "glm4_moe") else 3
    usual = ("mlp", layers, {"gate_up_proj": (8, 48, 32), "down_proj": (8, 32, 24)})
    block, count, shapes = STACKED.get(family, usual)
    names = {f"model.layers.*.{block}.experts.{name}": (count, shape) for name, shape in shapes.items()}
    if family in SHARED:
        place, count, width = SHARED[family]
        parts = {"up_proj": (width, 32), "down_proj": (32, width)}
        parts |= {} if family == "nemotron_h" else {"gate_proj": (width, 32)}
        names |= {f"model.layers.*.{place}.{name}.weight": (count, shape) for name, shape in parts.items()}
    return NAMES[family] | names


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_that_lora_adapts_is_known_by_name_and_shape(tmp_path: Path, family: str) -> None:
    model = build_family(tmp_path, family)
    groups = Groups(model)
    wanted: list[Any] = ["attention", "experts", "router", *(["shared_experts"] if family in SHARED else [])]
    tuned = make_trainable(model, TuneSection(groups=wanted, lora=LoraSection(r=2)), "")
    patterns = count_patterns(trained_weights(tuned, groups))
    found = {
        pattern: (count, shape) for (_, pattern, shape, by), count in patterns.items() if by == "LoRA r=2"
    }
    assert found == expected(family)
    trainable = [name for name, p in tuned.named_parameters() if p.requires_grad]
    assert len(trainable) == 2 * sum(
        count for count, _ in found.values()
    )  # A and B of each, and nothing else


def test_frozen_layers_groups_and_names_get_no_adapter(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    tune = TuneSection(
        groups=["attention", "experts", "router"], freeze=["layers: 0-1", "router", "*.o_proj"]
    )
    with pytest.raises(RecipeError, match="leaves nothing of router to train"):
        make_trainable(model, tune, "")
    weights = find_targets(model, ["attention", "experts"], ["layers: 0-1", "*.o_proj"]).weights
    assert weights == {
        *(f"model.layers.2.self_attn.{name}_proj.weight" for name in "qkv"),
        *(f"model.layers.2.mlp.experts.{name}_proj" for name in ("gate_up", "down")),
    }


def test_frozen_layers_stay_as_they_are_in_full_tuning(tmp_path: Path) -> None:
    model = build_family(tmp_path, "deepseek_v2")
    tune = TuneSection(method="full", groups=["attention", "experts"], freeze=["layers: 0-1", "*kv_a*"])
    trained = [n for n, p in make_trainable(model, tune, "").named_parameters() if p.requires_grad]
    assert trained and all(name.startswith("model.layers.2.") and "kv_a" not in name for name in trained)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("entry", ["layers: 7", "*.q_prj*", "router", "layers 0-1"])
def test_freeze_that_freezes_nothing_is_refused(tmp_path: Path, method: Any, entry: str) -> None:
    model = build_family(tmp_path, "mixtral")
    with pytest.raises(RecipeError, match=rf"tune\.freeze: '{entry.replace('*', '.')}' matches nothing"):
        make_trainable(model, TuneSection(method=method, freeze=[entry]), "")


def test_layer_range_may_be_written_as_a_mapping(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, "tune.freeze=[{layers: 0-1}, router]", "tune.groups=[experts, router]")
    assert recipe.tune.freeze == ["layers: 0-1", "router"]


def test_adapter_with_other_rank_on_experts_and_rank_stabilised_scale_is_served_as_peft_does(
    tmp_path: Path,
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    overrides = ("tune.lora.rslora=true", "tune.lora.r=2", "tune.lora.expert_r=3", "train.steps=3")
    output = train(build_recipe(tmp_path, *overrides))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    entries = find_experts(base)
    before = {e.layer: {p: getattr(e.module, p).detach().clone() for p in e.parameters} for e in entries}
    lora = read_expert_lora(output, entries)
    with pytest.warns(
        RuntimeWarning, match="rank_pattern keys did not match"
    ):  # PEFT looks among modules only
        merged: Any = PeftModel.from_pretrained(base, output).merge_and_unload()
    for entry in find_experts(merged):
        for expert in range(entry.num_experts):
            weights = {name: stack[expert].clone() for name, stack in before[entry.layer].items()}
            lora(ExpertId(entry.layer, expert), weights)
            for name, weight in weights.items():
                assert torch.equal(weight, getattr(entry.module, name)[expert])
                assert not torch.equal(weight, before[entry.layer][name][expert])
    assert load_file(output / "adapter_model.safetensors")[KEY + "lora_A.weight"].shape[0] == 8 * 3


KEY = "base_model.model.model.layers.0.mlp.experts."


LIST = ("tune.experts.select=list", "tune.experts.list=['0:1,5-6', '*:0']", "train.weight_decay=0.1")
CHOSEN = ((0, 1, 5, 6), (0,), (0,))


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_torch", "adafactor"])
def test_experts_that_are_not_selected_keep_their_weights_bit_for_bit_in_full_tuning(
    tmp_path: Path, optimizer: str
) -> None:
    recipe = build_recipe(
        tmp_path,
        *LIST,
        "tune.method=full",
        f"train.optimizer={optimizer}",
        "coop.profile.enabled=false",
        "train.activation_checkpointing=true",
    )
    before, after = load_model(recipe), load_model(build_recipe(tmp_path, f"model.path={train(recipe)}"))
    for old, new in zip(find_experts(before), find_experts(after), strict=True):
        for name in old.parameters:
            pairs = zip(getattr(old.module, name), getattr(new.module, name), strict=True)
            moved = tuple(e for e, (mine, other) in enumerate(pairs) if not torch.equal(mine, other))
            assert moved == CHOSEN[old.layer]


def test_adapters_of_experts_that_are_not_selected_stay_at_their_start(tmp_path: Path) -> None:
    output = train(build_recipe(tmp_path, *LIST, "train.steps=2", "checkpoint.every_steps=0"))
    free = train(
        build_recipe(tmp_path, "train.steps=1", "train.learning_rate=1e-30", f"output={tmp_path / 'o2'}")
    )
    weights, start = (load_file(folder / "adapter_model.safetensors") for folder in (output, free))
    for layer, chosen in enumerate(CHOSEN):
        for middle in ("", "base_layer."):
            prefix = f"base_model.model.model.layers.{layer}.mlp.experts.{middle}"
            down, up = weights[f"{prefix}lora_A.weight"], weights[f"{prefix}lora_B.weight"]
            start_down = start[f"{prefix}lora_A.weight"]
            rows = [(down[e * 4 : e * 4 + 4], start_down[e * 4 : e * 4 + 4]) for e in range(8)]
            assert [e for e, (mine, other) in enumerate(rows) if not torch.equal(mine, other)] == list(chosen)
            columns = up.reshape(-1, 4, 8)
            assert [e for e in range(8) if columns[:, :, e].any()] == list(chosen)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_selected_experts_decay_as_adamw_decays_them(tmp_path: Path, family: str) -> None:
    """gpt_oss has biases of experts, which Trainer lets alone."""
    common = (
        "tune.method=full",
        "train.weight_decay=0.3",
        "train.optimizer=adamw_torch",
        "train.steps=4",
        "model.attention=eager",
    )
    off = ("coop.profile.enabled=false", "checkpoint.every_steps=0")
    every = ("tune.experts.select=list", "tune.experts.list=['*:0-7']")
    masked = train(build_recipe(tmp_path, *common, *off, *every, family=family))
    plain = train(build_recipe(tmp_path, *common, *off, f"output={tmp_path / 'plain'}", family=family))
    mine, other = (load_file(folder / "model.safetensors") for folder in (masked, plain))
    assert all(torch.equal(mine[name], other[name]) for name in other)
    undecayed = train(
        build_recipe(tmp_path, *common[:1], *common[2:], *off, f"output={tmp_path / 'no'}", family=family)
    )
    assert any(not torch.equal(mine[n], w) for n, w in load_file(undecayed / "model.safetensors").items())


def test_gradient_of_an_expert_that_is_not_selected_is_zero_even_where_it_is_not_a_number(
    tmp_path: Path,
) -> None:
    model = build_family(tmp_path, "gpt_oss")
    tuned = make_trainable(model, TuneSection(method="full", groups=["experts"]), "")
    mask = ExpertMask(tuned, Selection(((1,), (), (0, 7)), "test"), 0.0)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            (parameter * float("nan")).sum().backward()
    for entry, chosen in zip(find_experts(tuned), ((1,), (), (0, 7)), strict=True):
        for name in entry.parameters:
            gradient = getattr(entry.module, name).grad
            assert [e for e in range(8) if gradient[e].isnan().all()] == list(chosen)
            assert [e for e in range(8) if (gradient[e] == 0).all()] == [
                e for e in range(8) if e not in chosen
            ]
    per_expert = sum(getattr(find_experts(tuned)[0].module, n)[0].numel() for n in entry.parameters)
    assert mask.frozen_elements == (24 - 3) * per_expert


def test_resumed_run_trains_the_experts_of_the_run_before(tmp_path: Path, monkeypatch: Any) -> None:
    hot = ("tune.experts.select=hot", "tune.experts.share=0.5", "train.weight_decay=0.1")
    whole = train(build_recipe(tmp_path, *hot, f"output={tmp_path / 'whole'}"))
    recipe = build_recipe(tmp_path, *hot)
    train_until_killed(recipe, 5, monkeypatch)
    monkeypatch.setattr("train.tuning.selection.count_uses", lambda *_: pytest.fail("counted again"))
    output = train(recipe, resume=Path())
    mine, other = (load_file(folder / "adapter_model.safetensors") for folder in (output, whole))
    assert all(torch.equal(mine[name], other[name]) for name in other)
    assert (output / "selected_experts.json").read_bytes() == (whole / "selected_experts.json").read_bytes()


def test_hot_experts_are_the_fewest_that_cover_the_share() -> None:
    uses = np.array([4, 0, 3, 3, 10])
    assert smallest_cover(uses, 0.5) == (4,)
    assert smallest_cover(uses, 0.51) == (0, 4)
    assert smallest_cover(uses, 0.85) == (0, 2, 4)  # 17 of 20: of two equals the lower
    assert smallest_cover(uses, 1.0) == (0, 2, 3, 4)
    assert smallest_cover(np.array([1] * 10), 0.9) == tuple(range(9))
    with pytest.raises(ProfileError, match="without any counted use"):
        smallest_cover(np.zeros(4, np.int64), 0.5)


def test_uses_of_the_quick_pass_equal_those_of_a_plain_recount(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    rows = [[5, 9, 3, 40], [7, 7]]
    seen = np.zeros((3, 8), np.int64)
    hooks = [
        entry.module.register_forward_pre_hook(
            lambda m, args, layer=entry.layer: (
                [np.add.at(seen[layer], int(e), 1) for e in args[1].flatten()] and None
            )
        )
        for entry in find_experts(model)
    ]
    counts = count_uses(model, rows)
    for hook in hooks:
        hook.remove()
    np.testing.assert_array_equal(counts, seen)
    assert (counts.sum(axis=1) == 6 * 2).all()


def test_hot_experts_come_from_a_profile_of_this_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = train(build_recipe(tmp_path))
    hot = ("tune.experts.select=hot", f"tune.experts.profile={earlier}", "tune.experts.share=0.6")
    recipe = build_recipe(tmp_path, *hot, f"output={tmp_path / 'second'}")
    output, profile = train(recipe), Profile.load(earlier)
    selection = read_selection(output, load_model(recipe))
    uses = profile.hot_prompt + profile.hot_answer
    assert selection is not None and selection.experts == tuple(smallest_cover(layer, 0.6) for layer in uses)
    total = sum(len(experts) for experts in selection.experts)
    assert f"experts trained: {total} of 24" in capsys.readouterr().out
    other = build_family(tmp_path / "other", "mixtral", num_local_experts=4)
    with pytest.raises(ProfileError, match="another model"):
        choose_experts(other, recipe.tune.experts, [])


@pytest.mark.parametrize(
    ("entry", "reason"),
    [("3:0", "MoE layers 0-2"), ("0:8", "within experts 0-7"), ("0:5-2", "within experts 0-7")],
)
def test_experts_that_the_model_does_not_have_are_refused(tmp_path: Path, entry: str, reason: str) -> None:
    recipe = build_recipe(tmp_path, "tune.experts.select=list", f"tune.experts.list=['{entry}']")
    with pytest.raises(RecipeError, match=reason):
        train(recipe, is_dry=True)


def test_quantised_checkpoint_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    import json

    recipe = build_recipe(tmp_path)
    path = tmp_path / "model" / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    with pytest.raises(CheckpointError, match=r"holds mxfp4 weights.*copy in bfloat16"):
        train(recipe, is_dry=True)


def test_library_that_adapts_something_else_is_noticed(tmp_path: Path, monkeypatch: Any) -> None:
    import peft

    def forgetful(model: Any, config: Any) -> Any:
        config.target_parameters = None
        return original(model, config)

    original = peft.get_peft_model
    monkeypatch.setattr(peft, "get_peft_model", forgetful)
    with pytest.raises(CoopError, match=r"experts\.down_proj and 5 more: not adapted"):
        make_trainable(build_family(tmp_path, "mixtral"), TuneSection(), "")
