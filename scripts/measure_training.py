"""Measure training of expert adapters: PEFT's way against coop's, resident and offloaded.

    python scripts/measure_training.py block --experts 8,16,32,64,128
    python scripts/measure_training.py step --ckpt models/bench --budgets 50%,25% --memory 2.5GB

Owns its processes; promises a fresh one for every row, alternating order, medians, and memory above what was held
before the first step. `block` is one layer's experts (Qwen3-MoE layout, uniform routing: it measures products, not
policy); `step` is forward, backward and optimiser step of a whole model. Both print a table and one JSON line a row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from coop.errors import CoopError
from infer.timing import peak_rss_bytes, rss_bytes

MIB = 2**20
CHILD_SECONDS = 900.0


def main() -> int:
    """Run every row `--runs` times in alternating order and print the medians."""
    args = parse_arguments()
    if args.child:
        print(json.dumps(CHILDREN[args.what](json.loads(args.child))))
        return 0
    rows = block_rows(args) if args.what == "block" else step_rows(args)
    found: dict[str, list[dict[str, Any]]] = {}
    for run in range(args.runs):
        for row in rows if run % 2 == 0 else reversed(rows):
            print(f"run {run + 1}/{args.runs}: {row['title']}", file=sys.stderr, flush=True)
            found.setdefault(row["title"], []).append(run_child(args.what, row))
    for row in rows:
        print(json.dumps(summarise(row, found[row["title"]])), flush=True)
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("block", "step"))
    parser.add_argument("--experts", default="8,16,32,64,128", help="block: numbers of experts")
    parser.add_argument("--ckpt", default="", help="step: folder of the model")
    parser.add_argument("--budgets", default="50%,25%", help="step: budgets of the offloaded arms")
    parser.add_argument(
        "--memory", default="", help="step: memory limit of the offloaded arms, such as 2.5GB"
    )
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a batch")
    parser.add_argument(
        "--steps", type=int, default=5, help="timed steps in a process, after one that is not"
    )
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--runs", type=int, default=3, help="processes for each row")
    parser.add_argument("--accumulate", type=int, default=1, help="step: batches in one step")
    parser.add_argument("--checkpointing", action="store_true", help="step: compute activations again")
    parser.add_argument("--skip-peft", action="store_true", help="step: leave PEFT's own arm out")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def block_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each way and number of experts."""
    common = {"tokens": args.tokens, "steps": args.steps, "rank": args.rank}
    return [
        {"title": f"{way} {experts} experts", "way": way, "experts": int(experts), **common}
        for experts in args.experts.split(",")
        for way in ("peft", "coop")
    ]


def step_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """PEFT, coop resident, and coop at each budget."""
    common = {
        "ckpt": args.ckpt,
        "tokens": args.tokens,
        "steps": args.steps,
        "rank": args.rank,
        "accumulate": args.accumulate,
        "checkpointing": args.checkpointing,
    }
    ways = ([] if args.skip_peft else [("peft", "")]) + [("coop", "")]
    ways += [("coop", budget) for budget in args.budgets.split(",") if budget]
    return [
        {
            "title": f"{way} {budget}".strip(),
            "way": way,
            "budget": budget,
            "memory": args.memory if budget else "",
            **common,
        }
        for way, budget in ways
    ]


def run_child(what: str, row: dict[str, Any]) -> dict[str, Any]:
    """One row in a process of its own, in a memory group if it asks for one."""
    from coop.plan import parse_budget
    from infer.limits import memory_group

    command = [sys.executable, "-W", "ignore", __file__, what, "--child", json.dumps(row)]
    with ExitStack() as stack:
        if row.get("memory"):
            group = stack.enter_context(memory_group(parse_budget(row["memory"], 0, 0)))
            command = group.launcher(command)
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False)
        if done.returncode:
            raise CoopError(f"{row['title']}: exit status {done.returncode}: {done.stderr[-400:]}")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if row.get("memory"):
            result["group_peak_bytes"] = group.peak_bytes
    return result


