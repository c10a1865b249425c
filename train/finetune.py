"""The training command: `accelerate launch train/finetune.py RECIPE [key=value ...]`.

Owns the command line and the exit status (0 done, 2 something to correct, 130 interrupted); promises to say in
one line what is wrong. `train.run` does the work.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

if not __package__:  # started as a file: make `coop` and `train` importable from the clone it lies in
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from coop.errors import CoopError


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace: recipe, overrides, dry_run, print_config, resume, overwrite."""
    parser = argparse.ArgumentParser(
        prog="accelerate launch train/finetune.py",
        description="Fine-tune a mixture-of-experts model and record how its experts are used.",
        epilog="Every key of a recipe is explained in docs/recipes.md.",
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="YAML file, such as recipes/demo.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override of a key, such as train.steps=20"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, show the plan, train nothing"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the recipe with every key spelled out"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="CHECKPOINT",
        help="go on from the newest whole checkpoint of the output folder, or from this one",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="delete what an earlier run left in the output folder"
    )
    args = parser.parse_intermixed_args(argv)
    if args.resume is not None and args.overwrite:
        parser.error("--resume and --overwrite exclude each other")
    if args.resume and "=" in args.resume and not Path(args.resume).exists():
        args.overrides, args.resume = [*args.overrides, args.resume], ""
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        from train.recipe import load_recipe
        from train.sources import needs_hub

        recipe = load_recipe(args.recipe, args.overrides)
        if args.print_config:
            print(recipe.to_yaml(), end="")
            return 0
        prepare_environment(recipe.model.path, needs_hub(recipe.data))
        from train.run import Options, run

        resume = None if args.resume is None else Path(args.resume) if args.resume else Path()
        run(recipe, args.recipe, Options(is_dry=args.dry_run, resume=resume, is_overwriting=args.overwrite))
    except CoopError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def prepare_environment(model_path: str, needs_hub: bool = False) -> None:
    """Set what libraries read when they are imported: the CPU where there is nothing better, no network unless needed.

    Args:
        needs_hub: whether anything besides the model comes from the hub.
    """
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        if "ACCELERATE_MIXED_PRECISION" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
            # `accelerate launch` gives every process one thread unless it is told otherwise
            torch.set_num_threads(share_of_cores())
    if Path(model_path).is_dir() and not needs_hub:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="peft|trl|transformers|torch")


def share_of_cores() -> int:
    """The cores that each process of this machine may compute on: all of them, divided among the processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
