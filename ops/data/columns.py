"""The columns of a Hugging Face data set: which of them are inputs and labels, and their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import pyarrow  # type: ignore[import-untyped]
from numpy.typing import NDArray

from fedemu.ops.data.images import image_blocks
from fedemu.ops.data.source import ROW_NUMBERS, DataSource, listed, require_column
from fedemu.protocol.errors import DataError

_LABELS = ("label", "labels", "target", "class")
_FINE, _COARSE = "fine_label", "coarse_label"
"""The two label columns of CIFAR-100. The fine one is taken unless somebody asks for the other."""
_ROWS = 1024


def label_column(source: DataSource, features: datasets.Features) -> str:
    """Choose the column of the labels.

    It is the one that the source names, or the only column of class labels, or one that is named ``label``, or the
    fine one of CIFAR-100. Raises DataError if there is none, or more than one.
    """
    if source.label_column is not None:
        return require_column(source, features, source.label_column)
    others = [name for name in features if name not in source.columns]
    found = [name for name in others if isinstance(features[name], datasets.ClassLabel)]
    found = found or [name for name in others if name in _LABELS]
    if "label" in found:
        return "label"
    if {*found} == {_FINE, _COARSE}:
        return _FINE
    if len(found) == 1:
        return str(found[0])
    what = f"several columns of labels, {listed(found)}" if found else f"no column of labels among {listed(features)}"
    raise DataError(f"the data set {source.dataset!r} has {what}; set data.label_column to the one to learn")


def input_columns(source: DataSource, features: datasets.Features, label: str) -> list[str]:
    """Choose the columns of the inputs.

    They are the one that the source names, or the first one of images, or the only one of vectors, or all columns of
    numbers. Raises DataError if there are none, or if several of vectors are left.
    """
    if source.image_column is not None:
        return [require_column(source, features, source.image_column)]
    apart = {label, *source.columns}
    others = [name for name in features if name not in apart and not ROW_NUMBERS.fullmatch(name)]
    images = [name for name in others if isinstance(features[name], datasets.Image)]
    vectors = [name for name in others if is_vector(features[name])]
    numbers = [name for name in others if number_type(features[name])]
    if images:
        return images[:1]
    if len(vectors) == 1:
        return vectors
    if numbers and not vectors:
        return numbers
    what = f"several columns of vectors, {listed(vectors)}" if vectors else f"no such column among {listed(features)}"
    raise DataError(
        f"the data set {source.dataset!r} should have a column of images or numbers, but has {what}; "
        f"set data.image_column{_or_texts(features, others)}"
    )


def left_out(source: DataSource, features: datasets.Features, label: str, inputs: Sequence[str]) -> tuple[str, ...]:
    """The columns beside those of the numbers that are the ``inputs``. None if the inputs are images or vectors."""
    if source.image_column is not None or not all(number_type(features[name]) for name in inputs):
        return ()
    known = {label, *source.columns, *inputs}
    return tuple(name for name in features if name not in known and not ROW_NUMBERS.fullmatch(name))


def _or_texts(features: datasets.Features, names: Sequence[str]) -> str:
    """What else to do if there are columns of texts."""
    texts = [name for name in names if isinstance(features[name], datasets.Value) and features[name].dtype == "string"]
    return f", or data.text.kind = 'labels' to learn from the texts in {texts[0]!r}" if texts else ""


def number_type(feature: Any) -> str:
    """The type of a column of numbers, or of truths, which count as 1 and 0. Empty for any other, also for classes."""
    numbers = ("int", "uint", "float", "double", "bool")
    if not isinstance(feature, datasets.Value) or not feature.dtype.startswith(numbers):
        return ""
    return str(feature.dtype)


def is_vector(feature: Any) -> bool:
    """Whether every row of a column holds several numbers."""
    if isinstance(feature, datasets.Array2D | datasets.Array3D):
        return True
    inner = getattr(feature, "feature", None)
    return inner is not None and (bool(number_type(inner)) or is_vector(inner))


def values_of(source: DataSource, split: datasets.Dataset, name: str) -> NDArray[Any]:
    """Read a whole column ``[n]`` of numbers or texts. Dates and times become seconds since 1970, float64.

    Raises DataError if it is missing, has empty cells, or is neither.
    """
    require_column(source, split.features, name)
    values = cells_of(source, split, name)
    if None in values:
        raise DataError(f"the column {name!r} of {source.dataset!r} is empty in row {values.index(None) + 1}")
    if _is_time(split.features[name]):
        return _seconds(split, name)
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty((0, 0))
    if array.ndim != 1 or array.dtype.kind not in "iufbU":
        raise DataError(f"the column {name!r} of {source.dataset!r} should hold one number or text per row")
    return array


def _is_time(feature: Any) -> bool:
    """Whether a column holds dates, or moments with or without a time zone."""
    return isinstance(feature, datasets.Value) and feature.dtype.startswith(("timestamp", "date"))


def _seconds(split: datasets.Dataset, name: str) -> NDArray[np.float64]:
    """A column of dates or times as seconds since 1970, UTC. Moments without a time zone count as UTC."""
    moments = split.select_columns([name]).with_format("arrow")[:].column(0)
    microseconds = moments.cast(pyarrow.timestamp("us"), safe=False).cast(pyarrow.int64())
    seconds: NDArray[np.float64] = microseconds.to_numpy() / 1e6
    return seconds


def cells_of(source: DataSource, split: datasets.Dataset, name: str) -> list[Any]:
    """All cells of a column. An empty one is None. Raises DataError if a text is not in UTF-8."""
    try:
        cells: list[Any] = split.select_columns([name]).with_format("arrow")[:].column(0).to_pylist()
    except UnicodeDecodeError as error:
        raise DataError(f"the column {name!r} of {source.dataset!r} holds a text that is not in UTF-8") from error
    return cells


def names_of(source: DataSource, name: str, classes: Sequence[str], cells: Sequence[Any]) -> list[str | None]:
    """The names of the classes whose numbers are in ``cells``. None for an empty cell, and for -1, a secret label.

    Raises DataError if a number is none of the ``classes``.
    """
    known = [None if cell is None or cell < 0 else cell for cell in cells]
    _require_declared(source, name, classes, np.array([cell for cell in known if cell is not None], dtype=np.int64))
    return [None if cell is None else classes[cell] for cell in known]


def test_labels(source: DataSource, test: datasets.Dataset, name: str, known: Any, train: NDArray[Any]) -> NDArray[Any]:
    """The labels of the test split in the form of those of the training split, ``train``, with the feature ``known``.

    Each split may number its classes by itself, so that a class has another number in the other one, and one split may
    have names in place of numbers. Then classes are found by their names. Raises DataError if the training split
    declares its classes and a test label is none of them.
    """
    values, feature = values_of(source, test, name), test.features[name]
    declared = known.names if isinstance(known, datasets.ClassLabel) else None
    by_name = declared is not None or train.dtype.kind == "U"
    if isinstance(feature, datasets.ClassLabel) and by_name and feature.names != declared:
        _require_declared(source, name, feature.names, values)
        values = np.array(feature.names, dtype=np.str_)[values]
    if declared is None or values.dtype.kind != "U":
        return values
    numbers = {one: number for number, one in enumerate(declared)}
    if unknown := [one for one in np.unique(values).tolist() if one not in numbers]:
        raise DataError(
            f"the test split of {source.dataset!r} has the class {unknown[0]!r}, which is none of the {len(numbers)} "
            "classes of the training split; give both splits the same classes"
        )
    return np.array([numbers[one] for one in values.tolist()], dtype=np.int64)


def classes_of(
    source: DataSource, name: str, feature: Any, labels: Mapping[str, NDArray[Any]]
) -> tuple[dict[str, NDArray[np.int64]], tuple[str, ...]]:
    """Number the classes. Returns the labels of each split, from 0 to classes - 1, and the names of the classes.

    The names are those that the data set declares, or else the sorted distinct values of ``labels``. Raises DataError
    if labels are fractions, or if a label is none of the declared classes.
    """
    everything = np.concatenate(list(labels.values()))
    if everything.dtype.kind == "f":
        raise DataError(
            f"the label column {name!r} of {source.dataset!r} holds fractions, not classes; name another by "
            "data.label_column, or make classes of the numbers, as pandas.cut does"
        )
    if not isinstance(feature, datasets.ClassLabel):
        distinct = np.unique(everything)
        found = {split: np.searchsorted(distinct, values) for split, values in labels.items()}
        return found, tuple(map(str, distinct.tolist()))
    names = tuple(map(str, feature.names))
    _require_declared(source, name, names, everything)
    return {split: values.astype(np.int64) for split, values in labels.items()}, names


def _require_declared(source: DataSource, name: str, names: Sequence[str], labels: NDArray[Any]) -> None:
    """Raise DataError if a label is not the number of one of the classes that are called ``names``."""
    outside = labels[(labels < 0) | (labels >= len(names))]
    if len(outside):
        raise DataError(
            f"the label column {name!r} of {source.dataset!r} holds {outside[0]}, "
            f"which is none of its {len(names)} classes"
        )


def input_blocks(
    source: DataSource, split: datasets.Dataset, inputs: Sequence[str], grey: bool, rows: NDArray[np.int64]
) -> Iterator[NDArray[Any]]:
    """Read the inputs of a split in order, a few at a time, so that the whole split need not fit into memory.

    ``rows`` are the places of its samples in the data, for errors.

    A block is ``[k, channels, height, width]`` of uint8 for images, and ``[k, ...]`` of uint8 or float32 for numbers.
    Raises DataError if the columns hold neither, or if a row does not fit.
    """
    if isinstance(split.features[inputs[0]], datasets.Image):
        return _images(source, split, inputs[0], grey, rows)
    wrong = [name for name in inputs if not number_type(split.features[name]) and not is_vector(split.features[name])]
    if wrong:
        raise DataError(f"the column {listed(wrong)} of {source.dataset!r} holds neither images nor numbers")
    if source.image_size:
        raise DataError(f"the data set {source.dataset!r} holds numbers and no images; leave out data.image_size")
    return _numbers(source, split, inputs, rows)


def _images(
    source: DataSource, split: datasets.Dataset, column: str, grey: bool, rows: NDArray[np.int64]
) -> Iterator[NDArray[np.uint8]]:
    files = split.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    return image_blocks(source, rows, lambda start, stop: files[start:stop][column], grey)


def _numbers(
    source: DataSource, split: datasets.Dataset, inputs: Sequence[str], rows: NDArray[np.int64]
) -> Iterator[NDArray[Any]]:
    table = split.select_columns(list(inputs)).with_format("arrow")
    kinds = {_innermost(split.features[name]) for name in inputs}
    single = len(inputs) == 1 and is_vector(split.features[inputs[0]])
    # A vector of signed whole numbers holds tokens. Columns of whole numbers are quantities.
    whole = single and all(kind.startswith("int") for kind in kinds)
    dtype = np.uint8 if kinds == {"uint8"} else np.int64 if whole else np.float32
    shape: tuple[int, ...] | None = None
    for start in range(0, len(table), _ROWS):
        read = table[start : start + _ROWS]
        columns = [read.column(name).to_pylist() for name in inputs]
        try:
            # A single column of vectors is the sample itself. Several columns of numbers are put side by side.
            x = np.asarray(
                columns[0] if single else list(zip(*columns, strict=True)), dtype=np.int64 if whole else np.float64
            )
        except (TypeError, ValueError):
            x = np.full(1, np.nan)
        if not _fit(x) or (shape is not None and x.shape[1:] != shape):
            raise DataError(_wrong(source, inputs, columns, rows[start : start + _ROWS], shape))
        shape = x.shape[1:]
        yield x.astype(dtype)


def _wrong(
    source: DataSource,
    inputs: Sequence[str],
    columns: Sequence[Sequence[Any]],
    rows: NDArray[np.int64],
    shape: tuple[int, ...] | None,
) -> str:
    """Name the first row that is not like the others. ``columns`` are the cells of ``rows``."""
    known = shape
    for row, cells in zip(rows.tolist(), zip(*columns, strict=True), strict=True):
        for name, cell in zip(inputs, cells, strict=True):
            try:
                value = np.asarray(cell, dtype=np.float64)
            except (TypeError, ValueError):
                value = np.full(1, np.nan)
            if cell is None or not _fit(value):
                where = f"row {row + 1} of {source.dataset!r}"
                return f"{where} has no finite number (float32) in the column {name!r}, but {str(cell)[:40]}"
            if len(inputs) == 1 and value.ndim:
                known = known or value.shape
                if value.shape != known:
                    return (
                        f"row {row + 1} of {source.dataset!r} has a vector {list(value.shape)} in the column {name!r}, "
                        f"where the rows before have {list(known)}; make them equally long"
                    )
    return f"rows {rows[0] + 1} to {rows[-1] + 1} of {source.dataset!r} do not fit in {listed(inputs)}"


def _fit(values: NDArray[Any]) -> bool:
    """Whether all numbers are finite in float32."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(values.astype(np.float32)).all())


def _innermost(feature: Any) -> str:
    while getattr(feature, "feature", None) is not None:
        feature = feature.feature
    return str(feature.dtype)
