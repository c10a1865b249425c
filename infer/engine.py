"""Generation over a runtime: one prompt in, streamed text and its timings out.

Owns the clock readings of one generation; promises that nothing here changes which tokens come.
Called by `infer.generate` (and by whatever serves or measures a runtime later).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, TextStreamer

from coop.errors import CheckpointError, NumberError, RequestError
from infer.timing import Timing


class Stats(Protocol):
    """What the engine's callers read from `coop.adapters.attach.RuntimeStats`."""

    bytes_read: int
    bytes_speculative: int
    bytes_wasted: int
    budget_bytes: int
    resident_bytes_max: int

    @property
    def waits(self) -> Mapping[str, float]: ...

    @property
    def hit_rate_prefill(self) -> float: ...
    @property
    def hit_rate_decode(self) -> float: ...


class Runtime(Protocol):
    """What the engine needs of `coop.adapters.attach.Runtime`; a test puts a fake in its place."""

    @property
    def model(self) -> Any: ...
    @property
    def plan(self) -> Any: ...
    @property
    def profile_status(self) -> str: ...
    @property
    def tokenizer_source(self) -> Path: ...

    def stats(self) -> Stats: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is picked. `temperature` 0 is greedy; `top_p` and `seed` are then not looked at."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def arguments(self) -> dict[str, Any]:
        """Arguments for transformers' `generate`: all explicit, so that no default of the checkpoint's own
        `generation_config.json` joins in."""
        common = {
            "max_new_tokens": self.max_new_tokens,
            "num_beams": 1,
            "repetition_penalty": 1.0,
            "top_k": 0,
        }
        if self.is_greedy:
            return common | {"do_sample": False, "temperature": 1.0, "top_p": 1.0}
        return common | {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p}


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What one prompt gave. `logits` holds one [vocabulary] tensor per new token if they were asked for."""

    text: str
    prompt_tokens: int
    token_ids: list[int]
    timing: Timing
    logits: list[torch.Tensor]
    is_interrupted: bool


class TimedStreamer(TextStreamer):
    """transformers' TextStreamer, which holds back half a character, plus ids and times of the tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        emit: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._emit, self._clock = emit, clock
        self.token_ids: list[int] = []
        self.token_times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """The prompt once, [1, prompt_tokens], then each new token, [1]."""
        if not self.next_tokens_are_prompt:
            self.token_ids.extend(value.tolist())
            self.token_times_s.append(self._clock())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text or stream_end:
            self._emit(text + ("\n" if stream_end else ""))


