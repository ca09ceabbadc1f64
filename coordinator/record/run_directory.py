"""The run directory: the folder that a run writes. ``run.py`` reads it back, ``docs/run_directory.md`` is the contract.

No torch is imported here until a model is written, because light processes make run directories, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedemu.coordinator.record.data_file import DATA
from fedemu.coordinator.record.holder import holder_of, is_stopped
from fedemu.coordinator.record.json_lines import object_in, plain, to_line
from fedemu.coordinator.record.row import Row, read_rows
from fedemu.coordinator.record.summary import Summary
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.files import (
    GO_ON,
    append_line,
    make_durable,
    named_failure,
    require_held,
    usable,
    wait_for_disk,
    write_whole,
)
from fedemu.protocol.host.paths import exists, is_file, is_folder
from fedemu.protocol.ids import digest_of_file
from fedemu.protocol.wording import no_utf8

if TYPE_CHECKING:
    from fedemu.algorithms.interface import Tree


CONFIG = "config.toml"
"""The frozen experiment. A folder that holds one is a run directory."""
TRACES = "traces.json"
"""The traces that the experiment names. The file is there only if it names some."""
_FOLDERS = ("checkpoint", "logs", "devices", "spill", "blobs")
_FILES = (
    ".lock", "metrics.jsonl", "events.jsonl", "asks.jsonl", "diagnosis.jsonl", "checkpoint/leases.jsonl",
    "logs/coordinator.log", "logs/devices.log", "logs/devices.out",
)  # fmt: skip
"""The folders that a run writes into, and the files to which it adds."""


def frozen_files(directory: Path) -> dict[str, str]:
    """What a checkpoint keeps of the frozen experiment: the text of ``config.toml``, the digest of ``traces.json``.

    A file that is not there is left out.
    """
    found = {}
    if is_file(directory / CONFIG):
        found[CONFIG] = (directory / CONFIG).read_text(encoding="utf-8", errors="replace")
    if is_file(directory / TRACES):
        found[TRACES] = digest_of_file(directory / TRACES)
    return found


def claim_folder(path: Path) -> None:
    """Make the folder of a new run, which has to be absent or empty. Raises ConfigurationError if it cannot be used.

    The caller writes ``config.toml`` into it.
    """
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:  # messages, logs and pages could not name it
        raise ConfigurationError(f"the path of the folder {str(path)!a} {no_utf8('choose another --out')}") from None
    if exists(path) or path.is_symlink():
        _require_empty(path)
    with usable(path, "choose another --out"):
        make_durable(path)
        _locked(path).close()


def require_kinds(path: Path) -> None:
    """Raise ConfigurationError if a folder of a run is none, or a file is none, such as a pipe: it would be waited for.

    What is not there does not count.
    """
    for names, is_right, kind in ((_FOLDERS, Path.is_dir, "folder"), (_FILES, Path.is_file, "file")):
        for place in (path / name for name in names):
            if exists(place) and not is_right(place):
                raise ConfigurationError(f"{place} is no {kind}; move it away, or go on in a copy without it")


@contextlib.contextmanager
def alone_in(path: Path) -> Iterator[None]:
    """Nobody else writes into the run of this folder meanwhile. Raises ConfigurationError if somebody does now."""
    with usable(path, GO_ON):
        lock = _locked(path)
    with lock:
        yield


def remove_end(path: Path) -> None:
    """Remove what a run directory holds of the end of its run: the summary and the model."""
    for name in ("summary.json", "model.safetensors"):
        (path / name).unlink(missing_ok=True)


class RunDirectory:
    """Writes the files of one run, new or resumed. Every row and event is on its way to the disk when its call returns.

    Raises ConfigurationError if the folder holds no ``config.toml``, or if another coordinator is at work in it.
    Only a run that is ``diagnosed`` gets a ``diagnosis.jsonl``.
    """

    def __init__(self, path: Path, diagnosed: bool = False) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint"
        self.spill = path / "spill"
        """The folder of large payloads, while their ask is open. Nothing in it is needed later."""
        if not is_file(path / CONFIG):
            raise ConfigurationError(f"There is no run to resume in {path}: it has no {CONFIG}.")
        require_kinds(path)
        with usable(path, GO_ON):
            self._lock = _locked(path)
            self.frozen = frozen_files(path)
            logs = ("metrics", "events", "asks", *(["diagnosis"] if diagnosed else []))
            self._new = [place for log in logs if not exists(place := path / f"{log}.jsonl")]
            self._logs: dict[str, BinaryIO] = {log: _log(path / f"{log}.jsonl") for log in logs}
            self._sums = {log: _sum_of(path / f"{log}.jsonl", None) for log in self._logs}
            self.checkpoint.mkdir(exist_ok=True)
            wait_for_disk(path)  # a checkpoint is worth nothing if the names around it are lost

    def metrics(self, row: Row) -> None:
        """Append one round's row."""
        self._append("metrics", row.to_json())

    def diagnosis(self, line: Mapping[str, Any]) -> None:
        """Append what the diagnosis of one round found."""
        self._append("diagnosis", line)

    def ask(self, line: Mapping[str, Any]) -> None:
        """Append one ask that is over."""
        self._append("asks", line)

    def event(self, name: str, virtual_time: float, wall_time: float, /, **fields: Any) -> None:
        """Append one event. Times are seconds since the run's start."""
        self._append("events", {"event": name, "virtual_time": virtual_time, "wall_time": wall_time, **fields})

    def about_data(self, told: Mapping[str, Any]) -> None:
        """Write ``data.json``, unless there is nothing to tell, or it tells this already."""
        path, text = self.path / DATA, json.dumps(plain(told), indent=1, allow_nan=False) + "\n"
        if told and not (is_file(path) and path.read_bytes() == text.encode()):
            write_whole(path, text)

    def generated(self, task: int, page: Mapping[str, NDArray[Any]]) -> None:
        """Write the pictures of what is generated in a task. A task that begins again writes the same file again."""
        written = io.BytesIO()
        arrays: dict[str, Any] = dict(page)
        np.savez_compressed(written, **arrays)
        folder = self.path / "generated"
        with named_failure(folder):
            folder.mkdir(exist_ok=True)
        write_whole(folder / f"task-{task}.npz", written.getvalue())

    def rows(self) -> tuple[Row, ...]:
        """The rows that ``metrics.jsonl`` holds now, those before a resume included."""
        return read_rows(self.path)

    def cursor(self, *logs: str) -> dict[str, dict[str, Any]]:
        """The size of each log in ``bytes``, and its ``sha256``. A round's checkpoint keeps them. Default: all logs."""
        return {
            log: {"bytes": os.fstat(self._logs[log].fileno()).st_size, "sha256": self._sums[log].hexdigest()}
            for log in logs or self._logs
        }

    def flush(self) -> None:
        """Return when everything that the logs hold is on the disk.

        Raises FedemuError if the disk or the folder refuses, and if somebody has removed a log or put another file in
        its place: then what is written would be lost.
        """
        for log, file in self._logs.items():
            path = self.path / f"{log}.jsonl"
            with named_failure(path):
                os.fsync(file.fileno())
                written = os.fstat(file.fileno()).st_size  # before the other size, as lines may come meanwhile
                lost = not is_file(path) or path.stat().st_size < written
            if lost:
                raise FedemuError(
                    f"{path} was removed or replaced while the run went on, so that what the run writes there is lost; "
                    "put it back"
                )

    def rewind(self, cursor: Mapping[str, Any]) -> list[str]:
        """Remove the lines after ``cursor``, or all if it is empty.

        Returns a sentence for each log that is damaged and that no result depends on. Raises ConfigurationError if a
        log is shorter than the cursor says, or if ``metrics.jsonl`` is not what was written.
        """
        damage = []
        sums = {}
        for log, file in self._logs.items():
            path = self.path / f"{log}.jsonl"
            size, digest = _place(cursor.get(log, 0))
            held = os.fstat(file.fileno()).st_size
            sums[log] = _sum_of(path, size)
            fault = ""
            if size > held:
                fault = f"{path} has {held} bytes where the checkpoint knows of {size}"
            elif digest is not None and sums[log].hexdigest() != digest:
                fault = f"{path} was changed or is damaged: its checksum is wrong"
            if fault and log == "metrics":
                raise ConfigurationError(
                    f"{fault}, so the run cannot be resumed; put the file back, or start the run anew."
                )
            if fault:
                sums[log], size, kept = self._mend(log, size)
                damage.append(f"{fault}; it is kept as {kept.name}")
            with named_failure(path):
                os.truncate(path, size)
        self._sums = sums
        return damage

    def go_on(self) -> None:
        """Remove the summary and the model of an earlier end, because rounds follow."""
        remove_end(self.path)

    def _mend(self, log: str, size: int) -> tuple[hashlib._Hash, int, Path]:
        """Keep a damaged log under another name, and leave only lines of its first ``size`` bytes that can be read.

        Returns the checksum and the size of what is left, and where the log as it was is kept.
        """
        path = self.path / f"{log}.jsonl"
        harmed = path.read_bytes()
        names = chain([f"{log}.damaged.jsonl"], (f"{log}.damaged-{number}.jsonl" for number in count(2)))
        kept = next(place for name in names if not exists(place := self.path / name))
        write_whole(kept, harmed)
        whole = (line for line in harmed[:size].splitlines(keepends=True) if line.endswith(b"\n"))
        lines = b"".join(line for line in whole if object_in(line) is not None)
        write_whole(path, lines)
        self._logs[log].close()
        self._logs[log] = _log(path)
        return hashlib.sha256(lines), len(lines), kept

    def finish(self, summary: Summary, variables: Tree) -> None:
        """Write ``model.safetensors``, then ``summary.json``, so that the model is there once the summary is."""
        from safetensors.torch import save  # light processes import this module without torch

        model = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in variables.items()})
        write_whole(self.path / "model.safetensors", model, durable=True)
        text = json.dumps(plain(asdict(summary)), indent=2, allow_nan=False)
        write_whole(self.path / "summary.json", text + "\n", durable=True)

    def close(self) -> None:
        """Close the logs and give up the lock. If nothing was written, as if a run is refused, no new log stays.

        A folder that lets nobody in any more keeps them, and is no error here: it has ended the run, and was told.
        """
        with contextlib.suppress(OSError):
            if not any(place.stat().st_size for place in self._new if is_file(place)):
                for place in self._new:
                    place.unlink(missing_ok=True)
        for file in (*self._logs.values(), self._lock):
            file.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, log: str, values: Mapping[str, Any]) -> None:
        line = to_line(values)
        with named_failure(self.path / f"{log}.jsonl"):
            append_line(self._logs[log], line)
            self._sums[log].update(line)


