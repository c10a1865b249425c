"""The engine: streaming, timing, what is refused, and what `--verify` compares. No experts, no runtime."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coop.errors import CheckpointError, NumberError, RequestError
from infer import engine
from infer.engine import Generation, Sampling, TimedStreamer, refuse_bad_numbers
from infer.timing import Timing, peak_rss_bytes
from tests.infer.models import byte_tokenizer, dense_model

TOKENIZER = byte_tokenizer()


def streamed(text: str) -> list[str]:
    """The pieces in which `text`, one token for each byte, reaches the terminal."""
    pieces: list[str] = []
    streamer = TimedStreamer(TOKENIZER, pieces.append)
    streamer.put(torch.tensor([[1, 5, 9]]))
    for token in TOKENIZER(text)["input_ids"]:
        streamer.put(torch.tensor([token]))
    streamer.end()
    return pieces


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=60, deadline=None)
def test_streamed_pieces_join_to_the_text_and_never_split_a_character(text: str) -> None:
    assert "".join(streamed(text)) == text + "\n"


def test_half_a_character_is_held_back_until_it_is_whole() -> None:
    assert [piece for piece in streamed("a한b") if piece.strip()] == ["a", "한", "b"]


def test_the_prompt_is_neither_printed_nor_timed() -> None:
    ticks = iter(range(100))
    streamer = TimedStreamer(TOKENIZER, lambda text: None, clock=lambda: float(next(ticks)))
    streamer.put(torch.tensor([[1, 5, 9]]))
    for token in (10, 11, 12):
        streamer.put(torch.tensor([token]))
    assert streamer.token_ids == [10, 11, 12]
    assert streamer.token_times_s == [0.0, 1.0, 2.0]


def test_timing_counts_the_tokens_after_the_first() -> None:
    timing = Timing.of(10.0, [11.0, 11.5, 12.0, 13.0])
    assert timing.ttft_ms == 1000
    assert timing.tokens_per_s == pytest.approx(1.5)
    assert timing.token_ms_p50 == 500
    assert 500 < timing.token_ms_p99 <= 1000


def test_timing_of_one_token_has_no_rate_and_of_none_has_nothing() -> None:
    assert Timing.of(0.0, [0.25]).ttft_ms == 250
    assert math.isnan(Timing.of(0.0, [0.25]).tokens_per_s)
    assert math.isnan(Timing.of(0.0, []).ttft_ms)


def test_a_chat_template_is_applied_unless_raw() -> None:
    chat = engine.encode(TOKENIZER, "hi", "be kind", is_raw=False)
    raw = engine.encode(TOKENIZER, "hi", "", is_raw=True)
    assert TOKENIZER.decode(chat["input_ids"][0]) == "<s>system: be kind\n<s>user: hi\n<s>assistant: "
    assert TOKENIZER.decode(raw["input_ids"][0]) == "hi"
    assert chat["attention_mask"].shape == chat["input_ids"].shape


def test_a_system_text_without_a_template_is_refused() -> None:
    with pytest.raises(RequestError, match="leave out --system"):
        engine.encode(byte_tokenizer(chat_template=""), "hi", "be kind", is_raw=False)


def test_a_template_that_refuses_a_role_says_so() -> None:
    tokenizer = byte_tokenizer("{{ raise_exception('no system role here') }}")
    with pytest.raises(RequestError, match=r"no system role here; pass --raw"):
        engine.encode(tokenizer, "hi", "be kind", is_raw=False)


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"copy tokenizer\.json"):
        engine.load_tokenizer(tmp_path)


def test_a_prompt_past_the_model_context_is_refused_with_both_numbers() -> None:
    model = dense_model(context=64)
    engine.check_length(model, 60, 4, max_context=64)
    with pytest.raises(RequestError, match=r"60 prompt tokens \+ 5 new tokens = 65, more than the 64"):
        engine.check_length(model, 60, 5, max_context=4096)


def test_a_prompt_past_the_plan_names_the_flag_to_pass() -> None:
    with pytest.raises(RequestError, match="pass --max-context 65"):
        engine.check_length(dense_model(), 60, 5, max_context=64)


def generation(sampling: Sampling) -> Generation:
    inputs = engine.encode(TOKENIZER, "hello", "", is_raw=False)
    return engine.generate(dense_model(), TOKENIZER, inputs, sampling, lambda text: None, keep_logits=True)


def test_generation_reports_what_was_streamed() -> None:
    pieces: list[str] = []
    inputs = engine.encode(TOKENIZER, "hello", "", is_raw=False)
    result = engine.generate(dense_model(), TOKENIZER, inputs, Sampling(max_new_tokens=8), pieces.append)
    assert "".join(pieces) == result.text + "\n"
    assert 1 <= len(result.token_ids) <= 8
    assert result.logits == []
    assert not result.is_interrupted


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    sampling = Sampling(max_new_tokens=16, temperature=1.5, top_p=0.95, seed=3)
    other = Sampling(max_new_tokens=16, temperature=1.5, top_p=0.95, seed=4)
    assert generation(sampling).token_ids == generation(sampling).token_ids
    assert generation(sampling).token_ids != generation(other).token_ids


def test_sampling_defaults_of_the_checkpoint_do_not_join_in() -> None:
    model = dense_model()
    inputs = engine.encode(TOKENIZER, "hello", "", is_raw=False)
    plain = engine.generate(model, TOKENIZER, inputs, Sampling(max_new_tokens=8), lambda text: None)
    model.generation_config.do_sample = True
    model.generation_config.temperature = 9.0
    model.generation_config.repetition_penalty = 5.0
    again = engine.generate(model, TOKENIZER, inputs, Sampling(max_new_tokens=8), lambda text: None)
    assert plain.token_ids == again.token_ids


def test_equal_runs_differ_in_nothing_and_one_changed_bit_is_found() -> None:
    one, other = generation(Sampling(max_new_tokens=4)), generation(Sampling(max_new_tokens=4))
    assert engine.first_difference(one, other) == ""
    other.logits[2].view(torch.int32)[7] ^= 1
    assert "logits of token 3 differ" in engine.first_difference(one, other)


def test_a_shorter_run_is_a_difference() -> None:
    one, other = generation(Sampling(max_new_tokens=4)), generation(Sampling(max_new_tokens=3))
    assert engine.first_difference(one, other) == "4 tokens and then 3"


def test_peak_memory_of_this_process_is_a_plausible_number() -> None:
    assert 2**24 < peak_rss_bytes() < 2**40


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_the_request_instead_of_picking_token_zero(bad: float) -> None:
    with pytest.raises(NumberError, match="after 5 tokens are not finite"):
        refuse_bad_numbers(torch.zeros(1, 5), torch.tensor([[0.0, bad, 1.0]]))


def test_banned_tokens_are_no_fault_unless_all_are_banned() -> None:
    banned = torch.tensor([[0.0, float("-inf")]])
    assert refuse_bad_numbers(torch.zeros(1, 5), banned) is banned
    with pytest.raises(NumberError):
        refuse_bad_numbers(torch.zeros(1, 5), torch.full((1, 3), float("-inf")))
