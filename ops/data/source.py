"""What is to be read, and where the name of a data set leads: to a folder, a file, the hub, or a function."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from fedemu.algorithms.data.language import TextKind
from fedemu.ops.data.cache import FORMAT
from fedemu.ops.data.own import given
from fedemu.ops.homes import cache_folder, expanded
from fedemu.protocol.code.named import is_name, is_restricted
from fedemu.protocol.code.source import digest_of_source, source_of
from fedemu.protocol.errors import ConfigurationError, DataError
from fedemu.protocol.host.paths import exists, is_file, is_folder

BUILT_IN = ("digits", "synthetic")
LABEL = "label"
"""The name of the labels among the columns of a corpus, whatever their column was called in the data set."""
SPLIT = "split"
"""The column of a file that names the split of each row."""
ROW_NUMBERS = re.compile(r"__index_level_\d+__|Unnamed: 0(\.\d+)?|")
"""The names of columns in which pandas has written the numbers of its rows. They tell the order of the rows alone."""
CSV_FILES = (".csv", ".csv.gz")
TABLE_FILES = (".parquet", ".jsonl", ".json")
FILES = (*CSV_FILES, ".txt", ".txt.gz", *TABLE_FILES)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class TextSource:
    """How samples are made of texts. A sample has ``length`` tokens; some of them, or the next ones, are predicted.

    With the objective ``labels`` the label of each text is predicted. ``vocabulary`` is the largest number of different
    tokens. ``column`` is the column of the texts; None means that it is found by its name.
    """

    objective: TextKind | Literal["labels"]
    length: int
    vocabulary: int
    tokenizer: Literal["wordpiece", "characters"]
    column: str | None = None


@dataclass(frozen=True)
class DataSource:
    """What is to be read of a data set. Two equal sources at the same place share one entry of the cache.

    ``image_column`` and ``label_column`` are found in the data if they are None. ``columns`` are further columns to
    keep. ``order`` is one of them whose values order the samples, so they count as numbers; the values of the others
    name something. ``train_split`` names the splits to train on, joined by ``+``; None means that they are found. A
    data set without a test split gives ``test_fraction`` of each label to it, or of each value of the column
    ``test_by``. Samples whose value of ``id_column`` has fewer than ``id_min_samples`` are left out. Both columns are
    among ``columns``. With ``text`` the data are language. ``image_size`` is the width and height of all images in
    pixels (0: unchanged). ``regroup`` names a division of ImageNet into other classes.
    """

    dataset: str
    image_column: str | None = None
    label_column: str | None = None
    columns: tuple[str, ...] = ()
    order: str | None = None
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
        """A short name of the data set, for people and for folders."""
        return re.split(r"[/:]", self.dataset.rstrip("/"))[-1].replace("#", "-")


@dataclass(frozen=True)
class Place:
    """Where a data set is. ``where`` is a folder, a file, an id of the hub or ``module:Name``, as ``kind`` says.

    An ``object`` is one that a program has handed over; ``where`` is its folder in the cache.

    ``subset`` is one of the configurations that some Hugging Face data sets come in, or the size of ``synthetic``.
    ``looked_in`` are the folders that do not exist, if the kind is ``hub``.
    """

    kind: Literal["built_in", "function", "object", "folder", "file", "hub"]
    where: str
    subset: str | None = None
    looked_in: tuple[str, ...] = field(default=(), compare=False)


def require_column(source: DataSource, columns: Collection[str], name: str, where: str = "the data set ") -> str:
    """Return ``name`` if the data set, or the part of it that ``where`` names, has such a column.

    Raises DataError if it has none.
    """
    if name not in columns:
        raise DataError(f"{where}{source.dataset!r} has no column {name!r}; its columns are {listed(columns)}")
    return name


def listed(names: Collection[str]) -> str:
    """Names for an error: with commas, or ``none``."""
    return ", ".join(names) or "none"


def locate(dataset: str, data: Path | None) -> Place:
    """Find a data set by its name.

    ``data`` is the folder to look in first. Raises DataError if the name leads nowhere.
    """
    if dataset.partition("#")[0] in BUILT_IN:
        return Place("built_in", *_checked_size(dataset))
    if dataset.startswith(given.PREFIX):
        return Place("object", str(given.find(dataset, cache_folder(os.environ))))
    if is_name(dataset):
        return Place("function", dataset)
    name, _, subset = dataset.partition("#")
    folders = _places(name, data)
    if subset and any(exists(folder) for folder in _places(dataset, data)):
        name, subset, folders = dataset, "", _places(dataset, data)  # a path with this sign in it
    for folder in folders:
        if exists(folder) and is_restricted():
            _require_shared(dataset, folder, data)
        if is_folder(folder):
            return Place("folder", str(folder.resolve()), subset or None)
        if is_file(folder):
            return Place("file", _checked_ending(folder))
    if ends_in(name, FILES):
        raise DataError(
            f"there is no file {' or '.join(map(str, folders))}; "
            "check data.dataset, or set FEDEMU_DATA to the folder that holds it"
        )
    if _HUB_ID.fullmatch(name):
        return Place("hub", name, subset or None, tuple(map(str, folders)))
    raise DataError(
        f"there is no data set {dataset!r}: no folder {' or '.join(map(str, folders))}, "
        "and it is no Hugging Face id; check data.dataset"
    )


def ends_in(name: str, endings: tuple[str, ...]) -> bool:
    """Whether the name of a file has one of these endings, in small or capital letters."""
    return name.lower().endswith(endings)


def _places(name: str, data: Path | None) -> list[Path]:
    """Where a file or a folder of this name may be, each place once."""
    return [*dict.fromkeys([*([data / name] if data is not None else []), expanded(name)])]


def entry_of(source: DataSource, place: Place, cache: Path) -> Path:
    """The folder of the cache for a source. Other files, columns, shares or settings lead to another folder."""
    dataset = {"kind": place.kind, "where": place.where, "subset": place.subset}
    settings = asdict(source) | {"dataset": dataset, "format": FORMAT}
    match place.kind:
        case "folder":
            settings["content"] = _fingerprint(Path(place.where))
        case "file":
            settings["content"] = _status(Path(place.where))
        case "function":
            # A module reads files beside it, so the same text in another folder makes other data.
            settings["file"] = str(_module_file(place.where).resolve())
            settings["content"] = digest_of_source(place.where.rpartition(":")[0])
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return cache / "datasets" / f"{re.sub(r'[^A-Za-z0-9.-]', '_', source.name)}-{key[:16]}"


def _require_shared(dataset: str, found: Path, data: Path | None) -> None:
    """Raise DataError unless ``found`` is below the folder of data sets. A coordinator may name no other file."""
    inside = data is not None and Path(os.path.abspath(found)).is_relative_to(os.path.abspath(data))
    if not inside:
        raise DataError(
            f"the coordinator's experiment names the data set {dataset!r}, and devices read files and folders only in "
            "FEDEMU_DATA; set it to a folder above that data set, if devices may read all that is in it"
        )


def _checked_size(dataset: str) -> tuple[str, str | None]:
    """The name of a built-in data set, and the size of the synthetic one."""
    name, _, size = dataset.partition("#")
    if not size:
        return name, None
    if name != "synthetic" or not size.isascii() or not size.isdigit() or not 100 <= int(size) <= 10_000_000:
        raise DataError(f"data.dataset = {dataset!r}: only synthetic#N takes a size, N from 100 to 10000000")
    return name, size


def _fingerprint(folder: Path) -> str:
    """A digest of the paths, sizes and times of change of all files. It is cheap to take, and changes with the data.

    Readers follow links to folders, so they are followed here, and none twice.
    """
    digest = hashlib.sha256()
    seen: set[str] = set()
    for base, folders, names in os.walk(folder, followlinks=True):
        place = os.path.realpath(base)
        folders[:] = [] if place in seen else sorted(folders)
        seen.add(place)
        digest.update(os.fsencode(f"{os.path.relpath(base, folder)}\0"))
        for name in sorted(names):
            size, changed = _status(os.path.join(base, name))
            digest.update(os.fsencode(f"{name}\0{size}\0{changed}\0"))
    return digest.hexdigest()


def _status(file: str | Path) -> tuple[int, int]:
    try:
        status = os.stat(file)
    except FileNotFoundError:  # a link to nothing, or a file that was just removed
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _checked_ending(file: Path) -> str:
    if not ends_in(file.name, FILES):
        raise DataError(
            f"the file {file} is none of {', '.join(FILES)}; set data.dataset to one of these, to a folder, or to code "
            "of your own that reads the file, as in my_data.py:load"
        )
    return str(file.resolve())


def _module_file(where: str) -> Path:
    place = where.rpartition(":")[0]
    if place.endswith(".py"):
        if not is_file(Path(place)):
            raise DataError(f"the data set {where} names the file {place!r}, which is not there")
        return Path(place)
    try:
        # Every process has another __main__, so other processes cannot find what a notebook defines.
        if place != "__main__":
            return source_of(place)
    except ConfigurationError:
        pass
    raise DataError(f"the data set {where} names a module {place!r} that can't be found; run fedemu beside it")
