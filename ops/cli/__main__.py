"""The entry point of the command ``fedemu``. The commands are in ``commands.py``."""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

from fedemu.ops.running.codes import leave_on_signals
from fedemu.protocol.host.kernel import keep_one_heap
from fedemu.protocol.host.streams import keep_streams


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command that the arguments name, and end the process with its exit code.

    ``arguments`` are those of the process unless they are given.
    """
    keep_streams()
    # Importing commands takes half a second, in which Ctrl-C must not end in a traceback. A command changes that.
    leave_on_signals()
    keep_one_heap()
    # The collector finds nothing in what imports make.
    gc.disable()
    from fedemu.ops.cli.commands import app

    gc.freeze()
    gc.enable()
    sys.exit(app(arguments))


if __name__ == "__main__":
    main()
