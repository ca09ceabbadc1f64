"""The cache of decoded data sets: each is written once per machine, and memory-mapped by every process.

An entry is a folder of ``.npy`` files and ``meta.json``. It appears by one rename, so a process finds all of it or
nothing. If samples are large, ``compared.json`` notes the state of their files when their digests were last compared.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.protocol.errors import DataError, FedemuError
from fedemu.protocol.host.files import require_held, usable, wait_for_disk, write_among_others
from fedemu.protocol.ids import Digest, digest_of

FORMAT = 6
"""The version of the entries. Raise it if data are decoded or stored in another way. Older entries are not read."""
LONGEST_WAIT = 3600.0
"""The longest time, in real seconds, that a process waits for another one to decode the same data."""
_SUMMED_BYTES: Final = 2**22
"""Larger arrays of samples are read to compare their digests only if their files have changed.

Otherwise every process of a run would read them as a whole.
"""
_COMPARED: Final = "compared.json"
_OWN_DIGEST: Final = "own_digest"
_ROWS = 4096
_PIXELS = 2**22


@dataclass(frozen=True)
class Samples:
    """One decoded split of ``n`` samples, with labels ``y [n]`` and ``columns`` ``[n]`` by name.

    ``blocks`` are the samples themselves, in order, a few at a time: ``[k, *shape]``, uint8 or float32. Tokens are
    int16, int32 or int64, see ``Corpus``.
    """

    blocks: Iterable[NDArray[Any]]
    y: NDArray[np.int64]
    columns: Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Decoded:
    """A decoded data set. ``vocabulary``, ``left_out`` and ``own_test_split`` are those of ``Corpus``."""

    class_names: tuple[str, ...]
    train: Samples
    test: Samples
    vocabulary: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    own_test_split: bool = False


class Coloured(Exception):
    """Raised while blocks are read with one channel, when an image has colours and needs three."""


def read(entry: Path) -> Corpus | None:
    """Map an entry. None if there is none or if it is damaged: then it has to be written.

    Labels, columns and samples of at most ``_SUMMED_BYTES`` are compared with the digests that were taken when they
    were written, and larger samples if their files have changed since the last time.
    """
    try:
        meta = json.loads((entry / "meta.json").read_text())
        _require_whole(meta)
        sums = meta["arrays"]
        splits = {
            split: Split(
                x=_checked(entry / f"{split}.x.npy", sums[f"{split}.x"], _SUMMED_BYTES),
                y=_checked(entry / f"{split}.y.npy", sums[f"{split}.y"]),
                columns={
                    name: _checked(entry / f"{split}.{file}.npy", sums[f"{split}.column.{name}"])
                    for name, file in meta["columns"][split].items()
                },
            )
            for split in ("train", "test")
        }
        _require_unchanged(entry, sums)
        return Corpus(
            name=meta["name"],
            class_names=tuple(meta["class_names"]),
            input_shape=tuple(meta["input_shape"]),
            mean=np.array(meta["mean"]),
            std=np.array(meta["std"]),
            digest=Digest(meta["digest"]),
            vocabulary=tuple(meta["vocabulary"]),
            left_out=tuple(meta["left_out"]),
            own_test_split=meta["own_test_split"],
            **splits,
        )
    # The last three are raised by other JSON.
    except (OSError, ValueError, LookupError, EOFError, AttributeError, TypeError, RecursionError):
        return None


def write(entry: Path, name: str, decoded: Decoded) -> None:
    """Store a data set as ``entry``, which must not exist. The caller holds the entry's lock.

    Raises DataError if the two splits have samples of other shapes, samples without a number, or fractions to test what
    is trained on whole numbers.
    """
    with tempfile.TemporaryDirectory(prefix=f"{entry.name}.partial-", dir=entry.parent) as scratch:
        folder = Path(scratch) / "entry"
        folder.mkdir()
        sums: dict[str, Any] = {}
        columns: dict[str, dict[str, str]] = {}
        for split, samples in (("train", decoded.train), ("test", decoded.test)):
            sums[f"{split}.x"] = _save(folder / f"{split}.x.npy", samples.blocks, len(samples.y))
            sums[f"{split}.y"] = _save(folder / f"{split}.y.npy", [samples.y], len(samples.y))
            columns[split] = {}
            for place, (column, values) in enumerate(sorted(samples.columns.items())):
                columns[split][column] = f"column{place}"
                saved = _save(folder / f"{split}.column{place}.npy", [values], len(samples.y))
                sums[f"{split}.column.{column}"] = saved
        shape = sums["train.x"]["shape"][1:]
        if sums["test.x"]["shape"][1:] != shape:
            raise DataError(f"training samples are of shape {shape}, but test samples {sums['test.x']['shape'][1:]}")
        if np.dtype(sums["train.x"]["dtype"]).kind == "i" and np.dtype(sums["test.x"]["dtype"]).kind == "f":
            raise DataError("training samples are whole numbers, but test samples fractions; give both in one type")
        if 0 in shape:
            raise DataError(f"samples of shape {shape} hold no numbers to learn from")
        stored = mapped_array(folder / "train.x.npy")
        mean, std = ([0.0] * shape[0], [1.0] * shape[0]) if stored.dtype.kind == "i" else _moments(stored)
        told = {"vocabulary": decoded.vocabulary} if decoded.vocabulary else {}
        content = json.dumps({"arrays": sums, "class_names": decoded.class_names, **told}, sort_keys=True)
        meta = {
            "name": name,
            "class_names": decoded.class_names,
            "vocabulary": decoded.vocabulary,
            "left_out": decoded.left_out,
            "own_test_split": decoded.own_test_split,
            "input_shape": shape,
            "mean": mean,
            "std": std,
            "columns": columns,
            "arrays": sums,
            "digest": digest_of(content.encode()),
        }
        meta[_OWN_DIGEST] = _digest_without_own(meta)
        (folder / "meta.json").write_text(json.dumps(meta))
        if states := _states(folder, sums):
            (folder / _COMPARED).write_text(json.dumps(states))
        for path in (*folder.iterdir(), folder):
            wait_for_disk(path)  # after a power failure an entry is whole, or it is not there
        folder.rename(entry)


@contextlib.contextmanager
def locked(entry: Path) -> Iterator[None]:
    """Lock an entry for this process, and wait for another process that has it.

    The system releases the lock when the process ends, however it ends. Raises ConfigurationError if the cache cannot
    be written, and DataError after ``LONGEST_WAIT``.
    """
    with usable(entry.parent, "set FEDEMU_CACHE to another folder"):
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle = open(entry.with_name(entry.name + ".lock"), "ab")  # noqa: SIM115
    with handle:
        patience = time.monotonic() + LONGEST_WAIT
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                require_held(entry.parent, error)
                if time.monotonic() > patience:
                    raise DataError(f"another process has been decoding {entry.name} for an hour; end it") from None
                time.sleep(0.05)
        # Processes that were killed in the middle of writing left these.
        for leftover in entry.parent.glob(f"{entry.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def mapped_array(path: Path) -> NDArray[Any]:
    """A read-only view of a stored array. It is a plain ndarray, which is quicker to index than ``np.memmap``.

    In a file system that maps no files it is a copy. Raises OSError or ValueError if the file cannot be read.
    """
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
        array = np.asarray(np.load(path, allow_pickle=False))
        array.flags.writeable = False
        return array
    except (SyntaxError, TypeError, TokenError) as error:  # numpy reads the head of a file as Python reads a program
        raise ValueError(f"{path} is damaged") from error


def _checked(path: Path, known: Mapping[str, Any], most: float = math.inf) -> NDArray[Any]:
    """A stored array. Raises ValueError if it is not what ``_save`` told; of more than ``most`` bytes only the form."""
    array = mapped_array(path)
    whole = (array.dtype.str, [*array.shape]) == (known["dtype"], known["shape"])
    if not whole or (array.nbytes <= most and hashlib.sha256(array.tobytes()).hexdigest() != known["sha256"]):
        raise ValueError(f"{path} is damaged")
    return array


def _require_unchanged(entry: Path, sums: Mapping[str, Any]) -> None:
    """Raise ValueError if large samples are not what ``_save`` told. They are read only if their file has changed.

    Several processes may do this at once: they find the same, and each replaces the note as a whole. In a folder that
    this process cannot write nothing is compared, because each process would have to do it.
    """
    states, noted = _states(entry, sums), _noted(entry)
    if states == noted or not states or not os.access(entry, os.W_OK):
        return
    for name, state in states.items():
        if noted.get(name) != state and _sha256(entry / f"{name}.npy", sums[name]) != sums[name]["sha256"]:
            raise ValueError(f"{entry / name}.npy is damaged")
    with contextlib.suppress(FedemuError):  # on a full disk the next process compares them again
        write_among_others(entry / _COMPARED, json.dumps(states).encode())


def _states(folder: Path, sums: Mapping[str, Any]) -> dict[str, list[int]]:
    """The size and the times of change of the files of large samples, by name of the array.

    The second time also changes if a file is replaced, or if its first time is set.
    """
    large = [name for name in ("train.x", "test.x") if _nbytes(sums[name]) > _SUMMED_BYTES]
    found = {name: os.stat(folder / f"{name}.npy") for name in large}
    return {name: [state.st_size, state.st_mtime_ns, state.st_ctime_ns] for name, state in found.items()}


def _noted(entry: Path) -> dict[str, list[int]]:
    """The states at the last comparison. Empty if their note is missing or damaged."""
    try:
        noted = json.loads((entry / _COMPARED).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _nbytes(known: Mapping[str, Any]) -> int:
    return int(np.dtype(known["dtype"]).itemsize * math.prod(known["shape"]))


def _sha256(path: Path, known: Mapping[str, Any]) -> str:
    """The SHA-256 of the numbers of a stored array, which are read and not mapped: a broken disk is then an OSError."""
    with open(path, "rb") as file:
        file.seek(-_nbytes(known), os.SEEK_END)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_whole(meta: Mapping[str, Any]) -> None:
    """Raise ValueError if ``meta.json`` has not the digest that it tells."""
    if meta[_OWN_DIGEST] != _digest_without_own(meta):
        raise ValueError("meta.json is damaged")


def _digest_without_own(meta: Mapping[str, Any]) -> Digest:
    told = {key: value for key, value in meta.items() if key != _OWN_DIGEST}
    return digest_of(json.dumps(told, sort_keys=True).encode())


def _save(path: Path, blocks: Iterable[NDArray[Any]], count: int) -> dict[str, Any]:
    """Write blocks of rows as one little-endian array of ``count`` rows; returns its dtype, shape and SHA-256.

    These are plain writes: on a full disk they raise an error, where a memory map would end the process by SIGBUS.
    """
    sha = hashlib.sha256()
    rows = 0
    shape: tuple[int, ...] = ()
    dtype = ""
    with open(path, "wb") as file:
        for block in blocks:
            block = np.ascontiguousarray(block, dtype=block.dtype.newbyteorder("<"))
            if not rows:
                shape, dtype = (count, *block.shape[1:]), block.dtype.str
                header = {"descr": dtype, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            data = block.tobytes()
            sha.update(data)
            file.write(data)
            rows += len(block)
    if rows != count:
        raise DataError(f"{count} samples were expected, but {rows} were read; the data changed while being read")
    return {"dtype": dtype, "shape": list(shape), "sha256": sha.hexdigest()}


def _moments(x: NDArray[Any]) -> tuple[list[float], list[float]]:
    """The mean and the standard deviation of each channel of ``x`` ``[n, channels, ...]``.

    A deviation of 0 becomes 1.
    """
    channels = x.shape[1]
    if x.dtype == np.uint8:
        counts = np.zeros((channels, 256), dtype=np.int64)
        # bincount makes 64 bits of every byte, so large samples are taken fewer at a time.
        rows = max(1, min(_ROWS, _PIXELS * channels // math.prod(x.shape[1:])))
        for start in range(0, len(x), rows):
            for channel in range(channels):
                counts[channel] += np.bincount(x[start : start + rows, channel].ravel(), minlength=256)
        values = np.arange(256)
        # Integer sums, so that every machine gets the same last bits.
        n, total, squares = (
            [int(row) for row in counts @ power] for power in (np.ones_like(values), values, values * values)
        )
        mean = [s / k for s, k in zip(total, n, strict=True)]
        deviations = [math.sqrt((k * q - s * s) / (k * k)) for s, q, k in zip(total, squares, n, strict=True)]
    else:
        axes = (0, *range(2, x.ndim))
        size = x.size // channels
        blocks = range(0, len(x), _ROWS)
        sums = sum(x[start : start + _ROWS].sum(axis=axes, dtype=np.float64) for start in blocks)
        centre = (np.asarray(sums) / size).reshape(-1, *[1] * (x.ndim - 2))
        spread = sum(((x[start : start + _ROWS] - centre) ** 2).sum(axis=axes) for start in blocks)
        # Rounded, because the order in which numpy adds floats may depend on the processor.
        mean = [float(np.float32(value)) for value in centre.ravel()]
        deviations = [_rounded_root(float(variance)) for variance in np.asarray(spread) / size]
    return mean, [deviation or 1.0 for deviation in deviations]


def _rounded_root(variance: float) -> float:
    """The root of the variance rounded to float32. Where float32 holds no such variance, the root itself is rounded.

    0 if the inverse of the root is no finite float32.
    """
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(variance))
    if 0.0 < rounded < math.inf:
        return math.sqrt(rounded)
    root = float(np.float32(math.sqrt(variance)))
    return root if root >= np.finfo(np.float32).tiny else 0.0
