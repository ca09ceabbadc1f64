"""Search by Optuna: a seeded sampler proposes settings, every proposal is run with all seeds, and the best one wins.

The study lies in ``study.sqlite3`` in the folder of the sweep, so a search that was killed goes on. Proposals come in
batches of a fixed size, and each trial has a seed of its own. So neither the number of runs at a time nor an
interruption changes what is proposed. No trial is ended early.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedemu.ops.experiment.near import did_you_mean
from fedemu.ops.experiment.sources import differences
from fedemu.ops.extras import require
from fedemu.ops.sweeps.grid import KEY, Choice, require_varied, values_of
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import usable

STUDY = "study.sqlite3"
BATCH = 4
"""Trials that are proposed before the results of any of them are known."""
_FAILED = "failed"
"""The mark of a trial of which a run has failed."""
_BEGUN_WITH = "fedemu"
"""What a study was begun with."""
LESS_IS_BETTER = re.compile(r"forgetting|loss|perplexity|objective|bytes|time")
SHORT = {"accuracy": "final_accuracy"}
_RANGE = re.compile(r"(?P<low>[^.:,]+(?:\.\d[^.:,]*)?)\.\.(?P<high>[^:,]+?)(?P<log>:log)?")


@dataclass(frozen=True)
class Space:
    """The values that a key may have: those of a list, or the numbers from ``low`` to ``high``."""

    key: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    @property
    def least(self) -> Any:
        """The first value that it holds."""
        return self.choices[0] if self.choices else int(self.low) if self.whole else self.low


def parse_space(options: Sequence[str]) -> list[Space]:
    """The spaces of options such as ``local.lr=0.001..1:log``, ``local.epochs=1..5`` and ``algorithm.loss=a,b``.

    Raises ConfigurationError for what is no such option.
    """
    spaces: list[Space] = []
    for option in options:
        key, _, text = (part.strip() for part in option.partition("="))
        if not KEY.fullmatch(key) or not text:
            raise ConfigurationError(
                f'--search "{option}" is no space; write KEY=LOW..HIGH, as in local.lr=0.001..1:log'
            )
        require_varied("--search", key, text, {space.key for space in spaces})
        spaces.append(_space(key, text))
    return spaces


def figure_of(metric: str, known: Sequence[str]) -> str:
    """The figure of a metric. ``accuracy`` is short for ``final_accuracy``. ConfigurationError if there is none."""
    figure = SHORT.get(metric, metric)
    if figure not in known:
        hint = did_you_mean(metric, [*SHORT, *known], 3) or f"; write one of {', '.join([*SHORT, *known])}"
        raise ConfigurationError(f"--metric {metric} is no figure of a run{hint}")
    return figure


class Study:
    """The trials of a search, each with its values and its result. Raises ConfigurationError without Optuna.

    ``seeds`` are those with which every trial is run; the first is that of the sampler, too. ``figure`` is what is best
    at its largest, or at its least. ``experiment`` is the table of what is searched, with the first value of each
    space. A study goes on only with what it was begun with, because its results are kept.
    """

    def __init__(
        self, folder: Path, spaces: Sequence[Space], figure: str, seeds: Sequence[int], experiment: Mapping[str, Any]
    ) -> None:
        require("optuna", "search", "--search")
        import optuna

        self._optuna, self._spaces, self._seed, self.figure = optuna, spaces, seeds[0], figure
        self.least = bool(LESS_IS_BETTER.search(figure))
        with usable(folder, "choose another folder with --out"):
            folder.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            self._study = optuna.create_study(
                storage=_storage(optuna, (folder / STUDY).resolve()),
                study_name="fedemu",
                direction="minimize" if self.least else "maximize",
                load_if_exists=True,
            )
            self._require_same(seeds, experiment)
        except ConfigurationError:
            raise
        except Exception as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigurationError(
                f"{folder / STUDY} can't be used: {first}; remove it, or choose another --out"
            ) from error

    def batch(self, trials: int) -> list[tuple[int, tuple[Choice, ...]]]:
        """The next trials that have no result yet, by number, at most ``BATCH`` and ``trials`` in all.

        They are those that an interrupted search has left, or new ones. Empty if there are enough.
        """
        for trial in self._unfinished():
            if len(trial.params) < len(self._spaces):  # it was interrupted while it was proposed
                self._seeded(trial.number)  # some versions of Optuna draw values here already
                self._propose(trial.number, self._optuna.trial.Trial(self._study, trial._trial_id))
        there = len(self._study.get_trials(deepcopy=False))
        begun = bool(self._unfinished())
        # A batch that was cut off is filled up, so that it is what it would have been.
        upto = -(-there // BATCH) * BATCH if begun else (there // BATCH + 1) * BATCH
        for number in range(there, min(trials, upto)):
            self._seeded(number)
            self._propose(number, self._study.ask())
        return [(trial.number, self._choices(trial.params)) for trial in self._unfinished()]

    def tell(self, number: int, values: Sequence[float | None]) -> None:
        """Tell the figure of each run of a trial. It has failed if one of them is None, or if there are none."""
        known = [value for value in values if value is not None]
        state = self._optuna.trial.TrialState
        if known and len(known) == len(values):
            self._study.tell(number, statistics.fmean(known))
        else:
            self._study.tell(number, state=state.FAIL)

    def fail(self, number: int) -> bool:
        """Note that a run of a trial failed. Returns whether it was the second time, so that the trial is over."""
        trial = next(trial for trial in self._unfinished() if trial.number == number)
        if trial.user_attrs.get(_FAILED):
            self.tell(number, [])
            return True
        self._optuna.trial.Trial(self._study, trial._trial_id).set_user_attr(_FAILED, True)
        return False

    def over(self) -> list[tuple[int, tuple[Choice, ...], float | None]]:
        """All trials that are over, the best first: number, values, result. A trial that failed has no result."""
        done = [trial for trial in self._study.get_trials(deepcopy=False) if trial.state.is_finished()]
        found = [(trial.number, self._choices(trial.params), trial.value) for trial in done]
        sign = 1 if self.least else -1
        return sorted(found, key=lambda trial: (trial[2] is None, sign * (trial[2] or 0.0), trial[0]))

    def _unfinished(self) -> list[Any]:
        return [trial for trial in self._study.get_trials(deepcopy=False) if not trial.state.is_finished()]

    def _seeded(self, number: int) -> None:
        """Give the sampler the seed of one trial."""
        self._study.sampler = self._optuna.samplers.TPESampler(seed=(self._seed * 1_000_003 + number) % 2**32)

    def _propose(self, number: int, trial: Any) -> None:
        """Draw the values of a trial. It keeps those that it has; they are drawn all the same, because the next follow.

        Optuna writes every value by itself, so a search may be killed between two of them.
        """
        self._seeded(number)
        together, kept = trial.relative_params, trial.distributions
        for space in self._spaces:
            if space.key not in kept:
                _suggest(trial, space)
            elif space.key not in together:
                self._study.sampler.sample_independent(self._study, trial, space.key, kept[space.key])

    def _choices(self, params: Mapping[str, Any]) -> tuple[Choice, ...]:
        chosen = []
        for space in self._spaces:
            value = params[space.key]
            # Optuna keeps places in a list, because a study holds texts and numbers only.
            chosen.append((space.key, space.choices[value] if space.choices else value))
        return tuple(chosen)

    def _require_same(self, seeds: Sequence[int], experiment: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if the study was begun with anything else. Older studies do not tell everything."""
        said: dict[str, Any] = {
            "spaces": [repr(space) for space in self._spaces],
            "figure": self.figure,
            "seed": self._seed,
            "seeds": [*seeds],
            "experiment": json.loads(json.dumps(experiment)),
        }
        before: dict[str, Any] = self._study.user_attrs.get(_BEGUN_WITH, {})
        if other := next((key for key in said if key in before and before[key] != said[key]), None):
            what = f"other {other}"
            if other == "experiment":
                path, old, new = differences(before[other], said[other])[0]
                what = f"another experiment: there {path} is {old}, and here {new}"
            raise ConfigurationError(f"the search in this folder was begun with {what}; choose another --out")
        if before != said:
            self._study.set_user_attr(_BEGUN_WITH, said)


