"""The subjects of ``fedemu bench``, in the order in which they are measured.

The code of a subject is imported when the subject is measured, because every command of fedemu imports this file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from fedemu.ops.bench.measuring.measure import Effort, Figure, Tell

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


def _wire(effort: Effort, tell: Tell) -> Iterator[Figure]:
    from fedemu.ops.bench.wire import wire

    return wire.figures(effort, tell)


def _aggregation(effort: Effort, tell: Tell) -> Iterator[Figure]:
    from fedemu.ops.bench.aggregation import aggregation

    return aggregation.figures(effort, tell)


def _training(effort: Effort, tell: Tell) -> Iterator[Figure]:
    from fedemu.ops.bench.training import training

    return training.figures(effort, tell)


def _fleet(effort: Effort, tell: Tell) -> Iterator[Figure]:
    from fedemu.ops.bench.fleet import fleet

    return fleet.figures(effort, tell)


def _system(effort: Effort, tell: Tell) -> Iterator[Figure]:
    from fedemu.ops.bench.system import system

    return system.figures(effort, tell)


SUBJECTS: Final[Mapping[str, Callable[[Effort, Tell], Iterator[Figure]]]] = {
    "wire": _wire,
    "aggregation": _aggregation,
    "training": _training,
    "fleet": _fleet,
    "system": _system,
}


class Study(Protocol):
    """A benchmark with tables of its own, which rich prints."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The tables."""
        ...

    def table(self) -> dict[str, Any]:
        """The study for JSON."""
        ...


@dataclass(frozen=True)
class Wishes:
    """What studies are told: the number of ``problems``, the folder of environments (None: in the cache), that of
    plots (None: no plots), and the number of devices of the ``largest`` fleet."""

    problems: int = 50
    largest: int = 1_000_000
    environments: Path | None = None
    plots: Path | None = None


def _selection(effort: Effort, wishes: Wishes, tell: Tell) -> Iterator[Study]:
    from fedemu.ops.bench.selection import selection

    return selection.study(effort, wishes.problems, tell)


def _peers(effort: Effort, wishes: Wishes, tell: Tell) -> Iterator[Study]:
    from fedemu.ops.bench.peers import peers

    return peers.compare(effort, _environments(wishes), tell)


def _growth(effort: Effort, wishes: Wishes, tell: Tell) -> Iterator[Study]:
    from fedemu.ops.bench.growth import growth

    return growth.grow(effort, wishes.plots, tell)


def _fleet_size(effort: Effort, wishes: Wishes, tell: Tell) -> Iterator[Study]:
    from fedemu.ops.bench.growth import fleet_size

    return fleet_size.measure(effort, wishes.largest, tell)


def _gpu(effort: Effort, wishes: Wishes, tell: Tell) -> Iterator[Study]:
    from fedemu.ops.bench.gpu import gpu

    return gpu.study(effort, _environments(wishes), tell)


def _environments(wishes: Wishes) -> Path:
    from fedemu.ops.homes import cache_folder

    return wishes.environments or cache_folder(os.environ) / "peers"


STUDIES: Final[Mapping[str, Callable[[Effort, Wishes, Tell], Iterator[Study]]]] = {
    "selection": _selection,
    "peers": _peers,
    "growth": _growth,
    "fleet-size": _fleet_size,
    "gpu": _gpu,
}
"""They run only if they are named. Each gives its study again and again as it grows, so that no error loses it."""