def summarise(row: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the runs of one row; losses must be the same in all of them."""
    losses = [run.pop("losses", None) for run in runs]
    assert all(loss == losses[0] for loss in losses), "the same row gave different losses"
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    spread = max(run["seconds"] for run in runs) / min(run["seconds"] for run in runs)
    facts = {"title": row["title"], "tokens": row["tokens"], "runs": len(runs), "spread": round(spread, 2)}
    return {**facts, **medians, "losses": losses[0]}


def run_block(row: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward of one layer's experts with adapters: seconds, and memory beyond the weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from coop.adapters.transformers import find_experts

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=1024,
        moe_intermediate_size=512,
        num_experts=row["experts"],
        num_experts_per_tok=8,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    entry = find_experts(model)[0]
    wrapped = adapt(model, row["rank"])
    if row["way"] == "coop":
        from coop.adapters.training import ExpertTraining

        ExpertTraining(wrapped)
    block = wrapped.get_base_model().get_submodule(entry.name)
    hidden = torch.randn(row["tokens"], 1024, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.stack([torch.randperm(row["experts"])[:8] for _ in range(row["tokens"])])
    weights = torch.full(ids.shape, 1 / 8, dtype=torch.bfloat16)
    before = rss_bytes()
    seconds = []
    for _ in range(row["steps"] + 1):
        began = time.perf_counter()
        block(hidden, ids, weights).sum().backward()
        seconds.append(time.perf_counter() - began)
    return {
        "seconds": statistics.median(seconds[1:]),
        "extra_mib": round((peak_rss_bytes() - before) / MIB, 1),
    }


def run_step(row: dict[str, Any]) -> dict[str, Any]:
    """Training steps of a whole model: seconds a step, memory, bytes read a step, and every loss."""
    import torch

    from coop.adapters.offload import open_offloaded
    from coop.adapters.training import ExpertTraining

    with ExitStack() as stack:
        scheduler = None
        if row["budget"]:
            opened = stack.enter_context(
                open_offloaded(row["ckpt"], budget=row["budget"], dtype=torch.bfloat16, attention="sdpa")
            )
            model, scheduler = opened.model, opened.scheduler
        else:
            model = load_resident(row["ckpt"])
        torch.manual_seed(0)
        wrapped = adapt(model, row["rank"])
        if row["way"] == "coop":
            ExpertTraining(wrapped, scheduler)
        before = rss_bytes()
        read = (lambda: scheduler.loads["bytes_read"]) if scheduler else lambda: 0
        result = time_steps(wrapped, row, read)
        return {
            **result,
            "resident_mib": round(before / MIB),
            "peak_mib": round(peak_rss_bytes() / MIB),
        }


def load_resident(folder: str) -> Any:
    """The whole model in memory."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation="grouped_mm"
    )


def time_steps(model: Any, row: dict[str, Any], read: Any) -> dict[str, Any]:
    """Steps of AdamW on random tokens; the first is not timed."""
    import torch

    if row["checkpointing"]:
        model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.get_base_model().config.get_text_config().vocab_size
    losses, seconds, bytes_read = [], [], []
    for _ in range(row["steps"] + 1):
        began, read_before = time.perf_counter(), read()
        for _ in range(row["accumulate"]):
            ids = torch.randint(0, vocabulary, (1, row["tokens"]), generator=generator)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / row["accumulate"]
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        bytes_read.append(read() - read_before)
    return {
        "seconds": statistics.median(seconds[1:]),
        "read_mib": round(statistics.median(bytes_read[1:]) / MIB, 1),
        "losses": losses,
    }


def adapt(model: Any, rank: int) -> Any:
    """PEFT's model with adapters on every expert parameter; its own start values."""
    from peft import LoraConfig, get_peft_model

    from coop.adapters.transformers import find_experts

    targets = [f"{e.name}.{p}" for e in find_experts(model) for p in e.parameters if not p.endswith("_bias")]
    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[], target_parameters=targets)
    )


CHILDREN = {"block": run_block, "step": run_step}

if __name__ == "__main__":
    sys.exit(main())
