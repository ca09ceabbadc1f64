"""What to read, and where a data set's name leads: built in, a folder or a file of texts, the hub, or a function."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from fedemu.algorithms.data.language import Objective
from fedemu.ops.data.cache import FORMAT
from fedemu.protocol.errors import DataError

BUILT_IN = ("digits", "synthetic")
LABEL = "label"
"""What the labels are called among a corpus's columns, whatever their column was called in the data set."""
TEXT_FILES = (".csv", ".csv.gz", ".txt", ".txt.gz")
_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class TextSource:
    """What samples are made of texts: so many tokens each, to be predicted where they are masked or as the next ones.

    ``vocabulary`` is how many different tokens there are at most; ``column`` that of the texts (None: found).
    """

    objective: Objective
    length: int
    vocabulary: int
    tokenizer: Literal["wordpiece", "characters"]
    column: str | None = None


@dataclass(frozen=True)
class DataSource:
    """What to read: the data set, its columns (None: found from the data), and further columns to keep per sample.

    ``train_split`` names the splits to train on, joined by ``+`` (None: found from the data). ``test_fraction`` applies
    where the data set has no test split of its own: to each label, or to each value of the column ``test_by``. Samples
    whose value of ``id_column`` has fewer than ``id_min_samples`` are left out. Both are among ``columns``. With
    ``text`` the data are language. ``image_size`` is that of all images in pixels (0: as they are), ``regroup`` a
    division of ImageNet into other classes.
    """

    dataset: str
    image_column: str | None = None
    label_column: str | None = None
    columns: tuple[str, ...] = ()
    test_fraction: float = 0.2
    train_split: str | None = None
    test_by: str | None = None
    id_column: str | None = None
    id_min_samples: int = 0
    text: TextSource | None = None
    image_size: int = 0
    regroup: str | None = None

    @property
    def name(self) -> str:
        return re.split(r"[/:]", self.dataset.rstrip("/"))[-1].replace("#", "-")


@dataclass(frozen=True)
class Place:
    """``kind`` tells how to read it; ``where`` is a folder, a file, a hub id or ``module:Name``.

    ``subset`` is one of the configurations that some Hugging Face data sets come in. ``looked_in`` are the folders
    that were not there, where only the hub is left.
    """

    kind: Literal["built_in", "function", "folder", "file", "hub"]
    where: str
    subset: str | None = None
    looked_in: tuple[str, ...] = field(default=(), compare=False)


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
        if folder.is_file():
            return Place("file", _checked_ending(folder))
    if _HUB_ID.fullmatch(name):
        return Place("hub", name, subset or None, tuple(map(str, folders)))
    raise DataError(
        f"there is no data set {dataset!r}: no folder {' or '.join(map(str, folders))}, "
        "and it is no Hugging Face id; check data.dataset"
    )


def entry_of(source: DataSource, place: Place, cache: Path) -> Path:
    """The cache entry for a source: another one when files, columns or the test split's share are others."""
    dataset = {"kind": place.kind, "where": place.where, "subset": place.subset}
    settings = asdict(source) | {"dataset": dataset, "format": FORMAT}
    match place.kind:
        case "folder":
            settings["content"] = _fingerprint(Path(place.where))
        case "file":
            settings["content"] = _status(Path(place.where))
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


def _fingerprint(folder: Path) -> str:
    """A digest of every file's path, size and time of change: cheap to take, and other when the data are."""
    digest = hashlib.sha256()
    for base, folders, names in os.walk(folder):
        folders.sort()
        digest.update(os.fsencode(f"{os.path.relpath(base, folder)}\0"))
        for name in sorted(names):
            size, changed = _status(os.path.join(base, name))
            digest.update(os.fsencode(f"{name}\0{size}\0{changed}\0"))
    return digest.hexdigest()


def _status(file: str | Path) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def _checked_ending(file: Path) -> str:
    if not file.name.endswith(TEXT_FILES):
        raise DataError(
            f"the file {file} is none of {', '.join(TEXT_FILES)}, which hold texts; "
            "set data.dataset to one of these, or to a folder"
        )
    return str(file.resolve())


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
