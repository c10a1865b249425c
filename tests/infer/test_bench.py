"""infer.bench: the line-up, the processes and their limits, the rows; on tiny models, nothing is judged by speed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coop.adapters.attach import attach
from coop.errors import CheckpointError, DataError, RequestError
from infer import arms, bench_report, contest
from infer.bench import Options, _config, main, parse_options
from infer.contest import Arm, Contest, Outcome, alternating, measure
from infer.limits import memory_group, why_unlimited
from infer.lineup import GGUF_FAMILIES, Absent, Lineup, Shape, Weights, check_packs, line_up, weights_of
from infer.pagecache import cached_bytes, drop, weight_files
from infer.replay import Replay, Trace
from tests.infer.models import strict_json

ROOT = Path(__file__).resolve().parents[2]
needs_groups = pytest.mark.skipif(why_unlimited() != "", reason=why_unlimited() or "memory can be limited")
needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")


def stub(script: str) -> Callable[[Path], list[str]]:
    """A command for arms that runs `script` with the specification as its argument."""
    return lambda specification: [sys.executable, "-c", script, str(specification)]


def children() -> set[str]:
    """Processes whose command line names this test's stub or an arm."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes()
        except OSError:
            continue
        if b"STUB" in line or b"--arm" in line:
            found.add(entry.parent.name)
    return found


def sample(**others: Any) -> dict[str, Any]:
    """What one run of an arm finds."""
    numbers = {"tokens_per_s": 2.0, "ttft_ms": 5.0, "token_ms_p50": 1.0, "token_ms_p99": 1.0}
    one = {"prompt_tokens": 16, "new_tokens": 8, "is_cut": False} | numbers | others
    return {"samples": [one], "peak_bytes": 10**9, "facts": {}}


