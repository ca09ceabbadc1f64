"""One entry of a comparison: an experiment with one or several seeds, and its figures over them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedemu.coordinator.record.run import Run
from fedemu.coordinator.record.summary import LAST_ROUNDS, accuracy_of_last, forgetting_of
from fedemu.ops.results.periods import period_results, perplexity_of

ROUNDS_TO = {"rounds_to_50": 0.5, "rounds_to_75": 0.75, "rounds_to_95": 0.95}
"""The figures that count rounds until a share of the target accuracy, with this share (Aljahdali et al., table 1)."""
BY_PERIOD = (
    "average_accuracy",
    "average_incremental_accuracy",
    "average_forgetting",
    "backward_transfer",
    "forward_transfer",
    "all_period_loss",
    "all_period_perplexity",
    "relative_forgetting",
)
"""The figures of the latest model of a stream of periods. ``relative_forgetting`` is the mean over the earlier periods.
The last two exist for language data only."""
KEPT_OBJECTIVE = "kept_objective"
"""The figure of replay: the objective of the samples that devices keep, by sample, as the median over periods. In
the first period gradients are far more alike than later, so that a mean would show that period alone."""
OF_DIAGNOSED = ("local_forgetting", "aggregation_forgetting", "local_alignment", "global_alignment")
"""The figures that are means over the diagnosed rounds."""
_BY_ROUND = ("consistency", "round_forgetting", *OF_DIAGNOSED)
"""The figures that are means over the rounds that have them."""
FIGURES = (
    "final_accuracy",
    "best_accuracy",
    "last_accuracy",
    "forgetting",
    *_BY_ROUND,
    *BY_PERIOD,
    KEPT_OBJECTIVE,
    *ROUNDS_TO,
    "bytes_down",
    "bytes_up",
    "virtual_time",
    "wall_time",
)
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Statistic:
    """One figure for every run of an experiment. None for a run that lacks it, such as an accuracy never reached."""

    values: tuple[float | None, ...]

    @property
    def known(self) -> list[float]:
        """The values of the runs that have one."""
        return [value for value in self.values if value is not None]

    @property
    def mean(self) -> float | None:
        """The mean of the known values, None if there is none."""
        return statistics.fmean(self.known) if self.known else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation of the known values, None for fewer than two."""
        return statistics.stdev(self.known) if len(self.known) > 1 else None

    def table(self) -> dict[str, Any]:
        """The figure in the form of JSON."""
        return {"mean": self.mean, "deviation": self.deviation, "values": list(self.values)}


@dataclass(frozen=True)
class Entry:
    """One experiment of a comparison. ``figures`` has the keys ``FIGURES``.

    ``experiment`` is the table of its settings, empty without a ``config.toml``. ``place`` is that of its colour and
    line in all pictures (``looks.py``).
    """

    label: str
    runs: tuple[Run, ...]
    seeds: tuple[int | None, ...]
    figures: Mapping[str, Statistic]
    experiment: Mapping[str, Any] = field(default_factory=dict)
    place: int = 0

    @property
    def outcome(self) -> str:
        """The outcome of all runs, or how many runs ended in each outcome."""
        counts = Counter(run.outcome for run in self.runs)
        return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {name}" for name, n in counts.most_common())

    def table(self) -> dict[str, Any]:
        """The entry in the form of JSON."""
        return {
            "label": self.label,
            "outcome": self.outcome,
            "runs": [
                {"directory": str(run.path), "seed": seed, "outcome": run.outcome, "rounds": len(run.rows)}
                for run, seed in zip(self.runs, self.seeds, strict=True)
            ],
            **{key: figure.table() for key, figure in self.figures.items()},
        }


def figures_of(runs: Sequence[Run], target: float | None, last: int = LAST_ROUNDS) -> dict[str, Statistic]:
    """The figures of these runs. Rounds are counted until a run reaches shares of the accuracy ``target``.

    ``last_accuracy`` is the mean over the last ``last`` rounds.
    """
    of_runs = [_figures_of_run(run, target, last) for run in runs]
    return {key: Statistic(tuple(figures[key] for figures in of_runs)) for key in FIGURES}


def cut_short(runs: Iterable[tuple[Run, Any]]) -> list[tuple[Run, int]]:
    """The runs that have fewer rounds than others that were to have as many, each with the rounds of the furthest.

    Each run comes with the ``rounds`` of its settings. A completed run is none of them, nor is one without any figures.
    """
    every = list(runs)
    furthest: dict[Any, int] = {}
    for run, planned in every:
        furthest[planned] = max(len(run.rows), furthest.get(planned, 0))
    return [
        (run, furthest[planned])
        for run, planned in every
        if 0 < len(run.rows) < furthest[planned] and run.outcome != "completed"
    ]


def best_accuracy(run: Run) -> float | None:
    """The best accuracy of the evaluated rounds, None if there are none."""
    return max(_accuracies(run), default=None)


def _rounds_to(run: Run, accuracy: float) -> int | None:
    """The first evaluated round that reached ``accuracy``, None if none did."""
    for row in run.rows:
        if row.accuracy is not None and row.accuracy >= accuracy - _ROUNDING:
            return row.round
    return None


def _accuracies(run: Run) -> list[float]:
    """The accuracies of the evaluated rounds."""
    return [row.accuracy for row in run.rows if row.accuracy is not None]


def _figures_of_run(run: Run, target: float | None, last: int) -> dict[str, float | None]:
    reached = _accuracies(run)
    return {
        "final_accuracy": reached[-1] if reached else None,
        "best_accuracy": best_accuracy(run),
        "last_accuracy": accuracy_of_last(run.rows, last),
        "forgetting": forgetting_of(run.rows),
        **{key: _of_known(statistics.fmean, (row.number(key) for row in run.rows)) for key in _BY_ROUND},
        **_by_period(run),
        KEPT_OBJECTIVE: _of_known(statistics.median, (row.kept_objective for row in run.rows)),
        **{key: None if target is None else _rounds_to(run, share * target) for key, share in ROUNDS_TO.items()},
        **{key: _of_known(sum, (row.number(key) for row in run.rows)) for key in ("bytes_down", "bytes_up")},
        **{key: run.rows[-1].number(key) if run.rows else None for key in ("virtual_time", "wall_time")},
    }


def _by_period(run: Run) -> dict[str, float | None]:
    found = period_results(run)
    if found is None:
        return dict.fromkeys(BY_PERIOD)
    return {
        **{
            key: _known(found.after_each(key)[-1])
            for key in ("average_accuracy", "average_forgetting", "backward_transfer")
        },
        "average_incremental_accuracy": _known(found.average_incremental_accuracy),
        "forward_transfer": _known(found.forward_transfer),
        "all_period_loss": _known(found.all_period_loss[-1]),
        "all_period_perplexity": _known(perplexity_of(found.all_period_loss)[-1]) if found.language else None,
        "relative_forgetting": _known(found.relative_forgetting_after_each()[-1]) if found.language else None,
    }


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _of_known(figure: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """A figure of the values that are known, such as their mean. None if there is none."""
    known = [value for value in values if value is not None]
    return float(figure(known)) if known else None
