"""The tutorial shows what its commands print, where this does not depend on the machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import ROOT

from fedemu.ops.cli import commands

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("digits_decoded")
def test_validate_prints_what_the_tutorial_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    [file] = re.findall(r"Save this as `fleet\.toml`:\n\n```toml\n(.*?)```", PAGE, re.DOTALL)
    [shown] = re.findall(r"\$ fedemu validate fleet\.toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "fleet.toml").write_text(file)
    monkeypatch.delenv("FEDEMU_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        commands.command(["validate", "fleet.toml"], prog_name="fedemu")
    assert (ended.value.code, capfd.readouterr()) == (0, (shown, ""))
