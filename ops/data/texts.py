"""The reader of texts: a column of a file, of a folder or of a data set on the hub becomes samples of tokens.

``fedemu.algorithms.data.language`` says what a sample is, ``tokens.py`` where the vocabulary comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.language import PAD, TextKind, masked, windows
from fedemu.ops.data.cache import Decoded, Samples
from fedemu.ops.data.own.text_files import identifiers, read_file, values
from fedemu.ops.data.source import SPLIT, TABLE_FILES, DataSource, Place, TextSource, ends_in, require_column
from fedemu.ops.data.split import Part, chosen_splits, divided
from fedemu.ops.data.tokens import Tokenizer, require_tokenizer, train_tokenizer
from fedemu.protocol.errors import DataError

UNLABELLED = "text"
"""The name of the only class, if texts have no labels."""
_TEXTS = ("text", "utterance", "sentence", "content", "line")
_LABELS = ("label", "labels", "target", "class", "scenario", "domain", "intent")
_ROWS = 4096

Columns = Mapping[str, Sequence[Any]]
"""The cells of each column. None and an empty text are empty cells."""
Declared = Mapping[str, Mapping[str, Sequence[str]]]
"""The names of the classes that a column declares, by the name of the split and that of the column."""


def decode_texts(source: DataSource, wanted: TextSource, place: Place, scratch: Path) -> Decoded:
    """Read texts, divide them into training and test texts, and tokenise them.

    The tokenizer is trained on the training texts. A long text is cut into several samples, which all have its label
    and its columns. Rows without text are left out. ``scratch`` is a folder for temporary files. Raises DataError if a
    column is missing or nothing is left, and ConfigurationError if the tokenizer's library is not installed.
    """
    require_tokenizer(wanted)
    return decode_columns(source, wanted, *_read(source, place, scratch))


def decode_columns(
    source: DataSource, wanted: TextSource, columns: Columns, splits: Sequence[str], declared: Declared
) -> Decoded:
    """Do the same with texts that are in columns already. ``splits`` names the split of each row.

    If the training splits declare classes for the column of the labels, these are the classes, in this order. If their
    labels are numbers, those of the test split are the numbers that it declares.
    """
    text = _text_column(source, wanted, columns)
    label = _label_column(source, columns, text)
    if label is None and wanted.objective == "labels":
        raise DataError(
            f"the data set {source.dataset!r} has no column of labels among {', '.join(columns)}; set data.label_column"
        )
    for name in source.columns:
        require_column(source, columns, name)
    present = np.array([bool(str(cell or "").strip()) for cell in columns[text]])
    of_split = np.array(splits)
    unlabelled = np.array([label is not None and _is_empty(cell) for cell in columns[label or text]])
    names, test = chosen_splits(source, splits, lambda test, train: bool(unlabelled[np.isin(of_split, test)].all()))
    rows = [np.flatnonzero(np.isin(of_split, chosen) & present) for chosen in (names, test)]
    for chosen, found in zip((names, test), rows, strict=True):
        if chosen and not len(found):
            raise DataError(f"the split {' and '.join(chosen)} of {source.dataset!r} holds no texts")
    both = np.concatenate(rows)
    known = dict.fromkeys(one for split in names for one in declared.get(split, {}).get(label or "", ()))
    if label is not None and not known and not any(isinstance(columns[label][row], str) for row in rows[0].tolist()):
        columns = {**columns, label: _numbered(columns[label], label, splits, declared)}
    y, classes = classes_of_cells(source, columns, label, both, tuple(known))
    kept = {name: kept_column(source, name, [columns[name][row] for row in both]) for name in source.columns}
    texts = np.array([str(columns[text][row]) for row in both], dtype=object)

    def part(chosen: slice) -> Part:
        held = texts[chosen]
        return Part(y[chosen], {name: column[chosen] for name, column in kept.items()}, lambda some: [held[some]])

    first = len(rows[0])
    decoded = divided(source, classes, part(slice(first)), part(slice(first, None)) if test else None)
    return _tokenised(decoded, wanted)


def _read(source: DataSource, place: Place, scratch: Path) -> tuple[Columns, list[str], Declared]:
    if place.kind == "file" and not ends_in(place.where, TABLE_FILES):
        columns = read_file(Path(place.where))
        return columns, columns.get(SPLIT) or ["train"] * len(next(iter(columns.values()))), {}
    # Only a process that reads a folder or the hub imports this: it needs datasets and pyarrow.
    from fedemu.ops.data.hugging_face import open_tables, read_texts

    return read_texts(source, open_tables(source, place, scratch))


def _text_column(source: DataSource, wanted: TextSource, columns: Columns) -> str:
    """The column of the texts: the one that is set, or the first with a usual name.

    Raises DataError if there is none.
    """
    if wanted.column is not None:
        return require_column(source, columns, wanted.column)
    found = [name for name in _TEXTS if name in columns]
    if not found:
        raise DataError(
            f"the data set {source.dataset!r} has no column called {', '.join(_TEXTS)}, but {', '.join(columns)}; "
            "set data.text.column to that of the texts"
        )
    return found[0]


def _label_column(source: DataSource, columns: Columns, text: str) -> str | None:
    """The column of the labels: the one that is set, or the first with a usual name. None if there is none."""
    if source.label_column is not None:
        return require_column(source, columns, source.label_column)
    return next((name for name in _LABELS if name in columns and name != text), None)


def _numbered(cells: Sequence[Any], label: str, splits: Sequence[str], declared: Declared) -> list[Any]:
    """The labels of texts where those of the training splits are numbers: numbers in place of declared names, too."""
    places = {
        split: {one: place for place, one in enumerate(classes.get(label, ()))} for split, classes in declared.items()
    }
    return [places.get(split, {}).get(cell, cell) for split, cell in zip(splits, cells, strict=True)]


def classes_of_cells(
    source: DataSource, columns: Columns, label: str | None, rows: NDArray[np.int64], declared: tuple[str, ...] = ()
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The labels of some rows, from 0, and the names of the classes.

    The names are those that are ``declared``, or else the sorted distinct values of the column. Raises DataError if a
    label is empty, a fraction, or none of the declared names.
    """
    if label is None:
        return np.zeros(len(rows), dtype=np.int64), (UNLABELLED,)
    cells = [columns[label][row] for row in rows]
    empty = [row for row, cell in zip(rows.tolist(), cells, strict=True) if _is_empty(cell)]
    if empty:
        raise DataError(f"the column {label!r} of {source.dataset!r} is empty in row {empty[0] + 1}")
    if declared:
        places = {one: place for place, one in enumerate(declared)}
        if unknown := sorted({*map(str, cells)} - {*places}):
            raise DataError(
                f"the label column {label!r} of {source.dataset!r} holds {unknown[0]!r}, which is none of the "
                f"{len(declared)} classes of the training split; give all splits the same classes"
            )
        return np.array([places[str(cell)] for cell in cells], dtype=np.int64), declared
    found, numbers = identifiers(cells), values(cells)
    # Where a cell has several numbers, it is a word.
    several = any(len(str(cell).split()) > 1 for cell in cells)
    fractions = numbers.dtype.kind == "f" and bool(np.any(numbers != np.floor(numbers)))
    if (fractions and not several) or found.dtype.kind == "f":
        raise DataError(
            f"the label column {label!r} of {source.dataset!r} holds fractions, not classes; name another by "
            "data.label_column, or make classes of the numbers, as pandas.cut does"
        )
    distinct, y = np.unique(found, return_inverse=True)
    return y.astype(np.int64), tuple(map(str, distinct.tolist()))


