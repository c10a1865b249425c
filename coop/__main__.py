"""`coop NAME ...` and `python -m coop NAME ...`: other spellings of the `python -m` commands.

Owns only the list of commands; promises the same options and exit codes as the module itself. It is the one
place in `coop` that names `train` and `infer`, and it imports them by name, only when they are asked for.
"""

from __future__ import annotations

import difflib
import runpy
import sys
from collections.abc import Sequence

COMMANDS = {
    "finetune": (
        "train.finetune",
        "fine-tune from a recipe, one process (several: accelerate launch train/finetune.py)",
    ),
    "profile": ("coop.profile", "show, merge and compare expert profiles, and say whether one has drifted"),
    "pack": ("coop.pack", "rewrite a checkpoint so that each expert is one read, quantised if wanted"),
    "generate": ("infer.generate", "generate text with part of the experts in memory"),
    "bench": ("infer.bench", "measure speed against memory, beside what people use today"),
}


def usage() -> str:
    """The help text: one line for each command."""
    lines = [
        f"  {name:<10}{what}\n  {'':<10}same as: python -m {module}"
        for name, (module, what) in COMMANDS.items()
    ]
    return "\n".join(
        ("usage: coop COMMAND [options]", "", "commands:", *lines, "", "coop COMMAND --help says more.")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command as `python -m` would; its SystemExit passes through. 2 for a name that is none."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if given else sys.stderr)
        return 0 if given else 2
    name, *rest = given
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"pass one of {', '.join(COMMANDS)}"
        print(f"error: coop has no command {name!r}; {hint}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[name]
    sys.argv[1:] = rest
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
