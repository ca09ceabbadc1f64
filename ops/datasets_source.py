"""Where a data set's name leads: built in, a folder, the Hugging Face hub, or a user's own function."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedemu.ops.datasets_cache import FORMAT, Decoded, Samples
from fedemu.protocol.errors import DataError

BUILT_IN = ("digits", "synthetic")
SYNTHETIC_SAMPLES = 20_000
"""How many ``synthetic`` has; ``synthetic#N`` has N."""
LABEL = "label"
"""What the labels are called among a corpus's columns, whatever their column was called in the data set."""
_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Source:
    """What to read: the data set, its columns (None: found from the data), and further columns to keep per sample.

    ``test_fraction`` applies where the data set has no test split of its own.
    """

    dataset: str
    image_column: str | None = None
    label_column: str | None = None
    columns: tuple[str, ...] = ()
    test_fraction: float = 0.2

    @property
    def name(self) -> str:
        return re.split(r"[/:]", self.dataset.rstrip("/"))[-1].replace("#", "-")


@dataclass(frozen=True)
class Place:
    """``kind`` tells how to read it; ``where`` is a folder, a hub id or ``module:Name``.

    ``subset`` is one of the configurations that some Hugging Face data sets come in.
    """

    kind: Literal["built_in", "function", "folder", "hub"]
    where: str
    subset: str | None = None


def locate(dataset: str, data: Path | None) -> Place:
    """Find a data set; ``data`` is the folder to look in first. Raises DataError where the name leads nowhere."""
    if dataset.partition("#")[0] in BUILT_IN:
        return Place("built_in", *_checked_size(dataset))
    if _ATTRIBUTE.fullmatch(dataset):
        return Place("function", dataset)
    name, _, subset = dataset.partition("#")
    folders = dict.fromkeys([*([data / name] if data is not None else []), Path(name).expanduser()])
    for folder in folders:
        if folder.is_dir():
            return Place("folder", str(folder.resolve()), subset or None)
    if _HUB_ID.fullmatch(name):
        return Place("hub", name, subset or None)
    raise DataError(
        f"there is no data set {dataset!r}: no folder {' or '.join(map(str, folders))}, "
        "and it is no Hugging Face id; check data.dataset"
    )


def entry_of(source: Source, place: Place, cache: Path) -> Path:
    """The cache entry for a source: another one when files, columns or the test split's share are others."""
    settings = asdict(source) | {"dataset": asdict(place), "format": FORMAT}
    match place.kind:
        case "folder":
            settings["content"] = _fingerprint(Path(place.where))
        case "function":
            settings["content"] = hashlib.sha256(_module_file(place.where).read_bytes()).hexdigest()
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return cache / "datasets" / f"{re.sub(r'[^A-Za-z0-9.-]', '_', source.name)}-{key[:16]}"


def _checked_size(dataset: str) -> tuple[str, str | None]:
    """A built-in data set's name and, for the synthetic one, its size."""
    name, _, size = dataset.partition("#")
    if not size:
        return name, None
    if name != "synthetic" or not size.isascii() or not size.isdigit() or not 100 <= int(size) <= 10_000_000:
        raise DataError(f"data.dataset = {dataset!r}: only synthetic#N takes a size, N from 100 to 10000000")
    return name, size


def built_in(place: Place, test_fraction: float) -> Decoded:
    """The data set that a place of kind ``built_in`` names."""
    if place.where == "digits":
        return digits(test_fraction)
    return synthetic(int(place.subset or SYNTHETIC_SAMPLES), test_fraction)


def synthetic(samples: int, test_fraction: float) -> Decoded:
    """Images that need no download, for fleets larger than any data at hand: 8x8, 10 classes, values 0 to 255.

    A class is a fixed random image; a sample is it under Gaussian noise of 1.5 times its own spread.
    """
    random = np.random.RandomState(0)
    prototypes = random.normal(128, 24, size=(10, 1, 8, 8))
    y = random.permutation(np.arange(samples, dtype=np.int64) % 10)
    x = np.clip(prototypes[y] + random.normal(0, 36, size=(samples, 1, 8, 8)), 0, 255).astype(np.uint8)
    return split_off(x, y, {}, tuple(map(str, range(10))), test_fraction)


