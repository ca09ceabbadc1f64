"""The forms of the lines that the page reads: what it uses of them has the types that ``docs/run_directory.md`` tells.

A run directory may have been edited by hand, or be that of a later version. What the page does not use may be anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from fedemu.coordinator.record.json_lines import plain
from fedemu.ops.live.rows import COLUMNS

_ASK_NUMBERS: Final = ("round", "attempt", "start", "end", "wanted")


def is_row(line: Mapping[str, Any]) -> bool:
    """A line of ``metrics.jsonl``."""
    lists = (line.get(name) or [] for name in ("class_accuracy", "period_accuracy"))
    return (
        all(_is_number(line.get(name)) for name in COLUMNS)
        and all(_are(values, _is_number) for values in lists)
        and all(isinstance(line.get(name) or {}, Mapping) for name in ("device_metrics", "remarks"))
    )


def is_event(line: Mapping[str, Any]) -> bool:
    """A line of ``events.jsonl``. Viewers get all of it, so it may hold no number that JSON does not know."""
    numbers = (line.get(name) for name in ("virtual_time", "wall_time", "back"))
    known = isinstance(line.get("event"), str) and all(map(_is_number, numbers))
    try:
        return known and _is_index(line.get("device", 0)) and plain(line) == line
    except RecursionError:  # hundreds of lists within each other
        return False


def is_ask(line: Mapping[str, Any]) -> bool:
    """A line of ``asks.jsonl``."""
    return (
        all(_is_number(line.get(name)) for name in _ASK_NUMBERS)
        and all(isinstance(line.get(name, ""), str) for name in ("ask", "program", "outcomes"))
        and _are(line.get("devices", []), _is_index)
        and _are(line.get("times", []), _is_number)
        and len(line.get("outcomes", "")) == len(line.get("devices", []))
    )


def _are(values: Any, form: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and all(map(form, values))


def _is_number(value: Any) -> bool:
    """A number, or None where nothing was measured."""
    most = sys.float_info.max
    return value is None or (isinstance(value, int | float) and -most <= value <= most)


def _is_index(value: Any) -> bool:
    return value is None or (isinstance(value, int) and 0 <= value < 2**31)
