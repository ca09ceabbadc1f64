"""A run of which trackers are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import write_frozen


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An unfinished run of two rounds."""
    directory = tmp_path / "run-7"
    (directory / "plots").mkdir(parents=True)
    write_frozen(Experiment.parse({"name": "tiny", "local": {"lr": 0.25}}), directory)
    rows = [{"round": n, "accuracy": n / 10, "class_accuracy": [0.5, None]} for n in (1, 2)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Image.new("RGB", (4, 3), "red").save(directory / "plots" / "accuracy.png")
    (directory / "model.safetensors").write_bytes(b"model")
    return directory
