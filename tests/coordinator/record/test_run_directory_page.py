"""The events of ``docs/run_directory.md`` are those that the code records."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "run_directory.md").read_text(encoding="utf-8")
NAME_AT = {"event": 0, "_gone": 2, "_leave": 1, "_count_refusal": 1}
"""The place of the event's name among the arguments of the calls that record events."""


def recorded() -> Iterator[tuple[str, set[str]]]:
    """The name of each event that is recorded, and those of its keys that the call names."""
    for path in sorted((ROOT / "coordinator").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                place = NAME_AT.get(node.func.attr)
                if place is not None and len(node.args) > place and isinstance(node.args[place], ast.Constant):
                    yield ast.literal_eval(node.args[place]), {key.arg for key in node.keywords if key.arg}


def rows() -> dict[str, str]:
    """The rest of each row of the table of events, by the name of the event."""
    section = PAGE.partition("## events.jsonl")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \|(.*)$", section, re.MULTILINE))


def test_every_recorded_event_is_on_the_page_and_every_event_of_the_page_is_recorded() -> None:
    assert set(rows()) == {name for name, _ in recorded()}


def test_every_key_of_an_event_is_in_its_row() -> None:
    for name, keys in recorded():
        assert keys - {"awaited"} <= set(re.findall(r"`(\w+)`", rows()[name])), name
