"""The reader of Hugging Face data sets, from a folder or from the hub.

Importing ``datasets`` takes seconds and over 100 MB, so only a process that decodes such data imports this file.
"""

from __future__ import annotations

import os
import re
import socket
import textwrap
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES  # type: ignore[import-untyped]
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]

from fedemu.ops.data.cache import Decoded
from fedemu.ops.data.columns import (
    cells_of,
    classes_of,
    input_blocks,
    input_columns,
    label_column,
    left_out,
    names_of,
    test_labels,
    values_of,
)
from fedemu.ops.data.regroup import regrouped
from fedemu.ops.data.source import SPLIT, DataSource, Place, require_column
from fedemu.ops.data.split import Part, Rows, chosen_splits, divided, plain_name
from fedemu.protocol.errors import DataError
from fedemu.protocol.host.paths import is_file

PROBE_SECONDS = 5.0
"""Seconds that the hub may take to accept a connection. After that it counts as out of reach."""
_CONFIGURATIONS = re.compile(r"available configs: \[(.*?)\]")
_LONGEST = 400
"""How many letters of the library's own words an error tells. Those on a schema go over several lines."""
_NO_ROWS = re.compile(r'Instruction "(.*)" corresponds to no data!')


def decode_table(source: DataSource, opened: datasets.DatasetDict, grey: bool) -> Decoded:
    """Choose the columns of an opened data set. Samples are decoded while the blocks of the result are read.

    With ``grey`` images get one channel, and ``Coloured`` is raised at the first one that needs three. Raises DataError
    if the data set does not fit.
    """
    train, test = _splits(source, _with_splits(source, opened))
    label = label_column(source, train.features)
    inputs = input_columns(source, train.features, label)
    for column in source.columns:
        require_column(source, train.features, column)
    given = {"train": values_of(source, train, label)}
    if test is not None:
        given["test"] = test_labels(source, test, label, train.features[label], given["train"])
        for column in inputs:
            require_column(source, test.features, column, "the test split of ")
    y, names = classes_of(source, label, train.features[label], given)

    def part(name: str, split: datasets.Dataset) -> Part:
        def read(rows: Rows) -> Iterator[NDArray[Any]]:
            # Reading is faster without a selection.
            some = split if len(rows) == len(split) else split.select(rows)
            return input_blocks(source, some, inputs, grey, rows)

        columns = {column: values_of(source, split, column) for column in source.columns if column in split.features}
        return Part(y[name], columns, read)

    parts = part("train", train), None if test is None else part("test", test)
    decoded = divided(source, *regrouped(source, names, *parts))
    return replace(decoded, left_out=left_out(source, train.features, label, inputs))


def read_texts(
    source: DataSource, opened: datasets.DatasetDict
) -> tuple[dict[str, list[Any]], list[str], dict[str, dict[str, Sequence[str]]]]:
    """Read an opened data set as columns of cells.

    Returns the columns, the name of each row's split, and for each split the classes that its columns declare, by the
    name of the column. The rows of all splits follow each other. Only columns of numbers, texts and class labels are
    kept. A class is given by its name, an empty cell is None. Raises DataError if the data set cannot be read.
    """
    columns: dict[str, list[Any]] = {}
    declared: dict[str, dict[str, Sequence[str]]] = {}
    rows = 0
    opened = _with_splits(source, opened)
    for key, split in opened.items():
        declared[str(key)] = {}
        for name, feature in split.features.items():
            if isinstance(feature, datasets.Value | datasets.ClassLabel):
                cells = cells_of(source, split, name)
                if isinstance(feature, datasets.ClassLabel):
                    declared[str(key)][name] = feature.names
                    cells = names_of(source, name, feature.names, cells)
                columns.setdefault(name, [None] * rows).extend(cells)
        rows += len(split)
        for cells in columns.values():
            cells.extend([None] * (rows - len(cells)))
    return columns, [str(key) for key, split in opened.items() for _ in range(len(split))], declared