def refuse_bad_numbers(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """`scores` [batch, vocabulary] as they are; NumberError where picking a token from them would mean nothing.

    transformers calls it before each pick. Minus infinity bans a token and is no fault, unless it bans all.
    """
    if bool(torch.isnan(scores).any()) or not bool(torch.isfinite(scores.amax(-1)).all()):
        raise NumberError(
            f"the logits after {input_ids.shape[1]} tokens are not finite numbers: the weights are damaged, "
            "or their type is too narrow for this prompt; try --dtype float32"
        )
    return scores


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`, never running code that lies there. CheckpointError if there is none."""
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as exc:
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise CheckpointError(
            f"{folder}: no tokenizer can be loaded from here ({reason[:200]}); "
            "copy tokenizer.json and tokenizer_config.json from the model it was trained with"
        ) from exc


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str, system: str, is_raw: bool
) -> dict[str, torch.Tensor]:
    """`prompt` as model inputs, [1, prompt_tokens] each, through the chat template if there is one.

    `is_raw` leaves the template out. RequestError if a system text has no template to go into, or if there
    are no tokens.
    """
    if is_raw or not tokenizer.chat_template:
        if system:
            raise RequestError("this tokenizer has no chat template for a system text; leave out --system")
        inputs = dict(tokenizer(prompt, return_tensors="pt"))
    else:
        inputs = dict(_apply_template(tokenizer, prompt, system))
    if inputs["input_ids"].shape[1] == 0:
        raise RequestError("the prompt has no tokens; pass some text")
    return {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}


def _apply_template(
    tokenizer: PreTrainedTokenizerBase, prompt: str, system: str
) -> Mapping[str, torch.Tensor]:
    from jinja2 import TemplateError

    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except TemplateError as exc:
        raise RequestError(
            f"the chat template of this tokenizer refuses the prompt: {exc}; pass --raw"
        ) from exc


def check_length(model: Any, prompt_tokens: int, max_new_tokens: int, max_context: int) -> None:
    """RequestError unless prompt and answer fit the model's context and the room in the plan."""
    wanted = prompt_tokens + max_new_tokens
    asked = f"{prompt_tokens} prompt tokens + {max_new_tokens} new tokens = {wanted}"
    model_context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if model_context is not None and wanted > model_context:
        raise RequestError(
            f"{asked}, more than the {model_context} tokens this model can see; "
            "shorten the prompt or lower --max-new-tokens"
        )
    if wanted > max_context:
        raise RequestError(
            f"{asked}, more than the {max_context} tokens the plan has room for; pass --max-context {wanted}"
        )


def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, torch.Tensor],
    sampling: Sampling,
    emit: Callable[[str], None],
    *,
    keep_logits: bool = False,
) -> Generation:
    """Run `model` over one prompt and hand each finished piece of text to `emit`.

    Ctrl-C ends the generation early with what there is. Logits are kept, on the CPU, only if asked for: they
    take new_tokens x vocabulary x 4 bytes.
    """
    streamer = TimedStreamer(tokenizer, emit)
    _forget_defaults(model)
    if not sampling.is_greedy:
        torch.manual_seed(sampling.seed)
    on_device = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    started_s = time.perf_counter()
    logits: list[torch.Tensor] = []
    is_interrupted = False
    try:
        output = model.generate(
            **on_device,
            **sampling.arguments(),
            streamer=streamer,
            logits_processor=[refuse_bad_numbers],
            return_dict_in_generate=True,
            output_logits=keep_logits,
        )
        logits = [step[0].cpu() for step in output.logits] if keep_logits else []
    except KeyboardInterrupt:
        streamer.end()
        is_interrupted = True
    return Generation(
        text=tokenizer.decode(streamer.token_ids, skip_special_tokens=True),
        prompt_tokens=inputs["input_ids"].shape[1],
        token_ids=streamer.token_ids,
        timing=Timing.of(started_s, streamer.token_times_s),
        logits=logits,
        is_interrupted=is_interrupted,
    )


def _forget_defaults(model: Any) -> None:
    """Keep the special tokens of the checkpoint's generation config and nothing else of it.

    transformers fills what a call leaves open from there: bans, penalties or stop strings of its author's.
    """
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    kept = {name: getattr(model.generation_config, name, None) for name in names}
    for name, value in kept.items():
        ids = value if isinstance(value, list) else [value]
        if not all(token is None or type(token) is int for token in ids):
            raise CheckpointError(f"generation_config.json: {name} is {str(value)[:60]!r}, not a token id")
    model.generation_config = GenerationConfig(**kept)


def first_difference(one: Generation, other: Generation) -> str:
    """What differs first between two generations that kept their logits, or "" if they agree bit for bit."""
    for position, (a, b) in enumerate(zip(one.logits, other.logits, strict=False)):
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            largest = (a.float() - b.float()).abs().max().item()
            return f"logits of token {position + 1} differ by up to {largest:.3g}"
        if one.token_ids[position] != other.token_ids[position]:
            return f"token {position + 1} is {one.token_ids[position]} and then {other.token_ids[position]}"
    if len(one.token_ids) != len(other.token_ids):
        return f"{len(one.token_ids)} tokens and then {len(other.token_ids)}"
    return ""
