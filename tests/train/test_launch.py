"""Launch: several processes equal one, FSDP2 equals one process, and what a launcher would drop is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from coop.errors import CoopError, RecipeError
from coop.profile import Profile
from tests.train.test_training import train
from tests.train.tiny import build_recipe, read_losses, write_recipe
from train.launch import check_sharded, join_processes, launch_command, read_kind

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "recipes" / "launch"
SCRIPT = str(ROOT / "train" / "finetune.py")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
# neither dropout nor a loss over the tokens of a micro-batch: what is left must not depend on the split of a batch
SHARED = (
    "moe.aux_loss_coef=0",
    "eval.at_start=false",
    "eval.every_steps=3",
    "train.steps=4",
    "checkpoint.every_steps=2",
)
FULL = (
    "tune.method=full",
    "tune.lora={}",
    "tune.groups=[attention,experts,router,other]",
    "eval.at_start=false",
)


def write_plain_recipe(folder: Path, family: str = "mixtral") -> Path:
    recipe = write_recipe(folder, family)
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.0}))
    return recipe


def launch(config: str, script: str, *arguments: str, extra: tuple[str, ...] = ()) -> str:
    """Start `script` with the real `accelerate launch`; returns what it showed. Fails the test if it fails."""
    process = launched(config, script, *arguments, extra=extra)
    assert process.returncode == 0, process.stdout
    return process.stdout


def launched(
    config: str, script: str, *arguments: str, extra: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / config)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [*launcher, "--num_processes", "2", "--main_process_port", "0", *extra, script, *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        check=False,
    )


def assert_same_updates(mine: Path, other: Path, start: Path | None = None, share: float = 0.01) -> None:
    """The weights differ by less than `share` of how far they have moved from `start`, in each tensor's norm.

    Element by element they need not: Adam makes a full step of a gradient that is nearly zero, whatever its sign.
    """
    first, second = load_file(mine), load_file(other)
    before = load_file(start) if start is not None else {}
    assert first.keys() == second.keys()
    for name, weight in second.items():
        moved = weight - before.get(name, torch.zeros_like(weight))
        assert (first[name] - weight).norm() <= share * moved.norm(), name


def assert_same_losses(mine: Path, other: Path) -> None:
    pairs = zip(read_losses(mine), read_losses(other), strict=True)
    for first, second in pairs:
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-4)


def test_two_processes_with_one_row_each_equal_one_process_with_two(tmp_path: Path) -> None:
    recipe = write_plain_recipe(tmp_path)
    asked = ("launch.processes=2", f"launch.config={LAUNCH / 'cpu-2.yaml'}", "train.batch_size=1")
    hot = ("tune.experts.select=hot", "tune.experts.share=0.7")
    shown = launch("cpu-2.yaml", SCRIPT, str(recipe), *SHARED, *hot, *asked)
    assert "2 processes on cpu" in shown and "plan: 4 steps of 2 rows" in shown
    alone = train(build_recipe(tmp_path, *SHARED, *hot, f"output={tmp_path / 'alone'}", "train.batch_size=2"))
    chosen = [(folder / "selected_experts.json").read_bytes() for folder in (tmp_path / "out", alone)]
    assert chosen[0] == chosen[1] and "experts trained: " in shown
    assert_same_losses(tmp_path / "out", alone)
    assert_same_updates(tmp_path / "out" / "adapter_model.safetensors", alone / "adapter_model.safetensors")


@pytest.mark.slow
def test_fsdp2_equals_one_process_and_resumes_where_it_was(tmp_path: Path) -> None:
    recipe, script = (
        write_plain_recipe(tmp_path, "qwen3_moe"),
        str(ROOT / "tests" / "train" / "fsdp_on_cpu.py"),
    )
    arguments = (str(recipe), *SHARED, *FULL, "train.batch_size=1", f"launch.config={LAUNCH / 'fsdp2.yaml'}")
    shown = launch("fsdp2.yaml", script, *arguments)
    assert "sharded by FSDP" in shown and "no warm-up: this process does not hold whole experts" in shown
    output = tmp_path / "out"
    alone = train(
        build_recipe(
            tmp_path, *SHARED, *FULL, f"output={tmp_path / 'alone'}", "train.batch_size=2", family="qwen3_moe"
        )
    )
    assert_same_losses(output, alone)
    start = tmp_path / "model" / "model.safetensors"
    assert_same_updates(output / "model.safetensors", alone / "model.safetensors", start)
    mine, other = Profile.load(output), Profile.load(alone)
    assert mine.identity.architecture == other.identity.architecture
    for counts in ("train_prompt", "train_answer", "hot_prompt", "hot_answer"):
        assert (
            np.abs(getattr(mine, counts) - getattr(other, counts)).sum() <= 2
        )  # a tie that rounding decides
    assert mine.train_tokens_answer == other.train_tokens_answer
    uninterrupted = shutil.copytree(output, tmp_path / "uninterrupted")
    shutil.rmtree(output / "checkpoint-4")
    for name in ("summary.json", "model.safetensors"):
        (output / name).unlink()
    shown = launch("fsdp2.yaml", script, *arguments, "--resume")
    assert "at step 2" in shown
    assert_same_losses(output, uninterrupted)
    assert_same_updates(output / "model.safetensors", uninterrupted / "model.safetensors", start, share=0.0)


def test_fsdp_that_accelerate_would_drop_on_cpus_is_refused(tmp_path: Path) -> None:
    process = launched("fsdp2.yaml", SCRIPT, str(write_recipe(tmp_path)), *FULL)
    assert process.returncode != 0
    assert (
        "error: the launcher asked for FSDP, which accelerate silently drops for 2 processes"
        in process.stdout
    )


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends to be one of several accelerators under a launcher."""

    def start(kind: str = "", processes: int = 8, **environment: str) -> None:
        state = SimpleNamespace(
            num_processes=processes,
            distributed_type=DistributedType.MULTI_GPU if processes > 1 else DistributedType.NO,
            device=torch.device("cuda"),
        )
        monkeypatch.setattr("train.launch.PartialState", lambda **_: state)
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
        for name in ("FSDP", "DEEPSPEED"):
            monkeypatch.setenv(f"ACCELERATE_USE_{name}", str(kind == name).lower())
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return start


