"""The cards and tables that a notebook shows of results: small pieces of HTML that suit light and dark pages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

_BOX = "display:inline-block;border:1px solid #8886;border-radius:6px;padding:.5em .9em;max-width:100%;overflow-x:auto"
_NAME = "text-align:left;opacity:.7;font-weight:normal;padding:0 1.2em 0 0"
_CELL = "text-align:left;padding:0"
_TITLE = "margin-top:.8em"
_FIRST = "text-align:left;min-width:10em"
_OTHER = "white-space:nowrap"  # a number stays with its unit


class Html(str):
    """Text that is HTML already."""


def card(title: str, outcome: str, facts: Mapping[str, str]) -> str:
    """A box with a title, how it ended, and a line for each fact. Empty facts are left out."""
    lines = "".join(
        f'<tr style="background:none"><th style="{_NAME}">{escape(name)}</th>'
        f'<td style="{_CELL}">{_text(value)}</td></tr>'
        for name, value in facts.items()
        if value
    )
    return f'<div style="{_BOX}"><b>{escape(title)}</b> {escape(outcome)}<table style="margin:0">{lines}</table></div>'


def table(columns: Mapping[str, Sequence[str]], title: str = "") -> str:
    """A table by column, with a title above it if there is one. The first column names the rows."""
    head = _cells("th", (name.replace(" %", "\N{NO-BREAK SPACE}%") for name in columns), "")
    body = "".join(f"<tr>{_cells('td', line, _OTHER)}</tr>" for line in zip(*columns.values(), strict=True))
    above = f'<div style="{_TITLE}">{escape(title)}</div>' if title else ""
    return f'{above}<div style="max-width:100%;overflow-x:auto"><table><tr>{head}</tr>{body}</table></div>'


def notes(lines: Iterable[str]) -> str:
    """Lines of text beside tables."""
    return "".join(f"<div>{escape(line)}</div>" for line in lines)


def _cells(kind: str, cells: Iterable[str], others: str) -> str:
    """A row without its ends. ``others`` is the style of all cells but the first."""
    return "".join(
        f'<{kind} style="{others if place else _FIRST}">{escape(cell)}</{kind}>' for place, cell in enumerate(cells)
    )


def link(path: Path, text: str) -> Html:
    """A link to a file, relative to the working folder, which is that of the notebook."""
    return Html(f'<a href="{quote(os.path.relpath(path))}" target="_blank">{escape(text)}</a>')


def from_here(path: Path) -> Path:
    """The path as people write it: from the working folder, if it is below that."""
    return path.relative_to(here) if path.is_relative_to(here := Path.cwd()) else path


def _text(value: str) -> str:
    return value if isinstance(value, Html) else escape(value)
