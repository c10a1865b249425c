"""One of two processes that train together, with and without the callback: `torchrun two_processes.py FOLDER`.

Owns nothing; promises a recount-RANK.json in FOLDER with what this process's routers chose. A test starts it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.train.recount import Recount
from tests.train.tiny import build_recipe
from train import loading
from train import run as runs
from train.tuning.model import make_trainable


def main(folder: Path) -> None:
    """Train twice: seven rows, so that the last batch of an epoch is not full on one of the processes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    recounts: list[Recount] = []

    def watched(model: Any, *args: Any) -> Any:
        trainable = make_trainable(model, *args)
        recounts.append(Recount(trainable))
        return trainable

    loading.make_trainable = watched  # type: ignore[attr-defined]
    common = ("data.max_train_rows=7", "train.grad_accumulation=2", "train.steps=5")
    for name, more in (("with", ()), ("out", ("coop.profile.enabled=false",))):
        recipe = build_recipe(folder, *common, f"output={folder / name}", *more)
        runs.run(recipe, Path("recipe.yaml"), runs.Options())
    recount = recounts[0]
    facts = {
        "prompt": recount.prompt.tolist(),
        "answer": recount.answer.tolist(),
        "passes": recount.passes,
        "world": torch.distributed.get_world_size(),
        "random": torch.get_rng_state().tolist(),
    }
    (folder / f"recount-{os.environ['RANK']}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