@pytest.mark.parametrize(
    ("started", "overrides", "reason"),
    [
        (
            {"processes": 8},
            ("launch.processes=4",),
            "launch.processes is 4, but 8 take part; start with: .* 4 ",
        ),
        ({"kind": "FSDP", "processes": 1}, FULL, "silently drops for 1 process on cuda"),
        ({"kind": "FSDP", "FSDP_VERSION": "1"}, FULL, "FSDP 1; set fsdp_version: 2"),
        ({"kind": "FSDP", "FSDP_VERSION": "2"}, (), "lora is not supported with FSDP"),
        (
            {"kind": "DEEPSPEED"},
            (*FULL, "tune.experts.select=hot"),
            "tune.experts.select: must be all with DEEPSPEED",
        ),
        (
            {"kind": "FSDP", "FSDP_VERSION": "2"},
            (*FULL, "train.optimizer=adafactor"),
            "train.optimizer: adafactor cannot step sharded weights",
        ),
        (
            {"kind": "FSDP", "FSDP_VERSION": "2"},
            (*FULL, "eval.at_start=true"),
            "eval.at_start: must be false with FSDP",
        ),
        (
            {},
            (*FULL, f"launch.config={LAUNCH / 'fsdp2.yaml'}", "launch.processes=8"),
            r"means FSDP, but the run has no sharding; start with: accelerate launch --config_file \S+fsdp2.yaml "
            r"--num_processes 8 train/finetune.py my.yaml",
        ),
        ({}, ("launch.config=nothing.yaml",), "launch.config: nothing.yaml: no such file"),
    ],
)
def test_start_that_is_not_what_the_recipe_asks_for_is_refused(
    tmp_path: Path, pretend: Any, started: dict[str, Any], overrides: tuple[str, ...], reason: str
) -> None:
    recipe = build_recipe(tmp_path, *overrides)
    pretend(**started)
    with pytest.raises(CoopError, match=reason):
        join_processes(recipe, Path("my.yaml"))


def test_start_as_the_recipe_asks_for_is_accepted_and_the_recipe_decides_the_precision(
    tmp_path: Path, pretend: Any
) -> None:
    asked = ("launch.processes=8", f"launch.config={LAUNCH / 'fsdp2.yaml'}", "train.mixed_precision=bf16")
    recipe = build_recipe(tmp_path, *FULL, *asked)
    pretend("FSDP", FSDP_VERSION="2")
    assert join_processes(recipe, Path("my.yaml")).num_processes == 8
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    join_processes(build_recipe(tmp_path, *FULL), Path("my.yaml"))
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "no"


