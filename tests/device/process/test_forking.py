"""What waits in a process that forks, without its children, and what it tells when it fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


FAIL = """
import errno, os, socket
from fedemu.device.process import zygote

def fail(self):
    raise {}

ours, theirs = socket.socketpair()
zygote.Zygote.serve = fail
raise SystemExit(zygote.main([str(theirs.detach()), str(os.getppid())]))
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("OSError(errno.EMFILE, 'Too many open files')", "the limit of open files is reached; raise it (ulimit -n)"),
        ("MemoryError()", "no memory is left; free some"),
    ],
)
def test_a_zygote_for_which_the_machine_has_not_enough_tells_a_line_and_no_traceback(error: str, said: str):
    told = subprocess.run([sys.executable, "-c", FAIL.format(error)], capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stderr) == (1, f"fedemu-zygote ends: {said}\n")


def test_a_bug_of_a_zygote_is_told_with_its_traceback():
    told = subprocess.run(
        [sys.executable, "-c", FAIL.format("KeyError(3)")], capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 1
    assert told.stderr.startswith("Traceback")
