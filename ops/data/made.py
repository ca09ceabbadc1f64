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
from fedemu.ops.data.own import given
from fedemu.ops.data.own.objects import called, held_in
from fedemu.ops.data.source import LABEL, DataSource, Place
from fedemu.ops.data.split import Part, divided
from fedemu.ops.data.texts import decode_columns
from fedemu.protocol.code.named import load
from fedemu.protocol.code.own_code import account
from fedemu.protocol.errors import ConfigurationError, DataError
from fedemu.protocol.host.paths import is_file
from fedemu.protocol.wording import counted

SYNTHETIC_SAMPLES = 20_000
"""The number of samples of ``synthetic``. ``synthetic#N`` has N."""
MOST_CLASSES = 10_000
"""A larger label than this, and than the number of samples, is no number of a class but a name."""

Labelled = tuple[NDArray[Any], NDArray[np.int64]]
"""Samples ``[n, ...]`` and their labels ``[n]``."""


def built_in(place: Place, source: DataSource) -> Decoded:
    """Make the data set that a place of the kind ``built_in`` names.

    It has samples and labels, and no other columns.
    """
    if LABEL in source.columns:
        raise DataError(
            f"the data set {source.dataset!r} has only labels beside its samples, and neither people nor devices are "
            f"told apart by labels; leave out data.id_column = {LABEL!r}, and choose another data.partition"
        )
    named = [
        ("data.image_column", source.image_column),
        ("data.label_column", source.label_column),
        *(("the setting that names it", column) for column in source.columns),
    ]
    for setting, column in named:
        if column is not None and (setting, column) != ("data.label_column", LABEL):
            raise DataError(
                f"the data set {source.dataset!r} has no column {column!r}; leave out {setting}, for its only "
                f"column is that of its labels, {LABEL!r}"
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
    if file is None or not is_file(file):
        raise DataError("the digits are part of scikit-learn, which is not installed; install scikit-learn")
    with gzip.open(file, "rt") as text:
        table = np.loadtxt(text, delimiter=",").astype(np.uint8)
    return table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)


def own(place: Place, source: DataSource, grey: bool) -> Decoded:
    """Read an object that holds a data set: one that ``module:name`` names or returns, or one that was handed over.

    ``docs/data.md`` shows the forms. Raises DataError if the user's code fails, or gives anything else.
    """
    said = "data" if place.kind == "object" else f"the data set {place.where}"
    held = given.read(Path(place.where)) if place.kind == "object" else _made(said, place.where)
    if isinstance(held, dict) and not hasattr(held, "column_names"):
        return _of_arrays(said, held, source)
    # Only a process that reads such tables imports this: it needs datasets and pyarrow.
    from fedemu.ops.data.hugging_face import decode_table, read_texts

    if source.text is not None:
        return decode_columns(source, source.text, *read_texts(source, held))
    return decode_table(source, held, grey)


def _made(said: str, where: str) -> Any:
    """What the object ``module:name`` holds, or what it returns if it is a function or a class; see ``held_in``.

    Python, numpy and torch draw the same numbers each time: from a fixed seed when the module is imported, as for
    models and methods, and again from that seed when the function is called and items are read. Another process may
    have imported the module before.
    """
    # This imports torch, for which other data need not wait. The module may import it and draw by it at once, and each
    # process begins with another seed. So torch has to be there, and seeded, before the module.
    from fedemu.algorithms.models.torch_module import under_seed

    found = under_seed(lambda: _loaded(where), 0)
    return under_seed(lambda: held_in(said, _called(where, found)), 0)


def _loaded(where: str) -> Any:
    try:
        return load(where)
    except ConfigurationError as error:
        raise DataError(f"the data set {where} can't be loaded: {error}") from error


def _called(where: str, found: Any) -> Any:
    try:
        return called(found)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"the data set {where} failed with {account(error)}") from error


def _of_arrays(said: str, made: Mapping[str, Any], source: DataSource) -> Decoded:
    """A data set from a mapping with some of ``KEYS``, see ``held_in``. The labels of arrays may also be texts."""
    for setting in ("text", "train_split", "image_size"):
        if getattr(source, setting):
            raise DataError(f"data.{setting} goes with tables and images of columns, not with arrays; leave it out")
    names, made = _numbered(said, made)
    x, y = _checked(said, made["x"], made["y"])
    columns = _columns(said, source, made.get("columns", {}), len(y))
    tested = _checked(f"the test split of {said}", made["test_x"], made["test_y"]) if "test_x" in made else None
    top = int(max(y.max(), tested[1].max() if tested else 0))
    if not names and "class_names" not in made and top >= max(MOST_CLASSES, len(y)):
        raise DataError(
            f"{said} has the label {top}, so it would have {top + 1} classes; "
            f"number the {len(np.unique(y))} that it has from 0, or give words"
        )
    names = names or tuple(made.get("class_names", map(str, range(top + 1))))
    if top >= len(names):
        raise DataError(f"{said} has the label {top}, but {len(names)} class names")
    train = _part(x, y, columns)
    if tested is None:
        return divided(source, names, train)
    given_too = made.get("test_columns", {})
    told = {name: _flat(values) for name, values in given_too.items() if name in source.columns}
    if wrong := [name for name, values in told.items() if values.shape != tested[1].shape]:
        raise DataError(f"{said} has no test column {wrong[0]!r} of {len(tested[1])} values")
    return divided(source, names, train, _part(*tested, told))


