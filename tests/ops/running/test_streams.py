"""A run whose terminal, log or reader is gone, or whose standard streams were never open, goes on to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedemu.ops.stress.warm import WarmStart

COMMAND = [sys.executable, "-m", "fedemu.ops.cli", "run", "digits-small", "--rounds", "3"]
IN_MEMORY = ["--transport", "memory"]
FEW = ["--devices", "6", "--set", "fleet.per_round=2", "--trainers", "1"]


def outcome(run: Path) -> tuple[str, int]:
    summary = json.loads((run / "summary.json").read_text())
    return summary["outcome"], summary["rounds"]


@pytest.mark.parametrize(
    ("streams", "more"),
    [("2>/dev/full", [*IN_MEMORY, "--set", "runtime.report=false"]), (">&- 2>&- <&-", FEW)],
    ids=["full disk", "closed"],
)
def test_a_run_without_a_place_for_its_lines_is_completed(tmp_path: Path, streams: str, more: list[str]) -> None:
    run = tmp_path / "run"
    command = [*COMMAND, *more, "--out", str(run)]
    ended = subprocess.run(["sh", "-c", f'"$@" {streams}', "sh", *command], timeout=100)
    assert (ended.returncode, outcome(run)) == (0, ("completed", 3))
    assert (run / "report.html").exists() == (more == FEW)


def test_a_run_whose_reader_goes_away_is_completed(tmp_path: Path, warm: WarmStart) -> None:
    run = tmp_path / "run"
    words = [*COMMAND[-4:], *IN_MEMORY, "--set", "runtime.report=false", "--out", str(run)]
    reading, writing = os.pipe()
    process = warm.start(words, Path(f"/dev/fd/{writing}"), os.environ)
    os.close(writing)
    with open(reading) as lines:
        assert "digits-small" in lines.readline()
    assert process.wait(100) == 0
    assert outcome(run) == ("completed", 3)
