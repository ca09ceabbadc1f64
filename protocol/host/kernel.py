"""What we ask of the Linux kernel beyond the standard library: children that end with their parent, and their names."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int) -> None:
    """Be killed when ``parent`` (process id) ends; at once if it has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def name_process(name: str) -> None:
    """What ``ps`` and ``top`` show; at most 15 characters."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
