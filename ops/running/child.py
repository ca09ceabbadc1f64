"""The program of the children of ``fedemu run``: it answers to signals first, and then imports and does the work."""

from __future__ import annotations

import gc
import importlib
import sys

from fedemu.ops.running.processes import begin_child
from fedemu.protocol.host.phases import mark


def main(words: list[str]) -> int:
    """Run ``module.main(arguments)`` as a child of the process ``parent``, and return its exit code.

    ``words`` are ``parent name module argument...``; ``name`` is shown by ``ps``.
    """
    parent, name, module, *arguments = words
    begin_child(name, int(parent))
    # The collector finds nothing in what imports make, and would look at it again and again, now and later.
    gc.disable()
    action = importlib.import_module(module).main
    gc.freeze()
    gc.enable()
    mark(name.removeprefix("fedemu-"), "imports")
    return int(action(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
