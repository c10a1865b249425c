"""Shipped recipes: each is valid, resolves on a tiny model of its family with as many layers, and trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from coop.adapters.transformers import build_on_meta, find_experts
from tests.train.test_training import train
from tests.train.tiny import build_model, read_losses, write_rows
from train.launch import read_kind
from train.recipe import load_recipe
from train.schema import Recipe

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
# the published sizes of each model, from its config.json on the hub
REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {"num_hidden_layers": 48, "hidden_size": 2048, "num_experts": 128, "moe_intermediate_size": 768}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
    ),
    "olmoe-1b-7b": (
        "olmoe",
        {"num_hidden_layers": 16, "hidden_size": 2048, "num_experts": 64, "intermediate_size": 1024}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304},
    ),
    "mixtral-8x7b": (
        "mixtral",
        {"num_hidden_layers": 32, "hidden_size": 4096, "num_local_experts": 8, "intermediate_size": 14336}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {"num_hidden_layers": 27, "hidden_size": 2048, "n_routed_experts": 64, "moe_intermediate_size": 1408}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "n_shared_experts": 2}
        | {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        | {
            "v_head_dim": 128,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "intermediate_size": 10944,
        },
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {"num_hidden_layers": 24, "hidden_size": 2880, "num_local_experts": 32, "intermediate_size": 2880}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088},
    ),
}
RECIPES = [f"{name}-{method}" for name in REAL for method in ("lora", "full")]


def load_tiny(folder: Path, name: str, *overrides: str) -> Recipe:
    """The recipe `name` on a tiny model of its family, with as many layers as the real one has."""
    family, sizes = REAL[name.rpartition("-")[0]]
    build_model(folder / "model", family, num_hidden_layers=sizes["num_hidden_layers"])
    changes = [
        f"model.path={folder / 'model'}",
        f"data.train={write_rows(folder / 'train.jsonl', 24)}",
        f"data.eval={write_rows(folder / 'eval.jsonl', 4, seed=3)}",
        f"output={folder / 'out'}",
        "data.max_length=96",
    ]
    return load_recipe(ROOT / "recipes" / f"{name}.yaml", [*changes, *overrides])


@pytest.mark.parametrize("name", RECIPES)
def test_every_target_freeze_and_layer_of_a_recipe_resolves(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    recipe = load_tiny(tmp_path, name)
    train(recipe, is_dry=True)
    shown = capsys.readouterr().out
    assert "dry run: everything above is in order" in shown
    for group in recipe.tune.groups:
        assert re.search(rf"│ {group} +│ +[\d,]+ │ +[\d,]+ │", shown), group


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_two_steps(tmp_path: Path, name: str) -> None:
    here = ("launch.processes=null", "launch.config=null", "model.experts_budget=50%")
    short = ("train.epochs=null", "train.steps=2", "train.grad_accumulation=1", "logging.wandb.mode=disabled")
    fast = ("checkpoint.every_steps=0", "coop.profile.refresh_rows=2", "eval.every_steps=0")
    output = train(load_tiny(tmp_path, name, *here, *short, *fast))
    assert [record["step"] for record in read_losses(output)] == [1, 2]
    assert (output / "coop_profile.safetensors").is_file()


@pytest.mark.parametrize("name", REAL)
def test_sizes_in_the_comments_are_those_of_the_real_model(name: str) -> None:
    from transformers import AutoConfig

    family, sizes = REAL[name]
    model = build_on_meta(AutoConfig.for_model(family, tie_word_embeddings=False, **sizes))
    experts = find_experts(model)
    layers = [2 * sum(p.numel() for p in e.module.parameters(recurse=False)) / 1e9 for e in experts]
    total = 2 * sum(p.numel() for p in model.parameters()) / 1e9
    for method in ("lora", "full"):
        text = " ".join((ROOT / "recipes" / f"{name}-{method}.yaml").read_text().replace("#", " ").split())
        found = re.search(
            r"(\d+) MoE layers of (\d+) experts.*?: ([\d.]+) GB of experts a layer and ([\d.]+) GB in all; "
            r"([\d.]+) GB of other weights",
            text,
        )
        assert found is not None
        assert [int(found[1]), int(found[2])] == [len(experts), experts[0].num_experts]
        assert [float(n) for n in found.groups()[2:]] == [
            pytest.approx(layers[0], abs=0.01),
            pytest.approx(sum(layers), abs=0.1),
            pytest.approx(total - sum(layers), abs=0.1),
        ]


@pytest.mark.parametrize("name", REAL)
def test_adapters_of_experts_are_as_large_as_the_comment_says(name: str) -> None:
    from transformers import AutoConfig

    family, sizes = REAL[name]
    recipe = load_recipe(ROOT / "recipes" / f"{name}-lora.yaml")
    rank = recipe.tune.lora.expert_r or recipe.tune.lora.r
    weights = 0
    for entry in find_experts(build_on_meta(AutoConfig.for_model(family, **sizes))):
        for parameter in entry.parameters:
            shape = getattr(entry.module, parameter).shape
            weights += rank * (shape[1] + shape[2]) * shape[0] if len(shape) == 3 else 0
    found = re.search(r"= (\d+) M weights", (ROOT / "recipes" / f"{name}-lora.yaml").read_text())
    assert found is not None and int(found[1]) == pytest.approx(weights / 1e6, abs=1)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_recipe_is_valid_and_its_launch_file_exists(path: Path) -> None:
    recipe = load_recipe(path)
    if recipe.launch.config is not None:
        assert read_kind(str(ROOT / recipe.launch.config)) == "FSDP"


def test_template_runs_on_own_data(tmp_path: Path) -> None:
    build_model(tmp_path / "model")
    paths = [f"model.path={tmp_path / 'model'}", f"output={tmp_path / 'out'}", "train.epochs=0.5"]
    data = [f"data.{name}={write_rows(tmp_path / f'{name}.jsonl', 24)}" for name in ("train", "eval")]
    output = train(
        load_recipe(ROOT / "recipes" / "own-data.yaml", [*paths, *data, "logging.wandb.mode=disabled"])
    )
    assert len(read_losses(output)) == 2
