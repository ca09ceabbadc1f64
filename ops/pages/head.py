"""The head of a page: its facts, and what its colours mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedemu.ops.pages.colours import on_page


@dataclass(frozen=True)
class Fact:
    """One line of a head. ``kind`` is ``code`` for what can be copied, such as a command or a digest."""

    name: str
    value: str
    kind: Literal["words", "code"] = "words"


@dataclass(frozen=True)
class Swatch:
    """A colour, or several from left to right, and what it means. A dashed or dotted line has its ``line``."""

    colours: tuple[str, ...]
    meaning: str
    line: Literal["solid", "dashed", "dotted"] = "solid"

    @property
    def style(self) -> str:
        """The CSS of the field that shows the colour."""
        tones = [on_page(colour) for colour in self.colours]
        joined = ", ".join(tones)
        if self.line != "solid":
            return f"background: none; height: 0; border-top: 4px {self.line} {tones[0]}"
        return f"background: {tones[0] if len(tones) == 1 else f'linear-gradient(90deg, {joined})'}"
