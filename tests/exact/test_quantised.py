"""Live models that a quantiser has changed: the dense part stays as it is, quantised experts are refused by name.

The quantisers are no dependency of the project; a tensor subclass stands in for theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import coop
from coop.errors import CheckpointError
from tests.exact.test_families import all_logits, assert_same_bits
from tests.families import build_family


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8 with one scale for each row, as quantisers replace layers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter(
            (linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False
        )
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight * self.scale).to(x.dtype).t()


class PackedParameter(nn.Parameter):
    """Stands in for a quantiser's own parameter class."""


def with_int8_attention(folder: Path) -> Any:
    model = build_family(folder, "mixtral")
    for layer in model.model.layers:
        layer.self_attn.q_proj = Int8Linear(layer.self_attn.q_proj)
        layer.self_attn.o_proj = Int8Linear(layer.self_attn.o_proj)
    return model


def test_a_quantised_dense_part_keeps_working_at_every_budget(tmp_path: Path) -> None:
    plain = all_logits(with_int8_attention(tmp_path), 1, 30, 4)
    with coop.attach(with_int8_attention(tmp_path), tmp_path, budget="100%") as runtime:
        resident = all_logits(runtime.model, 1, 30, 4)
    assert (plain[0] - resident[0]).abs().max() < 1e-4
    with coop.attach(with_int8_attention(tmp_path), tmp_path, budget="25%", poison=True) as runtime:
        assert_same_bits(resident, all_logits(runtime.model, 1, 30, 4), "at 25 %")


def test_experts_that_a_quantiser_has_changed_are_refused_by_its_name(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    experts = model.model.layers[1].mlp.experts
    experts._parameters["down_proj"] = PackedParameter(experts.down_proj.detach())
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj is quantised \(tests PackedP"
    ):
        coop.attach(model, tmp_path, budget="50%")
    experts._parameters["down_proj"] = nn.Parameter(experts.down_proj.detach().to(torch.int8), False)
    with pytest.raises(CheckpointError, match=r"torch\.int8"):
        coop.attach(model, tmp_path, budget="50%")


def test_a_model_that_is_attached_already_is_refused(tmp_path: Path) -> None:
    model = build_family(tmp_path, "mixtral")
    with (
        coop.attach(model, tmp_path, budget="50%"),
        pytest.raises(CheckpointError, match="is or was attached"),
    ):
        coop.attach(model, tmp_path, budget="50%")