def _part(x: NDArray[Any], y: NDArray[np.int64], columns: Mapping[str, NDArray[Any]]) -> Part:
    return Part(y, columns, lambda rows: [x[rows]])


def _numbered(said: str, made: Mapping[str, Any]) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Number classes that are texts, in the order of ``class_names`` or else sorted.

    Returns their names, which are empty if labels are no texts. Raises DataError if ``class_names`` lack one.
    """
    labels = {key: made[key] for key in ("y", "test_y") if key in made}
    if any(part.dtype.kind not in "US" or part.ndim != 1 for part in labels.values()):
        return (), made
    found = np.unique(np.concatenate(list(labels.values())))
    names = tuple(made.get("class_names", map(str, found)))
    if lacking := [name for name in map(str, found) if name not in names]:
        raise DataError(f"{said} has the label {lacking[0]!r}, which is none of its class names {', '.join(names)}")
    numbers = np.array([names.index(str(name)) for name in found])
    return names, {**made, **{key: numbers[np.searchsorted(found, part)] for key, part in labels.items()}}


def _columns(said: str, source: DataSource, made: Mapping[str, Any], samples: int) -> dict[str, NDArray[Any]]:
    columns = {name: _flat(values) for name, values in made.items() if name in source.columns}
    for column in source.columns:
        if column not in columns:
            known = f"; it has {', '.join(map(str, made))}" if made else ""
            raise DataError(f"{said} has no column {column!r} of {samples} values{known}")
        if (shape := columns[column].shape) != (samples,):
            count = " × ".join(map(str, shape)) or "no row of"
            raise DataError(
                f"the column {column!r} of {said} has {count} values for {samples} samples; give one for each sample"
            )
    return columns


def _flat(values: NDArray[Any]) -> NDArray[Any]:
    """A single column ``[n, 1]`` as ``[n]``, and any other array as it is."""
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values


def _checked(said: str, x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Samples and labels in the types in which they are stored. Signed whole numbers stay whole, as tokens are."""
    y = _flat(y)
    y = y.astype(np.int64) if y.dtype == bool else y
    if not x.size and x.ndim > 1 and not len(y):
        raise DataError(f"{said} has no samples")
    if x.ndim > 1 and y.ndim == 1:
        if len(x) != len(y):
            found = f"{counted(len(x), 'sample')} in x and {counted(len(y), 'label')} in y"
            raise DataError(f"{said} has {found}; give one label for each sample")
        if y.dtype.kind == "f" and not (known := np.isfinite(y)).all():
            raise DataError(f"{said} has the label {y[known.argmin()]} in row {int(known.argmin())}, which is no class")
        if y.dtype.kind == "f":
            raise DataError(f"{said} has labels of {y.dtype}; labels are whole numbers, which y.astype(int) makes")
    if x.dtype.kind not in "fiub" or x.ndim < 2 or y.dtype.kind not in "iu" or y.shape != x.shape[:1] or not len(y):
        raise DataError(
            f"{said} has x of {x.dtype} {list(x.shape)} and y of {y.dtype} {list(y.shape)}; "
            "x must be numbers [n, ...] and y whole numbers [n]"
        )
    if x.dtype.kind == "i":
        short = np.iinfo(np.int32)
        x = x.astype(np.int64 if x.max(initial=0) > short.max or x.min(initial=0) < short.min else np.int32)
    elif x.dtype != np.uint8:
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
    if y.min() < 0:
        raise DataError(f"{said} has the negative label {y.min()} in row {int(y.argmin())}; labels count from 0")
    if y.max() > np.iinfo(np.int64).max:
        raise DataError(f"{said} has the label {y.max()}, beyond int64; number the labels from 0, or give words")
    if len(wrong := np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(axis=1))):
        raise DataError(f"{said} holds a value that is not finite, or too large for float32, in row {wrong[0]} of x")
    return x, y.astype(np.int64)
