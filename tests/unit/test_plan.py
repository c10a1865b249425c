"""Plan and budget: one dial, refused with the smallest that runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coop
from coop.errors import BudgetError
from coop.plan import format_bytes, parse_budget
from coop.strategy import STRATEGIES
from tests.families import build_family


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1024", 1024),
        ("6GiB", 6 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("500MB", 500_000_000),
        ("2mib", 2 * 2**20),
        ("50%", 500),
        ("12.5%", 125),
        ("100%", 1000),
        ("auto", 777),
        (4096, 4096),
    ],
)
def test_budgets_are_read_as_people_write_them(text: str | int, nbytes: int) -> None:
    assert parse_budget(text, expert_bytes=1000, auto_bytes=777) == nbytes


@pytest.mark.parametrize(
    "text", ["", "-1", "nan", "inf", "1e9", "6XB", "GiB", "50 %%", "101%", "0x10", "6 Gi B"]
)
def test_other_budgets_are_refused_with_the_forms_that_work(text: str) -> None:
    with pytest.raises(BudgetError, match="budget"):
        parse_budget(text, expert_bytes=1000, auto_bytes=777)


@given(st.text(max_size=30))
def test_no_text_makes_the_budget_parser_fail_otherwise(text: str) -> None:
    with contextlib.suppress(BudgetError):
        assert parse_budget(text, 1000, 777) >= 0


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (2**20, "1.0 MiB"), (3 * 2**29, "1.5 GiB")]
)
def test_bytes_are_shown_in_the_unit_that_fits(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_a_budget_below_top_k_is_refused_with_the_smallest_that_runs_and_that_one_runs(
    tmp_path: Path,
) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="100%") as runtime:
        smallest = runtime.plan.smallest_bytes
    with pytest.raises(BudgetError, match=rf"layer 0 needs 2 x .*the smallest that runs is {smallest} bytes"):
        coop.attach(tmp_path, budget=smallest - 1)
    with coop.attach(tmp_path, budget=smallest) as runtime:
        runtime.model(input_ids=torch.arange(3, 50)[None])
        assert runtime.stats().resident_bytes_max <= smallest
        assert "below the experts of one token" in " ".join(runtime.plan.warnings)


def test_a_bare_small_number_is_taken_for_a_forgotten_percent_sign(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with pytest.raises(BudgetError, match=r"did you mean 50%\?"):
        coop.attach(tmp_path, budget="50")


def test_a_live_model_keeps_its_weights_when_the_budget_is_refused(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    with pytest.raises(BudgetError):
        coop.attach(model, tmp_path, budget=1)
    assert model(input_ids=torch.arange(3, 9)[None]).logits.isfinite().all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_puts_its_own_numbers_in_force(strategy: str, tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="auto", strategy=strategy) as runtime:
        assert runtime.scheduler.strategy is STRATEGIES[strategy]
        assert strategy in runtime.plan.render()
        runtime.model(input_ids=torch.arange(3, 50)[None])
        assert runtime.scheduler.wait_idle(5)
        guesses = runtime.scheduler.loads["speculative_loads"]
    assert (guesses == 0) == (STRATEGIES[strategy].prefetch_experts == 0)


def test_without_prefetch_nothing_is_read_that_was_not_asked_for(tmp_path: Path) -> None:
    build_family(tmp_path, "mixtral")
    with coop.attach(tmp_path, budget="100%", prefetch=False) as runtime:
        runtime.model(input_ids=torch.arange(3, 50)[None])
        assert runtime.scheduler.wait_idle(5)
        assert runtime.scheduler.loads["speculative_loads"] == 0
        assert "prefetch off" in runtime.plan.render()


def test_a_prompt_fetches_each_expert_at_most_once_for_each_layer(tmp_path: Path) -> None:
    build_family(tmp_path, "qwen3_moe")
    for budget in ("20%", "50%"):
        with coop.attach(tmp_path, budget=budget, prefetch=False) as runtime:
            runtime.model(input_ids=torch.randint(3, 96, (1, 200)), use_cache=False)
            stats, loads = runtime.stats(), runtime.scheduler.loads
        assert loads["demand_loads"] == stats.misses_prefill <= 3 * 8
