"""How many files and sockets this process may have open at once: the limit that holds, and what it may be raised to.

Child processes inherit both.
"""

from __future__ import annotations

import resource
from typing import Final

UNLIMITED: Final = 2**31
"""Stands for no limit."""


def open_files() -> int:
    """The limit of this process."""
    return _limits()[0]


def most_open_files() -> int:
    """What the limit of this process may be raised to."""
    return _limits()[1]


def allow_open_files(wanted: int) -> int:
    """Raise the limit of this process to ``wanted``, or as far as it may be. Returns the limit that holds now."""
    limit = min(wanted, most_open_files())
    if open_files() < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return open_files()


def _limits() -> tuple[int, int]:
    """What holds, and what it may be raised to. A sandbox that does not tell them is taken to have none."""
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError:
        return UNLIMITED, UNLIMITED
    return _number(soft), _number(hard)


def _number(limit: int) -> int:
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit
