"""What a command tells people in the terminal. Data go to stdout, and everything else to stderr."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print a line for people on stderr."""
    print(text, file=sys.stderr, flush=True)
