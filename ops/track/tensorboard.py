"""TensorBoard, by tensorboardX: scalars by round, the settings as text, the figures as images."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedemu.coordinator.record.row import Row
from fedemu.ops.track.tracker import Ended, Gone, Memory, Tracked
from fedemu.protocol.host.paths import is_folder


class TensorBoard:
    """Writes event files into a folder named like the run directory, inside ``out``.

    If another run has that folder, the name of the folder above the run directory comes before it. The writer of
    tensorboardX with a thread of its own is not used: if the disk is full, the thread dies and nobody is told.
    """

    def __init__(self) -> None:
        # An extra, which need not be installed.
        self._files: Any = import_module("tensorboardX.event_file_writer")
        self._events: Any = import_module("tensorboardX.proto.event_pb2")
        self._protocol: Any = import_module("tensorboardX.proto.summary_pb2")
        self._summaries: Any = import_module("tensorboardX.summary")
        self._writer: Any = None
        self._last = 0

    def begin(self, run: Tracked) -> Memory:
        self._last = run.told
        folder = _folder(run)
        try:
            self._open(run, folder)
        except OSError:
            if not run.told:  # the next attempt takes the same name
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return {"folder": folder.name}

    def _open(self, run: Tracked, folder: Path) -> None:
        # What a killed process has written of rounds that were not told is purged by the readers of these files.
        # The names of its files have whole seconds, and a second writer would replace the file of the first.
        suffix = f".{time.time_ns() % 10**9:09d}"
        self._writer = self._files.EventsWriter(str(folder / "events"), suffix)
        if run.told or run.memory:
            started = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(run.told + 1, file_version="brain.Event:2")
            self._write(run.told + 1, session_log=started)
        if not run.told:
            settings = "\n".join(f"| {name} | `{value}` |" for name, value in run.parameters.items())
            self._text("settings", f"| setting | value |\n|---|---|\n{settings}")
            self._text("experiment digest", run.digest)
        self._writer.flush()

    def row(self, row: Row, numbers: Mapping[str, float]) -> None:
        self._last = row.round
        # One event for all of them, under their own names: tensorboardX would change some, and two could become one.
        values = [self._protocol.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._write(row.round, summary=self._protocol.Summary(value=values))

    def flush(self) -> None:
        self._writer.flush()

    def ended(self, end: Ended) -> None:
        for figure in end.figures:
            pixels = np.asarray(Image.open(figure).convert("RGB"))
            image = self._summaries.image(f"figures/{figure.stem}", pixels, dataformats="HWC")
            self._write(self._last, summary=image)
        for name in ("outcome", "model_digest"):
            self._text(name.replace("_", " "), str(end.summary.get(name)))
        if end.model is not None:
            self._text("model", str(end.model.resolve()))

    def close(self) -> None:
        self._writer.close()

    def _text(self, name: str, text: str) -> None:
        self._write(self._last, summary=self._summaries.text(name, text))

    def _write(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._events.Event(wall_time=time.time(), step=step, **content))


def _folder(run: Tracked) -> Path:
    """The folder that the run had before, or a new one that no other run has. Seeds of two groups may have one name.

    Raises Gone if the folder that the run had is not there any more.
    """
    own, out = run.directory.resolve(), Path(run.out)
    if known := run.memory.get("folder", own.name if run.told else ""):
        if not is_folder(out / str(known)):
            raise Gone
        return out / str(known)
    longer = f"{own.parent.name}-{own.name}"
    for name in chain((own.name, longer), (f"{longer}-{number}" for number in count(2))):
        with suppress(FileExistsError):
            (out / name).mkdir(parents=True)
            return out / name
    raise AssertionError("there is always another number")