def kept_column(source: DataSource, name: str, cells: Sequence[Any]) -> NDArray[Any]:
    """The values ``[n]`` of a column that is kept: numbers if it orders the samples, and else what names something."""
    return values(cells) if name == source.order else identifiers(cells)


def _is_empty(cell: Any) -> bool:
    return cell is None or not str(cell).strip()


def _tokenised(decoded: Decoded, wanted: TextSource) -> Decoded:
    train, test = (_texts(samples) for samples in (decoded.train, decoded.test))
    tokenizer = train_tokenizer(wanted, train)
    if wanted.objective == "labels":
        # Without a vocabulary: the samples are classified, and no token of them is predicted.
        return replace(
            decoded,
            train=_whole(decoded.train, train, tokenizer, wanted),
            test=_whole(decoded.test, test, tokenizer, wanted),
        )
    return replace(
        decoded,
        train=_cut(decoded.train, train, tokenizer, wanted, seed=0),
        test=_cut(decoded.test, test, tokenizer, wanted, seed=1),
        vocabulary=tokenizer.vocabulary,
    )


def _texts(samples: Samples) -> list[str]:
    return [text for block in samples.blocks for text in block]


def _whole(samples: Samples, texts: Sequence[str], tokenizer: Tokenizer, wanted: TextSource) -> Samples:
    """One sample ``[length]`` of tokens for each text, filled up by ``[PAD]``. What is longer is left out."""
    x = np.full((len(texts), wanted.length), PAD, dtype=np.int32)
    for row, text in zip(x, texts, strict=True):
        tokens = tokenizer.encode(text)[: wanted.length]
        row[: len(tokens)] = tokens
    return Samples([x], samples.y, samples.columns)


def _cut(samples: Samples, texts: Sequence[str], tokenizer: Tokenizer, wanted: TextSource, seed: int) -> Samples:
    """Make the samples of one split. The masking is drawn from ``seed``, and is the same in every experiment."""
    kind: TextKind = "masked" if wanted.objective == "masked" else "next"
    cut = [windows(tokenizer.encode(text), wanted.length, kind) for text in texts]
    counts = [len(part) for part in cut]
    if not sum(counts):
        raise DataError("none of the texts of a split has a token; set data.text.column to that of the texts")
    x = np.concatenate(cut)
    size = len(tokenizer.vocabulary)
    dtype = np.int16 if size <= np.iinfo(np.int16).max else np.int32
    # RandomState, because its streams never change between versions of numpy.
    random = np.random.RandomState(seed)

    def blocks() -> Iterator[NDArray[Any]]:
        for start in range(0, len(x), _ROWS):
            block = x[start : start + _ROWS]
            yield (masked(block[:, 0], random, size) if wanted.objective == "masked" else block).astype(dtype)

    columns = {name: np.repeat(column, counts) for name, column in samples.columns.items()}
    return Samples(blocks(), np.repeat(samples.y, counts), columns)
