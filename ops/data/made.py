"""The readers of whole arrays: of the built-in data sets, and of those that a user's own function returns."""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.ops.data.cache import Decoded
from fedemu.ops.data.source import DataSource, Place
from fedemu.ops.data.split import Part, divided
from fedemu.protocol.errors import ConfigurationError, DataError
from fedemu.protocol.host.named import load
from fedemu.protocol.host.own_code import account

SYNTHETIC_SAMPLES = 20_000
"""The number of samples of ``synthetic``. ``synthetic#N`` has N."""

Labelled = tuple[NDArray[Any], NDArray[np.int64]]
"""Samples ``[n, ...]`` and their labels ``[n]``."""


def built_in(place: Place, source: DataSource) -> Decoded:
    """Make the data set that a place of the kind ``built_in`` names.

    It has samples and labels, and no other columns.
    """
    if source.columns:
        raise DataError(
            f"the data set {source.dataset!r} has no column {source.columns[0]!r}; "
            "name its labels by 'label', for it has no other column"
        )
    if place.where == "digits":
        x, y = digits()
    else:
        x, y = synthetic(int(place.subset or SYNTHETIC_SAMPLES))
    return divided(source, tuple(map(str, range(10))), _part(x, y, {}))


def synthetic(samples: int) -> Labelled:
    """Make images ``[samples, 1, 8, 8]`` of 10 classes, values 0 to 255, for fleets that need many samples.

    A class is a fixed random image. A sample is the image of its class under Gaussian noise, whose standard deviation
    is 1.5 times that of the pixels of an image.
    """
    random = np.random.RandomState(0)
    prototypes = random.normal(128, 24, size=(10, 1, 8, 8))
    y = random.permutation(np.arange(samples, dtype=np.int64) % 10)
    x = np.clip(prototypes[y] + random.normal(0, 36, size=(samples, 1, 8, 8)), 0, 255).astype(np.uint8)
    return x, y


def digits() -> Labelled:
    """Read scikit-learn's 1,797 handwritten digits: images ``[1797, 1, 8, 8]`` with values 0 to 16.

    Raises DataError if scikit-learn is not installed.
    """
    # The file is read without importing scikit-learn, because the import takes over a second and 160 MB.
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz" if package and package.origin else None
    if file is None or not file.is_file():
        raise DataError("the digits are part of scikit-learn, which is not installed; install scikit-learn")
    with gzip.open(file, "rt") as text:
        table = np.loadtxt(text, delimiter=",").astype(np.uint8)
    return table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)


def own(where: str, source: DataSource) -> Decoded:
    """Call a user's function ``module:name`` and check what it returns. ``docs/data.md`` shows one.

    It returns a mapping with ``x [n, ...]``, ``y [n]`` from 0, and perhaps ``test_x``, ``test_y``, ``class_names``,
    ``columns`` and ``test_columns``. Raises DataError if it fails, or returns anything else.
    """
    try:
        made = load(where)()
    except DataError:
        raise
    except ConfigurationError as error:
        raise DataError(f"the data set {where} can't be loaded: {error}") from error
    except Exception as error:
        raise DataError(f"the data set {where} failed with {account(error)}") from error
    if not isinstance(made, Mapping) or not {"x", "y"} <= set(made):
        raise DataError(f"the data set {where} must return a mapping with at least x and y")
    extra = set(made) - {"x", "y", "test_x", "test_y", "class_names", "columns", "test_columns"}
    if extra or ("test_x" in made) != ("test_y" in made):
        raise DataError(f"the data set {where} returned {', '.join(sorted(made))}; docs/data.md tells the keys")
    x, y = _checked(where, made["x"], made["y"])
    columns = _columns(where, source, made.get("columns", {}), len(y))
    tested = _checked(where, made["test_x"], made["test_y"]) if "test_x" in made else None
    top = int(max(y.max(), tested[1].max() if tested else 0))
    names = tuple(map(str, made.get("class_names", range(top + 1))))
    if top >= len(names):
        raise DataError(f"the data set {where} has the label {top}, but {len(names)} class names")
    train = _part(x, y, columns)
    if tested is None:
        return divided(source, names, train)
    told = {name: np.asarray(values) for name, values in made.get("test_columns", {}).items() if name in source.columns}
    if wrong := [name for name, values in told.items() if len(values) != len(tested[1])]:
        raise DataError(f"the data set {where} has no test column {wrong[0]!r} of {len(tested[1])} values")
    return divided(source, names, train, _part(*tested, told))


def _part(x: NDArray[Any], y: NDArray[np.int64], columns: Mapping[str, NDArray[Any]]) -> Part:
    return Part(y, columns, lambda rows: [x[rows]])


def _columns(where: str, source: DataSource, made: Mapping[str, Any], samples: int) -> dict[str, NDArray[Any]]:
    columns = {name: np.asarray(values) for name, values in made.items() if name in source.columns}
    for column in source.columns:
        if len(columns.get(column, ())) != samples:
            raise DataError(f"the data set {where} has no column {column!r} of {samples} values")
    return columns


def _checked(where: str, x: Any, y: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    x, y = np.asarray(x), np.asarray(y)
    if x.dtype.kind not in "fiub" or x.ndim < 2 or y.dtype.kind not in "iu" or y.shape != x.shape[:1] or not len(y):
        raise DataError(
            f"the data set {where} returned x of {x.dtype} {list(x.shape)} and y of {y.dtype} {list(y.shape)}; "
            "x must be numbers [n, ...] and y whole numbers [n]"
        )
    x = x if x.dtype == np.uint8 else x.astype(np.float32)
    if y.min() < 0 or not np.isfinite(x).all():
        raise DataError(f"the data set {where} holds a negative label or a value that is not finite")
    return x, y.astype(np.int64)
