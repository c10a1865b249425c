"""Results: merged folders that load anywhere and equal the adapter, models that load back, packs, cards, uploads."""

from __future__ import annotations

import base64
import json
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from coop.adapters.attach import load_profile
from coop.checkpoint import open_checkpoint
from coop.errors import CoopError, RecipeError
from tests.train.tiny import build_recipe, write_recipe
from train.run import Options, run
from train.saving.card import base_licence
from train.saving.durable import STAGING_NAME
from train.saving.export import MERGED_NAME, PACK_NAME, check_reload
from train.saving.push import list_files, push_result, upload_command
from train.schema import HubSection, Recipe

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
    keys = (
        f"tune.groups={groups}",
        "model.attention=eager",
        "moe.aux_loss_coef=0",
        "checkpoint.final=merged",
    )
    recipe = build_recipe(tmp_path, *SHORT, *keys, family=family)
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


def test_offloaded_experts_are_merged_from_the_files_of_the_base(tmp_path: Path) -> None:
    keys = ("checkpoint.final=merged", "checkpoint.pack=bf16")
    plain, offloaded = (
        train(
            build_recipe(tmp_path, *SHORT, *keys, f"output={tmp_path / str(i)}", f"model.experts_offload={i}")
        )
        for i in ("false", "true")
    )
    mine, other = (load(output / MERGED_NAME).state_dict() for output in (offloaded, plain))
    base = load(tmp_path / "model").state_dict()
    for name in mine:
        torch.testing.assert_close(mine[name], other[name], rtol=1e-4, atol=1e-5)
    changed = [name for name in mine if not torch.equal(mine[name], base[name])]
    assert any("experts" in name for name in changed)
    assert open_checkpoint(offloaded / PACK_NAME).is_pack


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


# the card


def test_card_tells_what_was_trained_on_what_and_how_to_run_it(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    (tmp_path / "model" / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n# base\n")
    output = train(build_recipe(tmp_path, *SHORT, "checkpoint.final=merged"))
    cards = [(output / "README.md").read_text(), (output / MERGED_NAME / "README.md").read_text()]
    summary = json.loads((output / "summary.json").read_text())
    for card in cards:
        assert "license: apache-2.0" in card and "language" not in card
        assert f"base_model: {tmp_path / 'model'}" in card and str(tmp_path / "train.jsonl") in card
        assert "router frozen; load-balancing loss: as the base model's config says" in card
        assert f"{summary['eval_loss_before']:.4f} before, {summary['eval_loss_after']:.4f} after" in card
        assert "hottest half takes" in card and "from held-out rows through the final weights" in card
        assert f"torch {torch.__version__}" in card and "python -m infer.generate --ckpt" in card
    assert "library_name: peft" in cards[0] and "AutoPeftModelForCausalLM" in cards[0]
    assert "library_name: transformers" in cards[1] and "Peft" not in cards[1]
    assert (output / MERGED_NAME / "report.png").is_file()


@pytest.mark.parametrize(
    "text",
    ["# no front matter", "---\nlicense: [mit]\n---\n", "---\n: :\n  - x: [\n---\n", "---\n- a\n---\n"],
)
def test_licence_is_left_out_where_the_base_names_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(text)
    assert base_licence(str(tmp_path)) == {} and base_licence("name/model") == {}


# the upload


class Hub(BaseHTTPRequestHandler):
    """A stand-in for the hub that keeps what is committed, or refuses everybody."""

    created: list[dict[str, Any]]
    files: dict[str, bytes]
    tokens: set[str]
    is_refusing = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.tokens.add(self.headers.get("Authorization", ""))
        if self.is_refusing:
            self._answer(403, {"error": "no storage left"})
        elif self.path.endswith("/repos/create"):
            self.created.append(json.loads(body))
            self._answer(200, {"url": "https://huggingface.co/NAME/MODEL"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [{**f, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for f in files]
            self._answer(200, {"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(200, {"commitUrl": "https://huggingface.co/NAME/MODEL/commit/1", "commitOid": "1"})
        else:
            self._answer(200, {})

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub on this machine, at which somebody is logged in."""
    kind = type("OneHub", (Hub,), {"created": [], "files": {}, "tokens": set()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield kind
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


PUSH = ("hub.push=true", "hub.repo_id=NAME/MODEL")


def test_result_is_uploaded_and_nothing_else_of_its_folder(tmp_path: Path, hub: type[Hub]) -> None:
    recipe = build_recipe(tmp_path, "train.steps=2", "checkpoint.every_steps=1", *PUSH)
    output = train(recipe)
    assert hub.created[0]["visibility"] == "private" and hub.tokens == {"Bearer hf_test"}
    assert set(hub.files) >= {"adapter_model.safetensors", "adapter_config.json", "README.md", "recipe.yaml"}
    assert set(hub.files) >= {"tokenizer.json", "coop_profile.safetensors", "report.png"}
    assert {Path(name).parent for name in hub.files} == {Path()}
    assert [n for n in hub.files if n.endswith((".pt", ".pth", ".bin")) or n == "summary.json"] == []
    for name, data in hub.files.items():
        assert data == (output / name).read_bytes()


def test_merged_model_is_what_is_uploaded_if_there_is_one(tmp_path: Path) -> None:
    output = train(build_recipe(tmp_path, *SHORT, "checkpoint.final=merged"))
    files = list_files(output)
    assert "config.json" in files and "adapter_config.json" not in files
    assert {path.parent for path in files.values()} == {output / MERGED_NAME}


def test_failed_upload_leaves_a_finished_run_and_says_how_to_try_again(
    tmp_path: Path, hub: type[Hub]
) -> None:
    hub.is_refusing = True
    recipe = build_recipe(tmp_path, *SHORT, *PUSH)
    with pytest.raises(
        CoopError, match=r"is whole in .*could not be uploaded to NAME/MODEL: .*hf upload NAME"
    ):
        train(recipe)
    output = Path(recipe.output)
    assert (output / "summary.json").is_file() and (output / "adapter_model.safetensors").is_file()
    words = shlex.split(upload_command(recipe.hub, output))
    assert words[:5] == ["hf", "upload", "NAME/MODEL", str(output), "."] and "--private" in words


def test_upload_without_login_or_name_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(RecipeError, match=r"hub\.push: nobody is logged in"):
        train(build_recipe(tmp_path, *PUSH))
    assert not (tmp_path / "out").exists()
    with pytest.raises(RecipeError, match=r"hub\.repo_id: needed with hub\.push"):
        build_recipe(tmp_path, "hub.push=true")


def test_hub_that_does_not_answer_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CoopError, match="could not be uploaded"):
        push_result(HubSection(push=True, repo_id="a/b"), tmp_path, print)
