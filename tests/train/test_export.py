"""Results: merged folders that load anywhere and equal the adapter, models that load back, packs, cards, uploads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from coop.adapters.attach import load_profile
from coop.checkpoint import open_checkpoint
from coop.errors import CoopError
from tests.train.tiny import build_recipe
from train.durable import STAGING_NAME
from train.export import MERGED_NAME, PACK_NAME, check_reload
from train.run import Options, run
from train.schema import Recipe

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SHORT = ("train.steps=2", "train.learning_rate=0.05", "checkpoint.every_steps=0")
FULL = ("tune.method=full", "tune.groups=[attention,experts,other]")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(recipe: Recipe) -> Path:
    run(recipe, Path("recipe.yaml"), Options())
    return Path(recipe.output)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(3, 60).reshape(3, 19)
    with torch.no_grad():
        return model(tokens).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "deepseek_v3"])
def test_merged_folder_loads_in_plain_transformers_and_equals_the_adapter(
    tmp_path: Path, family: str
) -> None:
    groups = "[attention,experts]" if family in ("gpt_oss", "deepseek_v3") else "[attention,experts,router]"
    recipe = build_recipe(tmp_path, *SHORT, f"tune.groups={groups}", "checkpoint.final=merged", family=family)
    output = train(recipe)
    merged = load(output / MERGED_NAME)
    base = load(tmp_path / "model")
    untouched = logits(base)
    adapted = PeftModel.from_pretrained(base, output)
    assert not hasattr(merged, "peft_config")
    assert (logits(adapted) - untouched).abs().max() > 1e-2
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-4)
    theirs = adapted.merge_and_unload().state_dict()
    mine = merged.state_dict()
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    names = {path.name for path in (output / MERGED_NAME).iterdir()}
    assert names >= {"config.json", "tokenizer.json", "chat_template.jinja", "coop_profile.safetensors"}
    assert not (output / STAGING_NAME).exists() and "adapter_config.json" not in names


def test_merged_folder_keeps_its_profile_its_tokenizer_and_its_modes(tmp_path: Path) -> None:
    recipe = build_recipe(
        tmp_path, *SHORT, "tune.groups=[experts,router]", "checkpoint.final=merged", "moe.aux_loss_coef=0.01"
    )
    output = train(recipe)
    checkpoint = open_checkpoint(output / MERGED_NAME)
    model = load(output / MERGED_NAME)
    profile, status = load_profile(checkpoint, model, True)
    assert profile is not None and status.startswith("used"), status
    assert profile.identity.adapter_digest == "" and profile.identity.router_digest
    assert not model.config.output_router_logits
    mine, other = (AutoTokenizer.from_pretrained(f) for f in (output / MERGED_NAME, tmp_path / "model"))
    assert mine.chat_template == other.chat_template and mine.get_vocab() == other.get_vocab()
    assert {path.stat().st_mode & 0o777 for path in (output / MERGED_NAME).iterdir()} == {0o644}


def test_merged_folder_runs_in_coop_as_the_adapter_does(tmp_path: Path) -> None:
    from infer.generate import main

    output = train(build_recipe(tmp_path, *SHORT, "checkpoint.final=merged"))
    for folder in (output, output / MERGED_NAME):
        assert (
            main(["--ckpt", str(folder), "--budget", "50%", "--prompt", "say aa", "--max-new-tokens", "4"])
            == 0
        )


def test_fully_tuned_model_is_loaded_back_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = train(build_recipe(tmp_path, *SHORT, *FULL))
    assert "loaded back, all " in capsys.readouterr().out
    model = load(output)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 0, 0] += 1
    with pytest.raises(CoopError, match=r"experts\.down_proj is not what was trained"):
        check_reload(model, output)


@pytest.mark.parametrize("overrides", [(), FULL])
def test_result_is_packed_on_request(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    from coop.packs.verify import find_damage

    output = train(build_recipe(tmp_path, *SHORT, *overrides, "checkpoint.pack=int8"))
    assert find_damage(output / PACK_NAME, lambda nbytes: None).names == []
    assert open_checkpoint(output / PACK_NAME).is_pack


def test_merging_is_refused_where_nothing_can_be_merged(tmp_path: Path) -> None:
    with pytest.raises(CoopError, match=r"checkpoint\.final: merged is for tune\.method=lora"):
        build_recipe(tmp_path, *FULL, "checkpoint.final=merged")
