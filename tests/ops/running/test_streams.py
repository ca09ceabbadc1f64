"""A run whose terminal, log or reader is gone, or whose standard streams were never open, goes on to its end.

What such a run starts has streams again (``tests/protocol/host/test_streams.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fedemu.ops.stress.warm import WarmStart

WORDS = ["run", "digits-small", "--rounds", "2", "--transport", "memory"]
NO_REPORT = ["--set", "runtime.report=false"]


def outcome(run: Path) -> tuple[str, int]:
    summary = json.loads((run / "summary.json").read_text())
    return summary["outcome"], summary["rounds"]


def test_a_run_whose_lines_go_to_a_full_disk_is_completed(tmp_path: Path, warm: WarmStart) -> None:
    run = tmp_path / "run"
    process = warm.start([*WORDS, "--out", str(run)], Path("/dev/full"), os.environ)
    assert (process.wait(100), outcome(run)) == (0, ("completed", 2))
    assert (run / "report.html").exists()


def test_a_run_without_standard_streams_is_completed(tmp_path: Path, digits_decoded: None) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "fedemu.ops.cli", *WORDS, *NO_REPORT, "--out", str(run)]
    ended = subprocess.run(["sh", "-c", '"$@" >&- 2>&- <&-', "sh", *command], timeout=100)
    assert (ended.returncode, outcome(run)) == (0, ("completed", 2))


def test_a_run_whose_reader_goes_away_is_completed(tmp_path: Path, warm: WarmStart) -> None:
    run = tmp_path / "run"
    reading, writing = os.pipe()
    process = warm.start([*WORDS, *NO_REPORT, "--out", str(run)], Path(f"/dev/fd/{writing}"), os.environ)
    os.close(writing)
    with open(reading) as lines:
        assert "digits-small" in lines.readline()
    assert process.wait(100) == 0
    assert outcome(run) == ("completed", 2)
