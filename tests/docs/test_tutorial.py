"""The tutorial shows what its commands print, where this does not depend on the machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from pages import ROOT

from fedemu.ops.stress.warm import WarmStart

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def test_validate_prints_what_the_tutorial_shows(
    tmp_path: Path, warm: WarmStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    [file] = re.findall(r"Save this as `fleet\.toml`:\n\n```toml\n(.*?)```", PAGE, re.DOTALL)
    [shown] = re.findall(r"\$ fedemu validate fleet\.toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "fleet.toml").write_text(file)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FEDEMU_")}
    monkeypatch.chdir(tmp_path)
    env = environment | {"FEDEMU_CACHE": str(tmp_path / "cache")}
    validate = warm.start(["validate", "fleet.toml"], tmp_path / "printed", env)
    assert validate.wait(120) == 0
    notes, _, printed = (tmp_path / "printed").read_text().rpartition("\nfleet: ok\n")
    assert notes == "fedemu: decoding the data set digits, once on this machine", "what is told on stderr meanwhile"
    assert f"fleet: ok\n{printed}" == shown
