"""Model: every group is found in every family, exactly the asked ones are trained, and an empty one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coop.errors import CheckpointError, CoopError, RecipeError
from tests.families import FAMILIES, build_family
from tests.train.tiny import build_recipe
from train.schema import LoraSection, TuneSection
from train.tuning.model import (
    Groups,
    GroupSize,
    check_trainable,
    find_targets,
    group_sizes,
    load_model,
    load_tokenizer,
    make_trainable,
    shortest_suffixes,
)

SHARED = ("deepseek_v2", "deepseek_v3", "qwen2_moe", "glm4_moe", "nemotron_h")


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_trains_exactly_the_asked_groups_in_every_family(tmp_path: Path, family: str) -> None:
    model = build_family(tmp_path, family)
    groups = Groups(model)
    wanted: list[Any] = ["attention", "experts", "router", *(["shared_experts"] if family in SHARED else [])]
    tuned = make_trainable(model, TuneSection(groups=wanted, lora=LoraSection(r=2)), str(tmp_path))
    check_trainable(group_sizes(tuned, groups), wanted)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_router_is_frozen_unless_asked_for(tmp_path: Path, family: str) -> None:
    model = build_family(tmp_path, family)
    groups = Groups(model)
    sizes = group_sizes(
        make_trainable(model, TuneSection(groups=["attention", "experts"]), str(tmp_path)), groups
    )
    assert {size.group: bool(size.trainable) for size in sizes}["router"] is False


def test_full_tuning_trains_the_weights_of_the_group_and_no_others(tmp_path: Path) -> None:
    model = build_family(tmp_path, "qwen2_moe")
    tuned = make_trainable(model, TuneSection(method="full", groups=["shared_experts"]), str(tmp_path))
    trained = [name for name, parameter in tuned.named_parameters() if parameter.requires_grad]
    assert trained and all(".shared_expert." in name or ".shared_expert_gate." in name for name in trained)
    assert any(".shared_expert_gate." in name for name in trained)


def test_targets_are_short_names_where_these_match_nothing_else(tmp_path: Path) -> None:
    targets = find_targets(build_family(tmp_path, "mixtral"), ["attention", "experts"])
    assert targets.modules == ("k_proj", "o_proj", "q_proj", "v_proj")
    assert targets.parameters == ("mlp.experts.down_proj", "mlp.experts.gate_up_proj")


def test_targets_are_whole_names_where_short_ones_would_match_more() -> None:
    every = ["a.attn.proj", "b.attn.proj", "b.mlp.proj"]
    assert shortest_suffixes(every[:2], every, 2) == ("attn.proj",)
    assert shortest_suffixes(every[:2], every, 1) == ("a.attn.proj", "b.attn.proj")


def test_shared_experts_are_not_rewritten_to_routed_ones(tmp_path: Path) -> None:
    targets = find_targets(build_family(tmp_path, "deepseek_v3"), ["shared_experts"])
    assert targets.modules == ()
    assert targets.parameters == tuple(f"shared_experts.{p}_proj.weight" for p in ("down", "gate", "up"))


def test_group_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="shared_experts matches nothing in MixtralForCausalLM"):
        find_targets(build_family(tmp_path, "mixtral"), ["attention", "shared_experts"])


def test_trainable_group_that_was_not_asked_for_is_noticed() -> None:
    with pytest.raises(CoopError, match=r"asked to train \['experts'\], but .* made \['router'\] trainable"):
        check_trainable([GroupSize("experts", 9, 0), GroupSize("router", 9, 3)], ["experts"])


def test_model_runs_in_the_type_and_implementations_of_the_recipe(tmp_path: Path) -> None:
    overrides = ("model.dtype=bfloat16", "model.experts=eager", "model.attention=eager")
    model: Any = load_model(build_recipe(tmp_path, *overrides))
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.bfloat16"}
    assert model.get_experts_implementation() == {"": "eager"}
    assert model.config._attn_implementation == "eager"


def test_missing_model_says_what_to_do(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, f"model.path={tmp_path / 'nothing'}")
    with pytest.raises(CheckpointError, match=r"model\.path: .*nothing holds no config\.json"):
        load_model(recipe)
    with pytest.raises(CheckpointError, match=r"nothing holds no config\.json"):
        load_tokenizer(recipe)


def rewrite_weights(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_weights_that_are_missing_or_of_another_shape_are_refused(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path)
    rewrite_weights(tmp_path / "model", lambda w: w.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"no weights that fit for model\.norm\.weight"):
        load_model(recipe)
    rewrite_weights(tmp_path / "model", lambda w: w.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"no weights that fit for model\.norm\.weight"):
        load_model(recipe)


def test_weights_that_are_cut_short_are_refused(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"model\.path: "):
        load_model(recipe)
