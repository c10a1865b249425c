"""HotMap counts exactly, against a recount with plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coop.errors import ProfileError
from coop.hotmap import ANSWER, PADDING, PROMPT, HotMap, RoutedBatch
from tests.unit.profiles import build_profile

LAYERS, EXPERTS, TOP_K = 3, 5, 2


def random_batch(seed: int, tokens: int = 17) -> RoutedBatch:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(LAYERS, tokens, EXPERTS, generator=generator)
    kinds = torch.randint(0, 3, (tokens,), generator=generator)
    follows = torch.rand(tokens, generator=generator) > 0.3
    follows[0] = False
    follows[1:] &= (kinds[1:] != PADDING) & (kinds[:-1] != PADDING)
    follows &= kinds != PADDING
    return RoutedBatch(scores.topk(TOP_K).indices, kinds, follows, True)


def recount(batches: list[RoutedBatch]) -> dict[str, np.ndarray]:
    """The same counts with one loop iteration for each use of an expert."""
    counts = {
        PROMPT: np.zeros((LAYERS, EXPERTS), np.int64),
        ANSWER: np.zeros((LAYERS, EXPERTS), np.int64),
    }
    same = np.zeros((LAYERS, EXPERTS, EXPERTS), np.int64)
    following = np.zeros((LAYERS - 1, EXPERTS, EXPERTS), np.int64)
    for batch in batches:
        for token, kind in enumerate(batch.kinds.tolist()):
            if kind == PADDING:
                continue
            for layer in range(LAYERS):
                for expert in batch.indices[layer, token].tolist():
                    counts[kind][layer, expert] += 1
                    if batch.follows[token]:
                        for before in batch.indices[layer, token - 1].tolist():
                            same[layer, before, expert] += 1
                    for after in batch.indices[layer + 1, token].tolist() if layer + 1 < LAYERS else []:
                        following[layer, expert, after] += 1
    return {"prompt": counts[PROMPT], "answer": counts[ANSWER], "same_layer": same, "next_layer": following}


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=4))
@settings(deadline=None, max_examples=25)
def test_counts_and_transitions_equal_a_recount(seeds: list[int]) -> None:
    batches = [random_batch(seed) for seed in seeds]
    hotmap = HotMap(LAYERS, EXPERTS, TOP_K)
    for batch in batches:
        hotmap.record(batch)
    counts = hotmap.read()
    for name, expected in recount(batches).items():
        np.testing.assert_array_equal(getattr(counts, name), expected)
    assert counts.tokens_prompt == sum(int((b.kinds == PROMPT).sum()) for b in batches)
    assert (counts.answer.sum(axis=1) == counts.tokens_answer * TOP_K).all()


def test_indices_outside_the_layer_are_not_counted() -> None:
    indices = torch.tensor([[[0, EXPERTS], [1, -1], [2, 3]]] * LAYERS)
    hotmap = HotMap(LAYERS, EXPERTS, TOP_K)
    hotmap.record(RoutedBatch(indices, torch.tensor([PROMPT] * 3), torch.tensor([False, True, True]), True))
    counts = hotmap.read()
    np.testing.assert_array_equal(counts.prompt, [[1, 1, 1, 1, 0]] * LAYERS)
    np.testing.assert_array_equal(counts.sample, [[[2, 3]] * LAYERS])


def test_sample_keeps_the_latest_tokens_in_order_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coop.hotmap.MAX_SAMPLE_TOKENS", 20)
    batches = [random_batch(seed) for seed in range(5)]
    hotmap = HotMap(LAYERS, EXPERTS, TOP_K)
    for batch in batches:
        hotmap.record(batch)
    expected = torch.cat([b.indices[:, b.kinds != PADDING] for b in batches[-2:]], dim=1).transpose(0, 1)
    np.testing.assert_array_equal(hotmap.read().sample, expected[-20:].numpy())


def test_rows_are_those_of_used_experts_in_a_call() -> None:
    hotmap = HotMap(1, 3, 1)
    for rows in ([0] * 4 + [1], [2] * 9):
        tokens = len(rows)
        follows = torch.zeros(tokens, dtype=torch.bool)
        indices = torch.tensor(rows).reshape(1, tokens, 1)
        hotmap.record(RoutedBatch(indices, torch.full((tokens,), PROMPT), follows, True))
    np.testing.assert_array_equal(hotmap.read().rows, [[4, 9, 9]])


def test_recent_answers_fade_with_the_answers_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coop.hotmap.RECENT_HALF_LIFE_TOKENS", 4)
    hotmap = HotMap(1, 2, 1)
    for expert in (0, 1):
        indices = torch.full((1, 4, 1), expert)
        hotmap.record(RoutedBatch(indices, torch.full((4,), ANSWER), torch.zeros(4, dtype=torch.bool), True))
    np.testing.assert_allclose(hotmap.read().recent_answer, [[2.0, 4.0]])


def test_transitions_are_left_empty_above_256_experts() -> None:
    hotmap = HotMap(2, 300, 1)
    follows = torch.tensor([False, True])
    hotmap.record(
        RoutedBatch(torch.tensor([[[299], [1]], [[0], [2]]]), torch.tensor([ANSWER, ANSWER]), follows, True)
    )
    counts = hotmap.read()
    assert counts.same_layer.shape == (2, 0, 0) and counts.next_layer.shape == (1, 0, 0)
    assert counts.answer[0, 299] == 1


def test_counts_are_exact_under_bfloat16_autocast() -> None:
    tokens = 1000  # bfloat16 cannot count beyond 256
    hotmap = HotMap(1, 2, 1)
    with torch.autocast("cpu", torch.bfloat16):
        batch = RoutedBatch(
            torch.zeros(1, tokens, 1, dtype=torch.int64),
            torch.full((tokens,), PROMPT),
            torch.ones(tokens, dtype=torch.bool),
            True,
        )
        hotmap.record(batch)
    assert hotmap.read().prompt.tolist() == [[tokens, 0]]


def test_restored_counts_continue_where_the_profile_ended() -> None:
    profile = build_profile(layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
    hotmap = HotMap(LAYERS, EXPERTS, TOP_K)
    hotmap.restore(profile)
    batch = random_batch(1)
    hotmap.record(batch)
    counts = hotmap.read()
    np.testing.assert_array_equal(counts.prompt, profile.train_prompt + recount([batch])["prompt"])
    np.testing.assert_array_equal(counts.same_layer, profile.same_layer + recount([batch])["same_layer"])
    assert counts.tokens_answer == profile.train_tokens_answer + int((batch.kinds == ANSWER).sum())


def test_a_profile_of_another_shape_is_not_restored() -> None:
    with pytest.raises(ProfileError, match=r"\[3, 5, 2\] in the profile, \[3, 6, 2\] in the model"):
        HotMap(LAYERS, 6, TOP_K).restore(build_profile(layers=LAYERS, experts=EXPERTS, top_k=TOP_K))


def test_reading_sums_over_processes_with_the_given_function() -> None:
    hotmap = HotMap(LAYERS, EXPERTS, TOP_K)
    hotmap.record(random_batch(0))
    alone, doubled = hotmap.read(), hotmap.read(lambda tensor: tensor * 2)
    np.testing.assert_array_equal(doubled.prompt, 2 * alone.prompt)
    assert doubled.tokens_answer == 2 * alone.tokens_answer
    np.testing.assert_array_equal(hotmap.read().prompt, alone.prompt)
