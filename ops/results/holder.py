"""Who holds the lock of a run directory: the kernel tells the process, and nobody else has to be asked."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from pathlib import Path

_LOCK = "@hhqqi4x"
"""``struct flock`` of Linux on 64 bits: kind, origin, start, length, process."""


def holder_of(path: Path) -> int | None:
    """The process that has locked the file with ``fcntl.lockf``, None if there is none. The lock is not touched."""
    if sys.platform != "linux":
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_LOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None if kind == fcntl.F_UNLCK or pid <= 0 else int(pid)
