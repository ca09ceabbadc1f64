"""Who holds the lock of a run directory: the kernel tells the process, and nobody else has to be asked."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from pathlib import Path
from typing import Final

UNNAMED: Final = 0
"""Stands for a process that has no number here, such as one of another container or of another machine."""
_LOCK = "@hhqqi4x"
"""``struct flock`` of Linux on 64 bits: kind, origin, start, length, process."""


def holder_of(path: Path) -> int | None:
    """The process that has locked the file with ``fcntl.lockf``. The lock is not touched.

    None if nobody holds it, and ``UNNAMED`` if the process has no number here. No signal may be sent to that.
    """
    if sys.platform != "linux":
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is not waited for
    except OSError:
        return None
    try:
        asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_LOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None if kind == fcntl.F_UNLCK else max(int(pid), UNNAMED)


def is_stopped(process: int) -> bool:
    """Whether a process of this machine is stopped (state T), as by SIGSTOP: it does nothing, and heeds no SIGTERM."""
    try:
        # The name of the process is in parentheses before its state, and may hold blanks and parentheses.
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False
