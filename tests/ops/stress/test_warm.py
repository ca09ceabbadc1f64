"""Commands that are forked from a process which has imported everything already."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from fedemu.ops.stress import warm
from fedemu.ops.stress.warm import WarmStart
from fedemu.protocol.errors import ConfigurationError

FEW_IMPORTS = """
import sys
from fedemu.ops.stress import warm_process
warm_process._IMPORTED = ()
sys.exit(warm_process.main(sys.argv[3:]))
"""


def test_a_command_ends_with_the_process_that_has_forked_it_even_if_it_stands_still(
    tmp_path: Path, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "interpreter", lambda: [sys.executable, "-c", FEW_IMPORTS])
    started = WarmStart()
    words = ["device", "--connect", f"ipc://{socket_folder}/nobody", "--state", str(tmp_path / "state")]
    command = psutil.Process(started.start(words, tmp_path / "log", os.environ).pid)
    command.send_signal(signal.SIGSTOP)
    forking = command.parent()
    assert forking is not None
    forking.kill()
    try:
        gone, _ = psutil.wait_procs([command], timeout=60)
        assert gone
    finally:
        started.close()
        if command.is_running():
            command.kill()


def test_a_system_without_proc_is_told_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "TASKS", tmp_path / "none")
    with pytest.raises(ConfigurationError, match="this system has no /proc, which tells what processes do; mount it"):
        WarmStart().start(["ls"], tmp_path / "log", os.environ)
