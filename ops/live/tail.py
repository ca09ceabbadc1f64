"""Follows a log of a run directory: what was appended since the last look, and whether the log began anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedemu.coordinator.record.growing import GrowingLog

MOST_BYTES = 2**25
"""The most bytes that one look reads. The rest comes with the next looks."""


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
        self._log = GrowingLog(path)
        self._form = form

    def look(self) -> Look:
        """What came since the last call. Nothing if the log cannot be read."""
        try:
            whole, anew = self._log.look(MOST_BYTES)
        except OSError:
            return Look([], False)
        self._log.read(whole)
        found = [*map(_object, filter(None, whole.splitlines()))]
        lines = [value for value in found if isinstance(value, dict) and self._form(value)]
        return Look(lines, anew, len(found) - len(lines))


def _object(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
