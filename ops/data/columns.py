"""Which columns of a Hugging Face data set are the inputs and the labels, and the values of the small ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from fedemu.ops.data.source import DataSource
from fedemu.protocol.errors import DataError

_LABELS = ("label", "labels", "target", "class")
_FINE, _COARSE = "fine_label", "coarse_label"
"""CIFAR-100's: what is meant unless somebody asks for the other."""


def label_column(source: DataSource, features: datasets.Features) -> str:
    """The one given, the only column of class labels, or one that is named ``label``; the finer one of CIFAR-100."""
    if source.label_column is not None:
        return require(source, features, source.label_column)
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
    """The column given, the first one of images, the only one of vectors, or all columns of numbers."""
    if source.image_column is not None:
        return [require(source, features, source.image_column)]
    others = [name for name in features if name != label and name not in source.columns]
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
        "set data.image_column"
    )


def require(source: DataSource, features: Mapping[str, Any], name: str) -> str:
    if name not in features:
        raise DataError(f"the data set {source.dataset!r} has no column {name!r}; its columns are {listed(features)}")
    return name


def number_type(feature: Any) -> str:
    """The type of a column of numbers, empty for any other; a class label is no number."""
    if not isinstance(feature, datasets.Value) or not feature.dtype.startswith(("int", "uint", "float", "double")):
        return ""
    return str(feature.dtype)


def is_vector(feature: Any) -> bool:
    """Whether every row holds several numbers."""
    if isinstance(feature, datasets.Array2D | datasets.Array3D):
        return True
    inner = getattr(feature, "feature", None)
    return inner is not None and (bool(number_type(inner)) or is_vector(inner))


def values_of(source: DataSource, split: datasets.Dataset, name: str) -> NDArray[Any]:
    """A whole column of numbers or texts ``[n]``."""
    require(source, split.features, name)
    values = split.select_columns([name]).with_format("arrow")[:].column(0).to_pylist()
    if None in values:
        raise DataError(f"the column {name!r} of {source.dataset!r} is empty in row {values.index(None)}")
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty((0, 0))
    if array.ndim != 1 or array.dtype.kind not in "iufbU":
        raise DataError(f"the column {name!r} of {source.dataset!r} should hold one number or text per row")
    return array


def classes_of(
    source: DataSource, name: str, feature: Any, labels: Mapping[str, NDArray[Any]]
) -> tuple[dict[str, NDArray[np.int64]], tuple[str, ...]]:
    """Labels by split as 0 to classes - 1, and the classes' names: those declared, or the sorted distinct values."""
    everything = np.concatenate(list(labels.values()))
    if everything.dtype.kind == "f":
        raise DataError(f"the label column {name!r} of {source.dataset!r} holds fractions, not classes")
    if not isinstance(feature, datasets.ClassLabel):
        distinct = np.unique(everything)
        found = {split: np.searchsorted(distinct, values) for split, values in labels.items()}
        return found, tuple(map(str, distinct.tolist()))
    names = tuple(map(str, feature.names))
    outside = everything[(everything < 0) | (everything >= len(names))]
    if len(outside):
        raise DataError(
            f"the label column {name!r} of {source.dataset!r} holds {outside[0]}, "
            f"which is none of its {len(names)} classes"
        )
    return {split: values.astype(np.int64) for split, values in labels.items()}, names


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
