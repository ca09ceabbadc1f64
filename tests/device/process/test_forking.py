"""What waits in a process that forks, without its children."""

from __future__ import annotations

import subprocess
import sys

LEAVE = """
import os, signal, socket
from fedemu.device.forking import Waiting

ours, theirs = socket.socketpair()
waiting = Waiting(ours)
theirs.close()
waiting.serve(lambda: bool(ours.recv(1)), print)
del waiting
os.kill(os.getpid(), signal.SIGCHLD)
"""


def test_a_child_that_ends_after_its_parent_has_left_off_waiting_is_no_error():
    told = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=60, check=True)
    assert told.stderr == ""
