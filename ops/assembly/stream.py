"""The stream of an experiment: which sample arrives at which device when, and what each period is tested on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.data.partition import Partition
from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.algorithms.streams.period_tests import PeriodTests
from fedemu.algorithms.streams.periods import consecutive, dirichlet_drift, static, window_drift
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.algorithms.streams.tasks import ClassTasks, class_incremental, own_orders
from fedemu.algorithms.streams.times import own_times, poisson
from fedemu.ops.experiment import Classes, Drift, Experiment, Periods, Static, Stream, Window
from fedemu.ops.experiment.tables.stream import INDEX, LABEL
from fedemu.protocol import seeds
from fedemu.protocol.errors import ConfigurationError, DataError


def open_stream(experiment: Experiment, corpus: Corpus, partition: Partition) -> tuple[StreamPlan, PeriodTests]:
    """Make the stream that devices get, and the tests of its periods. Both follow from the experiment and its data.

    Raises ConfigurationError or DataError if the samples cannot make such a stream.
    """
    stream = experiment.stream
    with _named(stream):
        arrivals, tests = _divided(stream, corpus, partition, experiment.seed)
    match stream:
        case Static():
            pass
        case Periods(arrivals="order", order=order, cut=cut):
            times = _times(corpus, order)
            arrivals = own_times(arrivals, times, stream.seconds, per_device=cut == "device")
        case _ if stream.arrivals == "poisson":
            random = seeds.generator(experiment.seed, purpose="stream arrivals")
            arrivals = poisson(arrivals, stream.seconds, generator=random)
    plan = StreamPlan(
        arrivals,
        rounds_per_period=stream.rounds_each,
        period_seconds=stream.seconds,
        cumulative=stream.cumulative,
        budget=experiment.replay.room,
        alone=experiment.replay.kept,
    )
    return plan, tests


def class_tasks(experiment: Experiment, classes: int) -> ClassTasks | None:
    """The tasks of a class-incremental stream that brings ``classes`` classes. None for any other stream.

    Raises ConfigurationError if the classes cannot be divided into these tasks.
    """
    match experiment.stream:
        case Classes() as stream:
            with _named(stream):
                tasks = _tasks(stream, classes, seeds.generator(experiment.seed, purpose="stream"))
                return _ordered(tasks, stream, experiment.fleet.devices, experiment.seed)
    return None


@contextmanager
def _named(stream: Stream) -> Iterator[None]:
    """Begin the sentence of a ConfigurationError with the kind of the stream."""
    try:
        yield
    except ConfigurationError as error:
        raise type(error)(f'stream.kind = "{stream.kind}": {error}') from error


def _tasks(stream: Classes, classes: int, random: np.random.Generator) -> ClassTasks:
    """The tasks of a stream. If the experiment does not give the order of the classes, ``random`` draws it.

    It is the first draw from ``random``.
    """
    return ClassTasks.of(classes, stream.tasks, stream.order or random.permutation(classes))


def _ordered(tasks: ClassTasks, stream: Classes, devices: int, seed: int) -> ClassTasks:
    """The tasks in the order in which devices meet them: one for the fleet, or one for each device."""
    return tasks if stream.order_by == "fleet" else own_orders(tasks, devices, seed)


def _divided(stream: Stream, corpus: Corpus, partition: Partition, seed: int) -> tuple[Arrivals, PeriodTests]:
    random = seeds.generator(seed, purpose="stream")
    train, test = corpus.train, corpus.test
    match stream:
        case Static():
            return static(partition, len(test))
        case Periods(order=order, periods=periods, cut=cut, test_fraction=fraction):
            times = _times(corpus, order)
            return consecutive(times, partition, periods, cut=cut, test_fraction=fraction)
        case Drift(column=column, periods=periods, alpha=alpha, cut=cut):
            values = _column(corpus, train, column), _column(corpus, test, column)
            return dirichlet_drift(*values, partition, periods, alpha=alpha, generator=random, cut=cut)
        case Window(column=column, periods=periods, width=width, cut=cut):
            values = _column(corpus, train, column), _column(corpus, test, column)
            return window_drift(*values, partition, periods, width=width, generator=random, cut=cut)
        case Classes():
            tasks = _ordered(_tasks(stream, corpus.classes, random), stream, len(partition), seed)
            return class_incremental(train.y, test.y, partition, tasks, generator=random)
        case _:
            assert_never(stream)


def _times(corpus: Corpus, order: str) -> NDArray[Any]:
    """The numbers that order the training samples, ``[samples]``."""
    return np.arange(len(corpus.train)) if order == INDEX else _column(corpus, corpus.train, order)


def _column(corpus: Corpus, split: Split, name: str) -> NDArray[Any]:
    """The values of a column, or the labels, ``[samples]``. Raises DataError if there is no such column."""
    if name == LABEL:
        return split.y
    if name not in split.columns:
        part, key = ("test", "test_columns") if split is corpus.test else ("training", "columns")
        raise DataError(
            f"the {part} split of the data set {corpus.name!r} has no column {name!r}; "
            f"a function of your own returns it in {key!r}"
        )
    return split.columns[name]
