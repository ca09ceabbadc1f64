"""The numbers that a method's own programs and remarks tell of a round, beside what fedemu itself measures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

from fedemu.coordinator.record.row import Row
from fedemu.protocol.wording import one_line

Teller = Literal["devices", "method"]

LARGEST: Final = 1e150
"""The square of a larger number does not fit into a float. So it has no deviation, and nothing can draw the largest."""
MOST: Final = 8
"""The number of own measures that pictures show, in the order of their names."""
_ELSEWHERE: Final = frozenset({"loss", "replay_samples", "replay", "coordination", "generator", "importance"})
"""What fedemu itself adds to the metrics of devices, and the topics of its remarks."""


class OwnMeasure(NamedTuple):
    """A measure by its name. ``teller``: devices in training (the mean over accepted ones), or the method's remarks."""

    name: str
    teller: Teller

    @property
    def column(self) -> str:
        """Its name in tables, by where rows have it: ``device_metrics.norm`` or ``remarks.norm``."""
        return f"{'device_metrics' if self.teller == 'devices' else 'remarks'}.{self.name}"

    @property
    def title(self) -> str:
        """``column`` as one line for a terminal: a device may have named its metric by control characters."""
        return one_line(self.column)


def own_measures(row: Row) -> dict[OwnMeasure, float]:
    """The own measures of a round."""
    return measures_of(row.device_metrics, row.remarks)


def measures_of(device_metrics: Mapping[str, Any], remarks: Mapping[str, Any]) -> dict[OwnMeasure, float]:
    """The own measures: the numbers up to ``LARGEST`` in the ``device_metrics`` and the ``remarks`` of a round."""
    return {**_numbers("devices", device_metrics), **_numbers("method", remarks)}


def first_measures(rows: Iterable[Row]) -> list[OwnMeasure]:
    """The first ``MOST`` own measures of some rounds, in the order of their names."""
    return first_of(measure for row in rows for measure in own_measures(row))


def first_of(measures: Iterable[OwnMeasure]) -> list[OwnMeasure]:
    """The first ``MOST`` of these measures, in the order of their names."""
    return sorted({*measures})[:MOST]


def last_measures(rows: Iterable[Row]) -> dict[OwnMeasure, float]:
    """The own measures of a run, each with its value in the last round that has it."""
    return {measure: value for row in rows for measure, value in own_measures(row).items()}


def _numbers(teller: Teller, told: Mapping[str, Any]) -> dict[OwnMeasure, float]:
    """The numbers up to ``LARGEST`` of what was told. Those of a mapping have its name before them: ``norm.first``."""
    found: dict[OwnMeasure, float] = {}
    left = [(name, value) for name, value in told.items() if name not in _ELSEWHERE][::-1]
    while left:
        name, value = left.pop()
        match value:
            case bool():
                pass
            case int() | float() if abs(value) <= LARGEST:
                found[OwnMeasure(name, teller)] = float(value)
            case Mapping():
                left += [(f"{name}.{inner}", of_inner) for inner, of_inner in value.items()][::-1]
    return found
