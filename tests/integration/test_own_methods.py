"""The example of ``docs/own_methods.md``, run as it stands on the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "own_methods.md"


def test_the_pages_own_method_model_and_data_set_train_a_fleet(tmp_path: Path) -> None:
    page = PAGE.read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [experiment] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "mine.toml").write_text(experiment)
    done = subprocess.run(
        [sys.executable, "-m", "fedemu.ops.cli", "run", "mine.toml", "--transport", "memory", "--out", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["rounds"], summary["totals"]["accepted"]) == ("completed", 8, 48)
    assert summary["final_accuracy"] > 0.95  # no straight line parts the rings: a single layer reaches 0.6
