"""The inference command: what it refuses, what it prints where, and the exit codes, around a fake runtime."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import coop
from coop.errors import BudgetError
from infer import generate
from tests.infer.models import FakeRuntime, byte_tokenizer, dense_model, strict_json

KEYS = [
    "text",
    "prompt_tokens",
    "new_tokens",
    "ttft_ms",
    "tokens_per_s",
    "token_ms_p50",
    "token_ms_p99",
    "hit_rate_prefill",
    "hit_rate_decode",
    "bytes_read",
    "bytes_speculative",
    "bytes_wasted",
    "wait_ms",
    "budget_bytes",
    "resident_bytes_max",
    "rss_max_bytes",
    "profile",
    "strategy",
]


@pytest.fixture
def ckpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a tokenizer, and `coop.attach` replaced by a fake that notes how it was called."""
    byte_tokenizer().save_pretrained(tmp_path / "model")

    def attach(folder: Path, **arguments: Any) -> FakeRuntime:
        CALLS.append(arguments)
        RUNTIMES.append(FakeRuntime(dense_model(), folder))
        return RUNTIMES[-1]

    CALLS.clear()
    RUNTIMES.clear()
    monkeypatch.setattr(coop, "attach", attach, raising=False)
    return str(tmp_path / "model")


CALLS: list[dict[str, Any]] = []
RUNTIMES: list[FakeRuntime] = []


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a run that must end with exit code 2."""
    assert generate.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err


def test_text_goes_to_stdout_and_everything_else_to_stderr(
    ckpt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--ckpt", ckpt, "--prompt", "hi", "--max-new-tokens", "6"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    assert "the plan" not in captured.out
    assert "the plan" in captured.err
    assert "tokens/s" in captured.err
    assert "hits 50.0% in prefill, n/a in decode" in captured.err
    assert "none: a fake" in captured.err
    assert RUNTIMES[0].is_closed


def test_quiet_leaves_stderr_empty(ckpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--ckpt", ckpt, "--prompt", "hi", "--max-new-tokens", "2", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_json_has_exactly_the_promised_keys_and_null_for_nan(ckpt: str, tmp_path: Path) -> None:
    target = tmp_path / "answer.json"
    assert (
        generate.main(["--ckpt", ckpt, "--prompt", "hi", "--max-new-tokens", "3", "--json", str(target)]) == 0
    )
    report = strict_json(target.read_text())
    assert list(report) == KEYS
    assert report["hit_rate_decode"] is None
    assert report["strategy"] == "Balanced"


def test_json_on_stdout_is_alone_there(ckpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--ckpt", ckpt, "--prompt", "hi", "--max-new-tokens", "3", "--json", "-"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == KEYS


def test_every_option_reaches_attach(ckpt: str) -> None:
    options = ["--budget", "2GiB", "--strategy", "MemoryFirst", "--no-profile", "--no-prefetch"]
    options += ["--base", "b", "--dtype", "float32", "--max-context", "99", "--max-new-tokens", "2"]
    options += ["--device", "cuda:1", "--no-guard"]
    assert generate.main(["--ckpt", ckpt, "--prompt", "hi", *options]) == 0
    assert callable(CALLS[0].pop("say"))
    assert CALLS == [
        {
            "budget": "2GiB",
            "strategy": "MemoryFirst",
            "profile": False,
            "prefetch": False,
            "base": "b",
            "dtype": "float32",
            "max_context": 99,
            "device": "cuda:1",
            "guard": False,
        }
    ]


def test_verify_runs_again_with_everything_resident(ckpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ckpt", ckpt, "--prompt", "hi", "--max-new-tokens", "5", "--budget", "50%", "--verify"]
    assert generate.main(arguments) == 0
    assert [call["budget"] for call in CALLS] == ["50%", "100%"]
    assert [call["prefetch"] for call in CALLS] == [True, False]
    assert "verify: 5 tokens, logits identical bit for bit" in capsys.readouterr().err
    assert all(runtime.is_closed for runtime in RUNTIMES)


def test_verify_exits_1_when_a_weight_differs(
    ckpt: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def attach(folder: Path, budget: str, **arguments: Any) -> FakeRuntime:
        model = dense_model()
        if budget == "100%":
            with torch.no_grad():
                model.lm_head.weight[5, 5] += 1e-4
        return FakeRuntime(model, folder)

    monkeypatch.setattr(coop, "attach", attach, raising=False)
    assert (
        generate.main(["--ckpt", ckpt, "--prompt", "hi", "--max-new-tokens", "3", "--verify", "--quiet"]) == 1
    )
    assert "NOT identical" in capsys.readouterr().err


def test_ctrl_c_exits_130_with_what_there_was(
    ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from infer.engine import TimedStreamer

    put = TimedStreamer.put

    def interrupting(self: TimedStreamer, value: Any) -> None:
        put(self, value)
        if len(self.token_ids) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(TimedStreamer, "put", interrupting)
    target = tmp_path / "partial.json"
    assert generate.main(["--ckpt", ckpt, "--prompt", "hi", "--json", str(target)]) == 130
    assert strict_json(target.read_text())["new_tokens"] == 3
    assert "interrupted" in capsys.readouterr().err
    assert RUNTIMES[0].is_closed


def test_a_reader_that_went_away_is_no_error_message(
    ckpt: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(generate, "_print_now", broken)
    monkeypatch.setattr(generate, "_detach_stdout", lambda: None)
    assert generate.main(["--ckpt", ckpt, "--prompt", "hi", "--quiet"]) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", "  \n"], "the prompt is empty"),
        (["--prompt", "hi", "--temperature", "-1"], "--temperature -1.0: pass 0"),
        (["--prompt", "hi", "--temperature", "nan"], "--temperature nan: pass 0"),
        (["--prompt", "hi", "--temperature", "1", "--top-p", "0"], "--top-p 0.0: pass a share above 0"),
        (["--prompt", "hi", "--temperature", "1", "--top-p", "1.5"], "--top-p 1.5: pass a share above 0"),
        (["--prompt", "hi", "--temperature", "1", "--seed", "-3"], "--seed -3"),
        (["--prompt", "hi", "--top-p", "0.9"], "--top-p does nothing at temperature 0"),
        (["--prompt", "hi", "--seed", "1"], "--seed does nothing at temperature 0"),
        (["--prompt", "hi", "--max-new-tokens", "0"], "--max-new-tokens 0: pass 1 or more"),
        (["--prompt", "hi", "--max-context", "0"], "--max-context 0: pass 1 or more"),
        (["--prompt", "hi", "--threads", "0"], "--threads 0: pass 1 or more"),
        (["--prompt", "hi", "--raw", "--system", "be kind"], "leave out one of them"),
        (["--prompt", "hi", "--max-new-tokens", "5000"], "more than the 512 tokens this model can see"),
        (["--prompt", "hi", "--max-context", "20", "--max-new-tokens", "9"], "pass --max-context"),
        (["--prompt", "\udcff"], "not valid UTF-8"),
        (["--prompt-file", "/no/such/file"], "--prompt-file /no/such/file: No such file"),
        (["--prompt", "hi", "--json", "/no/such/folder/a.json"], "--json /no/such/folder/a.json: cannot"),
    ],
)
def test_a_bad_request_is_one_sentence_and_exit_2(
    arguments: list[str], sentence: str, ckpt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refusal(capsys, "--ckpt", ckpt, "--quiet", *arguments)


def test_a_checkpoint_that_is_no_folder_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert "pass one with config.json" in refusal(capsys, "--ckpt", "no/such", "--prompt", "hi")


def test_a_budget_error_of_attach_is_one_line(
    ckpt: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach(folder: Path, **arguments: Any) -> FakeRuntime:
        raise BudgetError("budget 'lots' is not a size")

    monkeypatch.setattr(coop, "attach", attach, raising=False)
    assert "'lots' is not a size" in refusal(capsys, "--ckpt", ckpt, "--prompt", "hi", "--budget", "lots")


def test_a_prompt_file_that_is_not_utf_8_names_the_byte(
    ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt").write_bytes(b"ab\xff")
    assert "byte 2 is not UTF-8" in refusal(capsys, "--ckpt", ckpt, "--prompt-file", str(tmp_path / "prompt"))


def test_the_prompt_comes_from_standard_input_when_no_flag_gives_it(
    ckpt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("größe".encode())))
    assert generate.parse_options(["--ckpt", ckpt]).prompt == "größe"


def test_misspelt_and_abbreviated_flags_are_refused(ckpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--max-new", "--budgte"):
        with pytest.raises(SystemExit) as caught:
            generate.main(["--ckpt", ckpt, "--prompt", "hi", flag, "5"])
        assert caught.value.code == 2
        assert flag in capsys.readouterr().err


def test_the_coop_command_answers_like_the_module() -> None:
    def output(*command: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    assert output("coop", "generate", "--help") == output("infer.generate", "--help")
    bad = ("--ckpt", "no/such", "--prompt", "hi")
    assert output("coop", "generate", *bad) == output("infer.generate", *bad)
    assert output("coop", "genrate") == (2, "error: coop has no command 'genrate'; did you mean generate?\n")
    code, text = output("coop", "--help")
    assert code == 0
    assert all(name in text for name in ("finetune", "profile", "generate"))
