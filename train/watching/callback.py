"""CoopCallback: watches a training run and writes what it learned into its checkpoints.

Owns the recorder, the hot map and the warm-up of one run; promises that losses, weights and random state are the
same with and without it. Trainer calls it on its events, `train.trainer` when it saves.
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
from coop.adapters.transformers import PEFT_PREFIX, find_experts, model_identity
from coop.hotmap import HotCounts, HotMap, RoutedBatch
from coop.profile import Profile, ProfileIdentity, adapter_digest
from coop.scheduler import Scheduler
from coop.topology import hardware_fingerprint
from train.schema import CoopSection
from train.watching.expert_scalars import ExpertScalars
from train.watching.warmup import Warmup

Reduce = Callable[[Tensor], Any]
Log = Callable[[dict[str, float], int], None]


class CoopCallback(TrainerCallback):
    """Counts routing in training mode, times experts now and then, and builds the profile.

    Args:
        model: the model that Trainer calls, PEFT wrapper included.
        tokenizer: for the identity of the profile.
        settings: the `coop` section of the recipe.
        say: gets one line for each warm-up.
        is_main: whether this process runs warm-ups, logs and carries restored counts.
        scheduler: who serves experts whose weights do not lie in the model; None: they lie there.
        log: gets scalars and their step.
        is_detailed: whether scalars of every layer are among them.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        settings: CoopSection,
        say: Callable[[str], None] = lambda line: None,
        is_main: bool = True,
        scheduler: Scheduler | None = None,
        log: Log = lambda values, step: None,
        is_detailed: bool = False,
    ) -> None:
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._is_main, self._scheduler, self._log = is_main, scheduler, log
        self._experts = find_experts(model)
        self._hotmap = self._new_hotmap()
        self._recorder: Recorder | None = None
        self.warmup = Warmup(settings.warmup, self._experts, scheduler, say)
        self._scalars = ExpertScalars(is_detailed)
        self._began_step = 0.0
        self.train_seconds = 0.0  # of all steps, those before a resume included
        self.counting_seconds = 0.0  # in this process, logging included

    def cost(self) -> dict[str, float]:
        """What all of this has cost: warm-ups of the whole run beside its steps, and counting in this process."""
        return {
            "warmups": self.warmup.count,
            "warmup_seconds": round(self.warmup.seconds, 3),
            "counting_seconds": round(self.counting_seconds, 3),
            "train_seconds": round(self.train_seconds, 3),
        }

    # what Trainer calls

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to watch."""
        self._recorder = Recorder(self._model, self._count)
        if self._is_main:
            self.warmup.at_start(state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self._began_step = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop the clock; run the warm-up and log where they are due."""
        self.train_seconds += time.perf_counter() - self._began_step
        if not self._is_main:
            return
        self.warmup.at_step(state.global_step, self.train_seconds)
        every = self._settings.profile.log_every_steps
        if every and state.global_step % every == 0:
            self._log_scalars(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop watching; time what no warm-up has reached yet."""
        self.close()
        if self._is_main:
            self.warmup.at_end(state.global_step, self.train_seconds)

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
        self.warmup.restore(profile, profile.fingerprint == hardware_fingerprint())
        self.train_seconds = profile.train_seconds

    def build_profile(self, folder: Path, step: int, reduce: Reduce) -> Profile:
        """The profile of the weights that were just saved in `folder`; every process calls it together."""
        return self._profile_of(self._hotmap.read(reduce), self._identity(folder), step)

    def _profile_of(self, counts: HotCounts, identity: ProfileIdentity, step: int) -> Profile:
        return Profile(
            identity=identity,
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
            row_counts=np.array(self._settings.warmup.row_counts, dtype=np.int32),
            compute_ms=self.warmup.compute_ms,
            load_ms=self._load_ms(),
            fingerprint=hardware_fingerprint(),
            warmups=self.warmup.count,
            warmup_seconds=self.warmup.seconds,
            warmup_next=self.warmup.next,
            train_seconds=self.train_seconds,
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
        return HotMap(len(self._experts), self._num_experts, self._experts[0].top_k)

    def _count(self, batch: RoutedBatch) -> None:
        if not batch.is_training:
            return
        began = time.perf_counter()
        self._hotmap.record(batch)
        self.counting_seconds += time.perf_counter() - began

    def _log_scalars(self, step: int) -> None:
        """Of this process's own tokens: a sum over processes would make all of them wait."""
        began = time.perf_counter()
        counts = self._hotmap.read()
        if counts.tokens_prompt + counts.tokens_answer:
            # nobody checks the identity of a profile that is not saved: its digests stay unknown
            identity = ProfileIdentity(
                architecture=type(self._model).__name__,
                layers=tuple(entry.name for entry in self._experts),
                num_experts=self._num_experts,
                top_k=self._experts[0].top_k,
                router_digest="",
                adapter_digest="",
                tokenizer_digest="",
            )
            values = self._scalars.take(self._profile_of(counts, identity, step))
            self._log(values, step)
        self.counting_seconds += time.perf_counter() - began

    def _load_ms(self) -> NDArray[np.float32]:
        """What one expert of each layer took from disk, NaN where none was loaded."""
        if self._scheduler is None:
            return np.full(len(self._experts), np.nan, dtype=np.float32)
        measured = np.array([row["load_ms"] for row in self._scheduler.calendar.table()], dtype=np.float32)
        return np.where(measured > 0, measured, np.float32(np.nan))

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