def test_dry_run_may_be_started_anyhow_except_where_settings_would_be_dropped(
    tmp_path: Path, pretend: Any
) -> None:
    recipe = build_recipe(tmp_path, *FULL, "launch.processes=8", f"launch.config={LAUNCH / 'fsdp2.yaml'}")
    pretend(processes=1)
    assert join_processes(recipe, Path("my.yaml"), is_dry=True).num_processes == 1


def test_trainer_that_does_not_shard_as_asked_is_noticed(pretend: Any) -> None:
    pretend("FSDP")
    with pytest.raises(CoopError, match="asked for FSDP, but accelerate runs as MULTI_GPU"):
        check_sharded(SimpleNamespace(distributed_type=DistributedType.MULTI_GPU))
    check_sharded(SimpleNamespace(distributed_type=DistributedType.FSDP))


@pytest.mark.parametrize(
    ("name", "kind", "processes"),
    [("fsdp2.yaml", "FSDP", 8), ("zero3.yaml", "DEEPSPEED", 8), ("ddp.yaml", "", 8), ("cpu-2.yaml", "", 2)],
)
def test_launch_files_are_read_by_accelerates_own_classes(name: str, kind: str, processes: int) -> None:
    config = load_config_from_file(str(LAUNCH / name))
    assert read_kind(str(LAUNCH / name)) == kind and config.num_processes == processes


def test_fsdp_settings_make_a_plugin_that_wraps_by_the_models_own_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    from train.tuning.model import load_model

    for key, value in load_config_from_file(str(LAUNCH / "fsdp2.yaml")).fsdp_config.items():
        monkeypatch.setenv(key.upper(), str(value))
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    model = load_model(build_recipe(tmp_path))
    plugin.set_auto_wrap_policy(model)
    policy: Any = plugin.auto_wrap_policy
    assert [cls.__name__ for cls in policy.keywords["transformer_layer_cls"]] == ["MixtralDecoderLayer"]


def test_zero3_settings_are_read_as_stage_3() -> None:
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    named = load_config_from_file(str(LAUNCH / "zero3.yaml")).deepspeed_config["deepspeed_config_file"]
    settings = HfDeepSpeedConfig(str(ROOT / named))
    assert settings.is_zero3() and not settings.is_offload()


def test_config_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("distributed_type: SOMETHING\n")
    (tmp_path / "b.yaml").write_text("[1, 2]\n")
    for name in ("a.yaml", "b.yaml"):
        with pytest.raises(RecipeError, match="not an accelerate config"):
            read_kind(str(tmp_path / name))


def test_command_to_type_starts_as_many_processes_as_asked(tmp_path: Path) -> None:
    two = launch_command(build_recipe(tmp_path, "launch.processes=2"), Path("a b.yaml"))
    assert two.endswith("--num_processes 2 train/finetune.py 'a b.yaml'")
    assert (
        launch_command(build_recipe(tmp_path), Path("a.yaml")) == "accelerate launch train/finetune.py a.yaml"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("deepseek_v2", ("tune.groups=[attention,experts,shared_experts,router,other]",)),
        ("gpt_oss", ("model.attention=eager",)),
        ("mixtral", ("tune.freeze=['layers: 0-1']",)),
    ],
)
def test_fsdp2_trains_bfloat16_checkpoints_of_other_families_in_float32(
    tmp_path: Path, family: str, overrides: tuple[str, ...]
) -> None:
    recipe, script = write_recipe(tmp_path, family), str(ROOT / "tests" / "train" / "fsdp_on_cpu.py")
    precision = ("model.dtype=bfloat16", "train.mixed_precision=bf16", "train.steps=2")
    launch("fsdp2.yaml", script, str(recipe), *FULL, *precision, *overrides)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert before.keys() == after.keys()
    frozen = {name for name in after if torch.equal(after[name].float(), before[name].bfloat16().float())}
    is_below = {
        name for name in after if family == "mixtral" and (".layers.0." in name or ".layers.1." in name)
    }
    assert is_below <= frozen
    trained = {name for name in after if name.endswith("o_proj.weight")} - is_below
    assert trained and not trained & frozen and all(after[name].dtype == torch.float32 for name in trained)
