"""The reader of ImageNet and TinyImageNet as they are unpacked: a folder of images for each class.

A folder is called by the WordNet id of its class: ``train/n01440764/*.JPEG``, in TinyImageNet
``train/n01443537/images/*.JPEG``. ``val`` looks the same, or it has all images in one folder and a file that tells
their classes: ``val/val_annotations.txt`` beside ``val/images`` as in TinyImageNet, or Kaggle's
``LOC_val_solution.csv``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedemu.ops.data.cache import Decoded
from fedemu.ops.data.images import Cell, image_blocks
from fedemu.ops.data.regroup import regrouped
from fedemu.ops.data.source import DataSource, Place
from fedemu.ops.data.split import Part, Rows, chosen_splits, divided
from fedemu.protocol.errors import DataError
from fedemu.protocol.host.paths import is_file, is_folder
from fedemu.protocol.wording import some_of

WNID = re.compile(r"n\d{8}")
ANNOTATIONS = "val_annotations.txt"
SOLUTION = "LOC_val_solution.csv"
_BELOW = (".", "tiny-imagenet-200", "ILSVRC/Data/CLS-LOC")
"""The folders of the archives that hold ``train`` and ``val``."""
_ENDINGS = (".jpeg", ".jpg", ".png")


class Images(NamedTuple):
    """The images of one class in one folder."""

    wnid: str
    folder: Path
    names: list[str]


def imagenet_folder(place: Place) -> Path | None:
    """The folder that holds ``train``. None unless all folders in ``train`` are called by WordNet ids."""
    if place.kind == "folder":
        for below in _BELOW:
            train = Path(place.where, below, "train")
            names = _folders(train) if is_folder(train) else []
            if names and all(map(WNID.fullmatch, names)):
                return train.parent
    return None


def decode_imagenet(source: DataSource, place: Place, folder: Path, grey: bool) -> Decoded:
    """Read the folder that ``imagenet_folder`` finds. Classes are called by their WordNet ids and sorted by them.

    ``grey`` is as in ``image_blocks``. Raises DataError if folders, images or labels are missing.
    """
    _require_columns(source)
    splits = {"train": _by_folder(folder / "train")}
    known = tuple(images.wnid for images in splits["train"])
    _check_listed(folder / "wnids.txt", known, folder / "train")
    if is_folder(folder / "val"):
        splits["val"] = _validation(folder, Path(place.where), known)
    train, test = chosen_splits(source, list(splits))

    def part(names: Sequence[str]) -> Part:
        parts = [images for name in names for images in splits[name]]
        numbers = [known.index(images.wnid) for images in parts]
        y = np.repeat(np.array(numbers, dtype=np.int64), [len(images.names) for images in parts])
        return Part(y, {}, lambda rows: _blocks(source, parts, rows, grey))

    return divided(source, *regrouped(source, known, part(train), part(test) if test else None))


def _require_columns(source: DataSource) -> None:
    if wrong := [*source.columns, *filter(None, (source.image_column, source.label_column))]:
        raise DataError(
            f"the data set {source.dataset!r} has no column {wrong[0]!r}: it is a folder of images by class; "
            "leave out the setting that names the column"
        )


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _image_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.name.lower().endswith(_ENDINGS))


def _by_folder(split: Path) -> list[Images]:
    found = []
    for wnid in filter(WNID.fullmatch, _folders(split)):
        folder = split / wnid / "images"
        if not is_folder(folder):
            folder = split / wnid
        found.append(Images(wnid, folder, _image_names(folder)))
        if not found[-1].names:
            raise DataError(f"the folder {folder} holds no images; unpack the data set again, or remove the folder")
    return found


def _check_listed(file: Path, known: Sequence[str], train: Path) -> None:
    if is_file(file) and (missing := sorted({*file.read_text().split()} - {*known})):
        raise DataError(f"{file} lists {some_of(missing)}, but {train} has no such folder; unpack the data set again")


def _validation(folder: Path, archive: Path, known: Sequence[str]) -> list[Images]:
    val = folder / "val"
    if any(map(WNID.fullmatch, _folders(val))):
        found = _by_folder(val)
        if unknown := [images.wnid for images in found if images.wnid not in known]:
            raise DataError(f"{val} has folders of classes that {folder / 'train'} lacks: {some_of(unknown)}")
        return found
    together = val / "images" if is_folder(val / "images") else val
    files = [val / ANNOTATIONS, archive / SOLUTION, folder / SOLUTION]
    file = next((file for file in files if is_file(file)), None)
    if file is None:
        raise DataError(
            f"nothing tells the classes of the images in {together}: there is no {files[0]} and no {files[1]}; "
            "add one of them, or put the images into a folder for each class"
        )
    by_class: dict[str, list[str]] = {wnid: [] for wnid in known}
    for name, wnid in _told(file, {*_image_names(together)}, together, {*known}).items():
        by_class[wnid].append(name)
    return [Images(wnid, together, sorted(names)) for wnid, names in by_class.items()]


def _told(file: Path, images: set[str], folder: Path, known: set[str]) -> Mapping[str, str]:
    """The class of each image of a folder, as the file tells it. Raises DataError if the two do not agree."""
    kaggle = file.name == SOLUTION
    told: dict[str, str] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip() or (kaggle and number == 1):
            continue
        fields = line.replace(",", " ").split()
        if len(fields) < 2:
            raise DataError(f"line {number} of {file} should give an image and its class, but is {line.strip()!r}")
        name, wnid = f"{fields[0]}.JPEG" if kaggle else fields[0], fields[1]
        if name not in images:
            raise DataError(f"line {number} of {file} names {name}, which is not in {folder}")
        if wnid not in known:
            raise DataError(f"line {number} of {file} names the class {wnid}, which has no training folder")
        told[name] = wnid
    if left := sorted(images - told.keys()):
        raise DataError(f"{file} does not tell the class of {some_of(left)} in {folder}")
    return told


def _blocks(source: DataSource, parts: Sequence[Images], rows: Rows, grey: bool) -> Iterator[NDArray[Any]]:
    ends = np.cumsum([len(images.names) for images in parts])

    def cells(start: int, stop: int) -> list[Cell]:
        places = zip(rows[start:stop], np.searchsorted(ends, rows[start:stop], "right"), strict=True)
        return [_cell(parts[at], row - ends[at]) for row, at in places]

    return image_blocks(source, rows, cells, grey)


def _cell(images: Images, place: int) -> Cell:
    """One image of a class. ``place`` is negative and counts from the end."""
    return {"bytes": None, "path": str(images.folder / images.names[place])}
