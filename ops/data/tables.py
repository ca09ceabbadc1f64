"""The reader of a CSV file of numbers: one column holds the labels, all others are the sample."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedemu.ops.data.cache import Decoded
from fedemu.ops.data.own.text_files import read_file
from fedemu.ops.data.source import ROW_NUMBERS, SPLIT, DataSource, Place, require_column
from fedemu.ops.data.split import Part, chosen_splits, divided
from fedemu.ops.data.texts import classes_of_cells, kept_column
from fedemu.protocol.errors import DataError
from fedemu.protocol.wording import counted

_LABELS = ("label", "labels", "target", "class", "y")
_TRUTHS = ("true", "false")
_TEXTS = "set data.text.kind = 'labels' to learn from texts"
_COMMA = re.compile(r"\s*[+-]?\d+,\d+\s*")


def decode_numbers(source: DataSource, place: Place) -> Decoded:
    """Read a CSV file whose cells are numbers, apart from the labels and the columns that are kept.

    A column ``split`` tells training rows from test rows. Columns without any number are left out. Raises DataError,
    with the row and the column, if a cell among numbers is empty or no number, and with all columns if one is missing.
    """
    columns = read_file(Path(place.where))
    label = _label_column(source, columns)
    for name in source.columns:
        require_column(source, columns, name, "the file ")
    apart = {label, *source.columns, SPLIT}
    others = [name for name in columns if name not in apart and not ROW_NUMBERS.fullmatch(name)]
    inputs = [name for name in others if _has_numbers(columns[name])]
    if source.image_column is not None:
        inputs = others = [require_column(source, columns, source.image_column, "the file ")]
    if not inputs:
        raise DataError(
            f"the file {source.dataset!r} has no column of numbers to learn from beside its labels; its columns are "
            f"{', '.join(columns)}; {_commas(columns, others) or _TEXTS}"
        )
    labels = np.array([cell.strip() for cell in columns[label]])
    splits = np.array(columns.get(SPLIT) or ["train"] * len(labels))

    def is_secret(test: Sequence[str], train: Sequence[str]) -> bool:
        """Whether all labels of the test split are -1, which is none to train on."""
        return bool((labels[np.isin(splits, test)] == "-1").all()) and "-1" not in labels[np.isin(splits, train)]

    train, test = chosen_splits(source, splits.tolist(), is_secret)
    rows = np.flatnonzero(np.isin(splits, [*train, *test]))  # those of other splits have no classes of their own
    y = np.zeros(len(splits), dtype=np.int64)
    y[rows], classes = classes_of_cells(source, columns, label, rows)
    x = np.stack([_numbers(source, name, columns[name]) for name in inputs], axis=1)
    kept = {name: kept_column(source, name, columns[name]) for name in source.columns}

    def part(chosen: Sequence[str]) -> Part:
        held = np.flatnonzero(np.isin(splits, chosen))
        return Part(y[held], {name: column[held] for name, column in kept.items()}, lambda some: [x[held[some]]])

    decoded = divided(source, classes, part(train), part(test) if test else None)
    return replace(decoded, left_out=tuple(name for name in others if name not in inputs))


def _label_column(source: DataSource, columns: dict[str, list[str]]) -> str:
    if source.label_column is not None:
        return require_column(source, columns, source.label_column, "the file ")
    found = next((name for name in _LABELS if name in columns), None)
    if found is None:
        raise DataError(
            f"the file {source.dataset!r} has no column called {', '.join(_LABELS)}; its columns are "
            f"{', '.join(columns)}; set data.label_column to the one to learn"
        )
    return found


def _has_numbers(cells: Sequence[str]) -> bool:
    """Whether a column holds any number, or nothing but the words ``true`` and ``false``."""
    return _are_truths(cells) or not all(np.isnan(_number(cell)) for cell in cells)


def _commas(columns: Mapping[str, Sequence[str]], names: Sequence[str]) -> str:
    """What to do if numbers are written with a decimal comma. Empty if no column begins with one."""
    found = next((name for name in names if columns[name] and _COMMA.fullmatch(columns[name][0])), None)
    if found is None:
        return ""
    return f"write numbers with a decimal point, not as {columns[found][0].strip()!r} in the column {found!r}"


def _are_truths(cells: Sequence[str]) -> bool:
    return all(cell.strip().lower() in _TRUTHS for cell in cells)


def _numbers(source: DataSource, name: str, cells: Sequence[str]) -> NDArray[np.float32]:
    """A column of numbers ``[n]``, in which true is 1 and false is 0.

    Raises DataError with the first cell that is none; rows count from 1.
    """
    if _are_truths(cells):
        return np.array([cell.strip().lower() == "true" for cell in cells], np.float32)
    try:
        exact = np.array(cells, dtype=np.float64)
    except ValueError:
        exact = np.array([_number(cell) for cell in cells])
    with np.errstate(over="ignore"):
        column = exact.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(column))
    if len(wrong):
        cell = cells[wrong[0]]
        what = "an empty cell" if not cell.strip() else f"{cell[:40]!r}"
        others = f" (and so in {counted(len(wrong) - 1, 'more row')})" if len(wrong) > 1 else ""
        raise DataError(
            f"row {wrong[0] + 1} of {source.dataset!r} has {what} in the column {name!r}, where a finite number "
            f"(float32) should be{others}; mend it, keep the column out by data.id_column, or {_TEXTS}"
        )
    return column


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return np.nan
