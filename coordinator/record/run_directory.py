"""The run directory: what a run leaves behind for reports, tests and other tools.

``docs/run_directory.md`` is the contract. No torch is imported here until a model is written, because reports read runs
without it.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedemu.coordinator.record.summary import Summary
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import named_failure, write_whole

if TYPE_CHECKING:
    from fedemu.algorithms.interface import Tree


_PAGE = ("x", "y", "real", "real_y", "names")
"""The arrays of a file of ``generated/``."""


class RunDirectory:
    """Writes one run's files. Every row and event is on its way to the disk when its call returns.

    A new run needs a folder that is absent or empty; ``resume`` needs one that holds a run. ConfigurationError
    otherwise. Only a run that is ``diagnosed`` gets a ``diagnosis.jsonl``.
    """

    def __init__(self, path: Path, resume: bool = False, diagnosed: bool = False) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.checkpoint = path / "checkpoint"
        self.spill = path / "spill"
        """Where large payloads rest while their ask is open; nothing in it is worth keeping."""
        if resume and not self.config.is_file():
            raise ConfigurationError(f"There is no run to resume in {path}: it has no config.toml.")
        if not resume and (path.exists() or path.is_symlink()):
            _require_empty(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(path)
            self._logs: dict[str, BinaryIO] = {
                log: open(path / f"{log}.jsonl", "ab", buffering=0)  # noqa: SIM115 - held open for the whole run
                for log in ("metrics", "events", *(["diagnosis"] if diagnosed else []))
            }
        except OSError as error:
            raise ConfigurationError(f"Cannot write to {path}: {error.strerror}; choose another --out.") from error

    def write_config(self, text: str) -> None:
        """Freeze the resolved experiment."""
        write_whole(self.config, text)

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Append one round's row."""
        self._append("metrics", row)

    def diagnosis(self, line: Mapping[str, Any]) -> None:
        """Append what one round's diagnosis found."""
        self._append("diagnosis", line)

    def event(self, name: str, virtual_time: float, wall_time: float, /, **fields: Any) -> None:
        """Append one event; times in seconds since the run's start."""
        self._append("events", {"event": name, "virtual_time": virtual_time, "wall_time": wall_time, **fields})

    def generated(self, task: int, page: Mapping[str, NDArray[Any]]) -> None:
        """Write the pictures of what is generated in a task; again the same where the task begins again."""
        written = io.BytesIO()
        arrays: dict[str, Any] = dict(page)
        np.savez_compressed(written, **arrays)
        folder = self.path / "generated"
        with named_failure(folder):
            folder.mkdir(exist_ok=True)
        write_whole(folder / f"task-{task}.npz", written.getvalue())

    def rows(self) -> list[dict[str, Any]]:
        """What ``metrics.jsonl`` holds now, rounds before a resume included."""
        return _read_lines(self.path / "metrics.jsonl")

    def cursor(self) -> dict[str, int]:
        """How far the logs reach, in bytes; belongs into the round's checkpoint."""
        return {log: os.fstat(file.fileno()).st_size for log, file in self._logs.items()}

    def rewind(self, cursor: Mapping[str, int]) -> None:
        """Forget what was written after ``cursor`` (all, where it is empty), and the results of an earlier end."""
        reached = self.cursor()
        for log, size in reached.items():
            wanted = cursor.get(log, 0)
            if wanted > size:
                raise ConfigurationError(
                    f"{self.path / log}.jsonl has {size} bytes where the checkpoint knows of {wanted}: it was "
                    "changed, so the run cannot be resumed."
                )
        for log, file in self._logs.items():
            os.ftruncate(file.fileno(), cursor.get(log, 0))
        for name in ("summary.json", "model.safetensors"):
            (self.path / name).unlink(missing_ok=True)

    def finish(self, summary: Summary, variables: Tree) -> None:
        """Write ``model.safetensors``, then ``summary.json``: whoever sees the summary sees the model."""
        from safetensors.torch import save  # reports read this module without torch

        model = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in variables.items()})
        write_whole(self.path / "model.safetensors", model)
        text = json.dumps(plain(asdict(summary)), indent=2, allow_nan=False)
        write_whole(self.path / "summary.json", text + "\n")

    def close(self) -> None:
        for file in (*self._logs.values(), self._lock):
            file.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, log: str, values: Mapping[str, Any]) -> None:
        line = json.dumps(plain(values), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        file = self._logs[log]
        with named_failure(self.path / f"{log}.jsonl"):
            before = os.fstat(file.fileno()).st_size
            if file.write(line) != len(line):
                os.ftruncate(file.fileno(), before)  # a full disk took only a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass(frozen=True)
class Run:
    """A run as its directory tells it; ``summary`` is None while it is unfinished.

    ``diagnosis`` are the lines of ``diagnosis.jsonl``, none where the run was not diagnosed.
    """

    path: Path
    config: str
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    summary: dict[str, Any] | None
    diagnosis: list[dict[str, Any]] = field(default_factory=list)


def read_run(path: Path) -> Run:
    """Read a finished or unfinished run; ConfigurationError where ``path`` holds none."""
    config = path / "config.toml"
    if not config.is_file() and not (path / "metrics.jsonl").is_file():
        raise ConfigurationError(f"{path} holds no run: it has neither config.toml nor metrics.jsonl.")
    summary = path / "summary.json"
    try:
        return Run(
            path=path,
            config=config.read_text(encoding="utf-8") if config.is_file() else "",
            rows=_read_lines(path / "metrics.jsonl"),
            events=_read_lines(path / "events.jsonl"),
            summary=_read_object(summary.read_bytes(), summary) if summary.is_file() else None,
            diagnosis=_read_lines(path / "diagnosis.jsonl"),
        )
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The run in {path} cannot be read: {error}") from error


def read_generated(path: Path) -> dict[int, dict[str, NDArray[Any]]]:
    """What a run generated, by task in ascending order; ConfigurationError where a file of it cannot be read."""
    pages = {}
    for file in path.glob("generated/task-*.npz"):
        try:
            if not zipfile.is_zipfile(file):
                raise ValueError("it is no npz file")
            with np.load(file, allow_pickle=False) as page:
                pages[int(file.stem.removeprefix("task-"))] = {name: page[name] for name in _PAGE}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise ConfigurationError(f"{file} cannot be read: {error}; remove it, or leave out the run") from error
    return dict(sorted(pages.items()))


def plain(value: Any) -> Any:
    """The value as JSON knows it: numpy scalars and arrays unwrapped, tuples as lists, NaN and infinities as None."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case tuple() | list() | set() | frozenset():
            return [plain(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
        case np.ndarray() | np.generic():
            return plain(value.tolist())
    return str(value)


def _locked(path: Path) -> BinaryIO:
    """The open lock file of a run, held by this process and by none of its children."""
    lock = open(path / ".lock", "ab", buffering=0)  # noqa: SIM115 - held open for the whole run
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigurationError(
            f"Another coordinator is at work in {path}; stop it, or choose another --out."
        ) from None
    return lock


def _require_empty(path: Path) -> None:
    if not path.is_dir():
        raise ConfigurationError(f"{path} exists and is not a folder; choose another --out.")
    if any(path.iterdir()):
        hint = f", or continue that run with --resume {path}" if (path / "config.toml").is_file() else ""
        raise ConfigurationError(f"{path} exists and is not empty; choose another --out{hint}.")


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a log; a last line that is still being written does not count."""
    if not path.is_file():
        return []
    text = path.read_bytes()
    lines = text[: text.rfind(b"\n") + 1].splitlines()
    return [_read_object(line, f"line {number} of {path}") for number, line in enumerate(lines, 1) if line]


def _read_object(text: bytes, place: Path | str) -> dict[str, Any]:
    """The JSON object that is ``text``; ConfigurationError naming ``place`` where it is none."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{place} cannot be read: {error}; mend the file or leave out the run") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{place} cannot be read: it holds no JSON object; mend the file or leave out the run")
    return value
