"""A process whose standard streams were closed before it began, and what it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHILD = """
import os, sys
open(sys.argv[1], "w").write(" ".join(os.path.realpath(f"/proc/self/fd/{number}") for number in range(3)))
"""
PARENT = f"""
import subprocess, sys
from fedemu.protocol.host.streams import keep_streams
keep_streams()
print("lost", file=sys.stderr, flush=True)
subprocess.run([sys.executable, "-c", {CHILD!r}, sys.argv[1]], check=True)
"""


def test_what_a_process_without_standard_streams_starts_has_them(tmp_path: Path) -> None:
    found = tmp_path / "found"
    command = [sys.executable, "-c", PARENT, str(found)]
    assert subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command], timeout=100).returncode == 0
    assert found.read_text() == "/dev/null /dev/null /dev/null"
