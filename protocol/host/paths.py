"""Whether there is a file or a folder at a path. That the system refuses to look is an error, and no answer.

Up to Python 3.13 the methods of ``pathlib.Path`` do the same. From 3.14 on they say False then, so that a folder on a
damaged disk would look like an empty one.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

LONGEST_OF_SOCKET: Final = 107
"""The most bytes of the path of a socket."""
_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""What the system says of a path that leads nowhere."""


def exists(path: Path) -> bool:
    """Whether there is anything at ``path``. Raises OSError if the system refuses to look."""
    return _mode(path) is not None


def is_file(path: Path) -> bool:
    """Whether there is a regular file, or a link to one. Raises OSError if the system refuses to look."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_folder(path: Path) -> bool:
    """Whether there is a folder, or a link to one. Raises OSError if the system refuses to look."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _mode(path: Path) -> int | None:
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
    except ValueError:  # no path has a zero byte
        pass
    return None
