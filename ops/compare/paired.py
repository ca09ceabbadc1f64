"""Paired tests: whether an experiment differs from the best one in runs of the same seeds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from fedemu.coordinator.record.run import Run
from fedemu.ops.compare.comparable import compares, data_named, data_of
from fedemu.ops.compare.entry import OF_DIAGNOSED, Entry, cut_short
from fedemu.ops.results.periods import Floats
from fedemu.ops.results.words import at, table_of

Better = Literal["higher", "lower"]
BETTER: Final[Mapping[str, Better]] = {
    "final_accuracy": "higher",
    "best_accuracy": "higher",
    "last_accuracy": "higher",
    "forgetting": "lower",
    "round_forgetting": "lower",
    "consistency": "higher",
    "average_accuracy": "higher",
    "average_incremental_accuracy": "higher",
    "average_forgetting": "lower",
    "backward_transfer": "higher",
    "forward_transfer": "higher",
    "all_period_perplexity": "lower",
    "relative_forgetting": "lower",
    "local_forgetting": "lower",
    "aggregation_forgetting": "lower",
    "local_alignment": "higher",
    "global_alignment": "higher",
}
"""The figures that say how good a model is, and which of two values is better."""
LEVEL: Final = 0.05
_ROUNDING: Final = 1e-12
"""Differences that are nearer to each other than this share of the values are equal but for the rounding of floats."""
_SIZE_OF_FIGURES: Final = 1.0
"""What fedemu's own figures are computed from has this size, also if they are smaller: most are means of accuracies or
differences between accuracies."""


@dataclass(frozen=True)
class Paired:
    """One figure of an experiment beside that of the best one, over the seeds that both have.

    ``difference`` is the mean of its values minus those of the best. ``t`` and ``wilcoxon`` are two-sided p-values, and
    ``adjusted`` is ``t`` after Holm's correction for all experiments that are tested in this figure. None where a test
    can't be made: with fewer than two pairs, or if all differences are equal.
    """

    key: str
    label: str
    best: str
    pairs: int
    difference: float
    t: float | None
    wilcoxon: float | None
    adjusted: float | None = None

    def table(self) -> dict[str, Any]:
        """The test in the form of JSON."""
        return asdict(self)


def best_of(entries: Sequence[Entry], key: str, better: Better | None = None) -> int | None:
    """The place of the entry with the best mean of a figure, the first of equals. None if no entry has the figure.

    ``better`` says which of two values is better; by default ``BETTER`` does. An entry with a run that was not
    completed is the best only if all others have one, too: after few rounds little can have been forgotten.
    """
    sign = 1 if (better or BETTER[key]) == "higher" else -1
    known = [
        (entry.outcome == "completed", sign * mean, -place)
        for place, entry in enumerate(entries)
        if (mean := entry.figures[key].mean) is not None
    ]
    return -max(known)[2] if known else None


def paired_tests(entries: Sequence[Entry], key: str, better: Better | None = None) -> list[Paired]:
    """Every entry beside the best one, in the order of ``entries``. ``better`` is as for ``best_of``.

    Those without a shared seed are left out, and those whose figure does not compare (``comparable.py``), or whose data
    set had another content. Runs that were cut short take no part, nor do two runs that were diagnosed in other rounds
    or on other numbers of samples, if the figure is a mean over these rounds.
    """
    place = best_of(entries, key, better)
    if place is None:
        return []
    best, short = entries[place], _cut_short(entries)
    of_best = _by_seed(best, key, short)
    tests = []
    for entry in entries:
        own = _by_seed(entry, key, short)
        shared = [seed for seed in own if seed in of_best and own[seed].diagnosed == of_best[seed].diagnosed]
        comparable = compares(entry.experiment, best.experiment, key) and not _of_other_data(entry, best)
        if entry is not best and shared and comparable:
            values, beside = (np.array([each[seed].value for seed in shared]) for each in (own, of_best))
            difference = float((values - beside).mean())
            p_values = _p_values(values, beside, _SIZE_OF_FIGURES if key in BETTER else 0.0)
            tests.append(Paired(key, entry.label, best.label, len(shared), difference, *p_values))
    return _corrected(tests)


def least_wilcoxon(pairs: int) -> float:
    """The least two-sided p-value that Wilcoxon's signed-rank test can give with this number of pairs."""
    return 2.0 ** (1 - pairs)


