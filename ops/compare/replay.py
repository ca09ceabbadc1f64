"""The comparison of runs that differ in their replay: the change against the run without replay.

There is one value for each strategy and buffer size. Changes are taken between runs of the same seed and then averaged.
So a seed that is easier or harder for all runs does not count as spread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedemu.algorithms.measures.continual import relative_change
from fedemu.ops.compare.comparable import data_of
from fedemu.ops.compare.entry import KEPT_OBJECTIVE, Entry, Statistic
from fedemu.ops.compare.replay_label import samples_kept, strategy_label, strategy_place
from fedemu.ops.compare.runs import Group, labels
from fedemu.ops.results.periods import Floats, period_results


@dataclass(frozen=True)
class Measure:
    """A figure of an entry, and how it is compared with the run without replay. ``absolute`` is not compared."""

    key: str
    name: str
    against: Literal["relative", "difference", "absolute"]
    form: Literal["share", "number"]

    def change(self, value: float, reference: float) -> float:
        """The change of ``value`` against ``reference``, relative or as a difference."""
        return float(relative_change(value, reference)) if self.against == "relative" else value - reference


PERPLEXITY = Measure("all_period_perplexity", "perplexity over all periods", "relative", "number")
ACCURACY = Measure("average_accuracy", "average accuracy", "difference", "share")
LOSS = Measure("all_period_loss", "loss over all periods", "relative", "number")
FORGETTING = {
    True: Measure("relative_forgetting", "relative forgetting of perplexity", "absolute", "share"),
    False: Measure("average_forgetting", "average forgetting of accuracy", "absolute", "share"),
}
"""The measure of forgetting for language data (True), and for other data (False)."""
OBJECTIVE = Measure(KEPT_OBJECTIVE, "objective of the kept samples, by sample", "absolute", "number")
MEASURES = {
    True: (PERPLEXITY, FORGETTING[True], OBJECTIVE),
    False: (ACCURACY, LOSS, FORGETTING[False], OBJECTIVE),
}
"""The measures for language data (True), and for other data (False)."""


@dataclass(frozen=True)
class Point:
    """An experiment with replay. ``line`` is its strategy, ``samples`` is how many samples a device keeps.

    ``changes`` has one value per run for each measure that is compared with the run without replay, None for a run
    whose seed has no such run. ``by_period [runs, periods]`` is the change of the latest model on each period. If there
    is no run to compare with, it is the model's own perplexity or accuracy.
    """

    line: str
    samples: int
    entry: Entry
    changes: Mapping[str, Statistic]
    by_period: Floats


@dataclass(frozen=True)
class ReplayStudy:
    """Experiments that differ in their replay only. ``reference`` has no replay; None if none can be used."""

    label: str
    language: bool
    reference: Entry | None
    points: tuple[Point, ...]
    unpaired: int
    """The number of runs without a counterpart: one without replay, with the same seed and as many periods."""

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The measures that suit the data."""
        return MEASURES[self.language]

    @property
    def lines(self) -> dict[str, list[Point]]:
        """The points of each strategy, by growing number of samples. Strategies stand in the order of ``points``."""
        found: dict[str, list[Point]] = {}
        for point in self.points:
            found.setdefault(point.line, []).append(point)
        return {line: sorted(points, key=lambda point: point.samples) for line, points in found.items()}

    @property
    def sizes(self) -> list[int]:
        """All numbers of samples that the points keep, ascending."""
        return sorted({point.samples for point in self.points})

    def is_change(self, measure: Measure) -> bool:
        """Whether ``value`` gives changes. If not, it gives the figures themselves."""
        return self.reference is not None and measure.against != "absolute"

    def value(self, point: Point, measure: Measure) -> Statistic:
        """The change against the run without replay, or the figure itself if ``is_change`` is false."""
        return point.changes[measure.key] if self.is_change(measure) else point.entry.figures[measure.key]

    def table(self) -> dict[str, Any]:
        """The study in the form of JSON."""
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
                    KEPT_OBJECTIVE: point.entry.figures[KEPT_OBJECTIVE].table(),
                    "by_period": [[None if np.isnan(value) else value for value in run] for run in point.by_period],
                }
                for points in self.lines.values()
                for point in points
            ],
        }


def replay_studies(entries: Sequence[Entry]) -> tuple[ReplayStudy, ...]:
    """A study for each set of experiments that differ in their replay only and were tested by period.

    Those on data sets of other content are sets of their own. An experiment that does not tell its data, or not yet,
    belongs to the first set that does. Sets in which no experiment has replay are left out.
    """
    tested = [entry for entry in entries if entry.experiment and any(period_results(run) for run in entry.runs)]
    usual_data = {_beside_replay(entry): data for entry in reversed(tested) if (data := data_of(entry.runs))}
    alike: dict[tuple[str, str], list[Entry]] = {}
    groups: dict[tuple[str, str], Group] = {}
    for entry in tested:
        rest = _beside_replay(entry)
        key = rest, data_of(entry.runs) or usual_data.get(rest, "")
        alike.setdefault(key, []).append(entry)
        groups.setdefault(key, Group(entry.runs[0].path, json.loads(rest), entry.runs, entry.seeds))
    named = zip(labels(list(groups.values())), alike.values(), strict=True)
    return tuple(_study(label, members) for label, members in named if any(map(_samples, members)))


def _beside_replay(entry: Entry) -> str:
    """A text that is the same for experiments whose settings differ in their replay only."""
    return json.dumps({key: value for key, value in entry.experiment.items() if key != "replay"}, sort_keys=True)


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
    twins = [None if without is None else _place_of_twin(entry, place, without) for place in range(len(entry.runs))]
    changes = {}
    by_period = []
    if without is not None:
        for measure in MEASURES[language]:
            if measure.against != "absolute":
                own, others = entry.figures[measure.key].values, without.figures[measure.key].values
                changes[measure.key] = Statistic(
                    tuple(
                        None if twin is None else _change(measure, value, others[twin])
                        for value, twin in zip(own, twins, strict=True)
                    )
                )
    for place, twin in enumerate(twins):
        latest = _latest(entry, place, language)
        if without is not None:
            other = np.full_like(latest, np.nan) if twin is None else _latest(without, twin, language)
            latest = relative_change(latest, other) if language else latest - other
        by_period.append(latest)
    return Point(line, samples, entry, changes, np.array(by_period))


def _place_of_twin(entry: Entry, place: int, without: Entry) -> int | None:
    """The place of the run of the same seed among the runs ``without`` replay.

    None if there is none, or if it has reached another number of periods.
    """
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
    """The accuracy or perplexity of a run's latest model on each period, ``[periods]``; NaN before the first test."""
    found = period_results(entry.runs[place])
    if found is None:
        periods = next(other.periods for run in entry.runs if (other := period_results(run)))
        return np.full(periods, np.nan)
    latest: Floats = (found.perplexity if language else found.accuracy)[-1]
    return latest


def _samples(entry: Entry) -> int:
    return samples_kept(entry.experiment.get("replay") or {})
