"""The entry point of the command ``fedemu``. The commands are in ``commands.py``."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from fedemu.ops.running.codes import INTERRUPTED

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command that the arguments name, and end the process with its exit code.

    ``arguments`` are those of the process unless they are given.
    """
    heeded = [sign for sign in _STOP_SIGNALS if signal.getsignal(sign) != signal.SIG_IGN]
    for sign in heeded:
        signal.signal(sign, _leave)
    # Importing this takes half a second, in which Ctrl-C must not end in a traceback.
    # The collector finds nothing in what imports make.
    gc.disable()
    from fedemu.ops.cli.commands import app

    gc.freeze()
    gc.enable()
    for sign in heeded:
        signal.signal(sign, signal.default_int_handler)
    sys.exit(app(arguments))


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process at once.

    Nothing has begun yet, and an exception in the middle of an import would be a traceback.
    """
    os.write(sys.stderr.fileno(), b"fedemu: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
