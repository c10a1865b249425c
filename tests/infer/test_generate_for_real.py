"""The inference command on real tiny mixtures of experts: plain folder, adapter, and what disk may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer import generate
from tests.infer.models import strict_json

PROMPT = ["--prompt", "What does textwrap.dedent do?", "--max-new-tokens", "6"]


@pytest.mark.parametrize("budget", ["25%", "50%", "100%"])
def test_a_plain_folder_is_verified_bit_for_bit(
    budget: str, moe_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "answer.json"
    arguments = ["--ckpt", str(moe_folder), "--budget", budget, "--verify", "--json", str(target)]
    assert generate.main([*arguments, *PROMPT]) == 0
    captured = capsys.readouterr()
    assert "logits identical bit for bit" in captured.err
    report = strict_json(target.read_text())
    assert captured.out.rstrip("\n") == report["text"].rstrip("\n")
    assert 0 < report["resident_bytes_max"] <= report["budget_bytes"]
    assert report["bytes_read"] > 0
    assert report["profile"].startswith("none: no coop_profile.safetensors")


def test_an_adapter_finds_its_base_and_is_verified(
    adapter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--ckpt", str(adapter_folder), "--budget", "50%", "--verify", *PROMPT]) == 0
    assert "logits identical bit for bit" in capsys.readouterr().err


def test_an_adapter_answers_otherwise_than_its_base(
    adapter_folder: Path, moe_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = set()
    for folder in (adapter_folder, moe_folder):
        assert generate.main(["--ckpt", str(folder), "--budget", "50%", "--quiet", *PROMPT]) == 0
        answers.add(capsys.readouterr().out)
    assert len(answers) == 2


def test_a_sampled_run_is_verified_too(moe_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = ["--temperature", "1.3", "--top-p", "0.9", "--seed", "7"]
    assert generate.main(["--ckpt", str(moe_folder), "--budget", "50%", "--verify", *PROMPT, *sampling]) == 0
    assert "logits identical bit for bit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [("lots", "budget 'lots' is not"), ("1KB", "the smallest that runs is"), ("0%", "smallest")],
)
def test_a_budget_that_cannot_run_is_one_sentence(
    budget: str, sentence: str, moe_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--ckpt", str(moe_folder), "--budget", budget, *PROMPT]) == 2
    assert sentence in capsys.readouterr().err


def test_an_empty_folder_is_not_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--ckpt", str(tmp_path), *PROMPT]) == 2
    assert "config.json" in capsys.readouterr().err
