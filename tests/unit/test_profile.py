"""Profile: survives a round trip, and a damaged, foreign or hostile file is refused by name."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from coop.errors import ProfileError
from coop.profile import PROFILE_NAME, Profile, adapter_digest, main
from coop.profile_report import layer_balance
from tests.unit.profiles import build_profile

ROOT = Path(__file__).resolve().parents[2]


def rewrite(path: Path, change_facts: Any = None, change_arrays: Any = None) -> None:
    """Write the profile file again with other metadata or arrays, as someone hostile would."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    facts = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["coop"])
    profile = Profile.load(path)
    names = [n for n in profile.__slots__ if isinstance(getattr(profile, n), np.ndarray)]
    arrays = {name: getattr(profile, name) for name in names}
    if change_facts:
        change_facts(facts)
    if change_arrays:
        change_arrays(arrays)
    path.write_bytes(save(arrays, metadata={"coop": json.dumps(facts)}))


def test_round_trip_keeps_every_field(tmp_path: Path) -> None:
    profile = build_profile()
    assert profile.save(tmp_path) == tmp_path / PROFILE_NAME
    loaded = Profile.load(tmp_path)
    for field in dataclasses.fields(Profile):
        mine, other = getattr(profile, field.name), getattr(loaded, field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == other.dtype
            np.testing.assert_array_equal(mine, other)
        else:
            assert mine == other


def test_file_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = build_profile().save(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == [PROFILE_NAME]


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=PROFILE_NAME):
        Profile.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hot_answer": np.zeros((3, 8), np.int64)}, "hot_answer of layer 0 sums to 0, not 20 tokens x 2"),
        ({"hot_answer": np.zeros((3, 8), np.int32)}, r"hot_answer is int32 \[3, 8\], expected int64"),
        ({"rows": np.array([[3, 2, 9]] * 3, np.int32)}, "rows must be ordered"),
        ({"recent_answer": np.full((3, 8), np.nan, np.float32)}, "recent_answer"),
        ({"compute_ms": np.full((3, 8, 2), np.inf, np.float32)}, "compute_ms"),
        ({"load_ms": np.full(3, -1, np.float32)}, "load_ms has a value that is not a time"),
        ({"warmups": -1}, "warmups is -1"),
        ({"train_seconds": float("nan")}, "train_seconds"),
        ({"row_counts": np.array([8, 1], np.int32)}, "row_counts"),
        ({"sample": np.full((4, 3, 2), 8, np.uint16)}, "sample names expert 8 of 8"),
        ({"sample": np.zeros((3000, 3, 2), np.uint16)}, "3000 tokens, more than 2048"),
        ({"same_layer": np.full((3, 8, 8), -1, np.int32)}, "same_layer has a negative count"),
        ({"tokens_prompt": 2**60}, "tokens_prompt"),
        ({"step": -1}, "step is -1"),
        ({"step": 10**300}, r"step is 10{79}, not"),
        ({"fingerprint": "a\x1b[2J"}, "fingerprint is .* printable"),
        ({"warmup_seconds": float("inf")}, "warmup_seconds"),
    ],
)
def test_inconsistent_profile_cannot_exist(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ProfileError, match=reason):
        build_profile(**change)


def test_count_above_its_tokens_is_refused_even_if_the_sum_is_right() -> None:
    counts = np.zeros((3, 8), np.int64)
    counts[:, 0] = 40
    with pytest.raises(ProfileError, match="more than once by a token"):
        build_profile(hot_answer=counts)


