"""A run, read back from its directory: what it was told to do, its rows, its events, its summary and its pictures.

``docs/run_directory.md`` is the contract. No torch is imported here.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.coordinator.record.data_file import read_class_names
from fedemu.coordinator.record.json_lines import read_lines, read_object
from fedemu.coordinator.record.outcome import outcome_of, planned_rounds
from fedemu.coordinator.record.row import Row, read_rows
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import exists, is_file

Line = Mapping[str, Any]
"""One line of ``events.jsonl`` or of ``diagnosis.jsonl``."""

_PAGE = ("x", "y", "real", "real_y", "names")
"""The arrays of a file of ``generated/``."""


@dataclass(frozen=True)
class Run:
    """A run, finished or not. ``summary`` is empty while it is unfinished.

    ``events`` and ``diagnosis`` are the lines of ``events.jsonl`` and ``diagnosis.jsonl``. ``diagnosis`` is empty
    if the run was not diagnosed. ``class_names`` are those of the data, by number; empty if the run does not have them.
    """

    path: Path
    config: str
    rows: tuple[Row, ...]
    events: Sequence[Line]
    summary: Mapping[str, Any]
    diagnosis: Sequence[Line] = ()
    class_names: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """How the run ended, as ``outcome_of`` says; ``unfinished`` if it has no summary."""
        last = self.rows[-1].round if self.rows else 0
        return outcome_of(self.summary, last, planned_rounds(self.config)) or "unfinished"

    def named(self, event: str) -> list[Line]:
        """The events of one name, such as ``dropout``, in the order in which they happened."""
        return [line for line in self.events if line.get("event") == event]


def read_run(path: Path) -> Run:
    """Read a run, finished or not. Raises ConfigurationError if ``path`` holds none, or a file of it is damaged."""
    config = path / "config.toml"
    if not is_file(config) and not is_file(path / "metrics.jsonl"):
        for inner in ("*", "*/*", "*/*/*"):  # a group of seeds, a sweep, a sweep in parts
            if found := sorted(path.glob(f"{inner}/config.toml")):
                raise ConfigurationError(
                    f"{path} is a folder of runs and no run itself; name one of them, such as {found[0].parent}."
                )
        if not exists(path):
            raise ConfigurationError(f"{path} does not exist; name the folder of a run.")
        raise ConfigurationError(f"{path} holds no run: it has neither config.toml nor metrics.jsonl.")
    try:
        summary = read_summary(path)  # before the rows: a run that ends meanwhile would seem to lack its last ones
        return Run(
            path=path,
            config=config.read_text(encoding="utf-8") if is_file(config) else "",
            rows=read_rows(path),
            events=read_lines(path / "events.jsonl"),
            summary=summary,
            diagnosis=read_lines(path / "diagnosis.jsonl"),
            class_names=read_class_names(path),
        )
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The run in {path} cannot be read: {error}") from error


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a run; empty while it is unfinished. Raises ConfigurationError if it is damaged."""
    file = path / "summary.json"
    return read_object(file.read_bytes(), file) if is_file(file) else {}


def read_generated(path: Path) -> dict[int, dict[str, NDArray[Any]]]:
    """The pictures of what a run generated, by task in ascending order. ConfigurationError if a file cannot be read.

    Each page has the arrays that ``docs/run_directory.md`` lists under ``generated/``.
    """
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
