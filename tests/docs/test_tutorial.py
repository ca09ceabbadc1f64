"""The tutorial shows what its commands print, where this does not depend on the machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from pages import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def test_validate_prints_what_the_tutorial_shows(tmp_path: Path) -> None:
    [file] = re.findall(r"Save this as `fleet\.toml`:\n\n```toml\n(.*?)```", PAGE, re.DOTALL)
    [shown] = re.findall(r"\$ fedemu validate fleet\.toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "fleet.toml").write_text(file)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FEDEMU_")}
    command = [sys.executable, "-m", "fedemu", "validate", "fleet.toml"]
    env = environment | {"FEDEMU_CACHE": str(tmp_path / "cache")}
    printed = subprocess.run(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    assert printed.stdout == shown
