"""Tiny checkpoint folders for the inference tests, each made once a session."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import build_family
from tests.infer.models import VOCABULARY, byte_tokenizer


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain Hub-layout qwen3_moe folder with a tokenizer and no profile."""
    folder = tmp_path_factory.mktemp("models") / "moe"
    build_family(folder, "qwen3_moe", vocab_size=VOCABULARY)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapter_folder(moe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA on attention and experts of `moe_folder`, with weights that change the answer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks transformers 5.24 by an old name
        model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(moe_folder), config)
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2)
    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
