"""The examples of ``docs/own_methods.md``, run as they stand on the page."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from fedemu.ops.stress.warm import WarmStart

PAGE = Path(__file__).parents[2] / "docs" / "own_methods.md"


NORMALISED = """
import math

from fedemu.algorithms import FedAvg
from measured import Measured
from torch import nn


class TwoLayers(nn.Sequential):
    def __init__(self, input_shape, classes, width: int = 32):
        inputs = math.prod(input_shape)
        first = nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU()
        super().__init__(nn.Flatten(), *first, nn.Dropout(0.1), nn.Linear(width, classes))


def measured(ingredients):
    return FedAvg(ingredients.training(Measured))
"""
"""A model whose batch normalisation has buffers: running statistics and a count of batches, which is a whole number."""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the files of the page, and ``normalised.py``."""
    text = PAGE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [experiment] = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    [measured] = [block for block in blocks if "class Measured" in block]
    (tmp_path / "mine.py").write_text(blocks[0])
    (tmp_path / "mine.toml").write_text(experiment)
    (tmp_path / "measured.py").write_text(measured)
    (tmp_path / "normalised.py").write_text(NORMALISED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("model", ["mine:TwoLayers", "normalised:TwoLayers"])
def test_the_pages_own_method_model_and_data_set_train_a_fleet(page: Path, warm: WarmStart, model: str) -> None:
    run(page, warm, f"model.name={model}")
    summary = json.loads((page / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["rounds"], summary["totals"]["accepted"]) == ("completed", 8, 48)
    assert summary["final_accuracy"] > 0.95  # no straight line parts the rings: a single layer reaches 0.6


def test_the_pages_measure_is_what_training_moves_and_no_count_of_batches(page: Path, warm: WarmStart) -> None:
    settings = "model.name=normalised:TwoLayers", "algorithm.name=normalised:measured", "algorithm.options={}"
    run(page, warm, *settings, "local.lr=1e-6", "rounds=1")
    [row] = map(json.loads, (page / "run" / "metrics.jsonl").read_text().splitlines())
    assert 0 < row["device_metrics"]["distance"] < 1e-3


def run(page: Path, warm: WarmStart, *settings: str) -> None:
    """Run the page's experiment with these settings, in one process."""
    words = [word for setting in ("runtime.report=false", *settings) for word in ("--set", setting)]
    command = ["run", "mine.toml", "--transport", "memory", "--out", "run", *words]
    done = warm.start(command, page / "log", os.environ)
    assert done.wait(120) == 0, (page / "log").read_text()