def _log(path: Path) -> BinaryIO:
    """A log, open for lines at its end."""
    return open(path, "ab", buffering=0)


def _place(known: Any) -> tuple[int, str | None]:
    """The size of a log by the cursor, and its checksum, which cursors of earlier versions lack."""
    return (known, None) if isinstance(known, int) else (known["bytes"], known["sha256"])


def _sum_of(path: Path, size: int | None) -> hashlib._Hash:
    """The running SHA-256 of a file's first ``size`` bytes, or of all of it."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        left = math.inf if size is None else size
        while left > 0 and (part := file.read(int(min(left, 2**20)))):
            found.update(part)
            left -= len(part)
    return found


def _locked(path: Path) -> BinaryIO:
    """The open lock file of a run. This process holds the lock, and none of its children does."""
    lock = open(path / ".lock", "ab", buffering=0)  # noqa: SIM115 - held open for the whole run
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        try:
            require_held(path, error)
        except ConfigurationError:
            with contextlib.suppress(OSError):  # where there are no locks, nobody holds it; a new folder is to be empty
                (path / ".lock").unlink()
            raise
        raise ConfigurationError(_held(path, holder_of(path / ".lock"))) from None
    return lock


def _held(path: Path, holder: int | None) -> str:
    """What people are told of a run that another coordinator holds."""
    if not holder:
        return f"Another coordinator is at work in {path}; stop it, or wait until it ends."
    if is_stopped(holder):
        return (
            f"Another coordinator holds the run in {path}, and its process {holder} is stopped; "
            f"`kill -CONT {holder}` lets it go on, or end if a signal for that has come."
        )
    return f"Another coordinator (process {holder}) is at work in {path}; stop it, or wait until it ends."


def _require_empty(path: Path) -> None:
    if not is_folder(path):
        raise ConfigurationError(f"{path} exists and is not a folder; choose another --out.")
    if any(path.iterdir()):
        begun = is_file(path / CONFIG)
        hint = f", or continue its run (--resume {shlex.quote(str(path))})" if begun else ""
        raise ConfigurationError(f"{path} exists and is not empty; choose another folder (--out){hint}.")
