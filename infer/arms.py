"""One arm of a comparison, in a process of its own: load an engine, warm it up, measure it.

Owns the engines; promises that every engine sees the same token ids, prompt and continuation, so that all do
the same work, and imports for each only what that engine needs. Started by `infer.contest`, through
`python -m infer.bench --arm FILE`; what it found goes to a file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from coop.errors import CoopError
from coop.files import write_atomic
from infer.contest import Arm
from infer.lineup import SHORT_DTYPES
from infer.pagecache import cached_bytes, weight_files
from infer.timing import Timing, peak_rss_bytes, rss_bytes

WARM_PROMPT, WARM_TOKENS = 256, 8  # enough to touch nearly every expert once, and the decode path
LEAST_TOKENS = 4  # a time limit never cuts a run shorter
TORCH_DTYPES = {short: name for name, short in SHORT_DTYPES.items()}
ACCELERATE_SHARE = 0.5  # of the limit for weights that stay; the rest is for layers on their way through


class Engine(Protocol):
    """What is measured: one generation at a time."""

    def run(
        self, prompt: Sequence[int], following: Sequence[int], until_s: float
    ) -> tuple[float, list[float]]:
        """Feed `prompt`, then each of `following`; when it started and when each next token was known."""
        ...

    def begin(self) -> None:
        """What follows counts."""
        ...

    def counts(self) -> dict[str, Any]:
        """Counters since `begin`: hit_rate, bytes_read, where the engine has any."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the engine knows about itself and the machine."""
        ...


def main(specification: Path) -> int:
    """Measure the arm that the file describes, and write what was found beside it."""
    arm = Arm.from_json(specification.read_text())
    out = specification.with_suffix(".result.json")
    try:
        found = _write_gguf(arm) if arm.engine == "gguf" else measure(arm, ENGINES[arm.engine])
    except CoopError as exc:
        found = {"error": str(exc)}
    write_atomic(out, json.dumps(_known(found), allow_nan=False).encode())
    return 0


def measure(
    arm: Arm, open_engine: Callable[[Arm], contextlib.AbstractContextManager[Engine]]
) -> dict[str, Any]:
    """Load, warm up, then one sample for each prompt length."""
    files = weight_files(Path(arm.path))
    started_s = time.monotonic()
    with open_engine(arm) as engine:
        loaded_s = time.monotonic() - started_s
        prompt, following = token_ids(arm, WARM_PROMPT, WARM_TOKENS, is_warm_up=True)
        engine.run(prompt, following, time.perf_counter() + arm.limit_seconds)
        cached = cached_bytes(files)
        samples = [_sample(arm, engine, length) for length in arm.prompt_tokens]
        after = cached_bytes(files)
        return {
            "samples": samples,
            "load_seconds": loaded_s,
            "peak_bytes": peak_rss_bytes(),
            "rss_bytes": rss_bytes(),
            "page_cache_grew_bytes": None if cached is None or after is None else after - cached,
            "facts": engine.facts(),
        }


def _sample(arm: Arm, engine: Engine, length: int) -> dict[str, Any]:
    prompt, following = token_ids(arm, length, arm.new_tokens)
    engine.begin()
    started_s, times_s = engine.run(prompt, following, time.perf_counter() + arm.limit_seconds)
    timing = Timing.of(started_s, times_s)
    return {
        "prompt_tokens": length,
        "new_tokens": len(times_s),
        "is_cut": len(times_s) < arm.new_tokens,
        "ttft_ms": timing.ttft_ms,
        "tokens_per_s": timing.tokens_per_s,
        "token_ms_p50": timing.token_ms_p50,
        "token_ms_p99": timing.token_ms_p99,
        **engine.counts(),
    }


def token_ids(
    arm: Arm, length: int, new_tokens: int, is_warm_up: bool = False
) -> tuple[list[int], list[int]]:
    """A prompt and what follows it, from the seed: the same for every engine, others for the warm-up."""
    length = min(length, arm.context - new_tokens)
    source = np.random.default_rng([arm.seed, length, int(is_warm_up)])
    ids = source.integers(0, arm.vocabulary, length + new_tokens).tolist()
    return ids[:length], ids[length:]


