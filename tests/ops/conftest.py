"""Fixtures that write parts of a small run directory, so that tests can read one without playing a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run_directory import RunDirectory


@pytest.fixture
def write_row() -> Callable[[Path, int], None]:
    """Adds the row of a round to a run directory."""

    def write(directory: Path, round: int) -> None:
        with RunDirectory(directory) as run:
            run.metrics(Row(round=round, accuracy=0.5, accepted=5))

    return write


@pytest.fixture
def write_summary() -> Callable[..., None]:
    """Writes the summary of a completed run of three rounds. Keyword arguments replace its values."""

    def write(directory: Path, **more: Any) -> None:
        summary = {
            "name": "tiny",
            "outcome": "completed",
            "rounds": 3,
            "final_accuracy": 0.875,
            "best_accuracy": 0.9,
            "perturbed": False,
            "totals": {"selected": 12, "accepted": 9, "cancelled": 2, "dropped": 1},
            "virtual_time": 7200.0,
            "wall_time": 4.25,
            "model_digest": "ab" * 32,
        }
        (directory / "summary.json").write_text(json.dumps(summary | more))

    return write
