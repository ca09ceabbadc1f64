"""Exit codes, and what becomes one: errors are told in one sentence on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import typer

from fedemu.ops.watching.logs import log_crash
from fedemu.protocol.errors import FedemuError

USAGE = 2
INTERRUPTED = 4
INTERNAL_ERROR = 5
EXIT_CODES = (
    "Exit codes: 0 done; 2 wrong usage or configuration; 3 no quorum, or the other side never came or is gone; "
    "4 interrupted, with a checkpoint; 5 internal error, its traceback in the log."
)


def complain(text: str) -> None:
    """One sentence to the user."""
    print(f"fedemu: {text}", file=sys.stderr, flush=True)


def exit_code_of(action: Callable[[], int]) -> int:
    """Run ``action``; what it raises becomes a sentence and a code."""
    try:
        return action()
    except FedemuError as error:
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout went away (`fedemu presets | head -1`); nothing is left to be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except typer.Exit:
        raise
    except Exception as error:
        complain(f"internal error: {type(error).__name__}: {error} (the traceback is in {log_crash(error)})")
        return INTERNAL_ERROR
