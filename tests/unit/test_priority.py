"""A priority signal from outside: it moves evictions, never a bit, and a bad one is refused without harm.

Owns the reading of docs/external-priority.md: its class is the measured one and its example runs as it stands.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import coop
from coop.errors import CoopError
from coop.scheduler import Scheduler
from tests.families import build_family

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import measure_priority  # noqa: E402
from measure_priority import ModePriority, Segment, replay  # noqa: E402

IDS = torch.arange(3, 23)[None]
LAYERS, EXPERTS, TOP_K = 2, 16, 2


def blocks() -> list[str]:
    text = (ROOT / "docs" / "external-priority.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def two_modes(segments: int = 16, tokens: int = 96) -> list[Segment]:
    """An agent that uses the lower half of the experts in one mode and the upper half in the other."""
    draw = np.random.default_rng(3)
    found = []
    for number in range(segments):
        first = EXPERTS // 2 * (number % 2)
        weights = np.array([8, 8, 4, 4, 1, 1, 1, 1]) / 28  # hot and cold experts within a mode
        ids = [
            [draw.choice(EXPERTS // 2, TOP_K, replace=False, p=weights) + first for _ in range(LAYERS)]
            for _ in range(tokens)
        ]
        found.append(Segment("ab"[number % 2], np.array(ids)))
    return found


# the document


def test_the_class_in_the_document_is_the_measured_one() -> None:
    constants = [
        line
        for line in inspect.getsource(measure_priority).splitlines()
        if re.match(r"[A-Z_]+_CALLS|REWARD", line)
    ]
    assert inspect.getsource(ModePriority).strip() in blocks()[0]
    for line in constants:
        assert line in blocks()[0]


def test_the_example_in_the_document_runs_and_its_tokens_do_not_depend_on_the_policy(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    episodes = [("explore", IDS), ("act", IDS + 30), ("explore", IDS), ("act", IDS + 30)]
    scope: dict[str, Any] = {"checkpoint": tmp_path, "episodes": episodes}
    for block in blocks():
        exec(compile(block, "external-priority.md", "exec"), scope)
    answers, policy = scope["answers"], scope["policy"]
    assert len(answers) == 4
    assert min(policy.trust.values()) > 0.1
    assert all(calls.min() > 0 for calls in policy._learned.values())
    assert policy.mode == "act"
    with coop.attach(tmp_path, budget="50%", prefetch=False) as runtime:
        for answer, (_, prompt) in zip(answers, episodes, strict=True):
            plain = runtime.model.generate(
                input_ids=prompt, max_new_tokens=len(answer[0]) - 20, do_sample=False
            )
            assert torch.equal(plain, answer)


# what a policy moves, and what it does not


def test_a_policy_that_knows_the_mode_keeps_what_the_mode_will_want() -> None:
    segments = two_modes()
    alone = replay(segments, EXPERTS, 0.5)
    known = replay(segments, EXPERTS, 0.5, ModePriority("ab", LAYERS, EXPERTS))
    idle = replay(segments, EXPERTS, 0.5, ModePriority("ab", LAYERS, EXPERTS), is_idle=True)
    assert known.hit_rate_first > alone.hit_rate_first
    assert idle.hit_rate_first > known.hit_rate_first
    assert idle.loads_at_switch > 0 == known.loads_at_switch
    assert known.loads < alone.loads


def test_a_policy_without_reward_leaves_the_forecast_alone() -> None:
    segments, silent = two_modes(8), ModePriority("ab", LAYERS, EXPERTS)
    silent.reward = lambda value: None  # type: ignore[method-assign]
    assert replay(segments, EXPERTS, 0.5, silent) == replay(segments, EXPERTS, 0.5)


def test_rewards_stay_between_nothing_and_everything_whatever_the_agent_says() -> None:
    policy = ModePriority("ab", LAYERS, EXPERTS)
    for value in (5.0, float("nan"), -3.0, float("inf")):
        policy.reward(value)
        assert 0.0 < policy.trust["a"] < 1.0
    assert policy.trust["b"] == 0.0


class Upside:
    """Holds the least likely experts and drops the likeliest."""

    def __init__(self) -> None:
        self.calls = 0

    def adjust(self, layer: int, likelihood: Any) -> Any:
        self.calls += 1
        return likelihood.max() - likelihood


@torch.inference_mode()
def logits(runtime: Any) -> list[torch.Tensor]:
    return [
        runtime.model(input_ids=ids).logits for ids in (IDS, IDS[:, :1], IDS[:, 1:2], IDS + 30, IDS[:, :1])
    ]


def test_evictions_follow_the_policy_and_bits_do_not(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    counts, answers, upside = [], [], Upside()
    for policy in (None, upside):
        with coop.attach(tmp_path, budget="40%", prefetch=False) as runtime:
            runtime.scheduler.set_priority(policy)
            answers.append([answer for _ in range(3) for answer in logits(runtime)])
            counts.append((runtime.stats().misses_decode, runtime.scheduler.residency.resident().tolist()))
    assert upside.calls > 10
    assert counts[0] != counts[1]
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))


def test_a_new_signal_is_in_force_before_the_next_call_and_ends_with_none(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="40%", prefetch=False) as runtime:
        logits(runtime)
        forecast = runtime.scheduler.forecast
        before = forecast.likelihood.copy()
        runtime.scheduler.set_priority(Upside())
        assert np.array_equal(forecast.likelihood, before.max(1, keepdims=True) - before)
        runtime.scheduler.set_priority(None)
        assert np.array_equal(forecast.likelihood, before)


# bad policies


class Answers:
    """A policy that answers what it was made with."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def adjust(self, layer: int, likelihood: Any) -> Any:
        return self.answer(likelihood)


