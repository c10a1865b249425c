"""The training command: `accelerate launch train/finetune.py RECIPE [key=value ...]`.

Owns the command line and the exit status; promises to say in one line what is wrong. `train.run` does the work.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # started as a file: make `coop` and `train` importable from the clone it lies in
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from coop.errors import CoopError

if TYPE_CHECKING:
    from train.schema import Recipe
    from train.stopping import Stop


EXIT_REFUSED, EXIT_INTERRUPTED = 2, 130
EPILOG = """\
exit status:
  0    the result is written, or a dry run found nothing wrong
  2    something to correct, said in one line: recipe, data, model, disk
  130  stopped by Ctrl-C (SIGINT)     training ends after the step it is in, with a checkpoint; a second
  143  stopped by SIGTERM             signal ends it at once; go on with --resume either way
`accelerate launch` and `torchrun` show a traceback of their own below that line and exit with 1 instead; with one
process, `python train/finetune.py RECIPE` does the same work and keeps the status.

Every key of a recipe is explained in docs/recipes.md, checkpoints in docs/checkpoints.md.
"""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace: recipe, overrides, dry_run, print_config, resume, force, overwrite."""
    parser = _build_parser()
    args = parser.parse_intermixed_args(argv)
    if args.resume and _is_no_checkpoint(args.resume):  # `--resume RECIPE`: nargs="?" takes what follows
        args.words, args.resume = [args.resume, *args.words], ""
    if args.resume is not None and args.overwrite:
        parser.error("--resume and --overwrite exclude each other")
    if args.force and args.resume is None:
        parser.error("--force belongs to --resume")
    recipe = next((word for word in args.words if "=" not in word or Path(word).is_file()), None)
    if recipe is None:
        parser.error("say which RECIPE, such as recipes/demo.yaml")
    args.words.remove(recipe)
    args.recipe, args.overrides = Path(recipe), args.words
    return args


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelerate launch train/finetune.py",
        usage="%(prog)s [options] RECIPE [key=value ...]",
        description="Fine-tune a mixture-of-experts model and record how its experts are used.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "words",
        nargs="*",
        metavar="RECIPE [key=value ...]",
        help="YAML file, such as recipes/demo.yaml, and overrides of its keys, such as train.steps=20",
    )
    add("--dry-run", action="store_true", help="check everything, show the plan, train nothing")
    add("--print-config", action="store_true", help="print the recipe with every key spelled out")
    add(
        "--resume",
        nargs="?",
        const="",
        metavar="CHECKPOINT",
        help="go on from the newest whole checkpoint of the output folder, or from this one",
    )
    add("--force", action="store_true", help="resume although recipe, data or number of processes differ")
    add("--overwrite", action="store_true", help="delete what an earlier run left in the output folder")
    return parser


def _is_no_checkpoint(word: str) -> bool:
    path = Path(word)
    return not path.is_dir() and ("=" in word or path.is_file() or path.suffix in (".yaml", ".yml"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parse_arguments(argv)
    try:
        from train.data.sources import needs_hub
        from train.recipe import load_recipe

        recipe = load_recipe(args.recipe, args.overrides)
        if args.print_config:
            print(recipe.to_yaml(), end="")
            return 0
        prepare_environment(recipe.model.path, recipe.hub.push or needs_hub(recipe.data))
        from train.stopping import Stop, Stopped

        try:
            with Stop() as stop:
                _run(args, recipe, stop)
        except Stopped as exc:
            print(f"stopped by {exc.name}", file=sys.stderr)
            return exc.status
    except CoopError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _run(args: argparse.Namespace, recipe: Recipe, stop: Stop) -> None:
    from train.run import Options, run

    resume = None if args.resume is None else Path(args.resume) if args.resume else Path()
    options = Options(
        is_dry=args.dry_run,
        resume=resume,
        is_overwriting=args.overwrite,
        is_forced=args.force,
        stop=stop,
    )
    run(recipe, args.recipe, options)


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


if __name__ == "__main__":
    sys.exit(main())
