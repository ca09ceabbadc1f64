"""What a tracker is, and what it is told of a run. ``docs/tracking.md`` shows how to write one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedemu.coordinator.record.row import Row

Memory = Mapping[str, Any]
"""What a tracker wants to know again when the run goes on, such as the id of its run. It has the form of JSON."""


@dataclass(frozen=True)
class Tracked:
    """A run, as a tracker is told of it at first.

    ``parameters`` are the settings of the experiment by dotted key. ``out`` is where the tracker puts things: a folder,
    or an address that it understands. ``told`` is the number of the last round that it was told of before, 0 for a new
    run, and ``memory`` what it asked to keep then.
    """

    directory: Path
    name: str
    digest: str
    config: str
    parameters: Mapping[str, str | int | float | bool]
    out: str
    project: str
    told: int = 0
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """A run at its end. ``figures`` are PNG files, and ``model`` is the final model, None if there is none."""

    summary: Mapping[str, Any]
    figures: Sequence[Path]
    model: Path | None


class Gone(Exception):
    """Is raised by ``begin`` if what was told is not there any more. What is missing is told again.

    ``told`` is the last round that is still there, 0 if there is none. ``begin`` then comes again with it and with
    ``memory``, and the end of the run is told again, too.
    """

    def __init__(self, told: int = 0, memory: Memory | None = None) -> None:
        self.told = told
        self.memory = memory or {}


class Tracker(Protocol):
    """Is told of one run, from a process of its own. Whatever it does, the run is not disturbed.

    ``begin`` comes first and ``close`` last. A run that is interrupted is told as ``ended``, too, with the outcome
    interrupted, and one that is killed is not. When a run is resumed, there is a new tracker, whose ``begin`` has what
    the one before was ``told`` and its ``memory``.
    """

    def begin(self, run: Tracked) -> Memory:
        """The run begins or goes on. What is returned comes back as ``memory`` when the run goes on."""
        ...

    def row(self, row: Row, numbers: Mapping[str, float]) -> None:
        """A round is finished. ``numbers`` are those of its row, by name.

        Each is told once. Only one whose telling failed or was killed is told again, whatever came of it.
        """
        ...

    def flush(self) -> None:
        """Make durable what was told. It is kept after that that it was."""
        ...

    def ended(self, end: Ended) -> None:
        """The run is over, or was interrupted. It is told again at the next end if the run is resumed."""
        ...

    def close(self) -> None:
        """No more comes from this process."""
        ...
