"""Objects that a program hands over as data: written once into the cache, under the digest of their content.

Every process that opens the data reads them there. Another machine needs a copy of the folder.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedemu.ops.data.own.objects import called, held_in
from fedemu.protocol.errors import DataError
from fedemu.protocol.host.files import usable
from fedemu.protocol.host.paths import exists, is_file, is_folder
from fedemu.protocol.host.private import working_folder

PREFIX = "object#"
"""The beginning of the names of such data sets. The digest follows."""
_ARRAYS = "arrays.json"
_DIGITS = 16
_NAME = re.compile(rf"{PREFIX}[0-9a-f]{{{_DIGITS}}}")


def store(data: Any, cache: Path) -> str:
    """Write an object into the cache unless it is there as a whole. Returns its name for ``data.dataset``.

    Raises DataError if it holds no data set or an empty split, and ConfigurationError if the cache cannot be written.
    """
    held = held_in("data", called(data))
    folder = _folder(cache)
    with usable(folder, "set FEDEMU_CACHE to another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        with working_folder("partial-", folder) as scratch:
            content = scratch / "content"
            _write(held, content)
            digest = _digest(content)
            place = folder / digest
            if exists(place) and _digest(place) != digest:
                shutil.rmtree(place)
            try:
                content.rename(place)
            except OSError:  # it is there, perhaps because another process was faster
                if not exists(place):
                    raise
    return f"{PREFIX}{digest}"


def find(dataset: str, cache: Path) -> Path:
    """The folder of an object with this name. Raises DataError if it is not there."""
    folder = _folder(cache) / dataset.removeprefix(PREFIX)
    if not _NAME.fullmatch(dataset) or not is_folder(folder):
        raise DataError(
            f"the data of {dataset!r}, which a program has handed over, are not in {folder.parent}; "
            "hand them over again, or copy the folder from the machine that has it"
        )
    return folder


def read(folder: Path) -> Any:
    """The object in a folder: a mapping of arrays, or a ``datasets.DatasetDict``.

    Raises DataError if it is not what was handed over, by whose digest the folder is called.
    """
    try:
        if _digest(folder) == folder.name:
            return _read(folder)
        cause = None
    except Exception as error:  # numpy and datasets raise errors of many types for damaged files
        cause = error
    raise DataError(
        f"the data in {folder}, which a program has handed over, are damaged; hand them over again"
    ) from cause


def _read(folder: Path) -> Any:
    if is_file(folder / _ARRAYS):
        told = json.loads((folder / _ARRAYS).read_text(encoding="utf-8"))
        arrays = {name: np.load(folder / file, allow_pickle=False) for name, file in told["files"].items()}
        held: dict[str, Any] = {name: array for name, array in arrays.items() if "/" not in name}
        for columns in ("columns", "test_columns"):
            found = {name.partition("/")[2]: array for name, array in arrays.items() if name.startswith(f"{columns}/")}
            if found:
                held[columns] = found
        return held | told["plain"]
    import datasets  # type: ignore[import-untyped]

    return datasets.load_from_disk(str(folder))


def _write(held: Any, folder: Path) -> None:
    if not isinstance(held, dict) or hasattr(held, "save_to_disk"):
        import datasets

        if empty := [name for name, split in held.items() if not len(split)]:
            # The library writes no file of such a split, and then cannot read the others either.
            raise DataError(f"the split {empty[0]} of data is empty; give it samples, or leave it out")
        quiet = datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            held.save_to_disk(str(folder))
        finally:
            if not quiet:
                datasets.enable_progress_bars()
        return
    folder.mkdir()
    arrays: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for name, value in held.items():
        if isinstance(value, Mapping):
            arrays |= {f"{name}/{column}": values for column, values in value.items()}
        elif name == "class_names":
            plain[name] = value
        else:
            arrays[name] = value
    files = {name: f"{place}.npy" for place, name in enumerate(sorted(arrays))}
    for name, file in files.items():
        np.save(folder / file, arrays[name], allow_pickle=False)
    (folder / _ARRAYS).write_text(json.dumps({"files": files, "plain": plain}, sort_keys=True), encoding="utf-8")


def _digest(folder: Path) -> str:
    """The digest of the content. The bookkeeping of ``datasets`` names fingerprints that differ each time."""
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if is_file(path) and path.name != "state.json":
            sha.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            sha.update(path.read_bytes())
    return sha.hexdigest()[:_DIGITS]


def _folder(cache: Path) -> Path:
    return cache / "objects"
