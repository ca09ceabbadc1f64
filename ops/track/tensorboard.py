"""TensorBoard, by tensorboardX: scalars by round, the settings as text, the figures as images."""

from __future__ import annotations

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
from fedemu.ops.track.tracker import Ended, Memory, Tracked


class TensorBoard:
    """Writes event files into a folder named like the run directory, inside ``out``.

    If another run has that folder, the name of the folder above the run directory comes before it.
    """

    def __init__(self) -> None:
        self._tensorboard: Any = import_module("tensorboardX")  # an extra, which need not be installed
        self._writer: Any = None
        self._last = 0

    def begin(self, run: Tracked) -> Memory:
        self._last = run.told
        folder = _folder(run)
        # A part of a round that a killed process has written is purged by the readers of these files.
        # The names of its files have whole seconds, and a second writer would replace the file of the first.
        suffix = f".{time.time_ns() % 10**9:09d}"
        purged = run.told + 1 if run.told else None
        self._writer = self._tensorboard.SummaryWriter(str(folder), purge_step=purged, filename_suffix=suffix)
        if not run.told:
            settings = "\n".join(f"| {name} | `{value}` |" for name, value in run.parameters.items())
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{settings}", 0)
            self._writer.add_text("experiment digest", run.digest, 0)
        self._writer.flush()
        return {"folder": folder.name}

    def row(self, row: Row, numbers: Mapping[str, float]) -> None:
        self._last = row.round
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, row.round)

    def flush(self) -> None:
        self._writer.flush()

    def ended(self, end: Ended) -> None:
        for figure in end.figures:
            pixels = np.asarray(Image.open(figure).convert("RGB"))
            self._writer.add_image(f"figures/{figure.stem}", pixels, self._last, dataformats="HWC")
        for name in ("outcome", "model_digest"):
            self._writer.add_text(name.replace("_", " "), str(end.summary.get(name)), self._last)
        if end.model is not None:
            self._writer.add_text("model", str(end.model.resolve()), self._last)

    def close(self) -> None:
        self._writer.close()


def _folder(run: Tracked) -> Path:
    """The folder that the run had before, or a new one that no other run has. Seeds of several groups are namesakes."""
    own, out = run.directory.resolve(), Path(run.out)
    if known := run.memory.get("folder", own.name if run.told else ""):
        return out / str(known)
    longer = f"{own.parent.name}-{own.name}"
    for name in chain((own.name, longer), (f"{longer}-{number}" for number in count(2))):
        with suppress(FileExistsError):
            (out / name).mkdir(parents=True)
            return out / name
    raise AssertionError("there is always another number")
