"""Tracking: a W&B run that can never stop a training run.

Owns the W&B run and the file with its id; promises that whatever W&B raises is said once, in one line, and training
goes on: online falls back to offline, offline to nothing. `train.run` opens it; `Metrics` feeds it the scalars.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from coop.errors import CheckpointError
from coop.files import read_json, write_atomic
from train.schema import WandbSection

RUN_NAME = "wandb_run.json"
STEP = "trainer/step"  # the x axis of every chart; W&B's own step may not go back, and a resumed run's does
MAX_KEYS = 256  # W&B gets slow with thousands; what is beyond is left out
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_Mode = Literal["online", "offline"]
_FALLBACKS: dict[str, tuple[_Mode, ...]] = {
    "online": ("online", "offline"),
    "offline": ("offline",),
    "disabled": (),
}


class Tracking:
    """Logs scalars, pictures and the profile to W&B as training goes.

    Args:
        settings: mode, project, name, group and tags.
        output: W&B's own files go here, and the id of the run, which a resumed run goes on under.
        facts: the resolved recipe, shown as the run's config.
        say: gets a line when something fails.
    """

    def __init__(
        self, settings: WandbSection, output: Path, facts: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        self._say, self._output = say, output
        self._run: Any = None
        self._keys: set[str] = set()
        self.place = ""  # where the run can be seen: its address, or the folder to sync
        for mode in _FALLBACKS[settings.mode]:
            if self._run is None:
                self._open(settings, output, facts, mode)

    def _open(self, settings: WandbSection, output: Path, facts: dict[str, Any], mode: _Mode) -> None:
        try:
            import wandb

            saved_id = self._saved_id()
            run = wandb.init(
                project=settings.project,
                name=settings.run_name or output.name,
                group=settings.group,
                tags=settings.tags,
                id=saved_id or None,
                resume="allow" if saved_id else None,
                dir=str(output),
                config=facts,
                mode=mode,
                settings=wandb.Settings(silent=True, console="off"),
            )
            run.define_metric(STEP)
            run.define_metric("*", step_metric=STEP)
            write_atomic(output / RUN_NAME, json.dumps({"id": run.id}).encode())
            # asking an offline run for its address makes W&B print a warning
            self.place = str(run.url) if mode == "online" else str(Path(run.dir).parent)
            self._run = run
        except Exception as exc:
            # whatever a tracker raises, the training that it watches is worth more
            self._say(f"W&B cannot track this run ({mode}): {_reason(exc)}")

    def _saved_id(self) -> str:
        """The id under which an earlier part of this run was tracked, or ""."""
        if not (self._output / RUN_NAME).is_file():
            return ""
        saved = read_json(self._output / RUN_NAME, CheckpointError, limit_bytes=4096)
        run_id = saved.get("id") if isinstance(saved, dict) else None
        if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
            raise CheckpointError(f"{self._output / RUN_NAME}: no run id in it; delete it to track a new run")
        return run_id

    @property
    def is_open(self) -> bool:
        """Whether the run is being tracked."""
        return self._run is not None

    def log_record(self, record: Mapping[str, Any]) -> None:
        """Log a record of metrics.jsonl: `loss` as train/loss, `eval_loss` as eval/loss, other names as they are."""
        values = {_grouped(name): value for name, value in record.items() if name != "step"}
        fresh = [name for name in values if name not in self._keys]
        too_many = fresh[max(0, MAX_KEYS - len(self._keys)) :]
        if too_many and len(self._keys) < MAX_KEYS:
            self._say(f"W&B gets no more than {MAX_KEYS} names: {too_many[0]} and others are left out")
        self._keys.update(name for name in fresh if name not in too_many)
        kept = {name: value for name, value in values.items() if name in self._keys}
        if kept:
            self._try(lambda run: run.log({**kept, STEP: record["step"]}))

    def log_images(self, images: Mapping[str, bytes], step: int) -> None:
        """Log pictures, PNG files by name."""

        def send(run: Any) -> None:
            import wandb
            from PIL import Image

            shown = {
                f"images/{name}": wandb.Image(Image.open(io.BytesIO(data))) for name, data in images.items()
            }
            run.log({**shown, STEP: step})

        self._try(send)

    def log_profile(self, path: Path, step: int) -> None:
        """Log the profile as an artifact; it is uploaded in the background, or by `wandb sync`."""

        def send(run: Any) -> None:
            import wandb

            artifact = wandb.Artifact(f"coop-profile-{run.id}", type="coop-profile", metadata={"step": step})
            artifact.add_file(str(path))
            run.log_artifact(artifact)

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


def _grouped(name: str) -> str:
    if "/" in name:
        return name
    return name.replace("eval_", "eval/", 1) if name.startswith("eval_") else f"train/{name}"


def _reason(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0][:160]
