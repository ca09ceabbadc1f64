"""The codes with which commands end, and their end before they begin. The numbers stand in ``protocol/errors.py``.

This file imports next to nothing, so a command knows its codes before the imports that take half a second.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from fedemu.protocol.errors import ConfigurationError, FedemuError, Interrupted, UnreachableError

USAGE = ConfigurationError.exit_code
GONE = UnreachableError.exit_code
INTERRUPTED = Interrupted.exit_code
INTERNAL_ERROR = FedemuError.exit_code
CODES = (
    "\b\nExit codes:\n"
    "  0 done: also a run that diverged, which its summary.json says\n"
    "  1 a scenario of `fedemu stress` failed\n"
    "  2 wrong usage or configuration, missing data, or a machine that can't do it\n"
    "  3 no quorum, or the other side never came, refused, or is gone\n"
    "  4 interrupted; what was checkpointed can be resumed\n"
    "  5 internal error, with its traceback in the log, or a full disk"
)
"""The exit codes, in the help of ``fedemu``."""
IN_WORDS = (
    "Exit codes: 0 done; 1 a scenario of stress failed; 2 wrong usage or configuration; 3 no quorum, or the other side "
    "never came or is gone; 4 interrupted, with a checkpoint; 5 internal error (see the log) or a full disk."
)
"""The exit codes, in the help of every command."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TOGETHER_SECONDS = 0.5
"""Signals that come within so many seconds are one request to stop.

A terminal that is closed sends two, by its shell and by the kernel, and so does a parent that had threads.
"""
_alone = _abandoned = False
_interrupted = -math.inf
"""When a signal last raised KeyboardInterrupt."""


def leave_on_signals() -> None:
    """A signal that stops a command ends the process at once from now on, unless it is ignored.

    Nothing has begun yet, and an exception in the middle of an import would be a traceback.
    """
    for sign in STOP_SIGNALS:
        if signal.getsignal(sign) != signal.SIG_IGN:
            signal.signal(sign, _leave)


def interrupt_on_signals() -> None:
    """Such a signal raises KeyboardInterrupt from now on. Those that come together do so once.

    The handler is not Python's own. That one asyncio would replace by one of its own, after which the first Ctrl-C is
    heard when a task waits, and not while an experiment is put together.
    """
    for sign in STOP_SIGNALS:
        if signal.getsignal(sign) is _leave:
            signal.signal(sign, _interrupt)


@contextmanager
def leaving_at_once(first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """In this block such a signal ends the process as before a command begins. It is for a command's first imports.

    ``first`` is called before. Compiled modules make another error of a KeyboardInterrupt that comes while they are
    imported, or break. The garbage collector, which finds nothing in what imports make, leaves it out from now on,
    unless this process may do more than one command. A block that imports nothing new, as that of a second run, changes
    nothing, because what the first run left is garbage.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        first()
        _leave(number, frame)

    changed = [sign for sign in STOP_SIGNALS if signal.getsignal(sign) is _interrupt]
    for sign in changed:
        signal.signal(sign, leave)
    known = len(sys.modules)
    if _alone:
        gc.disable()
    try:
        yield
    finally:
        if _alone:
            if len(sys.modules) > known:
                gc.freeze()
            gc.enable()
        for sign in changed:
            signal.signal(sign, _interrupt)


def keep_the_code() -> None:
    """Ignore such signals from now on: at its very end the interpreter lets them kill the process, without a code."""
    for sign in STOP_SIGNALS:
        signal.signal(sign, signal.SIG_IGN)


def command_alone() -> None:
    """This process does nothing but one command, and ends with it by ``end``."""
    global _alone
    _alone = True


def abandon_threads() -> bool:
    """Have ``end`` not wait for what threads of this process still compute, since the command is interrupted.

    Returns False, and changes nothing, in a process that may do more than one command, such as a notebook's.
    """
    global _abandoned
    _abandoned = _alone
    return _abandoned


def end(code: int) -> NoReturn:
    """End the process with this exit code. Threads that were not abandoned come to their ends first.

    A signal that stops a process ends it at once from now on, with this code, too: what libraries do at the end of a
    process makes a traceback of a KeyboardInterrupt.
    """

    def at_once(*_: object) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, RuntimeError):  # nobody reads it any more, or it is being written to just now
                stream.flush()
        os._exit(code)

    if _abandoned:
        at_once()
    for sign in STOP_SIGNALS:
        if signal.getsignal(sign) != signal.SIG_IGN:
            signal.signal(sign, at_once)
    sys.exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _interrupted
    if (now := time.monotonic()) >= _interrupted + TOGETHER_SECONDS:
        _interrupted = now
        raise KeyboardInterrupt


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):  # nobody reads it any more
        os.write(sys.stderr.fileno(), b"fedemu: interrupted\n")
    os._exit(INTERRUPTED)
