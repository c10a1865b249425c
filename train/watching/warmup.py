"""Warmup: when experts are timed while a run trains, which of them come next, and what that has cost.

Owns the timings of one run; promises that scheduled warm-ups stay within their share of the training time, that
each goes on where the last one stopped, and that every layer is reached early. `train.watching.callback` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from coop.adapters.transformers import ExpertsModule
from coop.errors import RecipeError
from coop.ids import ExpertId
from coop.profile import Profile
from coop.scheduler import Scheduler
from train.schema import WarmupSection


class Warmup:
    """The warm-ups of one run.

    Args:
        settings: the `coop.warmup` section of the recipe.
        experts: the experts modules of the model.
        scheduler: who serves experts that do not lie in the modules; None: the modules' own weights are timed.
        say: gets one line for each warm-up.

    Raises RecipeError for a layer that the model has not.
    """

    def __init__(
        self,
        settings: WarmupSection,
        experts: Sequence[ExpertsModule],
        scheduler: Scheduler | None,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._experts, self._scheduler, self._say = settings, experts, scheduler, say
        self._order = timing_order(experts, chosen_layers(settings, len(experts)))
        shape = (len(experts), max(entry.num_experts for entry in experts), len(settings.row_counts))
        self.compute_ms: NDArray[np.float32] = np.full(shape, np.nan, dtype=np.float32)
        self.seconds = 0.0
        self.count = 0
        self.next = 0  # index into the order
        self._expert_seconds = 0.0  # what one expert took in the last warm-up
        self._has_said_why_not = False

    def restore(self, profile: Profile, is_same_hardware: bool) -> None:
        """Go on from the profile of a checkpoint; timings of other hardware or other row counts are left."""
        self.seconds, self.count = profile.warmup_seconds, profile.warmups
        self.next = profile.warmup_next % len(self._order)
        if is_same_hardware and profile.row_counts.tolist() == self._settings.row_counts:
            self.compute_ms = profile.compute_ms.copy()

    # when

    def at_start(self, step: int) -> None:
        """Before the first step: if it is wanted and something has no timing yet."""
        if self._settings.at_start and not self._is_complete():
            self._run(step, self._settings.max_seconds)

    def at_step(self, step: int, train_seconds: float) -> None:
        """After a step: if it is due and its share of `train_seconds` allows it."""
        every = self._settings.every_steps
        if every and step % every == 0:
            self._run_within_share(step, train_seconds)

    def at_end(self, step: int, train_seconds: float) -> None:
        """After the last step: if it is wanted, or to make up for what scheduled ones have not reached."""
        if self._settings.at_end:
            self._run(step, self._settings.max_seconds)
        elif self._settings.every_steps and not self._is_complete():
            if self._allowed_seconds(train_seconds) > self._expert_seconds:
                self._run_within_share(step, train_seconds)
            if not self._is_complete() and not self._has_said_why_not:
                self._say(
                    f"{self._untimed()} of {len(self._order)} experts were not timed: coop.warmup.max_share allows no "
                    "more; coop.warmup.at_end=true times them whatever it takes"
                )

    # inside

    def _untimed(self) -> int:
        layers, experts = zip(*self._order, strict=True)
        return int(np.isnan(self.compute_ms[list(layers), list(experts)]).any(axis=1).sum())

    def _is_complete(self) -> bool:
        return self._untimed() == 0

    def _allowed_seconds(self, train_seconds: float) -> float:
        return self._settings.max_share * train_seconds - self.seconds

    def _run_within_share(self, step: int, train_seconds: float) -> None:
        allowed = self._allowed_seconds(train_seconds)
        if allowed <= self._expert_seconds:
            self._say(
                f"warm-up at step {step} postponed: coop.warmup.max_share allows "
                f"{self._settings.max_share * train_seconds:.3f} s so far, {self.seconds:.3f} s were spent"
            )
            return
        self._run(step, min(allowed, self._settings.max_seconds))

    def _run(self, step: int, limit_seconds: float) -> None:
        if any(not is_whole(entry.module) for entry in self._experts) and self._scheduler is None:
            if not self._has_said_why_not:
                self._say(
                    "no warm-up: this process does not hold whole experts; "
                    "they are timed at the first start of inference"
                )
            self._has_said_why_not = True
            return
        order = self._order[self.next :] + self._order[: self.next]
        scheduler = self._scheduler or Scheduler.for_modules(self._experts)
        settings = self._settings
        report = scheduler.warmup(settings.row_counts, settings.repeats, limit_seconds, order)
        self.compute_ms = np.fmin(self.compute_ms, report.compute_ms)  # the fastest counts; NaN yields
        self.next = (self.next + report.experts_done) % len(order)
        self.seconds += report.seconds
        self.count += 1
        self._expert_seconds = report.seconds / max(1, report.experts_done)
        self._say(self._describe(step, report.experts_done, report.seconds, report.compute_ms))

    def _describe(self, step: int, done: int, seconds: float, compute_ms: NDArray[np.float32]) -> str:
        median = float(np.nanmedian(compute_ms[..., 0])) if done else float("nan")
        rest = ""
        if done < len(self._order):
            first = self._order[self.next]
            rest = f"; the next goes on at layer {first.layer}, expert {first.expert}"
        return (
            f"warm-up at step {step}: {done} of {len(self._order)} experts in {seconds:.2f} s, "
            f"{median:.3f} ms each at {self._settings.row_counts[0]} row{rest}"
        )


def chosen_layers(settings: WarmupSection, num_layers: int) -> list[int]:
    """The MoE layers to time. Raises RecipeError for one that the model has not."""
    if settings.layers == "all":
        return list(range(num_layers))
    outside = [layer for layer in settings.layers if layer >= num_layers]
    if outside:
        raise RecipeError(
            f"coop.warmup.layers: there is no layer {outside[0]}; the model has MoE layers 0 to {num_layers - 1}"
        )
    return list(settings.layers)


def timing_order(experts: Sequence[ExpertsModule], layers: Sequence[int]) -> list[ExpertId]:
    """Expert 0 of every layer, then expert 1, and so on: a warm-up that is cut short has seen every layer."""
    widest = max(experts[layer].num_experts for layer in layers)
    return [
        ExpertId(layer, expert)
        for expert in range(widest)
        for layer in layers
        if expert < experts[layer].num_experts
    ]


def is_whole(experts: nn.Module) -> bool:
    """Whether the weights of an experts module lie in this process: not sharded over several, not left on disk."""
    stacks = [weight for weight in experts._parameters.values() if weight is not None]
    return bool(stacks) and all(
        weight.numel() > 0 and not weight.is_meta and not hasattr(weight, "device_mesh") for weight in stacks
    )
