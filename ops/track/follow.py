"""The process that tells a tracker of a run while it goes on.

The first line of its input has the settings of the tracker. A further line says that there is a new row.
Many lines that have come meanwhile say no more than one: all rows that are new are told then.
The end of its input says that the run is over, or that its coordinator is gone. If something goes wrong, its last line
says what, and the whole traceback comes before.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Final

from fedemu.ops.track.export import Export
from fedemu.protocol.code.own_code import account, whole

_MOST_LINES: Final = 2**16
"""As many as a pipe holds."""


def main(words: list[str]) -> int:
    """Follow a run. ``words`` are the run directory and the name of the tracker.

    Its settings come as JSON in the first line of stdin: ``out`` may hold a password, and everybody can read the
    command lines of processes.
    """
    directory, name = Path(words[0]), words[1]
    try:
        settings = json.loads(_first_line(sys.stdin.fileno()))
        # The one of a coordinator that was killed may not be done yet.
        exporting = Export(directory, name, settings["out"], settings["project"], wait=True)
        try:
            while os.read(sys.stdin.fileno(), _MOST_LINES):
                exporting.more()
            exporting.end()
        finally:
            exporting.close()
    except Exception as error:
        print(whole(error), file=sys.stderr, flush=True)
        print(account(error).split("\n")[0], flush=True)
        return 1
    return 0


def _first_line(descriptor: int) -> bytes:
    """The first line of what can be read there. Nothing behind it is read."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        line += byte
    return line
