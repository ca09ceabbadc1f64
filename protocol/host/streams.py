"""The standard streams of a process. They may be closed, on a full disk, or without a reader; no work ends for that."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


def keep_streams() -> None:
    """Let every standard stream be open, and let nothing fail that is written to stderr. What cannot be told is lost.

    Processes that this one starts find them open, too. stdout still fails: what is written there is the result of a
    command.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets this number, the lowest that is free
    if sys.stdin is None:
        sys.stdin = open(0)  # noqa: SIM115 - it lives as long as the process
    if sys.stdout is None:
        sys.stdout = open(1, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w")  # noqa: SIM115
    if not isinstance(sys.stderr, Unfailing):
        sys.stderr = cast(TextIO, Unfailing(sys.stderr))


@contextlib.contextmanager
def printed_for_people() -> Iterator[None]:
    """While it lasts, all that is written to stdout goes to stderr, and so leaves the result of the command whole.

    This holds for what ``print`` writes, libraries in C, and programs that are started meanwhile.
    """
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # libraries in C may still keep what they have written
        os.dup2(stdout, 1)
        os.close(stdout)


class Unfailing:
    """A text stream without the errors of the system below it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, if it can be written. Returns its length in any case."""
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Bring what was written to its reader, if there is one."""
        try:
            self._stream.flush()
        except OSError:
            return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