def digits(test_fraction: float) -> Decoded:
    """scikit-learn's 1,797 handwritten digits, 8x8, values 0 to 16."""
    # Its file is read without importing scikit-learn, which takes over a second and 160 MB.
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz" if package and package.origin else None
    if file is None or not file.is_file():
        raise DataError("the digits are part of scikit-learn, which is not installed; install scikit-learn")
    with gzip.open(file, "rt") as text:
        table = np.loadtxt(text, delimiter=",").astype(np.uint8)
    x, y = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)
    return split_off(x, y, {}, tuple(map(str, range(10))), test_fraction)


def split_off(
    x: NDArray[Any], y: NDArray[np.int64], columns: Mapping[str, NDArray[Any]], names: tuple[str, ...], fraction: float
) -> Decoded:
    """Arrays with a stratified part of them as the test split."""
    chosen = stratified(y, fraction)
    parts = [
        Samples([x[rows]], y[rows], {name: values[rows] for name, values in columns.items()})
        for rows in (np.flatnonzero(~chosen), np.flatnonzero(chosen))
    ]
    return Decoded(names, *parts)


def stratified(y: NDArray[np.int64], fraction: float) -> NDArray[np.bool_]:
    """Which samples are the test split: ``ceil(fraction * n)``, shared among classes by largest remainder.

    The same for every experiment, whatever its seed. A class keeps at least one sample for training.
    """
    counts = np.bincount(y)
    exact = counts * fraction
    take = np.minimum(np.floor(exact).astype(np.int64), np.maximum(counts - 1, 0))
    missing = int(np.ceil(fraction * len(y))) - int(take.sum())
    # Rounded, so that equal remainders tie whatever their last bits: the lower label comes first.
    for label in np.argsort(np.round(np.floor(exact) - exact, 9), kind="stable"):
        if missing > 0 and take[label] < counts[label] - 1:
            take[label] += 1
            missing -= 1
    if not take.any():
        raise DataError(f"no test split can be taken from {len(y)} samples of {np.count_nonzero(counts)} classes")
    # RandomState, because its streams never change between versions of numpy.
    random = np.random.RandomState(0)
    chosen = np.zeros(len(y), dtype=bool)
    for label, count in enumerate(take):
        chosen[random.permutation(np.flatnonzero(y == label))[:count]] = True
    return chosen


def own(where: str, source: Source) -> Decoded:
    """Call a user's function and check what it returns; ``docs/data.md`` shows one."""
    module, name = where.split(":")
    try:
        made = getattr(importlib.import_module(module), name)()
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"the data set {where} failed with {type(error).__name__}: {error}") from error
    if not isinstance(made, Mapping) or not {"x", "y"} <= set(made):
        raise DataError(f"the data set {where} must return a mapping with at least x and y")
    extra = set(made) - {"x", "y", "test_x", "test_y", "class_names", "columns", "test_columns"}
    if extra or ("test_x" in made) != ("test_y" in made):
        raise DataError(f"the data set {where} returned {', '.join(sorted(made))}; docs/data.md tells the keys")
    x, y = _checked(where, made["x"], made["y"])
    columns = {name: np.asarray(values) for name, values in made.get("columns", {}).items() if name in source.columns}
    for column in source.columns:
        if len(columns.get(column, ())) != len(y):
            raise DataError(f"the data set {where} has no column {column!r} of {len(y)} values")
    top = int(y.max()) if "test_y" not in made else max(int(y.max()), int(np.max(made["test_y"])))
    names = tuple(map(str, made.get("class_names", range(top + 1))))
    if top >= len(names):
        raise DataError(f"the data set {where} has the label {top}, but {len(names)} class names")
    if "test_x" not in made:
        return split_off(x, y, columns, names, source.test_fraction)
    test_x, test_y = _checked(where, made["test_x"], made["test_y"])
    return Decoded(names, Samples([x], y, columns), Samples([test_x], test_y, {}))


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


def _fingerprint(folder: Path) -> list[list[Any]]:
    """Every file's path, size and time of change: cheap to take, and other when the data are."""
    files = []
    for base, _, names in os.walk(folder):
        for name in names:
            path = Path(base, name)
            status = path.stat()
            files.append([str(path.relative_to(folder)), status.st_size, status.st_mtime_ns])
    return sorted(files)


def _module_file(where: str) -> Path:
    # Modules in the working folder are found too, but take no installed one's place.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module = where.split(":")[0]
    try:
        # Every process has another __main__, so what a notebook defines can't be found by the others.
        found = importlib.util.find_spec(module) if module != "__main__" else None
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None or not Path(found.origin).is_file():
        raise DataError(f"the data set {where} names a module {module!r} that can't be found; run fedemu beside it")
    return Path(found.origin)
