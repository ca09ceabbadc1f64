"""A run of which trackers are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import write_frozen


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An unfinished run that has its two rounds."""
    directory = tmp_path / "run-7"
    (directory / "plots").mkdir(parents=True)
    write_frozen(Experiment.parse({"name": "tiny", "rounds": 2, "local": {"lr": 0.25}}), directory)
    append(directory, 1, 2)
    Image.new("RGB", (4, 3), "red").save(directory / "plots" / "accuracy.png")
    (directory / "model.safetensors").write_bytes(b"model")
    return directory


@pytest.fixture
def add_rows() -> Callable[..., None]:
    """Adds the rows of the rounds from a first to a last one to a run."""
    return append


def append(directory: Path, first: int, last: int) -> None:
    rows = [{"round": n, "accuracy": n / 10, "class_accuracy": [0.5, None]} for n in range(first, last + 1)]
    with (directory / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def finish() -> Callable[..., None]:
    """Gives a run the summary of its end after some rounds."""

    def end(directory: Path, rounds: int, outcome: str = "completed") -> None:
        summary = {"outcome": outcome, "rounds": rounds, "model_digest": "d" * 64}
        (directory / "summary.json").write_text(json.dumps(summary))

    return end