def set_key(key: str, value: Any) -> Any:
    return lambda facts: facts.__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_key("schema", 3), "schema version 3; this coop reads versions 1 and 2"),
        (set_key("schema", 1), "'train_seconds' is not expected"),
        (set_key("warmup_next", -1), "warmup_next is -1"),
        (set_key("train_seconds", 10**400), "train_seconds is 10*$"),
        (set_key("schema", True), "schema version True"),
        (set_key("warmup_seconds", 10**400), "warmup_seconds is 10*$"),
        (
            lambda facts: facts["identity"].__setitem__("architecture", "a\nb"),
            "architecture is 'a.*printable",
        ),
        (
            lambda facts: facts["identity"].__setitem__("architecture", "\ud800"),
            "architecture is .*printable",
        ),
        (
            lambda facts: facts["identity"].__setitem__("layers", ["x" * 999] * 3),
            "name of a layer is .*printable",
        ),
        (set_key("extra", 1), "'extra' is not expected"),
        (lambda facts: facts.pop("step"), "'step' is missing"),
        (set_key("step", "40"), "step is '40', of the wrong type"),
        (set_key("step", True), "of the wrong type"),
        (lambda facts: facts["identity"].__setitem__("layers", [1, 2, 3]), "not a list of names"),
        (lambda facts: facts["identity"].__setitem__("num_experts", 10**9), "1000000000 experts"),
        (lambda facts: facts["identity"].__setitem__("top_k", 9), "9 experts per token of 8"),
    ],
)
def test_hostile_metadata_is_refused(tmp_path: Path, change: Any, reason: str) -> None:
    path = build_profile().save(tmp_path)
    rewrite(path, change_facts=change)
    with pytest.raises(ProfileError, match=reason):
        Profile.load(tmp_path)


def test_profile_of_an_earlier_version_is_read_without_what_it_did_not_know(tmp_path: Path) -> None:
    path = build_profile().save(tmp_path)

    def age(facts: dict[str, Any]) -> None:
        facts["schema"] = 1
        for name in ("warmups", "warmup_next", "train_seconds"):
            del facts[name]

    rewrite(path, age, lambda arrays: arrays.pop("load_ms"))
    old = Profile.load(path)
    assert (old.warmups, old.warmup_next, old.train_seconds) == (0, 0, 0.0)
    assert np.isnan(old.load_ms).all() and old.load_ms.shape == (3,)
    np.testing.assert_array_equal(old.hot_answer, build_profile().hot_answer)


def test_missing_and_extra_arrays_are_refused(tmp_path: Path) -> None:
    path = build_profile().save(tmp_path)
    original = path.read_bytes()
    rewrite(path, change_arrays=lambda arrays: arrays.pop("rows"))
    with pytest.raises(ProfileError, match="'rows' is missing"):
        Profile.load(path)
    path.write_bytes(original)
    rewrite(path, change_arrays=lambda arrays: arrays.__setitem__("payload", np.zeros(3)))
    with pytest.raises(ProfileError, match="'payload' is not expected"):
        Profile.load(path)


@given(st.data())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_bytes_end_in_a_profile_error_or_a_valid_profile(tmp_path: Path, data: st.DataObject) -> None:
    path = build_profile(layers=2, experts=4).save(tmp_path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(0, 3))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        Profile.load(path)
    except ProfileError as exc:
        assert PROFILE_NAME in str(exc)  # noqa: PT017 - a valid profile is an answer too


@given(st.data())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_spliced_headers_and_lengths_never_raise_anything_else_nor_take_memory(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = build_profile(layers=2, experts=4).save(tmp_path)
    content = bytearray(path.read_bytes())
    header = int.from_bytes(content[:8], "little") + 8
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header))
        kind = data.draw(st.sampled_from(["digits", "insert", "move", "length"]))
        if kind == "digits":
            content[at : at + 1] = data.draw(
                st.sampled_from([b"9" * 20, b"-", b"0", b"1e999", b"null", b"[", b'"'])
            )
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(max_size=12))
        elif kind == "move":
            start = data.draw(st.integers(0, header))
            content[at:at] = content[start : start + data.draw(st.integers(0, 200))]
        else:
            content[:8] = data.draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
    path.write_bytes(content)
    tracemalloc.start()
    try:
        Profile.load(path)
    except ProfileError as exc:
        assert PROFILE_NAME in str(exc) and len(str(exc)) < 2000  # noqa: PT017 - a valid profile is an answer too
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 2**20 + 64 * len(content)


