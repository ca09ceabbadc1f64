"""What a command tells people in the terminal. Data go to stdout, and everything else to stderr."""

from __future__ import annotations

import os
import sys
from typing import Final, TextIO

_DUMB: Final = ("dumb", "unknown")


def say(text: str) -> None:
    """Print a line for people on stderr."""
    print(text, file=sys.stderr, flush=True)


def can_redraw(stream: TextIO) -> bool:
    """Whether a stream leads to a terminal that can move its cursor. ``TERM=dumb`` says that it can't."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in _DUMB
