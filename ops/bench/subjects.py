"""The subjects of ``fedemu bench``, in the order in which they are measured.

The code of a subject is imported when the subject is measured, because every command of fedemu imports this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from fedemu.ops.bench.measuring.measure import Effort, Figure, Tell

if TYPE_CHECKING:
    from fedemu.ops.bench.selection.selection import Study


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


def study(effort: Effort, problems: int, tell: Tell) -> Study:
    """The study of selections: how good the choices of each strategy are, and how fast our solver makes them."""
    from fedemu.ops.bench.selection import selection

    return selection.study(effort, problems, tell)
