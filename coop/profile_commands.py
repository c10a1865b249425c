"""Profile commands: what `python -m coop.profile` can be asked.

Owns the command lines and exit statuses (0 done, 1 the profile has drifted, 2 something to correct, 141 the reader
has gone); promises one line for what is wrong. The work is done in the modules that each command names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coop.errors import CoopError, ProfileError, RequestError
from coop.profile import PROFILE_NAME, Profile
from coop.profile_report import check_picture, plot, render, summarise

_BROKEN_PIPE = 141  # what a shell shows for a program that SIGPIPE ended
_ANY_ROUTER = "compare even if the router weights differ: for a router that was trained in between"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parse, command = COMMANDS[given.pop(0)] if given and given[0] in COMMANDS else (_show_parser, show)
    args = parse().parse_args(given)
    try:
        return command(args)
    except CoopError as exc:
        print(exc, file=sys.stderr)
        return 2
    except BrokenPipeError:
        # the reader has gone; what is left in the buffer must not be tried again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except OSError as exc:
        print(f"{exc.filename or 'output'}: {exc.strerror or exc}", file=sys.stderr)
        return 2


# one profile


def _show_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coop.profile",
        description="Show the expert profile of a checkpoint, or do something with several of them.",
        epilog="other commands, each with --help: merge, diff, drift. A folder of that name: ./merge",
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="checkpoint folder, or the profile file itself")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="write a heat map of layers x experts")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    return parser


def show(args: argparse.Namespace) -> int:
    """`python -m coop.profile DIR [--plot FILE.png] [--json]`."""
    if args.plot:
        check_picture(args.plot)
    profile = Profile.load(args.dir)
    _print(args, lambda: summarise(profile), lambda: render(profile))
    if args.plot:
        plot(profile, args.plot)
        print(f"heat map: {args.plot}", file=sys.stderr)
    return 0


# several


def _merge_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coop.profile merge",
        description="Add the counts of several profiles of one model: for traffic that is a mixture of theirs.",
    )
    parser.add_argument("profiles", type=Path, nargs="+", metavar="DIR", help="two or more folders or files")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="checkpoint folder, or a file to write"
    )
    parser.add_argument(
        "--weights",
        type=_numbers,
        metavar="W,W",
        help="share of the merged tokens that each makes up, such as 3,1; without it every token counts once",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the profile that is at --out")
    return parser


def merge_profiles(args: argparse.Namespace) -> int:
    """`python -m coop.profile merge A B [...] --out PATH [--weights W,W]`."""
    from coop.profile_merge import merge

    if len(args.profiles) < 2:
        raise RequestError("merge: name two profiles or more")
    file = args.out / PROFILE_NAME if args.out.is_dir() else args.out
    if file.exists() and not args.overwrite:
        raise RequestError(f"{file}: is there already; add --overwrite to replace it")
    profiles = [Profile.load(path) for path in args.profiles]
    merged = merge(profiles, args.weights)
    merged.save(args.out)
    if len({profile.identity.adapter_digest for profile in profiles}) > 1:
        print(
            "their adapters differ: the merged profile is taken for any adapter of this model",
            file=sys.stderr,
        )
    total = merged.tokens_prompt + merged.tokens_answer
    print(f"{file}: {len(profiles)} profiles, {total:,} tokens, {merged.tokens_answer:,} of them answers")
    return 0


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is not numbers with commas between, such as 3,1"
        ) from None


def _diff_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coop.profile diff", description="Show what differs between two profiles of one model."
    )
    parser.add_argument("first", type=Path, metavar="A", help="checkpoint folder or profile file")
    parser.add_argument("second", type=Path, metavar="B", help="the same")
    parser.add_argument(
        "--top", type=int, default=0, metavar="N", help="hottest experts compared; default: a quarter"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="write a picture of it")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--any-router", action="store_true", help=_ANY_ROUTER)
    return parser


def diff(args: argparse.Namespace) -> int:
    """`python -m coop.profile diff A B [--top N] [--plot FILE.png] [--json]`."""
    from coop.profile_compare import compare, plot_comparison, render_comparison

    if args.plot:
        check_picture(args.plot)
    if args.top < 0:
        raise RequestError(f"--top {args.top}: must be 1 or more")
    mine, other = Profile.load(args.first), Profile.load(args.second)
    _check_comparable(mine, other, args.first, args.second, args.any_router)
    facts = compare(mine, other, args.top)
    _print(args, lambda: facts, lambda: render_comparison(facts))
    if args.plot:
        plot_comparison(mine, other, facts, args.plot)
        print(f"picture: {args.plot}", file=sys.stderr)
    return 0


def _drift_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coop.profile drift",
        description="Say whether a profile is still right for some traffic. Exit status 1: it is not.",
    )
    parser.add_argument("profile", type=Path, metavar="PROFILE", help="checkpoint folder or profile file")
    parser.add_argument(
        "--against",
        type=Path,
        required=True,
        metavar="TRAFFIC",
        help="a profile of it, or routes: an .npz file with ids [tokens, layers, top_k] and n_experts",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--any-router", action="store_true", help=_ANY_ROUTER)
    return parser


def drift(args: argparse.Namespace) -> int:
    """`python -m coop.profile drift PROFILE --against TRAFFIC [--json]`."""
    from coop.profile_drift import (
        DRIFTED,
        UNKNOWN,
        judge,
        render_drift,
        traffic_of_profile,
        traffic_of_routes,
    )
    from coop.routes import Routes

    profile = Profile.load(args.profile)
    if args.against.suffix == ".npz":
        traffic = traffic_of_routes(profile, Routes.load(args.against))
    else:
        other = Profile.load(args.against)
        _check_comparable(profile, other, args.profile, args.against, args.any_router)
        traffic = traffic_of_profile(profile, other)
    facts = judge(profile, traffic)
    _print(args, lambda: facts, lambda: render_drift(facts))
    return {DRIFTED: 1, UNKNOWN: 3}.get(facts["verdict"], 0)


# shared


def _check_comparable(mine: Profile, other: Profile, first: Path, second: Path, any_router: bool) -> None:
    """Raise ProfileError, naming both and what differs, unless they are of one model; adapters may differ."""
    ignored: dict[str, Any] = {"adapter_digest": ""} | ({"router_digest": ""} if any_router else {})
    try:
        mine.check(replace(other.identity, **ignored))
    except ProfileError as exc:
        raise ProfileError(f"{first} and {second}: {exc}") from exc


def _print(args: argparse.Namespace, facts: Callable[[], Any], text: Callable[[], str]) -> None:
    print(json.dumps(facts(), indent=1, allow_nan=False) if args.json else text(), flush=True)


COMMANDS: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[[argparse.Namespace], int]]] = {
    "merge": (_merge_parser, merge_profiles),
    "diff": (_diff_parser, diff),
    "drift": (_drift_parser, drift),
}
