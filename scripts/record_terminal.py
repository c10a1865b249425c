"""Record a command's terminal output as an SVG picture: `python scripts/record_terminal.py OUT.svg COMMAND ...`.

Owns nothing; promises that the picture is what the command really printed. Made docs/generate.svg.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text


def record(command: Sequence[str], out: Path, width: int) -> int:
    """Run `command`, write its output in the order it came to `out`, return its exit code."""
    environment = os.environ | {"COLUMNS": str(width), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True, check=False
    )
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True)
        console.print(Text(f"$ {shlex.join(command)}", style="bold green"))
        console.print(Text.from_ansi(done.stdout))
    picture = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="coop"), flags=re.DOTALL)
    out.write_text(picture, encoding="utf-8")  # without fonts from the web
    print(done.stdout, end="")
    return done.returncode


def main(argv: Sequence[str] | None = None) -> int:
    """The command's own exit code."""
    parser = argparse.ArgumentParser(description="Record a command's terminal output as an SVG picture.")
    parser.add_argument("out", type=Path, metavar="OUT.svg")
    parser.add_argument("--width", type=int, default=110, help="columns (default: %(default)s)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run")
    args = parser.parse_args(argv)
    if not args.command:
        parser.error("name the command to run")
    return record(args.command, args.out, args.width)


if __name__ == "__main__":
    sys.exit(main())
