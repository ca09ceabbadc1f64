"""The reader of FEMNIST as LEAF writes it (Caldas et al., 2018): JSON files of writers with images and labels.

A file is ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [[784 numbers, 0 to 1]], "y": [class]}}}``.
The folder holds ``train/*.json`` and ``test/*.json``, or else ``all_data*.json``, itself or in a folder ``all_data``.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.ops.data.cache import Decoded, mapped_array
from fedemu.ops.data.source import DataSource, Place
from fedemu.ops.data.split import Part, Rows, divided
from fedemu.protocol.errors import DataError

WRITER = "writer_id"
"""The column of the users' names. It has the same name in the Hugging Face form of these data."""
CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
_SIDE = 28
_BEGINNING = re.compile(r'\s*\{\s*"(users|num_samples|user_data|hierarchies)"\s*:')


def leaf_files(place: Place) -> dict[str, list[Path]]:
    """The files of a folder by split: ``train`` alone, or with ``test``. Empty if the folder is not in LEAF's form."""
    if place.kind != "folder":
        return {}
    folder = Path(place.where)
    files = {split: sorted(folder.glob(f"{split}/*.json")) for split in ("train", "test")}
    if not all(files.values()):
        files = {"train": sorted(folder.glob("all_data*.json")) or sorted(folder.glob("all_data/*.json"))}
    return files if files["train"] and _begins_like_leaf(files["train"][0]) else {}


def decode_leaf(source: DataSource, files: Mapping[str, Sequence[Path]], scratch: Path) -> Decoded:
    """Read the files that ``leaf_files`` finds. A sample is an 8-bit image ``[1, 28, 28]``.

    The images of each file are written to the folder ``scratch``, so only one file at a time has to fit into memory.
    Raises DataError if a file is not in LEAF's form, or if the source asks for a column that LEAF does not have.
    """
    _require_columns(source)
    parts = {}
    for split, paths in files.items():
        stored = [scratch / f"{split}-{place}.npy" for place in range(len(paths))]
        read = [_read(path, images) for path, images in zip(paths, stored, strict=True)]
        y, writers = (np.concatenate(arrays) for arrays in zip(*read, strict=True))
        kept = dict.fromkeys(source.columns, writers)
        parts[split] = Part(y, kept, partial(_blocks, stored))
    return divided(source, CLASSES, parts["train"], parts.get("test"))


def _begins_like_leaf(path: Path) -> bool:
    with open(path, encoding="utf-8", errors="replace") as file:
        return _BEGINNING.match(file.read(100)) is not None


def _require_columns(source: DataSource) -> None:
    wrong = {source.image_column} - {None, "x"} | {source.label_column} - {None, "y"} | {*source.columns} - {WRITER}
    if wrong:
        raise DataError(
            f"the data set {source.dataset!r} in LEAF's form has no such column {min(map(str, wrong))!r}; "
            f"its images are x, its labels y, its writers {WRITER}"
        )


def _read(path: Path, stored: Path) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Store the images of one file as uint8 ``[n, 1, 28, 28]``. Returns labels and writers, ``[n]`` each."""
    try:
        content = json.loads(path.read_bytes())
        held = {user: content["user_data"][user] for user in content["users"]}
        held = {user: data for user, data in held.items() if len(data["y"])}
        x = [np.asarray(data["x"], dtype=np.float64).reshape(len(data["y"]), -1) for data in held.values()]
        y = [np.asarray(data["y"]) for data in held.values()]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        words = f"no {error}" if isinstance(error, LookupError) else str(error).partition("\n")[0]
        raise DataError(f"{path} is not in LEAF's form: {words}") from error
    if not held:
        raise DataError(f"{path} holds no samples")
    for user, pixels, labels in zip(held, x, y, strict=True):
        _check(path, user, pixels, labels)
    images = np.rint(np.concatenate(x) * 255).astype(np.uint8)
    np.save(stored, images.reshape(-1, 1, _SIDE, _SIDE))
    writers = np.repeat(np.array([str(user) for user in held]), [len(labels) for labels in y])
    return np.concatenate(y).astype(np.int64), writers


def _check(path: Path, user: str, pixels: NDArray[np.float64], labels: NDArray[Any]) -> None:
    if pixels.shape[1] != _SIDE * _SIDE or not (pixels.min() >= 0.0 and pixels.max() <= 1.0):
        raise DataError(f"the samples of {user!r} in {path} are not {_SIDE * _SIDE} numbers from 0 to 1 each")
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= len(CLASSES):
        raise DataError(f"the labels of {user!r} in {path} are not whole numbers from 0 to {len(CLASSES) - 1}")


def _blocks(files: Sequence[Path], rows: Rows) -> Iterator[NDArray[np.uint8]]:
    """Read some images, file by file. ``rows`` are ascending and count through all files."""
    start = 0
    for file in files:
        images = mapped_array(file)
        first, last = np.searchsorted(rows, (start, start + len(images)))
        if last > first:
            yield images[rows[first:last] - start]
        start += len(images)