def _space(key: str, text: str) -> Space:
    found = _RANGE.fullmatch(text)
    if found is None:
        values = values_of(text, f"--search {key}")
        if len(values) < 2 or ".." in text:
            raise ConfigurationError(
                f"--search {key}={text} is no space; write LOW..HIGH, LOW..HIGH:log, or values with commas between them"
            )
        return Space(key, choices=tuple(values))
    try:
        low, high = float(found["low"]), float(found["high"])
    except ValueError:
        raise ConfigurationError(f"--search {key}={text} needs two numbers, as in 0.001..1") from None
    if not math.isfinite(high - low):
        raise ConfigurationError(
            f"--search {key}={text} needs two finite numbers that are less than 1e308 apart, as in 0.001..1"
        )
    if not low < high or (found["log"] and low <= 0):
        above = ", and the first above 0 with :log" if found["log"] else ""
        raise ConfigurationError(f"--search {key}={text}: the first number must be less than the second{above}")
    whole = all(re.fullmatch(r"[+-]?\d+", found[end].strip()) for end in ("low", "high"))
    return Space(key, low=low, high=high, log=bool(found["log"]), whole=whole)


def _suggest(trial: Any, space: Space) -> None:
    if space.choices:
        trial.suggest_categorical(space.key, list(range(len(space.choices))))
    elif space.whole:
        trial.suggest_int(space.key, int(space.low), int(space.high), log=space.log)
    else:
        trial.suggest_float(space.key, space.low, space.high, log=space.log)


def _storage(optuna: Any, file: Path) -> Any:
    """The file of a study. In an address a ``?``, a ``%`` or a brace of its name would lead to another file."""
    from sqlalchemy.pool import NullPool  # Optuna needs it itself

    connect = partial(sqlite3.connect, file, check_same_thread=False)
    return optuna.storages.RDBStorage("sqlite://", engine_kwargs={"creator": connect, "poolclass": NullPool})
