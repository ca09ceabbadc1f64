"""The entry point of the command ``fedemu``. The commands are in ``commands.py``."""

from __future__ import annotations

import atexit
import gc
import logging
import os
from typing import NoReturn

from fedemu.ops.running.codes import command_alone, end, keep_the_code, leave_on_signals


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command that the arguments name, and end the process with its exit code.

    ``arguments`` are those of the process unless they are given.
    """
    # Imports take half a second, in which Ctrl-C must not end in a traceback. A command changes that when it begins.
    leave_on_signals()
    from fedemu.protocol.host.kernel import keep_one_heap

    atexit.register(keep_the_code)  # the first that is registered is the last that is called
    keep_one_heap()
    # numpy reads it when it is imported. In memory devices compute here, and have to get the same bits as in a trainer.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    # Pictures go to files. matplotlib refuses to be imported where this variable has a name that it does not know.
    os.environ["MPLBACKEND"] = "agg"
    # The collector finds nothing in what imports make.
    gc.disable()
    from fedemu.protocol.host.streams import keep_streams

    keep_streams()
    # In a home that cannot be written it would tell people twice of folders of its own. It works without them.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from fedemu.ops.cli.commands import command

    gc.freeze()
    gc.enable()
    command_alone()
    end(command(arguments, standalone_mode=False))


if __name__ == "__main__":
    main()
