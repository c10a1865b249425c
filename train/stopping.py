"""Stopping: SIGTERM and Ctrl-C end a run at the next step boundary, with a checkpoint; a second one ends it at once.

Owns the two signals' handlers for the length of a run; promises that all processes stop at the same step, whichever
of them got the signal. `train.finetune` enters it, `train.run` says where a stop can wait.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_SECONDS = 1.0  # a launcher passes on a Ctrl-C that the terminal has sent to all processes already


class Stopped(KeyboardInterrupt):
    """A run that was ended by a signal; `status` is what the command exits with, as shells count."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number
        self.name = signal.Signals(number).name
        super().__init__(self.name)


class Stop:
    """Which signal has asked the run to end, 0 for none. A context manager; without it, nothing is heard."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.number = 0
        self._clock = clock
        self._asked_at = 0.0
        self._is_waiting_allowed = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        self._previous = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In this block a first signal only sets `number`; Stopped is raised at its end if nothing else was."""
        self._is_waiting_allowed = True
        try:
            yield
        finally:
            self._is_waiting_allowed = False
        if self.number:
            raise Stopped(self.number)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if self.number and now - self._asked_at < ECHO_SECONDS:
            return
        is_first, self.number, self._asked_at = not self.number, number, now
        if not (is_first and self._is_waiting_allowed):
            raise Stopped(number)
        if os.environ.get("RANK", "0") == "0":  # print may be in the middle of a line
            os.write(2, b"\nstopping after this step, with a checkpoint; once more stops at once\n")


class StopCallback(TrainerCallback):
    """Ends the training where a step ends, on all processes together.

    Args:
        stop: what this process has heard.
        agree: the largest of all processes' numbers; every process calls it at the end of every step.
    """

    def __init__(self, stop: Stop, agree: Callable[[int], int]) -> None:
        self._stop, self._agree = stop, agree

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """After each step."""
        self._check(control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """After each evaluation, which may have been long."""
        self._check(control)

    def _check(self, control: TrainerControl) -> None:
        self._stop.number = self._agree(self._stop.number)
        if self._stop.number:
            control.should_save = control.should_training_stop = True
