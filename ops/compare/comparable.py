"""What has to be the same in experiments, so that their figures compare."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from fedemu.coordinator.record.run import Run
from fedemu.ops.compare.entry import BY_PERIOD, ROUNDS_TO
from fedemu.ops.experiment.tables.section import AUTO
from fedemu.ops.experiment.tables.stream import INDEX, LABEL
from fedemu.ops.results.doubts import last_test
from fedemu.ops.results.words import Keys, Table, at, shown

_TEST_DATA: Final[tuple[Keys, ...]] = tuple(
    ("data", key)
    for key in (
        "dataset",
        "test_fraction",
        "test_by",
        "id_min_samples",
        "train_split",
        "label_column",
        "regroup",
        "text",
    )
)
"""The settings that decide which samples are used for tests, and what has to be predicted of them."""
_FROM_TEST_TO_TEST: Final = ("forgetting", "round_forgetting", "consistency")
"""The figures that depend on how often the classes are tested."""
_FROM_SEVERAL_ROUNDS: Final = ("best_accuracy", "last_accuracy", *ROUNDS_TO)
"""The figures that depend on which rounds are tested, and on how many samples. The best of many tests is better."""
_DIVIDING: Final = {
    "classes": ("kind", "tasks", "order", "order_by"),
    "drift": ("kind", "periods", "column", "cut", "alpha"),
    "window": ("kind", "periods", "column", "cut", "width"),
}
"""By kind of stream: the settings by which it divides the test split into periods."""


_COLUMN_OF_STREAM: Final = {
    "drift": ("column", (LABEL,)),
    "window": ("column", (LABEL,)),
    "periods": ("order", (INDEX, LABEL)),
}
"""By kind of stream: the setting that names the column that it reads, and the values that name none."""
_DIVIDED_LATER: Final = ("partition", "public", "validation")
"""The settings of data that say who gets which samples. Of them only the names of columns play a part in reading."""


def compares(one: Table, other: Table, key: str) -> bool:
    """Whether the figure ``key`` of two experiments compares, as far as their settings tell.

    They have to predict the same of the same test samples. If the figure tells what changes from test to test, their
    classes have to be tested at the same intervals, too. If it comes from the tests of several rounds, these have to be
    tested alike, and if it is one by period, the periods have to have the same tests.
    """
    if any(at(one, path) != at(other, path) for path in _TEST_DATA):
        return False
    if _people(one) != _people(other) or _held_out(one) != _held_out(other):
        return False
    if key in BY_PERIOD and _divided(one) != _divided(other):
        return False
    if key in _FROM_SEVERAL_ROUNDS and _tests(one) != _tests(other):
        return False
    return key not in _FROM_TEST_TO_TEST or _interval(one) == _interval(other)


def data_of(runs: Sequence[Run]) -> str:
    """The digest of the data set of runs of one experiment. Empty if none of them tells it (yet)."""
    return next((str(found) for run in runs if (found := run.summary.get("data_digest"))), "")


def data_named(table: Table) -> str:
    """A text that is the same for experiments that read the same columns of the same data set in the same way.

    So the digests of their data differ only if the data set has got another content.
    """
    data, stream = table.get("data") or {}, table.get("stream") or {}
    read = {key: value for key, value in data.items() if key not in _DIVIDED_LATER}
    by = [at(data, ("partition", "column")), at(data, ("partition", "options", "partition_by"))]
    column, none = _COLUMN_OF_STREAM.get(str(stream.get("kind")), ("", ()))
    streamed = [column, stream[column]] if column in stream and stream[column] not in none else []
    return json.dumps([read, by, streamed], sort_keys=True)


def incomparable(tables: Sequence[Table]) -> list[str]:
    """A sentence for each difference between experiments because of which some of their figures do not compare."""
    found = []
    alike = _with_whole_models(tables)
    for what, value, figures in _DIFFERENCES:
        values = dict.fromkeys(words for table in alike if (words := value(table)) is not None)
        if len(values) > 1:
            found.append(f"the runs differ in {what} ({', '.join(values)}), so {figures} do not compare")
    return found


def untested(runs: Iterable[Run]) -> list[str]:
    """A warning if runs ended early, and their last models were not tested, or not on all samples."""
    ended = [run for run in runs if run.summary and run.outcome != "completed"]
    told = ", ".join(f"{words} in {run.path}" for run in ended if (words := last_test(run.rows)))
    return [f"the last models of some runs were not tested: their final accuracies are those {told}"] if told else []


def tested_in_other_rounds(experiment: Table, seeds: Sequence[Run]) -> str:
    """A warning if the runs of one experiment were tested in other rounds. Empty if they were not.

    A run is tested in its last round. If it goes on with more rounds, that test stays. Periods by the clock, after each
    of which there is a test, end in other rounds with each seed.
    """
    before = max(0, min(len(run.rows) for run in seeds) - 1)  # what came later, not all may have got to
    ways: dict[tuple[int, ...], Path] = {}
    for run in seeds:
        ways.setdefault(tuple(row.round for row in run.rows[:before] if row.accuracy is not None), run.path)
    if len(ways) == 1 or at(experiment, ("stream", "period_seconds")):
        return ""
    counts = Counter(itertools.chain(*ways))
    some = sorted(round for round, count in counts.items() if count < len(ways))
    rounds = f"round{'' if len(some) == 1 else 's'} {', '.join(map(str, some))}"
    return (
        f"not all seeds of one experiment were tested in {rounds} ({', '.join(map(str, ways.values()))}), so their "
        "means over rounds and their rounds to a target do not compare"
    )


def _setting(path: Keys) -> tuple[str, Callable[[Table], str], str]:
    return ".".join(path), lambda table: shown(at(table, path)), "their accuracies"


def _model(table: Table) -> str:
    """The model and its options, which say the same in any order."""
    return shown(dict(sorted((at(table, ("model",)) or {}).items())))


def _with_whole_models(tables: Sequence[Table]) -> Sequence[Table]:
    """The tables with the defaults of their models, if one names an option that another of the same model lacks."""
    models = [at(table, ("model",)) or {} for table in tables]
    named = {str(model.get("name")) for model in models}
    if len(named) == len({(str(model.get("name")), *sorted(model)) for model in models}):
        return tables
    # It imports torch, for which other comparisons should not have to wait.
    from fedemu.algorithms.registry import model_defaults

    defaults = {name: model_defaults(name) for name in named}
    whole = [{**defaults[str(model.get("name"))], **model} for model in models]
    return [{**table, "model": model} for table, model in zip(tables, whole, strict=True)]


def _people(table: Table) -> str | None:
    """The column by whose values samples are chosen for tests or left out, as ``Data.ids`` finds it. None if none."""
    data = table.get("data") or {}
    if data.get("test_by") != "id" and not data.get("id_min_samples"):
        return None
    column = data.get("id_column", AUTO)
    return str(at(data, ("partition", "column")) if column == AUTO else column)


def _held_out(table: Table) -> Table:
    """The settings by which a stream holds out samples of its periods for tests. Empty if the test split is used."""
    stream = table.get("stream") or {}
    if stream.get("kind") != "periods":
        return {}
    return {key: stream.get(key) for key in ("kind", "periods", "order", "cut", "test_fraction")}


def _divided(table: Table) -> Table:
    """The settings by which a stream divides the test split into periods. Empty if it is not divided."""
    stream = table.get("stream") or {}
    return {key: stream[key] for key in _DIVIDING.get(str(stream.get("kind")), ()) if key in stream}


def _tests(table: Table) -> Table:
    """The settings that tell which rounds are tested, and on how many samples. Empty if it is not known."""
    evaluate = table.get("evaluate") or {}
    keys = ("every", "samples", "full_every") if evaluate.get("samples") else ("every",)
    return {key: evaluate[key] for key in keys if key in evaluate}


def _interval(table: Table) -> Any:
    """The number of rounds from one test by class to the next. None if the settings do not tell it."""
    evaluate = table.get("evaluate") or {}
    return evaluate.get("full_every" if evaluate.get("samples") else "every")


_DIFFERENCES: Final[Sequence[tuple[str, Callable[[Table], str | None], str]]] = (
    *map(_setting, _TEST_DATA),
    ("model", _model, "their accuracies"),
    ("the column that tells people apart", _people, "their accuracies"),
    ("the test samples", lambda table: shown(_held_out(table)) or "the test split", "their accuracies"),
    ("rounds", lambda table: str(table.get("rounds")), "the figures of their last models"),
    (
        "the rounds between two tests by class",
        lambda table: str(_interval(table)),
        "their forgetting, round forgetting and consistency",
    ),
    (
        "evaluate",
        lambda table: shown(_tests(table)) or None,
        "their best accuracies, those of the last rounds and the rounds to a target",
    ),
    ("the periods of their tests", lambda table: shown(_divided(table)) or None, "their figures by period"),
)
"""What may differ, its value in words (None if it plays no part), and the figures that do not compare then."""
