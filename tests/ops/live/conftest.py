"""Run directories for the tests of the live page, written line by line as a coordinator writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedemu.coordinator.record.json_lines import to_line
from fedemu.ops.experiment.sources import load_experiment, write_frozen


class Made:
    """A run directory of 12 devices in which no round is over."""

    def __init__(self, directory: Path, *overrides: str) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        settings = ["fleet.devices=12", "fleet.per_round=4", "rounds=5", *overrides]
        write_frozen(load_experiment("digits-small", settings, {})[0], directory)

    def append(self, log: str, *lines: dict[str, Any]) -> None:
        """Append lines to ``LOG.jsonl``."""
        with (self.directory / f"{log}.jsonl").open("ab") as file:
            file.writelines(to_line(line) for line in lines)

    def row(self, round: int, **columns: Any) -> None:
        """Append a row."""
        known = {"round": round, "accuracy": 0.5, "selected": 4, "accepted": 4, "round_seconds": 0.5}
        self.append("metrics", known | columns)

    def ask(self, round: int, devices: list[int], outcomes: str, end: float = 1.0) -> None:
        """Append an ask that has ended."""
        about = {"ask": f"{round}.0.0", "round": round, "attempt": 0, "program": "train"}
        times = {"start": 0.0, "end": end, "wanted": 4, "times": [0.5 for _ in devices]}
        self.append("asks", {**about, **times, "devices": devices, "outcomes": outcomes})


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Made]:
    """Makes run directories by their names, and by settings of their experiments."""
    return lambda name, *overrides: Made(tmp_path / name, *overrides)


@pytest.fixture
def made(make: Callable[..., Made]) -> Made:
    """A run directory that a test fills."""
    return make("run")
