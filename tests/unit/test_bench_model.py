"""The bench model: its layout, its sizes, and that it is the same for the same seed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coop.errors import DataError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from make_bench_model import Sizes, build, main

SMALL = Sizes(
    layers=2,
    experts=4,
    top_k=2,
    hidden=32,
    expert_width=16,
    heads=2,
    kv_heads=1,
    head_dim=16,
    vocabulary=1100,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "model"
    build(out, SMALL)
    return out


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def test_transformers_loads_it_whole_and_finds_every_weight_that_it_wants(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == sum(t.numel() for t in tensors(folder).values())


def test_each_layer_is_a_shard_and_the_index_names_every_tensor(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = tensors(folder)
    assert len(list(folder.glob("*.safetensors"))) == SMALL.layers + 1
    assert set(index["weight_map"]) == set(found)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())


def test_the_same_seed_gives_the_same_weights_and_another_gives_others(folder: Path, tmp_path: Path) -> None:
    build(tmp_path / "same", SMALL)
    build(tmp_path / "other", SMALL, seed=1)
    first, same, other = tensors(folder), tensors(tmp_path / "same"), tensors(tmp_path / "other")
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_embeddings_have_deviation_one_so_that_routing_depends_on_the_token(folder: Path) -> None:
    found = tensors(folder)
    assert abs(found["model.embed_tokens.weight"].float().std().item() - 1) < 0.05
    assert abs(found["model.layers.0.mlp.gate.weight"].float().std().item() - 0.02) < 0.005


def test_sizes_that_make_no_model_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are only 4 experts"):
        Sizes(experts=4, top_k=8)
    assert main(["--out", str(tmp_path / "m"), "--heads", "3", "--kv-heads", "2"]) == 2
    assert "--kv-heads 2 does not divide --heads 3" in capsys.readouterr().err
    with pytest.raises(DataError, match="the tokenizer has"):
        build(tmp_path / "m", Sizes(vocabulary=10))
