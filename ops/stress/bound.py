"""``python -m fedemu.ops.stress.bound PARENT WORDS``: ``fedemu WORDS``, killed when the process PARENT ends."""

from __future__ import annotations

import runpy
import sys

from fedemu.protocol.host.kernel import end_with_parent


def main() -> None:
    """Become the command. A parent that was killed could not end it, and a run may go on for hours."""
    end_with_parent(int(sys.argv.pop(1)))
    runpy.run_module("fedemu.ops.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
