"""The report of a run: pictures of what happened, and one page that needs nothing beside it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.tiny import build_recipe
from tests.unit.profiles import build_profile
from train.watching.expert_scalars import MAX_LAYER_KEYS, ExpertScalars, balance_scalars
from train.watching.pictures import run_pictures
from train.watching.report import Finished, final_scalars, render_summary, write_report

RECORDS: list[dict[str, Any]] = [
    {"step": 0, "eval_loss": 3.0},
    {"step": 1, "loss": 3.0},
    {"step": 2, "loss": None},
    {"step": 2, "experts/busiest_over_mean": 2.0, "experts/hit_rate_25": 0.5, "experts/hit_rate_50": 0.7},
    {"step": 3, "loss": 2.0},
]


def summary(profile: Any, name: str = "run") -> dict[str, Any]:
    return {
        "name": name,
        "steps": 3,
        "steps_here": 3,
        "train_loss_first": 3.0,
        "train_loss_last": 2.0,
        "eval_loss_before": 3.0,
        "eval_loss_after": 2.5,
        "train_tokens": 100,
        "tokens_per_s": 10.0,
        "phases": {"training": 10.0},
        "profile": "out/coop_profile.safetensors" if profile else "",
        "profile_cost": {
            "warmups": 2,
            "warmup_seconds": 0.1,
            "counting_seconds": 0.05,
            "train_seconds": 10.0,
        },
        "final": final_scalars(profile) if profile else {},
        "wandb": "",
    }


class Page(HTMLParser):
    """Every tag and attribute of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("has_profile", [True, False])
def test_page_loads_nothing_runs_nothing_and_escapes_everything(tmp_path: Path, has_profile: bool) -> None:
    hostile = '<script>alert("x")</script><img src=http://example.org/x>&'
    profile = build_profile() if has_profile else None
    recipe = build_recipe(tmp_path, f"logging.wandb.project={hostile!r}")
    run = Finished(recipe, summary(profile, hostile), RECORDS, profile, f"sample {hostile}")
    write_report(run, tmp_path)
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object", "a", "form"})
    sources = [attributes["src"] for tag, attributes in page.tags if "src" in attributes]
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert len(sources) == (5 if has_profile else 1)
    assert page.text.count(hostile) == 4  # title, heading, opening and recipe
    assert "on" not in {name[:2] for _, attributes in page.tags for name in attributes}
    if has_profile:
        assert "2 warm-ups" in page.text and "1.00%" in page.text


def test_summary_tells_what_the_profile_cost_and_promises(tmp_path: Path) -> None:
    text = render_summary(summary(build_profile()), tmp_path)
    assert "2 warm-ups took 0.10 s, 1.0% of training, counting and logging 0.05 s, 0.5%" in text
    assert "with a quarter of the experts in memory" in text
    assert "predicted" not in render_summary(summary(None), tmp_path)


def test_a_picture_is_drawn_for_what_there_is_and_for_nothing_else() -> None:
    assert run_pictures([], None).keys() == {"report", "losses"}
    untimed = build_profile(compute_ms=np.full((3, 8, 2), np.nan, np.float32))
    assert run_pictures(RECORDS, untimed).keys() == {"report", "losses", "experts", "heatmap", "balance"}


def test_balance_of_even_use_is_one_and_dead_experts_are_counted() -> None:
    counts = np.array([[5, 5, 5, 5], [10, 10, 0, 0]], np.int64)
    values = balance_scalars(counts)
    assert values["experts/busiest_over_mean"] == 2.0
    assert values["experts/load_entropy"] == pytest.approx((1.0 + 0.5) / 2)
    assert values["experts/dead"] == 2.0


def test_scalars_are_of_the_tokens_since_the_last_record() -> None:
    scalars = ExpertScalars()
    before, after = build_profile(train_seconds=0.0), build_profile(train_seconds=0.0)
    assert scalars.take(before)["experts/busiest_over_mean"] > 1
    assert scalars.take(after) == {}
    more = np.zeros((3, 8), np.int64)
    more[:, :4] = 10
    after = build_profile(train_answer=before.train_answer + more, train_tokens_answer=220, train_seconds=0.0)
    values = scalars.take(after)
    assert values["experts/busiest_over_mean"] == 2.0 and values["experts/dead"] == 12.0
    assert "experts/hit_rate_50" not in values  # the first record has used up their share of no training time


def test_layers_have_keys_of_their_own_only_where_asked_and_not_without_end() -> None:
    assert not any("layer" in name for name in ExpertScalars().take(build_profile()))
    values = ExpertScalars(is_detailed=True).take(build_profile(layers=100))
    keys = [name for name in values if name.startswith("experts_layer_")]
    assert len(keys) == MAX_LAYER_KEYS and "experts_layer_63/dead" in keys
