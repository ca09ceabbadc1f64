"""What fedemu asks of the Linux kernel beyond the standard library: to end a process with its parent, and to name it.

On other systems the requests are left out. A process may then live on until it notices by itself that its parent is
gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL, code: int = 0) -> None:
    """Have the kernel send this process the signal ``number`` when ``parent`` (its process id) ends.

    If the parent has ended already, this process exits at once with ``code``.
    """
    _control(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(code)


def name_process(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show: at most 15 bytes, the rest is cut off."""
    _control(_PR_SET_NAME, name.encode()[:15])


def _control(option: int, argument: int | bytes) -> None:
    if sys.platform == "linux":
        _libc.prctl(option, argument, 0, 0, 0)
