"""Reads files of texts into columns of cells: tables, plain lines, and scripts of plays, gzipped or not."""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.protocol.errors import DataError

TEXT, SPEAKER = "text", "speaker"
"""The columns of a file that names none."""
EXACT = 2**53
"""From this size on float64 does not have all whole numbers."""
_LINE_END = re.compile(r"\r\n?|\n")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_PLAIN = re.compile(r"[+-]?(0|[1-9]\d*)(\.\d*)?")
"""A number as people write it, which is no code of digits such as ``007`` or ``1e3``."""


def read_file(path: Path) -> dict[str, list[str]]:
    """Read the columns of a file, all of one length. Raises DataError if the file is not in the form of its kind.

    A ``.csv`` file has a heading, whose names lose the spaces around them. In a ``.txt`` file every line that is not
    blank is a text. But if all its paragraphs begin with a line that ends in a colon, it is the script of a play, and
    each paragraph is a speech with its speaker. A line feed, a carriage return or both end a line, and no other
    character does.
    """
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb") as file:
            content = file.read().decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as UTF-8 text: {error}") from error
    table = path.name.lower().removesuffix(".gz").endswith(".csv")
    columns = _table(path, content) if table else _play(content) or {TEXT: _lines(content)}
    if not any(columns.values()):
        raise DataError(f"{path} holds no row below its heading" if table else f"{path} holds no texts")
    return columns


def values(cells: Sequence[Any]) -> NDArray[Any]:
    """Make an array ``[n]`` of cells: of numbers if all cells are numbers or empty, and of texts otherwise.

    Empty cells become NaN, or empty texts. Spaces around a text do not count. A cell may hold several numbers, such as
    the times of several recordings of one sentence. Then the smallest one counts, which is the earliest. Whole numbers
    that differ stay different: the column holds texts if one is too long for int64, or if two would become one as
    float64, which a column with an empty cell takes.
    """
    numbers = [_number(cell) for cell in cells]
    if None in numbers or all(np.isnan(number) for number in numbers if number is not None):
        return np.array(["" if cell is None else str(cell).strip() for cell in cells])
    array = np.array(numbers, dtype=np.float64)
    known = array[~np.isnan(array)]
    whole = np.isfinite(known).all() and (known == np.floor(known)).all()
    if whole and np.abs(known).max() >= EXACT:
        return _long_numbers(["" if cell is None else str(cell).strip() for cell in cells], array)
    return array.astype(np.int64) if whole and len(known) == len(array) else array


def identifiers(cells: Sequence[Any]) -> NDArray[Any]:
    """Make an array ``[n]`` of cells that name something, such as classes or people. Different cells stay different.

    They become numbers as by ``values`` if all are written plainly, such as ``7``, ``-1`` and ``2.0``, and no two texts
    are the same number. Other columns hold texts, so that codes such as ``007``, ``1e3`` and ``18 24`` stay whole.
    """
    found = values(cells)
    texts = {cell.strip() for cell in cells if isinstance(cell, str)} - {""}
    if found.dtype.kind == "U" or not texts:
        return found
    if all(map(_PLAIN.fullmatch, texts)) and len(np.unique(found[~np.isnan(found)])) == len(texts):
        return found
    return np.array(["" if cell is None else str(cell).strip() for cell in cells])


def _long_numbers(cells: Sequence[str], array: NDArray[np.float64]) -> NDArray[Any]:
    """Long identifiers and times, exactly; as texts if that takes texts."""
    try:
        numbers = [min(map(int, cell.split())) for cell in cells if cell.strip()]
    except ValueError:  # such as 1e20
        return array
    if len(numbers) < len(cells):
        return np.array(cells) if len({*numbers}) > len(np.unique(array[~np.isnan(array)])) else array
    return np.array(cells) if max(map(abs, numbers)) >= 2**63 else np.array(numbers, dtype=np.int64)


def _number(cell: Any) -> float | None:
    """The number in a cell, the smallest if there are several. None if the cell holds anything else."""
    if cell is None:
        return np.nan
    if isinstance(cell, bool | int | float):
        return float(cell)
    parts = str(cell).split()
    if not all(_NUMBER.fullmatch(part) for part in parts):
        return None
    return min(map(float, parts), default=np.nan)


def _table(path: Path, content: str) -> dict[str, list[str]]:
    first = _LINE_END.split(content, maxsplit=1)[0]
    delimiter = "," if "," in first else next((mark for mark in ";\t" if mark in first), ",")
    csv.field_size_limit(max(csv.field_size_limit(), len(content)))  # a text may be longer than Python's own limit
    rows = csv.reader(io.StringIO(content, newline=""), strict=True, delimiter=delimiter)
    try:
        heading, *body = (row for row in rows if row)
    except (ValueError, csv.Error) as error:
        reason = error if isinstance(error, csv.Error) else "it is empty"
        raise DataError(f"{path} is no table of comma-separated values: {reason}") from error
    heading = [name.strip() for name in heading]
    if len({*heading}) < len(heading):
        twice = next(name for place, name in enumerate(heading) if name in heading[:place])
        raise DataError(f"{path} names the column {twice!r} twice in its heading; give each column a name of its own")
    for number, row in enumerate(body, 1):
        if len(row) != len(heading):
            raise DataError(f"row {number} of {path} has {len(row)} cells where the heading has {len(heading)}")
    return {name: [row[place] for row in body] for place, name in enumerate(heading)}


def _play(content: str) -> dict[str, list[str]]:
    """The speakers and speeches of a play, whose lines end in line feeds. Empty if the text is no play."""
    content = _LINE_END.sub("\n", content)
    paragraphs = [paragraph.strip().split("\n", 1) for paragraph in re.split(r"\n\s*\n", content) if paragraph.strip()]
    if len(paragraphs) < 2 or not all(heading.rstrip().endswith(":") for heading, *_ in paragraphs):
        return {}
    speeches = [(heading.rstrip().removesuffix(":"), speech[0]) for heading, *speech in paragraphs if speech]
    return {SPEAKER: [speaker for speaker, _ in speeches], TEXT: [speech for _, speech in speeches]}


def _lines(content: str) -> list[str]:
    return [line for line in _LINE_END.split(content) if line.strip()]