def open_tables(source: DataSource, place: Place, scratch: Path) -> datasets.DatasetDict:
    """Open a data set with all its splits. ``scratch`` is the folder for what ``datasets`` writes.

    Every error of the library becomes a DataError of one sentence.
    """
    # Even a bar that is not shown makes a lock. With Python 3.14 one between processes takes a process of its own, and
    # leaves a semaphore if both are killed.
    tqdm.set_lock(threading.RLock())
    quiet, verbosity = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    # The library logs its errors and raises them too. Once is enough.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        opened = _open_hub(place) if place.kind == "hub" else _open_folder(source, place, scratch)
        return opened if isinstance(opened, datasets.DatasetDict) else datasets.DatasetDict(train=opened)
    except DataError:
        raise
    except Exception as error:
        reason: BaseException = error
        # The library wraps errors in errors. The innermost one says what went wrong.
        while reason.__cause__ is not None:
            reason = reason.__cause__
        words = textwrap.shorten(str(reason), _LONGEST, placeholder=" ...") or type(reason).__name__
        if several := _CONFIGURATIONS.search(str(reason)):
            names = several[1].replace("'", "")
            raise DataError(
                f"the data set {source.dataset!r} comes in several configurations, {names}; "
                f"choose one, as in {source.dataset}#{names.split(', ')[0]}"
            ) from error
        # The library looks for the first line of a file of JSON. Earlier versions write no rows, and say this.
        if isinstance(reason, StopIteration) or "at least one example" in words:
            raise DataError(f"the data set {source.dataset!r} has a file without any rows; remove it") from error
        if empty := _NO_ROWS.fullmatch(words):
            raise DataError(f"the split {empty[1]} of {source.dataset!r} is empty") from error
        raise DataError(f"the data set {source.dataset!r} can't be read: {words}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not quiet:
            datasets.enable_progress_bars()


def _open_folder(source: DataSource, place: Place, scratch: Path) -> datasets.DatasetDict | datasets.Dataset:
    folder = Path(place.where)
    if place.kind == "file":
        kind = "parquet" if folder.suffix.lower() == ".parquet" else "json"
        table = datasets.load_dataset(kind, data_files=str(folder), cache_dir=str(scratch))["train"]
        return _by_split(source, table) if SPLIT in table.features else table
    if is_file(folder / "dataset_dict.json") or is_file(folder / "state.json"):
        return datasets.load_from_disk(str(folder))
    _require_no_links(folder)
    return datasets.load_dataset(str(folder), place.subset, cache_dir=str(scratch))


def _with_splits(source: DataSource, opened: datasets.DatasetDict) -> datasets.DatasetDict:
    """A data set in one piece by the splits that its rows name, and any other as it is.

    Rows name splits in a column ``split`` of texts, if one of them is ``train`` or the source names those to train on.
    """
    (table,) = opened.values() if len(opened) == 1 else (None,)
    feature = None if table is None or source.label_column == SPLIT else table.features.get(SPLIT)
    if getattr(feature, "dtype", None) not in ("string", "large_string"):
        return opened
    parts = _by_split(source, table)
    return parts if source.train_split is not None or "train" in map(plain_name, parts) else opened


def _by_split(source: DataSource, table: datasets.Dataset) -> datasets.DatasetDict:
    """The splits of a table that names the split of each row."""
    names = np.array(["" if cell is None else str(cell) for cell in cells_of(source, table, SPLIT)])
    rows = table if SPLIT in (*source.columns, source.label_column) else table.remove_columns([SPLIT])
    return datasets.DatasetDict({name: rows.select(np.flatnonzero(names == name)) for name in dict.fromkeys(names)})


def _require_no_links(folder: Path) -> None:
    """Raise DataError for a link to a folder elsewhere. The library would leave out what is behind it."""
    whole = folder.resolve()
    for base, folders, _ in os.walk(folder):
        for path in (Path(base, name) for name in sorted(folders) if not name.startswith(".")):
            if path.is_symlink() and not path.resolve().is_relative_to(whole):
                raise DataError(
                    f"{path} is a link to a folder, and such links are followed only in ImageNet's tree; "
                    "put the folder itself there, or links to its files"
                )


def _open_hub(place: Place) -> datasets.DatasetDict:
    name, offline = place.where, datasets.config.HF_HUB_OFFLINE
    if name in _PACKAGED_DATASETS_MODULES:
        # The library would read any files of the working folder, and unpickle them if the name is pandas.
        raise DataError(f"{name!r} is a reader of the package datasets, and no data set; name a folder or a file")
    folders = " or ".join(map(repr, place.looked_in or (name,)))
    # The hub's client tries again and again. If nothing answers, only earlier downloads are looked at.
    datasets.config.HF_HUB_OFFLINE = offline or not _reachable(datasets.config.HF_ENDPOINT)
    try:
        return datasets.load_dataset(name, place.subset)
    except (ConnectionError, FileNotFoundError) as error:
        if datasets.config.HF_HUB_OFFLINE:
            raise DataError(
                f"there is no folder {folders}, and the Hugging Face hub can't be reached to look there; "
                "name a folder, or set FEDEMU_DATA to the folder above it"
            ) from error
        raise DataError(
            f"there is no folder {folders}, and no such data set on the Hugging Face hub, or none open to this user"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def _reachable(endpoint: str) -> bool:
    """Whether the hub accepts a connection, or its proxy if one is configured."""
    url = urllib.parse.urlsplit(endpoint)
    if not urllib.request.proxy_bypass(url.hostname or "") and (proxy := urllib.request.getproxies().get(url.scheme)):
        url = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        socket.create_connection((url.hostname or "", port), timeout=PROBE_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def _splits(source: DataSource, opened: datasets.DatasetDict) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """The training split, which may be several splits joined, and the test split. None if there is no test split."""

    def is_secret(test: Sequence[str], train: Sequence[str]) -> bool:
        """Whether all labels of the test split are -1, as those of ImageNet's, which is none to train on."""
        label = label_column(source, opened[train[0]].features)
        return _labels(opened, test, label) == {-1} and -1 not in _labels(opened, train, label)

    train, test = chosen_splits(source, map(str, opened), is_secret)
    for split in (*train, *test):
        if not len(opened[split]):
            raise DataError(f"the split {split} of {source.dataset!r} is empty")
    return _joined(source, opened, train), _joined(source, opened, test) if test else None


def _joined(source: DataSource, opened: datasets.DatasetDict, names: Sequence[str]) -> datasets.Dataset:
    """The rows of some splits, one after another."""
    if len(names) == 1:
        return opened[names[0]]
    try:
        return datasets.concatenate_datasets([opened[name] for name in names])
    except ValueError as error:
        raise DataError(f"the splits {' and '.join(names)} of {source.dataset!r} have other columns") from error


def _labels(opened: datasets.DatasetDict, names: Sequence[str], label: str) -> set[int | None]:
    """The different labels of some splits that are whole numbers. Empty if they are none, or if no split has them."""
    found: set[int | None] = set()
    for split in map(opened.__getitem__, names):
        if getattr(split.features.get(label), "dtype", "").startswith("int") and len(split):
            found |= set(split.select_columns([label]).with_format("arrow")[:].column(0).to_pylist())
    return found