def fails(likelihood: Any) -> Any:
    raise ZeroDivisionError("the agent has no state")


BAD = {
    "nan": (lambda row: row * np.nan, CoopError, "negative or not finite"),
    "infinite": (lambda row: row + np.inf, CoopError, "negative or not finite"),
    "negative": (lambda row: row - 1, CoopError, "negative or not finite"),
    "shape": (lambda row: row[:3], CoopError, r"answered \(3,\) for \(8,\) experts"),
    "raises": (fails, ZeroDivisionError, "no state"),
}


@pytest.mark.parametrize("kind", list(BAD))
def test_a_bad_policy_is_refused_at_once_and_the_one_before_stays(kind: str, tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    answer, error, match = BAD[kind]
    good = Upside()
    with coop.attach(tmp_path, budget="40%", prefetch=False) as runtime:
        expected = logits(runtime)
        runtime.scheduler.set_priority(good)
        before, calls = runtime.scheduler.forecast.likelihood.copy(), good.calls
        with pytest.raises(error, match=match):
            runtime.scheduler.set_priority(Answers(answer))
        assert np.array_equal(before, runtime.scheduler.forecast.likelihood)
        assert all(map(torch.equal, expected, logits(runtime)))
        assert good.calls > calls


@pytest.mark.parametrize("kind", list(BAD))
def test_a_policy_that_turns_bad_fails_its_call_and_leaves_the_runtime_usable(
    kind: str, tmp_path: Path
) -> None:
    build_family(tmp_path, "mixtral")
    answer, error, match = BAD[kind]
    with coop.attach(tmp_path, budget="40%", prefetch=False) as runtime:
        expected = logits(runtime)
        policy = Answers(lambda row: row)
        runtime.scheduler.set_priority(policy)
        policy.answer = answer
        with pytest.raises(error, match=match):
            logits(runtime)
        assert runtime.scheduler.residency.leased() == 0
        runtime.scheduler.set_priority(None)
        assert all(map(torch.equal, expected, logits(runtime)))


def test_a_scheduler_is_not_begun_with_a_policy_it_refuses(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="40%") as runtime:
        options = {"budget_bytes": 2**20, "strategy": runtime.plan.strategy, "ring_bytes": 2**16}
        before = {thread.name for thread in threading.enumerate()}
        with pytest.raises(CoopError, match="not finite"):
            Scheduler(
                [], runtime.scheduler._store, loader_threads=2, policy=Answers(lambda row: row - 1), **options
            )
        assert before == {thread.name for thread in threading.enumerate()}


# the script


def test_the_script_compares_its_variants_on_traces_and_refuses_what_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for mode in "ab":
        ids = np.concatenate([segment.ids for segment in two_modes(8, 20) if segment.mode == mode])
        np.savez(tmp_path / f"{mode}.npz", ids=ids.astype(np.uint8), n_experts=np.int32(EXPERTS))
    options = ["--segment-tokens", "20", "--first-tokens", "10", "--share", "0.5"]
    traces = ["--trace", str(tmp_path / "a.npz"), "--trace", str(tmp_path / "b.npz")]
    assert measure_priority.main([*traces, *options, "--json", str(tmp_path / "rows.json")]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| resident | policy | first 10 tokens | all tokens | loads | of them at a switch |"
    assert [line.split("|")[2].strip() for line in table[2:]] == [
        "forecast alone",
        "modes",
        "modes, loads at the switch",
        "modes drawn at random",
    ]
    (tmp_path / "b.npz").write_bytes(b"no trace")
    assert measure_priority.main([*traces, *options]) == 2
    assert "is no routing trace" in capsys.readouterr().err