def _of_other_data(one: Entry, other: Entry) -> bool:
    """Whether a data set that both name in the same way is known to have had another content."""
    if data_named(one.experiment) != data_named(other.experiment):
        return False
    return len({data for entry in (one, other) if (data := data_of(entry.runs))}) > 1


def _cut_short(entries: Sequence[Entry]) -> set[Path]:
    """The directories of the runs of all entries that were cut short."""
    runs = ((run, entry.experiment.get("rounds")) for entry in entries for run in entry.runs)
    return {run.path for run, _ in cut_short(runs)}


class _Value(NamedTuple):
    """A figure of one run. If it is a mean over diagnosed rounds, ``diagnosed`` has their test samples, and them."""

    value: float
    diagnosed: tuple[int, ...]


def _by_seed(entry: Entry, key: str, short: set[Path]) -> dict[int, _Value]:
    """The figure by seed, without those of the runs in ``short``."""
    return {
        seed: _Value(value, _diagnosed(run, key) if key in OF_DIAGNOSED else ())
        for run, seed, value in zip(entry.runs, entry.seeds, entry.figures[key].values, strict=True)
        if seed is not None and value is not None and run.path not in short
    }


def _diagnosed(run: Run, key: str) -> tuple[int, ...]:
    samples = at(table_of(run), ("diagnose", "samples")) or 0
    return (samples, *(row.round for row in run.rows if row.number(key) is not None))


def _p_values(values: Floats, beside: Floats, least: float) -> tuple[float | None, float | None]:
    """The p-values of the paired t-test and of the signed-rank test. None if all pairs differ equally, as one does.

    The values were computed from numbers of their own size, and of the size ``least`` at least. What is small beside
    this size is the rounding of floats.
    """
    largest = max(least, float(np.abs([values, beside]).max()))
    if largest == 0:
        return None, None
    differences = (values - beside) / largest  # the squares of very small ones are 0
    if np.ptp(differences) < _ROUNDING:
        return None, None
    from scipy import stats  # It takes a second. No comparison without pairs has to wait for it.

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t = float(stats.ttest_1samp(differences, 0.0).pvalue)
    return (t if math.isfinite(t) else None), _signed_rank(differences)


def _signed_rank(differences: Floats) -> float:
    """The two-sided p-value of Wilcoxon's signed-rank test, exact also with ties.

    Differences of 0 have no sign and are left out. Those that differ by rounding alone share their rank.
    Each rank is positive or negative with the same chance, so the chances of all sums of positive ranks follow from
    rank to rank.
    """
    from scipy import stats

    steps = np.rint(differences / _ROUNDING)
    signed = steps[steps != 0]
    ranks = np.rint(2 * stats.rankdata(np.abs(signed))).astype(np.int64)  # those of ties may be halves
    chances = np.zeros(int(ranks.sum()) + 1)
    chances[0] = 1.0
    for rank in ranks:
        chances = (chances + np.concatenate([np.zeros(rank), chances[:-rank]])) / 2
    reached = int(ranks[signed > 0].sum())
    return min(1.0, 2.0 * min(float(chances[: reached + 1].sum()), float(chances[reached:].sum())))


def _corrected(tests: list[Paired]) -> list[Paired]:
    """The tests with Holm's correction: the smallest p-value times their number, the next one times one less, ..."""
    order = sorted((test.t, place) for place, test in enumerate(tests) if test.t is not None)
    adjusted: dict[int, float] = {}
    largest = 0.0
    for rank, (p, place) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - rank)))
        adjusted[place] = largest
    return [replace(test, adjusted=adjusted.get(place)) for place, test in enumerate(tests)]