def test_one_command_measures_coop_and_transformers_at_two_budgets(
    moe_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    given = ["decode", "--ckpt", str(moe_folder), "--budget", "100%,50%", "--baseline", "transformers"]
    given += ["--runs", "1", "--tokens", "6", "--memory-limit", "none", "--threads", "1"]
    assert main([*given, "--json", str(out), "--plot", str(picture)]) == 0
    document = strict_json(out.read_text())
    rows = document["rows"]
    assert [(row["engine"], row["budget_fraction"]) for row in rows] == [
        ("coop", 1.0),
        ("coop", 0.5),
        ("transformers", None),
    ]
    for row in rows:
        assert set(row) == set(bench_report.KEYS)
        assert (row["error"], row["skipped"], row["runs"], row["new_tokens"]) == (None, None, 1, 6)
        assert row["tokens_per_s"] > 0 and row["ttft_ms"] > 0 and row["peak_bytes"] > 2**20
        assert row["memory_limit_bytes"] is None
    config = json.loads((moe_folder / "config.json").read_text())
    asked = 5 * config["num_hidden_layers"] * config["num_experts_per_tok"]  # the first token is the prompt's
    for row in rows[:2]:
        assert row["hits_decode"] + row["misses_decode"] == asked
    assert rows[2]["hit_rate"] is None
    assert document["machine"]["versions"]["torch"] == importlib.metadata.version("torch")
    assert picture.stat().st_size > 10_000
    assert "one run: no spread" in capsys.readouterr().out


def test_an_unknown_baseline_is_refused_with_the_names_that_exist(
    moe_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["decode", "--ckpt", str(moe_folder), "--baseline", "vllm"]) == 2
    assert "--baseline vllm: pass one of transformers, accelerate, llamacpp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--runs", "0"], "--runs 0: pass 1 or more"),
        (["--budget", "50%,auto"], "--budget auto depends on what is free"),
        (["--budget", ","], "--budget and --prompt-tokens take one or more"),
        (["--prompt-tokens", "many"], "--prompt-tokens many: pass whole numbers"),
        (["--memory-limit", "half"], "--memory-limit half: pass auto, none or a size, such as 900MB"),
        (["--memory-limit", "50%"], "--memory-limit 50%: pass auto, none or a size"),
        (["--memory-limit", "0"], "--memory-limit 0: pass auto, none or a size"),
        (["--plot", "rows.txt"], "a picture must end in"),
        (["--replay", "nowhere.npz"], "--replay nowhere.npz: no such file"),
        (["--strategy", "Fastest"], "Fastest"),
    ],
)
def test_what_cannot_be_meant_is_refused(moe_folder: Path, given: list[str], said: str) -> None:
    with pytest.raises(Exception, match=said.replace("%", ".")):
        parse_options(["decode", "--ckpt", str(moe_folder), *given])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--baseline", "transformers"], "leave --baseline out"),
        (["--plot", "p.png"], "leave --plot out"),
        (["--tokens", "2"], "--tokens 2: profile-token needs 3 or more"),
        (["--pack", "."], "pass the pack as --ckpt"),
        (["--replay", "t.npz"], "only decode takes it, not profile-token"),
    ],
)
def test_profile_token_names_the_rule_that_was_broken(moe_folder: Path, given: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parse_options(["profile-token", "--ckpt", str(moe_folder), *given])


@pytest.mark.parametrize(
    ("text", "limit_bytes"), [("1GiB", 2**30), ("1GB", 10**9), ("900MB", 9 * 10**8), ("123456789", 123456789)]
)
def test_a_memory_limit_may_be_a_size(moe_folder: Path, tmp_path: Path, text: str, limit_bytes: int) -> None:
    assert parse_options(["decode", "--ckpt", str(moe_folder), "--memory-limit", text]).memory_limit == text
    lineup = lined_up(moe_folder, ("transformers",), tmp_path, memory_limit=text)
    assert {arm.memory_bytes for arm in lineup.arms} == {limit_bytes}


def test_a_pack_of_another_model_is_refused_with_both_named(
    moe_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = tmp_path / "pack"
    pack.mkdir()
    config = json.loads((moe_folder / "config.json").read_text())
    (pack / "config.json").write_text(json.dumps(config | {"hidden_size": 2 * config["hidden_size"]}))
    layers = [{}] * config["num_hidden_layers"]
    (pack / "coop_pack.json").write_text(json.dumps({"dtype": "int4", "dense_sha256": {}, "layers": layers}))
    given = ["decode", "--ckpt", str(moe_folder), "--pack", str(pack), "--memory-limit", "none"]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert f"--pack {pack} is of another model than --ckpt {moe_folder}" in said
    assert f"hidden size {2 * config['hidden_size']}; not {len(layers)} MoE layers" in said
    (pack / "config.json").write_text(json.dumps(config))
    shapes = {folder: Shape.of(folder, _config(folder)) for folder in (moe_folder, pack)}
    check_packs(shapes)  # the same model is not refused


def test_torch_baselines_load_the_dtype_of_the_checkpoint_and_say_so(
    moe_folder: Path, tmp_path: Path
) -> None:
    lineup = lined_up(moe_folder, ("transformers",), tmp_path)
    own = weights_of(moe_folder).dtype
    assert {arm.dtype for arm in lineup.arms} == {own}
    baseline = next(arm for arm in lineup.arms if arm.engine == "transformers")
    for dtype, expected in ((own, arms.TORCH_DTYPES[own]), ("fp16", "float16")):
        with arms.ENGINES["transformers"](replace(baseline, dtype=dtype)) as engine:
            assert engine._model.dtype == getattr(torch, expected)  # type: ignore[attr-defined]


def test_json_goes_to_standard_output_alone_and_no_number_is_exit_code_1(
    moe_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["decode", "--ckpt", str(moe_folder), "--budget", "1", "--runs", "1", "--tokens", "5"]
    assert main([*given, "--memory-limit", "none", "--json", "-"]) == 1
    out, err = capsys.readouterr()
    [row] = strict_json(out)["rows"]
    assert "the smallest that runs is" in row["error"] and "tokens/s" in err


def test_an_interruption_leaves_arms_that_say_they_did_not_run(
    moe_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[Arm] = []

    def interrupted(arm: Arm, command: Any) -> dict[str, Any]:
        measured.append(arm)
        if len(measured) > 1:
            raise KeyboardInterrupt
        return sample()

    monkeypatch.setattr(contest, "measure", interrupted)
    given = ["decode", "--ckpt", str(moe_folder), "--budget", "100%,50%", "--runs", "1"]
    assert main([*given, "--memory-limit", "none", "--json", "-"]) == 130
    rows = strict_json(capsys.readouterr().out)["rows"]
    assert [row["skipped"] for row in rows] == [None, "not run"]


def test_a_file_that_is_no_trace_is_refused_in_our_own_words(tmp_path: Path) -> None:
    contents = {"text": b"not a trace", "empty": b"", "cut": b"PK\x03\x04" + b"0" * 60}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    for name in (*contents, "one.npy", "other.npz"):
        said = f"--replay {tmp_path / name}: not an .npz trace with ids [tokens, layers, k] and n_experts"
        with pytest.raises(DataError) as caught:
            Trace.load(tmp_path / name)
        assert str(caught.value) == said


def test_an_adapter_is_refused_with_what_to_pass(
    adapter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["decode", "--ckpt", str(adapter_folder), "--memory-limit", "none"]) == 2
    assert "is an adapter: pass a full checkpoint, or a pack that was made of it" in capsys.readouterr().err


def lined_up(folder: Path, baselines: tuple[str, ...], tmp_path: Path, **others: Any) -> Lineup:
    values: dict[str, Any] = {"budgets": ("100%", "50%"), "memory_limit": "auto", "family": "qwen3_moe"}
    values |= {"template": Arm(engine="coop", path=str(folder))} | others
    return line_up(folders=[folder], baselines=baselines, gguf_dir=tmp_path, **values)


def test_baselines_get_the_limits_that_coop_gets(moe_folder: Path, tmp_path: Path) -> None:
    lineup = lined_up(moe_folder, ("transformers", "accelerate"), tmp_path)
    weights = weights_of(moe_folder)
    limit = weights.limit_bytes(0.5)
    assert limit == weights.dense_bytes + weights.expert_bytes // 2 + 768 * 2**20
    assert [(arm.engine, arm.memory_bytes) for arm in lineup.arms] == [
        ("coop", 0),
        ("coop", limit),
        ("transformers", 0),
        ("transformers", limit),
        ("accelerate", limit),
    ]


def test_a_baseline_whose_package_is_missing_is_named_with_the_way_to_get_it(
    moe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llama_cpp" else find(name))
    lineup = lined_up(moe_folder, ("llamacpp",), tmp_path)
    reason = "llama_cpp is not installed: pip install llama-cpp-python gguf"
    assert lineup.absent == [Absent("llamacpp", "", reason)]
    [row] = bench_report.rows_of([], lineup.absent, "tokens_per_s")
    assert (row["engine"], row["skipped"], row["tokens_per_s"]) == ("llamacpp", reason, None)


def test_a_family_that_the_gguf_writer_does_not_know_is_named(
    moe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    lineup = lined_up(moe_folder, ("llamacpp",), tmp_path, family="olmoe")
    assert "not olmoe" in lineup.absent[0].reason and not lineup.preparations


def test_four_bits_are_measured_at_the_limits_of_packs_too(
    moe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "coop_pack.json").write_text('{"dtype": "int4", "dense_sha256": {"model.safetensors": ""}}')
    (pack / "model.safetensors").write_bytes(b"x" * 1000)
    (pack / "experts-00001-of-00001.safetensors").write_bytes(b"x" * 500)
    template = Arm(engine="coop", path=str(moe_folder))
    folders, budgets = (moe_folder, pack), ("100%", "50%")
    lineup = line_up(template, folders, budgets, ("llamacpp",), "auto", "qwen3_moe", tmp_path)
    assert [(arm.path, arm.dtype) for arm in lineup.preparations] == [
        (str(tmp_path / "moe-bf16.gguf"), "bf16"),
        (str(tmp_path / "moe-q4_0.gguf"), "q4_0"),
    ]
    limits = {
        dtype: [arm.memory_bytes for arm in lineup.arms if arm.dtype == dtype] for dtype in ("bf16", "q4_0")
    }
    own, packed = weights_of(moe_folder).limit_bytes(0.5), 1000 + 250 + 768 * 2**20
    assert limits == {"bf16": [0, own], "q4_0": [0, own, packed]}


def test_arms_alternate_so_that_none_is_always_first() -> None:
    assert list(alternating(3, 3)) == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0), (2, 0), (2, 1), (2, 2)]


def test_a_killed_arm_is_an_error_in_its_row_and_is_not_tried_again(tmp_path: Path) -> None:
    killed = stub("import os; os.kill(os.getpid(), 9)  # STUB")
    said: list[str] = []
    contest = Contest([Arm(engine="coop", path=str(tmp_path))], 3, said.append, killed)
    contest.run()
    [row] = bench_report.rows_of(contest.outcomes, [], "tokens_per_s")
    assert row["error"] == "killed by signal 9"
    assert (row["runs"], row["tokens_per_s"], row["spread"]) == (0, None, None)
    assert sum(line.startswith("run") for line in said) == 1


def test_the_last_words_of_an_arm_that_failed_are_kept(tmp_path: Path) -> None:
    found = measure(Arm(engine="coop", path=str(tmp_path)), stub("raise SystemExit('the disk is gone')"))
    assert found["error"] == "failed with exit code 1: the disk is gone"


def test_a_large_model_gets_a_quarter_more_than_its_weights() -> None:
    assert Weights(Path("m"), 10**10, 3 * 10**10, "bf16").limit_bytes(1.0) == 5 * 10**10


def test_medians_and_the_spread_are_over_the_runs() -> None:
    found = [sample(tokens_per_s=rate) for rate in (4.0, 1.0, 2.0)]
    [row] = bench_report.rows_of([Outcome(Arm(engine="coop", path="x"), found)], [], "tokens_per_s")
    assert (row["tokens_per_s"], row["spread"], row["runs"]) == (2.0, [1.0, 4.0], 3)


@needs_groups
def test_an_arm_over_its_memory_is_killed_and_its_group_is_gone(tmp_path: Path) -> None:
    arm = Arm(engine="coop", path=str(tmp_path), memory_bytes=100 * 2**20)
    found = measure(arm, stub("bytearray(300 * 2**20)  # STUB"))
    assert found["error"] == "killed: more than 0.10 GB of memory"
    assert groups_left() == []


def groups_left() -> list[Path]:
    with memory_group(2**30) as group:
        return [p for p in group.path.parent.glob(f"coop-bench-{os.getpid()}-*") if p != group.path]


@needs_groups
def test_ctrl_c_leaves_neither_a_process_nor_a_group(tmp_path: Path) -> None:
    before = children()
    script = (
        "import sys; from pathlib import Path; from infer.contest import Arm, Contest\n"
        "stub = lambda spec: [sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(60)  # STUB']\n"
        "contest = Contest([Arm(engine='coop', path='.', memory_bytes=2**28)], 1,\n"
        "    lambda line: print(line, flush=True), stub)\n"
        "try: contest.run()\n"
        "except KeyboardInterrupt: print('stopped', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("run 1 of 1")
    until = time.monotonic() + 30
    while len(children() - before) < 2 and time.monotonic() < until:
        time.sleep(0.05)  # the script itself names STUB, the stub does too
    process.send_signal(2)
    out, _ = process.communicate(timeout=60)
    assert "stopped" in out
    assert children() - before == set()
    with memory_group(2**30) as group:
        assert list(group.path.parent.glob(f"coop-bench-{process.pid}-*")) == []


def test_where_no_memory_can_be_limited_the_reason_is_one_sentence(tmp_path: Path) -> None:
    assert why_unlimited(tmp_path) == "memory cannot be limited here (no memory controller is mounted)"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mincore is asked on Linux")
def test_pages_of_a_file_that_was_read_are_counted_and_can_be_dropped(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 2**20)
    files = weight_files(tmp_path)
    assert files == [path] and cached_bytes(files) == 2**20
    drop(files)
    assert cached_bytes(files) in (0, 2**20)  # a file system in memory keeps them


def trace_file(path: Path, ids: np.ndarray, num_experts: int) -> Path:
    np.savez(path, ids=ids.astype(np.uint8), seq_len=np.array([len(ids)]), n_experts=np.array(num_experts))
    return path


def test_replay_routes_decode_steps_as_the_trace_says(moe_folder: Path, tmp_path: Path) -> None:
    config = json.loads((moe_folder / "config.json").read_text())
    layers, k = config["num_hidden_layers"], config["num_experts_per_tok"]
    experts = config.get("num_experts") or config["num_local_experts"]
    rng = np.random.default_rng(0)
    ids = np.stack([[rng.permutation(experts)[:k] for _ in range(layers)] for _ in range(5)])
    trace = Trace.load(trace_file(tmp_path / "trace.npz", ids, experts))
    with attach(moe_folder, budget="100%") as runtime:
        seen: list[list[int]] = []
        execute = runtime.scheduler.execute

        def spy(
            layer: int, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
        ) -> torch.Tensor:
            if hidden.shape[0] == 1:
                seen.append(chosen[0].tolist())
            return execute(layer, hidden, chosen, weights)

        runtime.scheduler.execute = spy  # type: ignore[method-assign]
        Replay(runtime.scheduler, trace)
        runtime.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, min_new_tokens=5, do_sample=False)
        stats = runtime.stats()
    assert seen == [row.tolist() for row in ids[:4].reshape(4 * layers, k)]
    assert stats.hits_decode + stats.misses_decode == 4 * layers * k


def test_a_trace_with_more_experts_than_the_model_is_refused(tmp_path: Path) -> None:
    trace = Trace.load(trace_file(tmp_path / "t.npz", np.zeros((2, 3, 1)), 64))
    with pytest.raises(DataError, match="64 experts in a layer and the model 8"):
        trace.check(8)


def test_a_trace_of_another_shape_says_how_it_is_laid_on_the_model(tmp_path: Path) -> None:
    trace = Trace.load(trace_file(tmp_path / "t.npz", np.zeros((2, 5, 1)), 4))
    assert [trace.layer_for(layer, 3) for layer in range(3)] == [0, 2, 4]
    said = trace.describe(3, 8, 2)
    assert "each token asks for 1 experts, not 2" in said and "only experts 0 to 3 of 8" in said


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@needs_gguf
def test_the_gguf_file_has_the_models_metadata_and_its_weights_bit_for_bit(
    family: str, tmp_path: Path
) -> None:
    import gguf
    from safetensors.torch import load_file

    from infer.gguf_export import EXPERT_NAMES, export
    from tests.families import build_family

    assert set(GGUF_FAMILIES) == set(EXPERT_NAMES)
    build_family(tmp_path / "m", family)
    export(tmp_path / "m", tmp_path / "m.gguf", "bf16")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    architecture = {"qwen3_moe": "qwen3moe", "mixtral": "llama"}[family]
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert reader.fields["general.architecture"].contents() == architecture
    assert reader.fields[f"{architecture}.block_count"].contents() == config["num_hidden_layers"]
    assert reader.fields[f"{architecture}.expert_used_count"].contents() == config["num_experts_per_tok"]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    source = load_file(next((tmp_path / "m").glob("*.safetensors")))
    name = EXPERT_NAMES[family][3].format(1)
    expected = source[f"model.layers.0.{name}.weight"].bfloat16().view(torch.uint8).numpy()
    stack = tensors["blk.0.ffn_down_exps.weight"]
    assert np.array_equal(stack.data.reshape(-1, *expected.shape)[1], expected)


@needs_gguf
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(moe_folder: Path, tmp_path: Path) -> None:
    import shutil

    from infer.gguf_export import export

    folder = tmp_path / "m"
    shutil.copytree(moe_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    with pytest.raises(CheckpointError, match="norm_topk_prob"):
        export(folder, tmp_path / "m.gguf", "bf16")
    assert not (tmp_path / "m.gguf").exists()


def test_the_table_shows_a_reason_where_there_is_no_number() -> None:
    from rich.console import Console

    rows = bench_report.rows_of(
        [Outcome(Arm(engine="coop", path="x", budget="50%"), error="killed: more than 1.00 GB of memory")],
        [Absent("llamacpp", "", "not installed")],
        "tokens_per_s",
    )
    console = Console(width=200, record=True, file=io.StringIO())
    bench_report.show(console, rows, "tokens_per_s")
    text = console.export_text()
    assert "killed: more than 1.00 GB of memory" in text and "skipped: not installed" in text


def test_a_narrow_terminal_gets_whole_cells_and_notes_below() -> None:
    from rich.console import Console

    found = [sample(hit_rate=0.5, bytes_read=10**9)] * 2
    arm = Arm(engine="transformers", path="x", dtype="bf16", memory_bytes=2 * 10**9)
    why = "killed: more than 2.00 GB of memory " * 5
    rows = bench_report.rows_of([Outcome(arm, found), Outcome(arm, error=why)], [], "tokens_per_s")
    for width in (80, 150):
        console = Console(width=width, file=io.StringIO(), record=True)
        bench_report.show(console, rows, "tokens_per_s")
        text = console.export_text()
        lines = text.splitlines()
        assert f"(1) {why}" in lines  # on one line, for the terminal to break
        assert sum("transformers" in line for line in lines) == 2
        assert all(len(line) <= width for line in lines if not line.startswith("(1)"))
        assert ("min-max" in text) == (width == 150) and "tokens/s" in text


def test_points_without_a_limit_are_not_joined_to_those_with_one() -> None:
    from matplotlib.figure import Figure

    def outcome(budget: float, memory_bytes: int) -> Outcome:
        arm = Arm(engine="coop", path="x", budget_fraction=budget, memory_bytes=memory_bytes)
        return Outcome(arm, [sample()])

    outcomes = [outcome(1.0, 0), outcome(0.5, 2 * 10**9), outcome(0.25, 10**9)]
    rows = bench_report.rows_of(outcomes, [], "tokens_per_s")
    axes = Figure().subplots()
    bench_report._draw_decode(axes, rows)
    joined = [list(line.get_xdata()) for line in axes.lines if line.get_linewidth()]
    assert joined == [[1.0, 2.0]]
    assert {text.get_text() for text in axes.texts} == {"100%", "50%", "25%"}


def test_options_need_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="not a folder"):
        Options(**(vars_of(parse_options(["decode", "--ckpt", str(tmp_path)])) | {"ckpt": tmp_path / "none"}))


def vars_of(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in Options.__dataclass_fields__}


def test_a_replayed_comparison_names_its_trace_and_leaves_baselines_out(
    moe_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = trace_file(tmp_path / "law.npz", np.zeros((6, 3, 1)), 8), tmp_path / "rows.json"
    given = ["decode", "--ckpt", str(moe_folder), "--budget", "50%", "--runs", "1", "--tokens", "5"]
    given += ["--baseline", "transformers", "--replay", str(trace), "--memory-limit", "none"]
    assert main([*given, "--json", str(out)]) == 0
    row, absent = strict_json(out.read_text())["rows"]
    assert row["replay"] == "law.npz"
    config = json.loads((moe_folder / "config.json").read_text())
    assert (
        row["hits_decode"] + row["misses_decode"] == 4 * config["num_hidden_layers"]
    )  # one a layer, as traced
    assert absent["skipped"] == "--replay routes coop only"
    assert "replay: layers 0 to" in capsys.readouterr().err


def test_the_parts_of_a_token_add_up_to_the_token(moe_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "token.json"
    given = [
        "profile-token",
        "--ckpt",
        str(moe_folder),
        "--budget",
        "50%",
        "--tokens",
        "6",
        "--json",
        str(out),
    ]
    assert main(given) == 0
    found = strict_json(out.read_text())
    config = json.loads((moe_folder / "config.json").read_text())
    table = np.array(found["layers_ms"])
    assert table.shape == (config["num_hidden_layers"], len(found["parts"]))
    assert (table >= 0).all() and table[:, found["parts"].index("kernel")].all()


def test_the_parts_of_a_call_are_told_apart() -> None:
    from types import SimpleNamespace

    from infer.token_profile import PARTS, TokenProfile

    waits = SimpleNamespace(total=0.0)
    calendar = SimpleNamespace(record_compute=lambda layer, rows, seconds, experts: None)

    def execute(layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        waits.total += 2.0
        calendar.record_compute(layer, 1, 3.0)
        return hidden

    scheduler = SimpleNamespace(
        execute=execute, calendar=calendar, geometry=(0, 0), counters=SimpleNamespace(waits=waits)
    )
    profile = TokenProfile(scheduler)
    one = torch.zeros(1, 1)
    for _ in range(3):
        for layer in range(2):
            scheduler.execute(layer, one, one, one)
    scheduler.execute(0, torch.zeros(2, 1), one, one)  # a prompt is not counted
    table = dict(zip(PARTS, profile.table_ms().T.tolist(), strict=True))
    assert table["wait"] == [2000.0, 2000.0] and table["kernel"] == [3000.0, 3000.0]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_llama_cpp_picks_the_tokens_that_transformers_picks(family: str, tmp_path: Path) -> None:
    from llama_cpp import Llama
    from transformers import AutoModelForCausalLM

    from infer.gguf_export import export
    from tests.families import build_family

    build_family(tmp_path / "m", family)
    export(tmp_path / "m", tmp_path / "m.gguf", "bf16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    ids = np.random.default_rng(0).integers(3, model.config.vocab_size, 24).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    llama = Llama(str(tmp_path / "m.gguf"), n_ctx=32, n_threads=1, logits_all=True, verbose=False)
    try:
        llama.eval(ids)
        logits = np.array(llama.scores[: len(ids)])
    finally:
        llama.close()
    # it computes in bfloat16 or less, so a router may flip a pair of experts; a wrong layout agrees nowhere
    assert (logits.argmax(1) == expected.argmax(1)).mean() > 0.8


def test_an_arm_that_hangs_is_ended_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "_patience_seconds", lambda arm: 0.3)
    found = measure(Arm(engine="coop", path=str(tmp_path)), stub("import time; time.sleep(60)  # STUB"))
    assert found["error"].startswith("gave no answer within")


def test_a_generation_over_its_time_stops_after_four_tokens(moe_folder: Path) -> None:
    arm = Arm(engine="coop", path=str(moe_folder), budget="100%", vocabulary=200)
    with arms.open_coop(arm) as engine:
        _, whole = engine.run([5, 6, 7], list(range(10, 20)), time.perf_counter() + 600)
        _, cut = engine.run([5, 6, 7], list(range(10, 20)), 0.0)
    assert (len(whole), len(cut)) == (10, 4)


def test_the_model_is_fed_the_tokens_that_every_engine_is_fed(moe_folder: Path) -> None:
    arm = Arm(engine="coop", path=str(moe_folder), budget="100%", vocabulary=200)
    fed: list[int] = []
    with arms.open_coop(arm) as engine:
        model = engine.runtime.model
        model.register_forward_pre_hook(
            lambda module, args, kwargs: fed.extend(kwargs["input_ids"][0].tolist()), with_kwargs=True
        )
        engine.run([5, 6, 7], [11, 2, 13, 14], time.perf_counter() + 600)  # 2 ends a text, and must not here
    assert fed == [5, 6, 7, 11, 2, 13]


def test_warm_up_and_measurement_use_other_tokens_and_every_arm_the_same() -> None:
    arm = Arm(engine="coop", path="a", vocabulary=1000, seed=3)
    other = Arm(engine="llamacpp", path="b", vocabulary=1000, seed=3)
    assert arms.token_ids(arm, 16, 8) == arms.token_ids(other, 16, 8)
    assert arms.token_ids(arm, 16, 8) != arms.token_ids(arm, 16, 8, is_warm_up=True)
    prompt, following = arms.token_ids(arm, 16, 8)
    assert (len(prompt), len(following)) == (16, 8)
