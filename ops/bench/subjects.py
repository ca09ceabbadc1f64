"""The subjects of ``fedemu bench``, in the order in which they are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from fedemu.ops.bench import aggregation, fleet, system, training, wire
from fedemu.ops.bench.measure import Effort, Figure, Tell

SUBJECTS: Final[Mapping[str, Callable[[Effort, Tell], Iterator[Figure]]]] = {
    "wire": wire.figures,
    "aggregation": aggregation.figures,
    "training": training.figures,
    "fleet": fleet.figures,
    "system": system.figures,
}
