"""CoopCallback: watches a training run and writes what it learned into its checkpoints.

Owns the recorder, the hot map and the warm-up timings of one run; promises that losses, weights and random
state are the same with and without it. Trainer calls it on its events, `train.trainer` when it saves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coop.adapters.recorder import Recorder
from coop.adapters.transformers import PEFT_PREFIX, find_experts, is_sharded, model_identity
from coop.hotmap import HotCounts, HotMap, RoutedBatch
from coop.profile import Profile, ProfileIdentity, adapter_digest
from coop.scheduler import Scheduler
from coop.topology import hardware_fingerprint
from train.schema import CoopSection

Reduce = Callable[[Tensor], Any]


class CoopCallback(TrainerCallback):
    """Counts routing in training mode, times every expert now and then, and builds the profile.

    Args:
        model: the model that Trainer calls, PEFT wrapper included.
        tokenizer: for the identity of the profile.
        settings: the `coop` section of the recipe.
        say: gets one line for each warm-up.
        is_main: whether this process runs warm-ups and carries restored counts.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        settings: CoopSection,
        say: Callable[[str], None] = lambda line: None,
        is_main: bool = True,
    ) -> None:
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._say, self._is_main = say, is_main
        self._experts = find_experts(model)
        self._hotmap = self._new_hotmap()
        self._recorder: Recorder | None = None
        shape = (len(self._experts), self._num_experts, len(settings.warmup.row_counts))
        self._compute_ms: NDArray[np.float32] = np.full(shape, np.nan, dtype=np.float32)
        self.warmup_seconds = 0.0
        self.warmups = 0
        self.counting_seconds = 0.0

    # what Trainer calls

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to watch."""
        self._recorder = Recorder(self._model, self._count)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Run the warm-up when it is due."""
        every = self._settings.warmup.every_steps
        if every and state.global_step % every == 0:
            self._warm_up(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop watching; a run shorter than the warm-up interval is warmed up here, so that it has timings."""
        self.close()
        if self._settings.warmup.every_steps and not self.warmups:
            self._warm_up(state.global_step)

    def close(self) -> None:
        """Put the experts implementation back; safe to call again."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    # what the trainer calls

    def restore(self, folder: Path) -> None:
        """Continue counts and timings from the profile of the checkpoint in `folder`. Raises ProfileError."""
        profile = Profile.load(folder)
        profile.check(replace(self._identity(folder), router_digest="", adapter_digest=""))
        if self._is_main:
            self._hotmap.restore(profile)
        if (
            profile.fingerprint == hardware_fingerprint()
            and profile.compute_ms.shape == self._compute_ms.shape
        ):
            self._compute_ms = profile.compute_ms.copy()
        self.warmup_seconds = profile.warmup_seconds

    def build_profile(self, folder: Path, step: int, reduce: Reduce) -> Profile:
        """The profile of the weights that were just saved in `folder`; every process calls it together."""
        counts = self._hotmap.read(reduce)
        row_counts = np.array(self._settings.warmup.row_counts, dtype=np.int32)
        return Profile(
            identity=self._identity(folder),
            step=step,
            is_refreshed=False,
            **_hot(counts),
            train_prompt=counts.prompt,
            train_answer=counts.answer,
            train_tokens_prompt=counts.tokens_prompt,
            train_tokens_answer=counts.tokens_answer,
            recent_answer=counts.recent_answer,
            same_layer=counts.same_layer,
            next_layer=counts.next_layer,
            rows=counts.rows,
            sample=counts.sample,
            row_counts=row_counts,
            compute_ms=self._compute_ms,
            fingerprint=hardware_fingerprint(),
            warmup_seconds=self.warmup_seconds,
        )

    def refresh(self, profile: Profile, batches: Iterable[dict[str, Tensor]], reduce: Reduce) -> Profile:
        """`profile` with hot_* and the sample from a pass of `batches` through the weights as they are now.

        The model is put in eval mode for the pass and back after it; training counts stay as they were.
        """
        fresh = self._new_hotmap()
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(_devices()), Recorder(self._model, fresh.record):
                for batch in batches:
                    self._model(**batch, use_cache=False)
        finally:
            self._model.train(was_training)
        counts = fresh.read(reduce)
        if counts.tokens_prompt + counts.tokens_answer == 0:
            return profile
        return replace(profile, is_refreshed=True, **_hot(counts), sample=counts.sample)

    # inside

    @property
    def _num_experts(self) -> int:
        return max(entry.num_experts for entry in self._experts)

    def _new_hotmap(self) -> HotMap:
        device = next(self._experts[0].module.parameters()).device
        return HotMap(len(self._experts), self._num_experts, self._experts[0].top_k, device)

    def _count(self, batch: RoutedBatch) -> None:
        if not batch.is_training:
            return
        began = time.perf_counter()
        self._hotmap.record(batch)
        self.counting_seconds += time.perf_counter() - began

    def _warm_up(self, step: int) -> None:
        if not self._is_main:
            return
        if any(is_sharded(weight) for entry in self._experts for weight in entry.module.parameters()):
            if not self.warmups:
                self._say("warm-up: skipped, because the experts are sharded over processes")
            self.warmups += 1
            return
        warmup = self._settings.warmup
        report = Scheduler.for_modules(self._experts).warmup(
            warmup.row_counts, warmup.repeats, warmup.max_seconds
        )
        self._compute_ms = np.fmin(self._compute_ms, report.compute_ms)  # the fastest counts; NaN yields
        self.warmup_seconds += report.seconds
        self.warmups += 1
        total = sum(entry.num_experts for entry in self._experts)
        median = float(np.nanmedian(report.compute_ms[..., 0])) if report.experts_done else float("nan")
        self._say(
            f"warm-up at step {step}: {report.experts_done} of {total} experts in {report.seconds:.2f} s, "
            f"{median:.3f} ms each at {warmup.row_counts[0]} row"
        )

    def _identity(self, folder: Path) -> ProfileIdentity:
        """Identity of the weights in `folder`. A tuned router under LoRA is covered by the adapter's digest."""
        identity = model_identity(self._model, self._tokenizer, adapter_digest(folder))
        if any("lora_" in name and p.requires_grad for name, p in self._router_parameters()):
            return replace(identity, router_digest="")
        return identity

    def _router_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        blocks = tuple(entry.name.rpartition(".")[0] for entry in self._experts)
        for name, parameter in self._model.named_parameters():
            plain = name.removeprefix(PEFT_PREFIX)
            if any(plain.startswith((f"{block}.gate.", f"{block}.router.")) for block in blocks):
                yield name, parameter


def _hot(counts: HotCounts) -> dict[str, Any]:
    return {
        "hot_prompt": counts.prompt,
        "hot_answer": counts.answer,
        "tokens_prompt": counts.tokens_prompt,
        "tokens_answer": counts.tokens_answer,
    }


def _devices() -> list[int]:
    return list(range(torch.cuda.device_count()))
