"""The example of ``docs/own_methods.md``, run as it stands on the page."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from fedemu.ops.stress.warm import WarmStart

PAGE = Path(__file__).parents[2] / "docs" / "own_methods.md"


def test_the_pages_own_method_model_and_data_set_train_a_fleet(
    tmp_path: Path, warm: WarmStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.read_text()
    code, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [experiment] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "mine.toml").write_text(experiment)
    monkeypatch.chdir(tmp_path)
    done = warm.start(["run", "mine.toml", "--transport", "memory", "--out", "run"], tmp_path / "log", os.environ)
    assert done.wait(120) == 0, (tmp_path / "log").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["rounds"], summary["totals"]["accepted"]) == ("completed", 8, 48)
    assert summary["final_accuracy"] > 0.95  # no straight line parts the rings: a single layer reaches 0.6
