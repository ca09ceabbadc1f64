"""The program of the children of ``fedemu run``: it answers to signals first, and then imports and does the work."""

from __future__ import annotations

import gc
import importlib
import sys

from fedemu.ops.running.codes import INTERNAL_ERROR, keep_the_code
from fedemu.ops.running.processes import begin_child
from fedemu.ops.terminal import COMPLAINT
from fedemu.protocol.errors import lacks_memory
from fedemu.protocol.host.phases import mark


def main(words: list[str]) -> int:
    """Run ``module.main(arguments)`` as a child of the process ``parent``, and return its exit code.

    ``words`` are ``parent name module argument...``; ``name`` is shown by ``ps``.
    """
    parent, name, module, *arguments = words
    begin_child(name, int(parent))
    # The collector finds nothing in what imports make, and would look at it again and again, now and later.
    gc.disable()
    try:
        action = importlib.import_module(module).main
    except Exception as error:
        return _failed(error)
    gc.freeze()
    gc.enable()
    mark(name.removeprefix("fedemu-"), "imports")
    code = int(action(arguments))
    keep_the_code()
    return code


def _failed(error: Exception) -> int:
    """Tell that the work cannot be imported, such as torch where there is too little memory. Returns the exit code."""
    try:
        from fedemu.ops.running.exits import exit_code_of  # it imports much itself
    except Exception:  # what hindered the work hinders this, too
        said = "this machine has too little memory" if lacks_memory(error) else "internal error"
        print(f"{COMPLAINT}{said}: {error!r}", file=sys.stderr, flush=True)
        return INTERNAL_ERROR

    def again() -> int:
        raise error

    return exit_code_of(again)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
