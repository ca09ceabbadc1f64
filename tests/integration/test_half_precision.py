"""Whole runs of models that have variables of half precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

MODULE = """
import torch
from torch import nn


class Half(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body = nn.Linear(64, 16).to(torch.bfloat16)
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        features = self.body(x.flatten(1).to(torch.bfloat16)).relu().float()
        return self.head(features), features
"""


@pytest.mark.parametrize("part", ["", "+scaffold"])
def test_a_model_with_bfloat16_variables_trains(
    in_one_process: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    (tmp_path / "half_here.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = ("model={name='half_here:Half'}", "fleet.devices=3", "fleet.per_round=3", "rounds=2")
    summary = in_one_process(tmp_path / "run", *settings, experiment=f"digits-small{part}")
    assert summary.outcome == "completed"
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert {name: leaf.dtype for name, leaf in saved.items()} == {
        "body.weight": torch.bfloat16,
        "body.bias": torch.bfloat16,
        "head.weight": torch.float32,
        "head.bias": torch.float32,
    }
