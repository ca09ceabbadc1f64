"""Guards commands: an error becomes one sentence on stderr, and an exit code."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable
from typing import ParamSpec

import typer

from fedemu.ops.running.codes import USAGE, interrupt_on_signals
from fedemu.ops.running.exits import exit_code_of
from fedemu.ops.running.folder import take_back_growth

P = ParamSpec("P")


def guarded(command: Callable[P, int | None]) -> Callable[P, None]:
    """Wrap a command for typer: the result raises ``typer.Exit`` with the exit code of ``command``. None means 0."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        interrupt_on_signals()
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Letters that the output's encoding lacks are written as escapes, as Python does it on stderr.
            sys.stdout.reconfigure(errors="backslashreplace")
        code = exit_code_of(lambda: command(*args, **kwargs) or 0)
        if code == USAGE:
            take_back_growth()
        raise typer.Exit(code)

    return wrapped
