"""What a command tells people in the terminal, and what others find in it. Data go to stdout, all else to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Final, TextIO

COMPLAINT: Final = "fedemu: "
"""The beginning of a sentence that tells why something ended or went wrong."""
WARNING: Final = f"{COMPLAINT}warning: "
"""The beginning of a sentence about something that goes on nevertheless."""
_DUMB: Final = ("dumb", "unknown")


def say(text: str) -> None:
    """Print a line for people on stderr."""
    print(text, file=sys.stderr, flush=True)


def can_redraw(stream: TextIO) -> bool:
    """Whether a stream leads to a terminal that can move its cursor. ``TERM=dumb`` says that it can't."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in _DUMB


def complaint_in(lines: Iterable[str]) -> str:
    """The last complaint among the lines of a command, with the lines of its account. Empty if there is none.

    Warnings are no complaints.
    """
    said = [line.rstrip() for line in lines if line.strip()]
    complaints = [
        place for place, line in enumerate(said) if line.startswith(COMPLAINT) and not line.startswith(WARNING)
    ]
    if not complaints:
        return ""
    account = takewhile(lambda line: line.startswith(" "), said[complaints[-1] + 1 :])
    return "\n".join([said[complaints[-1]], *account])


def last_words(path: Path) -> str:
    """The last complaint in the file of a command's output, with the lines of its account.

    Without a complaint it is the last line that says something, and without such a line it is empty.
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return complaint_in(lines) or next((line.strip() for line in reversed(lines) if line.strip()), "")
