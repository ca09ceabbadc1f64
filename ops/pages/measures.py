"""What the figures of pages mean, in words and as the papers' equations. ``templates/measures.toml`` has the texts."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from markupsafe import Markup, escape

TEMPLATES: Final = Path(__file__).parent / "templates"
_FORMS: Final = (
    (re.compile(r"to [\d.]+ %"), "rounds to an accuracy"),
    (re.compile(r"last \d+"), "mean of the last rounds"),
)
"""Titles that have a number in them, and the measures that they show."""
_INDEX: Final = re.compile(r"_(?:\{([^}]*)\}|(\w))")


@dataclass(frozen=True)
class Measure:
    """A measure by its name on pages. ``equation`` has indices as in ``A_{t,c}``; it and ``source`` may be empty."""

    name: str
    words: str
    equation: str = ""
    source: str = ""

    @property
    def id(self) -> str:
        """The id of its explanation on a page."""
        return "about-" + re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def formula(self) -> Markup:
        """The equation as HTML."""
        return _indexed(self.equation)

    @property
    def explanation(self) -> Markup:
        """The words as HTML."""
        return _indexed(self.words)


def measure_of(title: str) -> Measure | None:
    """The measure that a card, a column, a line or a picture of this title shows. None if it needs no explanation."""
    known = measures()
    name = next((name for form, name in _FORMS if form.fullmatch(title)), title)
    return known.get(name)


@cache
def measures() -> Mapping[str, Measure]:
    """All measures, by each of their names."""
    tables = tomllib.loads((TEMPLATES / "measures.toml").read_text(encoding="utf-8"))["measure"]
    return {
        name: Measure(table["name"], table["words"], table.get("equation", ""), table.get("source", ""))
        for table in tables
        for name in (table["name"], *table.get("also", ()))
    }


def _indexed(text: str) -> Markup:
    return Markup(_INDEX.sub(lambda match: f"<sub>{match[1] or match[2]}</sub>", str(escape(text))))