def test_file_above_the_limit_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / PROFILE_NAME).open("wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(ProfileError, match="more than the limit"):
        Profile.load(tmp_path)


def test_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / PROFILE_NAME).symlink_to(PROFILE_NAME)
    for path in (tmp_path, tmp_path / PROFILE_NAME, tmp_path / "a\0b" / "c"):
        with pytest.raises(ProfileError):
            Profile.load(path)
    (tmp_path / PROFILE_NAME).unlink()
    build_profile().save(tmp_path)

    def deny(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", deny)
    with pytest.raises(ProfileError, match="cannot be read: Permission denied"):
        Profile.load(tmp_path)


def test_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    build_profile().save(tmp_path)
    (tmp_path / "a" / PROFILE_NAME).symlink_to(tmp_path / PROFILE_NAME)
    with pytest.raises(ProfileError, match="leads outside"):
        Profile.load(tmp_path / "a")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("architecture", "OlmoeForCausalLM", "architecture differ: profile MixtralForCausalLM, model Olmoe"),
        ("layers", ("a",), "mixture-of-experts layers differ"),
        ("num_experts", 16, "number of experts differ: profile 8, model 16"),
        ("router_digest", "x", "router weights differ"),
        ("adapter_digest", "x", "adapter weights differ"),
        ("tokenizer_digest", "x", "tokenizers differ"),
    ],
)
def test_check_says_what_differs(field: str, value: Any, reason: str) -> None:
    profile = build_profile()
    profile.check(profile.identity)
    with pytest.raises(ProfileError, match=reason):
        profile.check(dataclasses.replace(profile.identity, **{field: value}))


def test_digest_that_is_not_known_is_not_compared() -> None:
    profile = build_profile()
    profile.check(dataclasses.replace(profile.identity, tokenizer_digest="", adapter_digest=""))


def test_adapter_digest_is_of_the_file_and_empty_without_one(tmp_path: Path) -> None:
    assert adapter_digest(tmp_path) == ""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    first = adapter_digest(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"other")
    assert len(first) == 64 and adapter_digest(tmp_path) != first


def test_balance_of_even_and_of_one_sided_use() -> None:
    even, one_sided = layer_balance(np.array([[5, 5, 5, 5], [20, 0, 0, 0]], np.int64))
    assert even["max_over_mean"] == 1.0 and even["effective_experts"] == pytest.approx(4.0)
    assert one_sided == {
        "max_over_mean": 4.0,
        "effective_experts": pytest.approx(1.0),
        "unused": 3,
        "hottest": [0, 1, 2, 3],
    }


def test_command_prints_a_table_json_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_profile().save(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert "30 prompt and 20 answer tokens" in capsys.readouterr().out
    assert main([str(tmp_path), "--json", "--plot", str(tmp_path / "map.png")]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["tokens_answer"] == 20 and len(summary["answer"]["by_layer"]) == 3
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_profile_without_answer_tokens_is_shown_without_numbers_that_do_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_profile(hot_answer=np.zeros((3, 8), np.int64), tokens_answer=0).save(tmp_path)
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answer"]["hottest_half_share"] is None
    assert main([str(tmp_path), "--plot", str(tmp_path / "map.png")]) == 0


def test_command_says_what_is_wrong_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert PROFILE_NAME in capsys.readouterr().err


@pytest.mark.parametrize(("name", "reason"), [("map.zzz", "must end in .png"), ("", "is a folder")])
def test_picture_of_an_unknown_kind_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    build_profile().save(tmp_path)
    assert main([str(tmp_path), "--plot", str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert reason in captured.err and captured.out == ""


def test_reader_that_leaves_ends_the_command_quietly(tmp_path: Path) -> None:
    build_profile().save(tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "coop.profile", str(tmp_path), "--json"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60, cwd=ROOT)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