def _known(value: Any) -> Any:
    """The same with null for numbers that are none, as JSON wants it."""
    if isinstance(value, dict):
        return {name: _known(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_known(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_gguf(arm: Arm) -> dict[str, Any]:
    """No engine but its preparation: the file that the llamacpp arms map."""
    from infer.gguf_export import export

    export(Path(arm.source), Path(arm.path), arm.dtype)
    return {"samples": []}


class PlainEngine:
    """An engine that counts nothing."""

    def begin(self) -> None:
        """What follows counts."""

    def counts(self) -> dict[str, Any]:
        """None."""
        return {}

    def facts(self) -> dict[str, Any]:
        """None."""
        return {}


class TorchEngine(PlainEngine):
    """A transformers model behind its own `generate`, told which tokens to pick."""

    def __init__(self, model: Any) -> None:
        from transformers import GenerationConfig

        self._model = model
        model.generation_config = GenerationConfig(pad_token_id=0)  # no end token: every run has its length

    def run(
        self, prompt: Sequence[int], following: Sequence[int], until_s: float
    ) -> tuple[float, list[float]]:
        import torch

        clock = _Clock(following, len(prompt), until_s)
        ids = torch.tensor([prompt])
        with torch.no_grad():
            started_s = time.perf_counter()
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=len(following),
                do_sample=False,
                logits_processor=[clock.choose],
                stopping_criteria=[clock.is_over],
                streamer=clock,
            )
        return started_s, clock.times_s


class _Clock:
    """Picks the token that was to come, notes when, and ends a run whose time is over."""

    def __init__(self, following: Sequence[int], prompt_tokens: int, until_s: float) -> None:
        self._following, self._prompt_tokens, self._until_s = following, prompt_tokens, until_s
        self._has_prompt = False
        self.times_s: list[float] = []

    def choose(self, input_ids: Any, scores: Any) -> Any:
        """Scores [1, vocabulary] with only the wanted token left."""
        wanted = scores.new_full(scores.shape, -math.inf)
        wanted[0, self._following[input_ids.shape[1] - self._prompt_tokens]] = 0.0
        return wanted

    def is_over(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """[1], true when to stop."""
        new_tokens = input_ids.shape[1] - self._prompt_tokens
        is_late = time.perf_counter() > self._until_s and new_tokens >= LEAST_TOKENS
        return input_ids.new_full((1,), is_late, dtype=bool_type())

    def put(self, value: Any) -> None:
        """The prompt once, then each token."""
        if self._has_prompt:
            self.times_s.append(time.perf_counter())
        self._has_prompt = True

    def end(self) -> None:
        """Nothing is held back."""


def bool_type() -> Any:
    """torch's bool, which is loaded by then."""
    import torch

    return torch.bool


class CoopEngine(TorchEngine):
    """A model whose experts coop serves."""

    def __init__(self, runtime: Any) -> None:
        super().__init__(runtime.model)
        self.runtime = runtime

    def begin(self) -> None:
        self.runtime.reset_stats()

    def counts(self) -> dict[str, Any]:
        stats = self.runtime.stats()
        is_decode = bool(stats.hits_decode + stats.misses_decode)
        return {
            "hit_rate": stats.hit_rate_decode if is_decode else stats.hit_rate_prefill,
            "bytes_read": stats.bytes_read,
            "wait_seconds": stats.wait_seconds,
            "hits_decode": stats.hits_decode,
            "misses_decode": stats.misses_decode,
        }

    def facts(self) -> dict[str, Any]:
        from coop.topology import hardware_fingerprint

        plan = self.runtime.plan
        return {
            "budget_bytes": plan.budget_bytes,
            "dense_bytes": plan.dense_bytes,
            "profile": self.runtime.profile_status,
            "disk_bytes_per_second": plan.topology.disk.bytes_per_second,
            "hardware": hardware_fingerprint(),
        }


@contextlib.contextmanager
def open_coop(arm: Arm) -> Iterator[CoopEngine]:
    """coop at the arm's budget, closed when the block ends."""
    _settle_torch(arm)
    from coop.adapters.attach import attach
    from infer.replay import Replay, Trace

    room = max(max(arm.prompt_tokens), WARM_PROMPT) + max(arm.new_tokens, WARM_TOKENS)
    with attach(arm.path, budget=arm.budget, strategy=arm.strategy, max_context=room) as runtime:
        if arm.replay:
            Replay(runtime.scheduler, Trace.load(Path(arm.replay)))
        yield CoopEngine(runtime)


@contextlib.contextmanager
def _transformers(arm: Arm) -> Iterator[Engine]:
    yield TorchEngine(_load_whole(arm))


@contextlib.contextmanager
def _accelerate(arm: Arm) -> Iterator[Engine]:
    most = {"cpu": int(arm.memory_bytes * ACCELERATE_SHARE)}
    yield TorchEngine(_load_whole(arm, device_map="auto", max_memory=most, offload_folder=arm.scratch))


def _load_whole(arm: Arm, **placing: Any) -> Any:
    """The checkpoint as transformers loads it, in its own type, with its quickest experts."""
    torch = _settle_torch(arm)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        arm.path,
        dtype=getattr(torch, TORCH_DTYPES.get(arm.dtype, arm.dtype)),
        experts_implementation="grouped_mm",
        local_files_only=True,
        trust_remote_code=False,
        **placing,
    ).eval()


class LlamaEngine(PlainEngine):
    """llama.cpp over a memory-mapped GGUF file."""

    def __init__(self, llama: Any) -> None:
        self._llama = llama

    def run(
        self, prompt: Sequence[int], following: Sequence[int], until_s: float
    ) -> tuple[float, list[float]]:
        self._llama.reset()
        times_s: list[float] = []
        started_s = time.perf_counter()
        self._llama.eval(prompt)
        times_s.append(time.perf_counter())
        for token in following[:-1]:  # the first of them followed from the prompt already
            if time.perf_counter() > until_s and len(times_s) >= LEAST_TOKENS:
                break
            self._llama.eval([token])
            times_s.append(time.perf_counter())
        return started_s, times_s


@contextlib.contextmanager
def _llamacpp(arm: Arm) -> Iterator[Engine]:
    from llama_cpp import Llama

    room = max(max(arm.prompt_tokens), WARM_PROMPT) + max(arm.new_tokens, WARM_TOKENS)
    llama = Llama(arm.path, n_ctx=room, n_threads=arm.threads, n_threads_batch=arm.threads, verbose=False)
    try:
        yield LlamaEngine(llama)
    finally:
        llama.close()


def _settle_torch(arm: Arm) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import warnings

    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")  # one library's notes to another would bury an arm's own last words
    torch.set_num_threads(arm.threads)
    return torch


ENGINES: dict[str, Callable[[Arm], contextlib.AbstractContextManager[Engine]]] = {
    "coop": open_coop,
    "transformers": _transformers,
    "accelerate": _accelerate,
    "llamacpp": _llamacpp,
}
