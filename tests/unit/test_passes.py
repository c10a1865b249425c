"""PassForecast: the order of training's passes, and reads that an optimal cache could not save."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coop.forecast import Forecast
from coop.ids import ExpertId
from coop.passes import PassForecast
from coop.policy import UNLIMITED
from coop.residency import Residency
from coop.store import LayerGeometry, Slot
from coop.strategy import get_strategy

LAYERS, EXPERTS = 6, 8
ALL = np.arange(EXPERTS).reshape(-1, 2)
BALANCED = get_strategy("Balanced")


def passes(steps: int, is_checkpointed: bool = False) -> list[int]:
    """Layer calls of training: up, and down again; with checkpointing each layer is called twice on the way down."""
    down = [layer for layer in reversed(range(LAYERS)) for _ in range(1 + is_checkpointed)]
    return steps * [*range(LAYERS), *down]


def reads(forecast: Forecast, slots: int, calls: list[int]) -> list[int]:
    """Loads of each call when experts come one by one, as with a single loader and no guesses."""
    geometry = tuple(LayerGeometry(EXPERTS, 2, 1, 0) for _ in range(LAYERS))
    residency = Residency(
        geometry, slots, lambda layer: Slot(torch.empty(1, dtype=torch.uint8), {}), forecast.likelihood
    )
    counts = []
    for layer in calls:
        forecast.observe(layer, ALL)
        wanted = [ExpertId(layer, e) for e in range(EXPERTS)]
        hits = {lease.expert for lease in residency.lease_resident(wanted)}
        residency.release(*hits)
        missing = [e for e in wanted if e not in hits]
        for expert in missing:
            assert residency.reserve(expert, is_speculative=False, streams=UNLIMITED) is not None
            residency.publish(expert)
            residency.release(expert)
        counts.append(len(missing))
    return counts


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("slots", [8, 16, 24, 36])
def test_a_step_reads_what_does_not_fit_twice_and_no_more(slots: int, is_checkpointed: bool) -> None:
    per_step = len(passes(1, is_checkpointed))
    counts = reads(PassForecast(LAYERS, EXPERTS, BALANCED), slots, passes(4, is_checkpointed))
    last = sum(counts[-per_step:])
    # whatever stays must leave once on the way up and once on the way down; one layer passes through
    assert last <= 2 * (LAYERS * EXPERTS - slots) + 2 * EXPERTS
    assert last >= 2 * (LAYERS * EXPERTS - slots)


def test_use_counts_alone_would_read_more() -> None:
    calls = passes(4)
    ours = sum(reads(PassForecast(LAYERS, EXPERTS, BALANCED), 24, calls))
    plain = sum(reads(Forecast(LAYERS, EXPERTS, BALANCED), 24, calls))
    assert ours < plain


def test_what_comes_next_follows_the_direction() -> None:
    forecast, calls = PassForecast(LAYERS, EXPERTS, BALANCED), passes(3)
    for index, layer in enumerate(calls[: 2 * len(passes(1))]):
        forecast.observe(layer, ALL)
        if layer != calls[index - 1]:  # at a turn the direction shows with the second call
            following = [after for after, _ in forecast.upcoming(layer)]
            assert following == calls[index + 1 : index + 1 + len(following)]


def test_an_expert_that_its_layer_did_not_use_goes_first() -> None:
    forecast = PassForecast(LAYERS, EXPERTS, BALANCED)
    for layer in range(LAYERS):
        forecast.observe(layer, np.array([[0, 1], [2, 3]]))
    used, unused = forecast.likelihood[:, :4], forecast.likelihood[:, 4:]
    assert (used > unused).all()
