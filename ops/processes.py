"""What fedemu's own processes have in common: a name that `ps` shows, an end when their parent ends, early signals."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 4
_PR_SET_PDEATHSIG = 1
_NAME_BYTES = 15


def name_process(name: str) -> None:
    """Show ``name`` (its first 15 bytes) in process lists, where the system allows it."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name[:_NAME_BYTES])


def begin_child(name: str, parent: int) -> None:
    """What a child of ``launch`` does first: it ends with ``parent``, and a stop signal ends it at once.

    Leaving at once is right as long as nothing has begun, and safe in the middle of an import.
    """
    name_process(name)
    for sign in STOP_SIGNALS:
        signal.signal(sign, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(INTERRUPTED)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
