"""Follows a log of a run directory: what was appended since the last look, and whether the log began anew."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MOST_BYTES = 2**25
"""The most bytes that one look reads. The rest comes with the next looks."""
_SEAM = 64
"""The number of last bytes by which a log is known again. A resumed run cuts lines off and writes others."""


class Look(NamedTuple):
    """The new objects of a log. ``anew`` says that they are not new lines of it, but the log from its beginning.

    ``unread`` counts the new lines that are left out.
    """

    lines: list[dict[str, Any]]
    anew: bool
    unread: int = 0


class Tail:
    """The end of one log, which may not exist yet. A line that holds no JSON object of this ``form`` is left out."""

    def __init__(self, path: Path, form: Callable[[dict[str, Any]], bool] = lambda line: True) -> None:
        self._path = path
        self._form = form
        self._offset = 0
        self._seam = b""

    def look(self) -> Look:
        """What came since the last call."""
        try:
            with self._path.open("rb") as file:
                return self._read(file)
        except OSError:
            gone = self._offset > 0
            self._offset, self._seam = 0, b""
            return Look([], gone)

    def _read(self, file: Any) -> Look:
        size = os.fstat(file.fileno()).st_size
        anew = False
        if self._offset:
            file.seek(self._offset - len(self._seam))
            anew = size < self._offset or file.read(len(self._seam)) != self._seam
        if anew:
            self._offset, self._seam = 0, b""
        file.seek(self._offset)
        text = file.read(MOST_BYTES)
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._seam = (self._seam + whole)[-_SEAM:]
        found = [*map(_object, filter(None, whole.splitlines()))]
        lines = [value for value in found if isinstance(value, dict) and self._form(value)]
        return Look(lines, anew, len(found) - len(lines))


def _object(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
