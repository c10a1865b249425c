"""Profiles merged, compared and held against traffic: whole numbers, refusals by name, and chance told from drift."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coop.divergence import chance, clumping, jensen_shannon, use_counts
from coop.errors import DataError, ProfileError
from coop.profile import PROFILE_NAME, Profile, main
from coop.profile_compare import compare, overlap
from coop.profile_drift import judge, traffic_of_profile, traffic_of_routes
from coop.profile_merge import merge
from coop.rehearsal import hit_rate
from coop.routes import Routes
from tests.unit.profiles import build_profile

LAYERS, EXPERTS, TOP_K = 4, 32, 4


def route(rng: np.random.Generator, domain: int, texts: int, tokens: int = 60) -> NDArray[np.int64]:
    """Routing [tokens, layers, top_k] with the habits of trained routers: a domain, a topic per text, stickiness."""
    taste = np.random.default_rng(domain).gumbel(size=(LAYERS, EXPERTS)) * 0.8
    out = np.zeros((texts * tokens, LAYERS, TOP_K), np.int64)
    for text in range(texts):
        topic = taste + 0.6 * rng.normal(size=(LAYERS, EXPERTS))
        used = np.zeros((LAYERS, EXPERTS))
        for token in range(tokens):
            scores = topic + 0.8 * used + rng.gumbel(size=(LAYERS, EXPERTS))
            chosen = np.argsort(-scores, axis=1)[:, :TOP_K]
            used = np.zeros((LAYERS, EXPERTS))
            np.put_along_axis(used, chosen, 1.0, axis=1)
            out[text * tokens + token] = chosen
    return out


def profile_of(ids: NDArray[np.int64], **changes: Any) -> Profile:
    """A profile that has seen `ids` as answer tokens."""
    counts, none = use_counts(ids, EXPERTS), np.zeros((LAYERS, EXPERTS), np.int64)
    same = np.zeros((LAYERS, EXPERTS, EXPERTS), np.int32)
    for layer in range(LAYERS):
        np.add.at(same[layer], (ids[:-1, layer, :, None], ids[1:, layer, None, :]), 1)
    fields: dict[str, Any] = {
        "hot_answer": counts,
        "tokens_answer": len(ids),
        "hot_prompt": none,
        "tokens_prompt": 0,
        "same_layer": same,
        "sample": ids[-2048:].astype(np.uint16),
    }
    return build_profile(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, **{**fields, **changes})


@pytest.fixture(scope="module")
def law() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rng = np.random.default_rng(1)
    return route(rng, domain=1, texts=40), route(rng, domain=1, texts=40)


@pytest.fixture(scope="module")
def prose() -> NDArray[np.int64]:
    return route(np.random.default_rng(2), domain=2, texts=40)


# rehearsal


def test_everything_hits_where_everything_fits_and_a_cold_memory_misses_once_each(law: Any) -> None:
    sample = law[0][:200].astype(np.uint16)
    assert hit_rate(sample, EXPERTS, 1.0, profile_of(law[0])) == 1.0
    distinct = sum(len(np.unique(sample[:, layer])) for layer in range(LAYERS))
    assert hit_rate(sample, EXPERTS, 1.0, None) == 1.0 - distinct / sample.size


def test_more_memory_and_a_seed_of_the_same_domain_hit_more(law: Any, prose: Any) -> None:
    sample = law[1][:64].astype(np.uint16)
    seeds = {"own": profile_of(law[0]), "foreign": profile_of(prose), "cold": None}
    rates = {name: hit_rate(sample, EXPERTS, 0.25, seed) for name, seed in seeds.items()}
    assert rates["own"] > rates["foreign"] + 0.05 and rates["own"] > rates["cold"] + 0.02
    assert hit_rate(sample, EXPERTS, 0.5, seeds["own"]) > rates["own"] + 0.1


def test_a_memory_never_holds_less_than_one_tokens_experts_and_an_empty_sample_has_no_rate() -> None:
    same = np.tile(np.arange(4, dtype=np.uint16), (10, 1, 1))  # one layer, the same four experts
    assert hit_rate(same, 8, 0.01, None) == 1.0 - 4 / 40
    assert np.isnan(hit_rate(same[:0], 8, 0.5, None))


def test_seed_of_another_shape_is_refused(law: Any) -> None:
    with pytest.raises(ProfileError, match=r"\[3, 8, 2\] in the profile, \[4, 32, 4\] in the sample"):
        hit_rate(law[0][:5].astype(np.uint16), EXPERTS, 0.5, build_profile())


# divergence


def test_divergence_is_none_between_equals_and_one_bit_between_strangers() -> None:
    a = np.array([[4, 4, 0, 0], [1, 2, 3, 4]])
    np.testing.assert_allclose(jensen_shannon(a, 3 * a), [0.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(jensen_shannon(a[:1], np.array([[0, 0, 5, 1]])), [1.0])
    assert np.isnan(jensen_shannon(a[:1], np.zeros((1, 4)))).all()


def test_chance_shrinks_with_tokens_and_grows_with_clumps() -> None:
    shares = np.random.default_rng(0).dirichlet(np.ones(16), size=3)
    few, many = (np.round(shares * n).astype(np.int64) + 1 for n in (500, 50_000))
    assert chance(few, few, 1.0)[0].mean() > 20 * chance(many, many, 1.0)[0].mean()
    assert chance(few, few, 8.0)[0].mean() > 4 * chance(few, few, 1.0)[0].mean()
    mean, limit = chance(few, few, 1.0)
    assert (limit > mean).all()


def test_clumps_are_seen_in_texts_with_topics_and_not_in_shuffled_tokens(law: Any) -> None:
    ids = law[0][:1920]
    shuffled = np.random.default_rng(0).permutation(ids)
    assert clumping(shuffled, EXPERTS) < 1.5 < 2 < clumping(ids, EXPERTS)
    assert np.isnan(clumping(ids[:100], EXPERTS))


# merge


def test_merged_counts_are_the_sums_and_still_whole(tmp_path: Path) -> None:
    a, b = build_profile(seed=1), build_profile(seed=2)
    merged = merge([a, b])
    for name in ("hot_prompt", "hot_answer", "train_prompt", "train_answer", "same_layer", "next_layer"):
        np.testing.assert_array_equal(getattr(merged, name), getattr(a, name) + getattr(b, name))
    assert (merged.tokens_answer, merged.warmups, merged.train_seconds) == (40, 4, 200.0)
    np.testing.assert_array_equal(merged.compute_ms, np.minimum(a.compute_ms, b.compute_ms))
    assert Profile.load(merged.save(tmp_path)).tokens_prompt == 60


def test_weights_are_shares_of_the_merged_tokens_however_many_each_has_seen() -> None:
    big = profile_of(np.tile(np.arange(TOP_K), (2400, LAYERS, 1)))
    small = profile_of(np.tile(np.arange(TOP_K) + 8, (130, LAYERS, 1)))
    merged = merge([big, small], [3, 1])
    share = merged.hot_answer[:, :TOP_K].sum() / merged.hot_answer.sum()
    assert share == pytest.approx(0.75, abs=0.01)
    unweighted = merge([big, small])
    assert unweighted.hot_answer[0, 0] == 2400 and unweighted.hot_answer[0, 8] == 130
    assert (merged.hot_answer.sum(axis=1) == merged.tokens_answer * TOP_K).all()


def test_merged_with_a_larger_profile_never_overflows_the_transitions() -> None:
    full = build_profile(same_layer=np.full((3, 8, 8), 2**31 - 1, np.int32))
    assert (merge([full, full]).same_layer == 2**31 - 1).all()


def test_timings_of_other_hardware_or_other_row_counts_are_left() -> None:
    a = build_profile(compute_ms=np.full((3, 8, 2), np.nan, np.float32))
    foreign = build_profile(fingerprint="other")
    other_rows = build_profile(row_counts=np.array([1, 4], np.int32))
    assert np.isnan(merge([a, foreign, other_rows]).compute_ms).all()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("architecture", "OlmoeForCausalLM", "architecture differ"),
        ("router_digest", "x", "router weights differ"),
        ("tokenizer_digest", "x", "tokenizers differ"),
        ("layers", ("a", "b", "c"), "mixture-of-experts layers differ"),
    ],
)
def test_profiles_of_different_models_are_not_merged_nor_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: Any, reason: str
) -> None:
    a = build_profile()
    b = replace(a, identity=replace(a.identity, **{field: value}))
    with pytest.raises(ProfileError, match=f"profile 2 cannot be merged with profile 1: {reason}"):
        merge([a, b])
    files = [str(p.save(tmp_path / f"{i}.safetensors")) for i, p in enumerate((a, b))]
    for command in (["merge", *files, "--out", str(tmp_path / "c")], ["diff", *files]):
        assert main(command) == 2
        assert reason in capsys.readouterr().err
    assert main(["drift", files[0], "--against", files[1]]) == 2
    assert reason in capsys.readouterr().err and not (tmp_path / "c").exists()


def test_digest_that_the_first_does_not_know_is_still_compared_among_the_others() -> None:
    a = build_profile()
    unknown = replace(a, identity=replace(a.identity, router_digest=""))
    other = replace(a, identity=replace(a.identity, router_digest="y" * 64))
    assert merge([unknown, a]).identity.router_digest == "r" * 64
    with pytest.raises(ProfileError, match="router digests of the profiles differ"):
        merge([unknown, a, other])


def test_profiles_of_different_adapters_merge_into_one_for_any_of_them() -> None:
    a = build_profile()
    b = replace(a, identity=replace(a.identity, adapter_digest="b" * 64))
    assert merge([a, b]).identity.adapter_digest == "" and merge([a, a]).identity.adapter_digest == "a" * 64


@pytest.mark.parametrize(
    ("weights", "reason"),
    [("1", "1 weights for 2"), ("1,0", "above 0"), ("1,nan", "above 0"), ("1,1e30", "too far apart")],
)
def test_weights_that_cannot_be_had_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: str, reason: str
) -> None:
    file = str(build_profile().save(tmp_path))
    assert main(["merge", file, file, "--out", str(tmp_path / "c"), "--weights", weights]) == 2
    assert reason in capsys.readouterr().err


def test_merge_writes_a_file_or_into_a_folder_and_replaces_nothing_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(build_profile().save(tmp_path))
    (tmp_path / "folder").mkdir()
    for out in (tmp_path / "folder", tmp_path / "both.safetensors"):
        command = ["merge", file, file, "--out", str(out)]
        assert main(command) == 0
        assert "2 profiles, 100 tokens, 40 of them answers" in capsys.readouterr().out
        assert main(command) == 2
        assert "add --overwrite" in capsys.readouterr().err
        assert main([*command, "--overwrite"]) == 0
    assert Profile.load(tmp_path / "folder" / PROFILE_NAME).tokens_answer == 40
    assert main(["merge", file, "--out", str(tmp_path / "x")]) == 2
    assert "name two profiles" in capsys.readouterr().err


# diff


def test_diff_names_the_experts_that_moved_and_what_a_wrong_seed_costs(law: Any, prose: Any) -> None:
    facts = compare(profile_of(law[0]), profile_of(prose))
    assert facts["top"] == 8 and facts["tokens"] == "answer"
    assert facts["divergence_bits"] > 10 * facts["by_chance_bits"]
    for rates in facts["hit_rates"]:
        assert rates["at_25"]["own"] > rates["at_25"]["other"] + 0.05
    mover = facts["layers"][0]["movers"][0]
    assert abs(mover["share_after"] - mover["share_before"]) > 0.02


def test_overlap_is_the_share_of_common_hottest_experts() -> None:
    a, b = np.array([9, 8, 7, 0, 0, 0]), np.array([9, 0, 0, 0, 8, 7])
    assert overlap(a, b, 3) == pytest.approx(1 / 3) and overlap(a, a, 3) == 1.0


def test_diff_prints_a_table_json_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(build_profile(seed=i).save(tmp_path / f"{i}.safetensors")) for i in (1, 2)]
    assert main(["diff", *files]) == 0
    shown = capsys.readouterr().out
    assert "answer tokens: mean divergence" in shown and "taken as independent" in shown
    assert main(["diff", *files, "--json", "--top", "2", "--plot", str(tmp_path / "d.png")]) == 0
    assert json.loads(capsys.readouterr().out)["top"] == 2
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")
    assert main(["diff", *files, "--top", "-1"]) == 2


def test_profiles_with_no_kind_of_token_in_common_cannot_be_compared() -> None:
    none = np.zeros((3, 8), np.int64)
    prompts = build_profile(hot_answer=none, tokens_answer=0)
    answers = build_profile(hot_prompt=none, tokens_prompt=0)
    with pytest.raises(ProfileError, match="nothing to compare"):
        compare(prompts, answers)


def test_another_router_is_compared_only_where_that_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = build_profile()
    b = replace(a, identity=replace(a.identity, router_digest="x"))
    files = [str(p.save(tmp_path / f"{i}.safetensors")) for i, p in enumerate((a, b))]
    assert main(["diff", *files]) == 2
    assert main(["diff", *files, "--any-router"]) == 0


# drift


def test_other_texts_of_the_same_domain_are_no_drift_and_another_domain_is(law: Any, prose: Any) -> None:
    profile = profile_of(law[0])
    for ids, verdicts in ((law[1], {"right", "shifted"}), (prose, {"drifted"})):
        for traffic in (
            traffic_of_profile(profile, profile_of(ids)),
            traffic_of_routes(profile, Routes(ids, EXPERTS)),
        ):
            facts = judge(profile, traffic)
            assert facts["verdict"] in verdicts, facts["reason"]
    assert facts["loss"] > 0.02


def test_independent_tokens_of_one_source_are_within_chance() -> None:
    rng = np.random.default_rng(3)
    scores = rng.gumbel(size=(LAYERS, EXPERTS)) + rng.gumbel(size=(2, 1500, LAYERS, EXPERTS))
    halves = np.argsort(-scores, axis=3)[..., :TOP_K]
    profile, other = profile_of(halves[0]), profile_of(halves[1])
    assert judge(profile, traffic_of_profile(profile, other))["verdict"] == "right"


def test_few_tokens_tell_nothing(law: Any) -> None:
    profile = profile_of(law[0])
    facts = judge(profile, traffic_of_profile(profile, profile_of(law[1][:100])))
    assert facts["verdict"] == "unknown" and "100 tokens are too few, 256 are needed" in facts["reason"]


def test_drift_command_ends_with_the_verdict_and_exits_with_1_for_drift(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], law: Any, prose: Any
) -> None:
    profile = str(profile_of(law[0]).save(tmp_path / "law.safetensors"))
    for name, ids, status in (("same", law[1], 0), ("prose", prose, 1)):
        routes = tmp_path / f"{name}.npz"
        np.savez(routes, ids=ids.astype(np.uint8), n_experts=EXPERTS)
        assert main(["drift", profile, "--against", str(routes)]) == status
        assert capsys.readouterr().out.splitlines()[-1].startswith("verdict: ")
    assert main(["drift", profile, "--against", str(routes), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "drifted"


def test_routes_of_another_shape_are_refused(tmp_path: Path, law: Any) -> None:
    with pytest.raises(ProfileError, match=r"\[3, 8, 2\] in the profile, \[4, 32, 4\] in the routes"):
        traffic_of_routes(build_profile(), Routes(law[0], EXPERTS))
    with pytest.raises(ProfileError, match="name an expert twice"):
        traffic_of_routes(build_profile(), Routes(np.ones((4, 3, 2), np.int64), 8))


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"ids": np.zeros((3, 2), np.uint8), "n_experts": 4}, "not whole numbers"),
        ({"ids": np.full((3, 2, 2), 9, np.uint8), "n_experts": 4}, "outside 0 to 3"),
        ({"ids": np.ones((3, 2, 2), np.uint8)}, r"not an \.npz trace"),
        ({"ids": np.array([object()]), "n_experts": 4}, r"not an \.npz trace"),
    ],
)
def test_routes_that_are_none_are_refused(tmp_path: Path, arrays: dict[str, Any], reason: str) -> None:
    np.savez(tmp_path / "r.npz", **arrays)
    with pytest.raises(DataError, match=reason):
        Routes.load(tmp_path / "r.npz")


@given(st.data())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_routes_end_in_a_data_error_or_valid_routes(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "r.npz"
    np.savez(file, ids=np.arange(8, dtype=np.uint8).reshape(2, 1, 4), n_experts=8)
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    file.write_bytes(content)
    try:
        assert Routes.load(file).ids.ndim == 3
    except DataError as exc:
        assert "r.npz" in str(exc)  # noqa: PT017 - valid routes are an answer too


def test_routes_that_unpack_to_too_much_are_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "r.npz", ids=np.zeros((1000, 100, 1), np.uint8), n_experts=4)
    monkeypatch.setattr("coop.routes.MAX_UNPACKED_BYTES", 50_000)
    with pytest.raises(DataError, match="more than the limit of 50000"):
        Routes.load(tmp_path / "r.npz")
    (tmp_path / "r.npz").write_bytes(b"PK\x03\x04 not an archive")
    with pytest.raises(DataError, match=r"not an \.npz trace"):
        Routes.load(tmp_path / "r.npz")
    with pytest.raises(DataError, match="No such file"):
        Routes.load(tmp_path / "none.npz")
