"""Tracking: a W&B run that can never stop a training run.

Owns the W&B run; promises that whatever W&B raises is said once, in one line, and training goes on: online falls
back to offline, offline to nothing. `train.finetune` opens it; Trainer feeds it on the main process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from train.schema import WandbSection

_Mode = Literal["online", "offline"]
_FALLBACKS: dict[str, tuple[_Mode, ...]] = {
    "online": ("online", "offline"),
    "offline": ("offline",),
    "disabled": (),
}


class Tracking(TrainerCallback):
    """Logs scalars to W&B as training goes.

    Args:
        settings: mode, project and name.
        output: W&B's own files go here.
        facts: the resolved recipe, shown as the run's config.
        say: gets a line when something fails.
    """

    def __init__(
        self, settings: WandbSection, output: Path, facts: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._run: Any = None
        self.place = ""  # where the run can be seen: its address, or the folder to sync
        for mode in _FALLBACKS[settings.mode]:
            if self._run is None:
                self._open(settings, output, facts, mode)

    def _open(self, settings: WandbSection, output: Path, facts: dict[str, Any], mode: _Mode) -> None:
        try:
            import wandb

            run = wandb.init(
                project=settings.project,
                name=settings.run_name or output.name,
                dir=str(output),
                config=facts,
                mode=mode,
                settings=wandb.Settings(silent=True, console="off"),
            )
            # asking an offline run for its address makes W&B print a warning
            self.place = str(run.url) if mode == "online" else str(Path(run.dir).parent)
            self._run = run
        except Exception as exc:
            # whatever a tracker raises, the training that it watches is worth more
            self._say(f"W&B cannot track this run ({mode}): {_reason(exc)}")

    @property
    def is_open(self) -> bool:
        """Whether the run is being tracked."""
        return self._run is not None

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log scalars at a step."""
        self._try(lambda run: run.log(dict(values), step=step))

    def log_image(self, name: str, path: Path, step: int) -> None:
        """Log a picture."""

        def send(run: Any) -> None:
            import wandb

            run.log({name: wandb.Image(str(path))}, step=step)

        self._try(send)

    def close(self) -> None:
        """Finish the run; safe to call again."""
        self._try(lambda run: run.finish())
        self._run = None

    def _try(self, call: Callable[[Any], Any]) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as exc:
            self._say(f"W&B stopped tracking this run: {_reason(exc)}")
            self._run = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Forward what Trainer logs."""
        named = {
            name if name.startswith("eval_") else f"train/{name}": value
            for name, value in (logs or {}).items()
        }
        self.log(
            {name.replace("eval_", "eval/", 1): value for name, value in named.items()}, state.global_step
        )


def _reason(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0][:160]
