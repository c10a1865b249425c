"""Warmup: on schedule, within its share, over every expert in the end, and from where it stopped after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coop.adapters.transformers import ExpertsModule
from coop.ids import ExpertId
from coop.profile import Profile
from coop.scheduler import WarmupReport
from tests.families import build_family
from tests.train.test_training import train, train_until_killed
from tests.train.tiny import build_recipe
from tests.unit.profiles import build_profile
from train.schema import CoopSection, WarmupSection
from train.watching.callback import CoopCallback
from train.watching.warmup import Warmup, is_whole

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
LAYERS, EXPERTS = 3, 4


class FakeScheduler:
    """Times each expert at a whole second, and stops where a limit says so."""

    def __init__(self, row_counts: int = 1) -> None:
        self.timed: list[list[ExpertId]] = []
        self.calendar = SimpleNamespace(table=lambda: [{"load_ms": ms} for ms in (0.0, 2.5, 1.0)])

    def warmup(
        self, row_counts: Sequence[int], repeats: int, max_seconds: float, experts: Sequence[ExpertId]
    ) -> WarmupReport:
        done = list(experts[: int(max_seconds)])
        compute_ms = np.full((LAYERS, EXPERTS, len(row_counts)), np.nan, dtype=np.float32)
        for expert in done:
            compute_ms[expert] = 1.0 + expert.expert
        self.timed.append(done)
        return WarmupReport(tuple(row_counts), compute_ms, float(len(done)), len(done))


def build_warmup(**settings: Any) -> tuple[Warmup, FakeScheduler, list[str]]:
    experts = [ExpertsModule(f"layers.{i}", nn.Module(), EXPERTS, 2, i) for i in range(LAYERS)]
    scheduler, said = FakeScheduler(), []
    values = {"every_steps": 10, "row_counts": [1], "max_seconds": 5.0, **settings}
    section = WarmupSection.model_validate(values)
    return Warmup(section, experts, scheduler, said.append), scheduler, said  # type: ignore[arg-type]


def test_it_runs_at_its_steps_only() -> None:
    warmup, scheduler, _ = build_warmup()
    for step in range(1, 31):
        warmup.at_step(step, 10_000.0)
    assert [len(timed) for timed in scheduler.timed] == [5, 5, 5]
    never, scheduler, _ = build_warmup(every_steps=0)
    never.at_step(100, 10_000.0)
    never.at_end(100, 10_000.0)
    assert scheduler.timed == []


def test_each_goes_on_where_the_last_one_stopped_until_every_expert_is_timed() -> None:
    warmup, scheduler, said = build_warmup()
    for step in (10, 20, 30):
        warmup.at_step(step, 10_000.0)
    order = [ExpertId(layer, expert) for expert in range(EXPERTS) for layer in range(LAYERS)]
    assert [expert for timed in scheduler.timed for expert in timed][:12] == order
    assert not np.isnan(warmup.compute_ms).any()
    assert said[0] == (
        "warm-up at step 10: 5 of 12 experts in 5.00 s, 1.000 ms each at 1 row; the next goes on at layer 2, expert 1"
    )


def test_scheduled_ones_stay_within_their_share_of_the_training_time() -> None:
    warmup, scheduler, said = build_warmup(max_share=0.02)
    warmup.at_step(10, 100.0)  # 2 s allowed
    warmup.at_step(20, 120.0)  # 2.4 s allowed, 2 s spent, an expert takes 1 s
    warmup.at_step(30, 300.0)  # 6 s allowed, 2 s spent
    assert [len(timed) for timed in scheduler.timed] == [2, 4]
    assert "warm-up at step 20 postponed" in said[1] and "2.400 s so far, 2.000 s were spent" in said[1]
    assert warmup.seconds <= 0.02 * 300.0


def test_what_was_not_reached_is_made_up_after_the_last_step_within_the_share() -> None:
    warmup, scheduler, said = build_warmup()
    warmup.at_end(7, 200.0)
    assert [len(timed) for timed in scheduler.timed] == [4]
    assert "8 of 12 experts were not timed" in said[-1]
    warmup.at_end(7, 10_000.0)
    warmup.at_end(7, 10_000.0)
    assert not np.isnan(warmup.compute_ms).any()
    before = len(scheduler.timed)
    warmup.at_end(8, 20_000.0)
    assert len(scheduler.timed) == before


def test_at_start_and_at_end_ask_for_no_share() -> None:
    warmup, scheduler, _ = build_warmup(at_start=True, at_end=True, max_seconds=12.0, every_steps=0)
    warmup.at_start(0)
    warmup.at_start(0)  # everything is timed: a resumed run goes without
    warmup.at_end(5, 0.0)
    assert [len(timed) for timed in scheduler.timed] == [12, 12]


def test_only_the_layers_that_are_named_are_timed() -> None:
    warmup, scheduler, _ = build_warmup(layers=[0, 2], max_seconds=100.0)
    warmup.at_step(10, 10_000.0)
    assert {expert.layer for expert in scheduler.timed[0]} == {0, 2} and len(scheduler.timed[0]) == 8
    assert np.isnan(warmup.compute_ms[1]).all()
    warmup.at_end(11, 10_000.0)
    assert len(scheduler.timed) == 1


def test_it_goes_on_from_a_profile_and_leaves_timings_of_other_hardware() -> None:
    times = np.full((LAYERS, EXPERTS, 1), 7.0, dtype=np.float32)
    profile = build_profile(
        layers=LAYERS,
        experts=EXPERTS,
        row_counts=np.array([1], np.int32),
        compute_ms=times,
        warmups=3,
        warmup_seconds=4.0,
        warmup_next=8,
    )
    for is_same in (True, False):
        warmup, scheduler, _ = build_warmup(max_seconds=1.0)
        warmup.restore(profile, is_same)
        assert np.isnan(warmup.compute_ms).all() != is_same
        warmup.at_step(10, 10_000.0)
        assert scheduler.timed == [[ExpertId(2, 2)]]
        assert (warmup.count, warmup.seconds, warmup.next) == (4, 5.0, 9)


def test_experts_that_are_not_whole_here_are_not_timed_and_that_is_said_once(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    said: list[str] = []
    settings = CoopSection.model_validate({"warmup": {"every_steps": 1, "at_end": True}})
    callback = CoopCallback(model, None, settings, said.append)
    for entry in callback._experts:
        assert is_whole(entry.module)
        for name in entry.parameters:
            entry.module._parameters[name] = nn.Parameter(torch.empty(0))
        assert not is_whole(entry.module)
    for step in (1, 2):
        callback.warmup.at_step(step, 10_000.0)
    assert said == [
        "no warm-up: this process does not hold whole experts; they are timed at the first start of inference"
    ]


def test_experts_that_a_scheduler_serves_are_timed_through_it_with_their_load_times(tmp_path: Path) -> None:
    model = build_family(tmp_path / "model", "mixtral")
    scheduler: Any = FakeScheduler()
    settings = CoopSection.model_validate({"warmup": {"at_end": True, "row_counts": [1], "max_seconds": 100}})
    callback = CoopCallback(model, None, settings, scheduler=scheduler)
    callback.warmup.compute_ms = np.full((LAYERS, 8, 1), np.nan, dtype=np.float32)
    scheduler.warmup = lambda rows, repeats, seconds, experts: WarmupReport(
        tuple(rows), np.full((LAYERS, 8, 1), 3.0, np.float32), 1.0, len(experts)
    )
    for entry in callback._experts:
        for name in entry.parameters:
            entry.module._parameters[name] = nn.Parameter(torch.empty(0))
    callback.on_train_end(None, SimpleNamespace(global_step=4), None)  # type: ignore[arg-type]
    profile = callback.build_profile(tmp_path, 4, lambda tensor: tensor)
    assert (profile.compute_ms == 3.0).all() and profile.warmups == 1
    np.testing.assert_array_equal(profile.load_ms, np.array([np.nan, 2.5, 1.0], np.float32))


def test_resumed_run_goes_on_with_warm_ups_where_the_checkpoint_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = build_recipe(tmp_path, "coop.warmup.every_steps=2", "coop.warmup.max_share=1.0")
    train_until_killed(recipe, 5, monkeypatch)
    kept = Profile.load(Path(recipe.output) / "checkpoint-4")
    assert kept.warmups == 2 and kept.train_seconds > 0
    seen: list[tuple[int, float, int]] = []
    original = Warmup.restore

    def restore(self: Warmup, profile: Profile, is_same: bool) -> None:
        original(self, profile, is_same)
        seen.append((self.count, self.seconds, self.next))

    monkeypatch.setattr(Warmup, "restore", restore)
    output = train(recipe, resume=Path())
    assert seen == [(kept.warmups, kept.warmup_seconds, kept.warmup_next)]
    done = Profile.load(output)
    assert done.warmups == 3 and done.train_seconds > kept.train_seconds
