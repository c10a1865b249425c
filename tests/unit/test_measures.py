"""The measuring scripts run to their end on something tiny; what they measure is no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.families import build_family
from tests.infer.models import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_false_sharing_is_measured_for_both_layouts_and_thread_counts(tmp_path: Path) -> None:
    shown = run("measure_false_sharing.py", "--rounds", 1, "--calls", 1, "--json", tmp_path / "f.json")
    assert shown.count("packed") == shown.count("ring ") == 2
    assert json.loads((tmp_path / "f.json").read_text())


@pytest.mark.slow  # it writes a GiB to read from
def test_the_guard_is_measured_beside_a_real_reader_with_the_same_tokens(tmp_path: Path) -> None:
    build_family(tmp_path / "model", "mixtral", vocab_size=260)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    settings = [
        "--scratch",
        tmp_path,
        "--with-quiet",
        "--tokens",
        4,
        "--pairs",
        1,
        "--threads",
        1,
        "--json",
        tmp_path / "p.json",
    ]
    shown = run("measure_pressure.py", "--ckpt", tmp_path / "model", *settings)
    assert "tokens of all runs: the same" in shown
    assert {"on", "off"} <= set(shown.split())
    assert json.loads((tmp_path / "p.json").read_text())
