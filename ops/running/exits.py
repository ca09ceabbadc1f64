"""How an action ends: every error becomes an exit code, and one sentence on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import typer

from fedemu.ops.running.codes import INTERNAL_ERROR, INTERRUPTED
from fedemu.ops.watching.logs import log_crash
from fedemu.protocol.errors import FedemuError


def complain(text: str) -> None:
    """Tell the user one sentence on stderr, without a full stop."""
    print(f"fedemu: {text}", file=sys.stderr, flush=True)


def exit_code_of(action: Callable[[], int]) -> int:
    """Run ``action`` and return its code. An error is told in one sentence, and its code is returned."""
    try:
        return action()
    except FedemuError as error:
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout went away (`fedemu presets | head -1`). Nobody reads what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except typer.Exit:
        raise
    except Exception as error:
        complain(f"internal error: {type(error).__name__}: {error} (the traceback is in {log_crash(error)})")
        return INTERNAL_ERROR
