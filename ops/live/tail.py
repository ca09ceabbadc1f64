"""Follows a log of a run directory: what was appended since the last look, and whether the log began anew.

It also reads a log from its end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedemu.coordinator.record.growing import GrowingLog
from fedemu.coordinator.record.json_lines import object_in
from fedemu.protocol.host.paths import is_file

MOST_BYTES = 2**19
"""The most bytes that one look reads, or one line if that is longer. The rest comes with the next looks.

The page answers nobody during a look, and its objects take several times as much memory as their text.
"""
BLOCK_BYTES = 2**18
"""So many bytes are read at once from the end of a log."""
Form = Callable[[Mapping[str, Any]], bool]
"""Whether an object of a log can be shown, as ``forms.py`` tells it."""


class Look(NamedTuple):
    """The new objects of a log. ``anew`` says that they are not new lines of it, but the log from its beginning.

    ``unread`` counts the new lines that are left out. ``full`` says that more of the log may be there already.
    """

    lines: list[dict[str, Any]]
    anew: bool
    unread: int = 0
    full: bool = False


class Tail:
    """The end of one log, which may not exist yet. A line that holds no JSON object of this ``form`` is left out."""

    def __init__(self, path: Path, form: Form = lambda line: True) -> None:
        self._log = GrowingLog(path)
        self._form = form

    def look(self) -> Look:
        """What came since the last call. Nothing if the log cannot be read."""
        try:
            whole, anew = self._log.look(MOST_BYTES)
        except OSError:
            return Look([], False)
        self._log.read(whole)
        found = [*map(object_in, filter(None, whole.splitlines()))]
        lines = [value for value in found if value is not None and self._form(value)]
        return Look(lines, anew, len(found) - len(lines), bool(whole) and self._log.is_cut)


def backwards(path: Path, form: Form) -> Iterator[dict[str, Any]]:
    """The objects of a log, the last line first. One that holds no JSON object of this ``form`` is left out.

    No more of the log is read than is asked for. A log that cannot be read has no objects.
    """
    if not is_file(path):
        return
    with suppress(OSError), path.open("rb") as file:
        place, first, ended = file.seek(0, os.SEEK_END), b"", False
        while place > 0:
            begin = max(0, place - BLOCK_BYTES)
            file.seek(begin)
            # The first line of a block may begin in the block before.
            first, *lines = (file.read(place - begin) + first).split(b"\n")
            if lines and not ended:
                ended = True
                lines.pop()  # what stands behind the last line break is no whole line
            for line in reversed(lines if begin or not ended else [first, *lines]):
                if (value := object_in(line)) is not None and form(value):
                    yield value
            place = begin
