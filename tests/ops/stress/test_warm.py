"""Commands that are forked from a process which has imported everything already."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from fedemu.ops.stress.warm import WarmStart


def test_a_command_ends_with_the_process_that_has_forked_it_even_if_it_stands_still(tmp_path: Path) -> None:
    warm = WarmStart()
    words = ["device", "--connect", f"ipc://{tmp_path}/nobody", "--state", str(tmp_path / "state")]
    command = psutil.Process(warm.start(words, tmp_path / "log", os.environ).pid)
    command.send_signal(signal.SIGSTOP)
    forking = command.parent()
    assert forking is not None
    forking.kill()
    try:
        gone, _ = psutil.wait_procs([command], timeout=60)
        assert gone
    finally:
        warm.close()
        if command.is_running():
            command.kill()
