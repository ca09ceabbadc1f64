"""The forms of what the page reads: what it uses of a line has the types that ``docs/run_directory.md`` tells.

The accounts that the processes of a run give of themselves have the types that ``FleetFeed`` and supervisors write.

A run directory may have been edited by hand, or be that of a later version. What the page does not use may be anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fedemu.coordinator.record.json_lines import plain
from fedemu.ops.live.rows import COLUMNS

_ASK_NUMBERS: Final = ("round", "attempt", "start", "end", "wanted")
_PARTS: Final = {
    "ask": (("ask", "program"), ("start", "asked", "wanted")),
    "absence": (("then", "away"), ("devices", "connected", "seconds")),
    "job": (("name",), ("round", "step", "steps")),
}
"""The parts of a coordinator's account: the texts and the numbers of each."""


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
    return known and _is_index(line.get("device", 0)) and _is_plain(line)


def is_ask(line: Mapping[str, Any]) -> bool:
    """A line of ``asks.jsonl``."""
    return (
        all(_is_number(line.get(name)) for name in _ASK_NUMBERS)
        and all(isinstance(line.get(name, ""), str) for name in ("ask", "program", "outcomes"))
        and _are(line.get("devices", []), _is_index)
        and _are(line.get("times", []), _is_number)
        and len(line.get("outcomes", "")) == len(line.get("devices", []))
    )


def is_account(head: Mapping[str, Any]) -> bool:
    """What a coordinator tells of itself (``FleetFeed``). Viewers get parts of it as they are."""
    return (
        all(_is_number(head.get(name)) for name in ("virtual_time", "wall_time"))
        and _are_counts(head.get("counts"))
        and all(_is_part(head.get(name), *form) for name, form in _PARTS.items())
        and _is_plain(head)
    )


def is_crew(head: Mapping[str, Any]) -> bool:
    """What a supervisor tells of its processes."""
    trainers = head.get("trainers", {})
    return (
        isinstance(trainers, Mapping)
        and all(number.isdecimal() and len(number) < 10 and _is_whole(pid) for number, pid in trainers.items())
        and _are(head.get("devices", []), _is_process)
        and _is_whole(head.get("waiting", 0))
        and _are(head.get("busy", []), _is_whole)
    )


def _is_process(value: Any) -> bool:
    """The id of a process and its devices."""
    return isinstance(value, list) and len(value) == 2 and _is_whole(value[0]) and _are(value[1], _is_whole)


def _is_part(value: Any, texts: Sequence[str], numbers: Sequence[str]) -> bool:
    """A part of an account, or None."""
    return value is None or (
        isinstance(value, Mapping)
        and all(isinstance(value.get(name, ""), str) for name in texts)
        and all(_is_number(value.get(name)) for name in numbers)
        and _are_counts(value.get("counts"))
    )


def _are_counts(value: Any) -> bool:
    """Numbers by name, or None."""
    return value is None or (isinstance(value, Mapping) and all(map(_is_number, value.values())))


def _is_plain(value: Mapping[str, Any]) -> bool:
    """Whether JSON knows all of it."""
    try:
        return bool(plain(value) == value)
    except RecursionError:  # hundreds of lists within each other
        return False


def _are(values: Any, form: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and all(map(form, values))


def _is_number(value: Any) -> bool:
    """A number, or None where nothing was measured."""
    most = sys.float_info.max
    return value is None or (isinstance(value, int | float) and -most <= value <= most)


def _is_index(value: Any) -> bool:
    return value is None or _is_whole(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**31
