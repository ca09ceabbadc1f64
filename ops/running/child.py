"""How ``fedemu run`` starts its children: ready for signals first, then imports that take seconds, then the work."""

from __future__ import annotations

import importlib
import sys

from fedemu.ops.running.processes import begin_child


def main(words: list[str]) -> int:
    """``parent name module argument...``: run ``module.main(arguments)`` as a child of the process ``parent``."""
    parent, name, module, *arguments = words
    begin_child(name, int(parent))
    return int(importlib.import_module(module).main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
