"""Runs of one stream with different replay: what each strategy and buffer size changed against the run without replay.

Changes are taken between runs of the same seed, and only then averaged, so that what one seed makes easier or harder
for all does not count as spread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedemu.algorithms.measures.continual import relative_change
from fedemu.ops.compare.entry import Entry, Statistic
from fedemu.ops.compare.replay_label import samples_kept, strategy_label, strategy_place
from fedemu.ops.compare.runs import Group, labels
from fedemu.ops.results.periods import Floats, period_results


@dataclass(frozen=True)
class Measure:
    """A figure of an entry, and how it is set against the run without replay; ``absolute`` stands for itself."""

    key: str
    name: str
    against: Literal["relative", "difference", "absolute"]
    form: Literal["share", "number"]

    def change(self, value: float, reference: float) -> float:
        return float(relative_change(value, reference)) if self.against == "relative" else value - reference


PERPLEXITY = Measure("all_period_perplexity", "perplexity over all periods", "relative", "number")
ACCURACY = Measure("average_accuracy", "average accuracy", "difference", "share")
LOSS = Measure("all_period_loss", "loss over all periods", "relative", "number")
MEASURES = {
    True: (PERPLEXITY, Measure("relative_forgetting", "relative forgetting of perplexity", "absolute", "share")),
    False: (ACCURACY, LOSS, Measure("average_forgetting", "average forgetting of accuracy", "absolute", "share")),
}
"""Of language data, and of others."""


@dataclass(frozen=True)
class Point:
    """An experiment with replay: the line it belongs to, how many samples its devices keep, and what that changed.

    ``changes`` has a value per run for each measure that is set against the run without replay, None for a run that
    none of its seed is there for. ``by_period [runs, periods]`` is the change of the latest model on each period, or
    its own perplexity or accuracy where there is nothing to set it against.
    """

    line: str
    samples: int
    entry: Entry
    changes: Mapping[str, Statistic]
    by_period: Floats


@dataclass(frozen=True)
class ReplayStudy:
    """Experiments that differ in their replay only. ``reference`` is the one without, None where none can be used."""

    label: str
    language: bool
    reference: Entry | None
    points: tuple[Point, ...]
    unpaired: int
    """Runs that are left out of the changes, for want of a run without replay with their seed and as many periods."""

    @property
    def measures(self) -> tuple[Measure, ...]:
        return MEASURES[self.language]

    @property
    def lines(self) -> dict[str, list[Point]]:
        """The points of each strategy, random ones first, by growing N."""
        found: dict[str, list[Point]] = {}
        for point in self.points:
            found.setdefault(point.line, []).append(point)
        return {line: sorted(points, key=lambda point: point.samples) for line, points in found.items()}

    @property
    def sizes(self) -> list[int]:
        return sorted({point.samples for point in self.points})

    def is_change(self, measure: Measure) -> bool:
        """Whether ``value`` gives changes, and not the figures themselves."""
        return self.reference is not None and measure.against != "absolute"

    def value(self, point: Point, measure: Measure) -> Statistic:
        """The change against the run without replay; the figure itself where there is none or none is wanted."""
        return point.changes[measure.key] if self.is_change(measure) else point.entry.figures[measure.key]

    def table(self) -> dict[str, Any]:
        """As JSON knows it."""
        return {
            "label": self.label,
            "language": self.language,
            "reference": None if self.reference is None else self.reference.label,
            "unpaired": self.unpaired,
            "points": [
                {
                    "label": point.entry.label,
                    "strategy": point.line,
                    "samples": point.samples,
                    **{f"{key}_change": change.table() for key, change in point.changes.items()},
                    "by_period": [[None if np.isnan(value) else value for value in run] for run in point.by_period],
                }
                for points in self.lines.values()
                for point in points
            ],
        }


def replay_studies(entries: Sequence[Entry]) -> tuple[ReplayStudy, ...]:
    """A study for all experiments that differ in their replay only and were tested by period; none without replay."""
    alike: dict[str, list[Entry]] = {}
    groups: dict[str, Group] = {}
    for entry in entries:
        if entry.experiment and any(period_results(run) for run in entry.runs):
            rest = {key: value for key, value in entry.experiment.items() if key != "replay"}
            key = json.dumps(rest, sort_keys=True)
            alike.setdefault(key, []).append(entry)
            groups.setdefault(key, Group(entry.runs[0].path, rest, entry.runs, entry.seeds))
    named = zip(labels(list(groups.values())), alike.values(), strict=True)
    return tuple(_study(label, members) for label, members in named if any(map(_samples, members)))


def _study(label: str, members: Sequence[Entry]) -> ReplayStudy:
    language = any(entry.figures["all_period_perplexity"].known for entry in members)
    without = next((entry for entry in members if not _samples(entry)), None)
    taken: set[tuple[str, int]] = set()
    points = []
    for entry in sorted(members, key=lambda entry: strategy_place(entry.experiment.get("replay") or {})):
        if samples := _samples(entry):
            line = strategy_label(entry.experiment["replay"])
            line = entry.label if (line, samples) in taken else line
            taken.add((line, samples))
            points.append(_point(line, samples, entry, without, language))
    runs = sum(len(point.entry.runs) for point in points)
    unpaired = sum(1 for point in points for run in point.by_period if np.isnan(run).all())
    if without is not None and unpaired == runs:
        without = None
        points = [_point(point.line, point.samples, point.entry, None, language) for point in points]
    return ReplayStudy(label, language, without, tuple(points), unpaired if without is not None else 0)


def _point(line: str, samples: int, entry: Entry, without: Entry | None, language: bool) -> Point:
    places = [None if without is None else _place_of_twin(entry, place, without) for place in range(len(entry.runs))]
    changes = {}
    by_period = []
    if without is not None:
        for measure in MEASURES[language]:
            if measure.against != "absolute":
                own, others = entry.figures[measure.key].values, without.figures[measure.key].values
                changes[measure.key] = Statistic(
                    tuple(
                        None if twin is None else _change(measure, value, others[twin])
                        for value, twin in zip(own, places, strict=True)
                    )
                )
    for place, twin in enumerate(places):
        latest = _latest(entry, place, language)
        if without is not None:
            other = np.full_like(latest, np.nan) if twin is None else _latest(without, twin, language)
            latest = relative_change(latest, other) if language else latest - other
        by_period.append(latest)
    return Point(line, samples, entry, changes, np.array(by_period))


def _place_of_twin(entry: Entry, place: int, without: Entry) -> int | None:
    """Where among the runs ``without`` replay that of the same seed is; None if it got through other periods."""
    seed = entry.seeds[place]
    if seed not in without.seeds:
        return None
    twin = without.seeds.index(seed)
    own, other = period_results(entry.runs[place]), period_results(without.runs[twin])
    return twin if own and other and len(own.rounds) == len(other.rounds) else None


def _change(measure: Measure, value: float | None, reference: float | None) -> float | None:
    if value is None or reference is None or (measure.against == "relative" and reference == 0):
        return None
    return measure.change(value, reference)


def _latest(entry: Entry, place: int, language: bool) -> Floats:
    """The latest model of a run on each period ``[periods]``; NaN for a run that was not tested yet."""
    found = period_results(entry.runs[place])
    if found is None:
        periods = next(other.periods for run in entry.runs if (other := period_results(run)))
        return np.full(periods, np.nan)
    latest: Floats = (found.perplexity if language else found.accuracy)[-1]
    return latest


def _samples(entry: Entry) -> int:
    return samples_kept(entry.experiment.get("replay") or {})
