"""Streams that divide a partition's training samples into periods: by an order, or by values that drift.

Every function returns the arrivals and the test samples of each period. Both are functions of the arguments and the
generator's state. All samples arrive at the beginning of their period. ``column [samples]`` belongs to the whole
training split, ``test_column`` to the test split. A partition's validation samples take no part.

With ``cut = "device"`` the samples of each device are divided by themselves, and their numbers in the periods differ by
at most one. Devices take turns with the larger numbers: with n samples and T periods, the first ``n (t + 1) + r`` over
T (rounded down) samples of device m are in periods 0 to t, where ``r = T - 1 - m mod T``. So even if each device has
fewer samples than there are periods, the fleet has data in all periods. With ``cut = "fleet"`` the samples of all
devices are divided as if there were one device, number 0; a device may then have no samples in many periods. With ``cut
= "fleet"`` a drift is the same for all devices and for the test split. With ``cut = "device"`` a device that has few
values has the same few values in all of its periods.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.flat import Indices, owners_of
from fedemu.algorithms.data.partition import Partition, share_of
from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.algorithms.streams.period_tests import PeriodTests, checked
from fedemu.protocol.errors import ConfigurationError

Cut = Literal["device", "fleet"]


def static(partition: Partition, test_samples: int) -> tuple[Arrivals, PeriodTests]:
    """One period, in which a device has all of its samples from the beginning, in the partition's order.

    It is tested on the whole test split; ``test_samples`` is the size of this split.
    """
    every, tested = np.arange(len(partition.train_indices)), np.arange(test_samples)
    return checked(
        Arrivals.of(partition, every, np.zeros_like(every), 1),
        PeriodTests.of(np.zeros_like(tested), tested, period_count=1, held_out=False),
    )


def consecutive(
    column: NDArray[Any], partition: Partition, periods: int, *, cut: Cut = "device", test_fraction: float = 0.2
) -> tuple[Arrivals, PeriodTests]:
    """Periods that follow each other in the order of a column of numbers. The last part of each is for testing.

    This follows Good et al., "Coordinated Replay Sample Selection for Continual Federated Learning" (2023), section
    5.2, where four weeks of each period train and the fifth tests. But here periods hold equal numbers of samples, not
    equal times. Equal values are in the order of the training split; missing values (NaN) come last, in the same order.
    The last ``test_fraction`` of a device's samples in a period (with ``cut = "fleet"``, of the fleet's) are held out.
    It is rounded so that in each period devices 0 to m together hold out ``floor(test_fraction * samples)`` of their
    samples.
    """
    if not 0.0 < test_fraction < 1.0:
        raise ConfigurationError(f"the test fraction is {test_fraction}; it must be above 0 and below 1")
    if column.dtype.kind not in "iuf":
        raise ConfigurationError(
            f"the order column is of type {column.dtype}, but an order of arrival needs numbers; "
            "set stream.order to a column of numbers, such as seconds, or to 'index'"
        )
    group = _groups(partition, periods, cut)
    held = partition.train_indices
    order = np.lexsort((held, column[held], group))
    period = _consecutive_periods(group[order], periods)
    tested = _last_parts(group[order], period, test_fraction)
    return checked(
        Arrivals.of(partition, order[~tested], period[~tested], periods),
        PeriodTests.of(period[tested], held[order[tested]], period_count=periods, held_out=True),
    )


def dirichlet_drift(
    column: NDArray[Any],
    test_column: NDArray[Any],
    partition: Partition,
    periods: int,
    *,
    alpha: float,
    generator: np.random.Generator,
    cut: Cut = "fleet",
) -> tuple[Arrivals, PeriodTests]:
    """Each period has its own weights for the column's values (labels, domains), drawn from Dir(alpha).

    One period after the other takes its number of a device's remaining samples. It draws them one by one, each with a
    chance in proportion to the weight of its value. So the last period gets the rest, and a small alpha makes periods
    of few values. The test split is divided in the same way, by the same weights, as one device. The order within a
    period is random.
    """
    if not 0.0 < alpha < math.inf:
        raise ConfigurationError(f"the Dirichlet concentration alpha is {alpha}; it must be positive and finite")
    values, code = _codes(column, test_column)
    groups = _groups(partition, periods, cut)
    weights = generator.dirichlet(np.full(values, alpha), size=periods)
    period = _weighted_periods(groups, code[partition.train_indices], weights, generator)
    test_code = code[len(column) :]
    test_period = _weighted_periods(np.zeros_like(test_code), test_code, weights, generator)
    shuffled = generator.permutation(len(period))
    return checked(
        Arrivals.of(partition, shuffled, period[shuffled], periods),
        PeriodTests.of(test_period, np.arange(len(test_code)), period_count=periods, held_out=False),
    )


def window_drift(
    column: NDArray[Any],
    test_column: NDArray[Any],
    partition: Partition,
    periods: int,
    *,
    width: float,
    generator: np.random.Generator,
    cut: Cut = "fleet",
) -> tuple[Arrivals, PeriodTests]:
    """A window slides over the column's values (labels, domains). The generator draws the order of the values.

    The place of a sample is the position of its value in that order, plus a uniform draw from [0, width). Periods
    follow each other in the order of places. So the window covers ``width`` values at a time: with 1 the values come
    one after another, and with many more than there are values all are mixed. The test split is divided in the same
    way, in the same order, as one device.
    """
    if not 1.0 <= width < math.inf:
        raise ConfigurationError(f"the window's width is {width} values; it must be at least 1 and finite")
    values, code = _codes(column, test_column)
    groups = _groups(partition, periods, cut)
    draw = generator.random(len(code))
    place = generator.permutation(values)[code] + width * draw
    held = partition.train_indices
    order = np.lexsort((draw[held], place[held], groups))
    test_order = np.lexsort((draw[len(column) :], place[len(column) :]))
    test_period = _consecutive_periods(np.zeros_like(test_order), periods)
    return checked(
        Arrivals.of(partition, order, _consecutive_periods(groups[order], periods), periods),
        PeriodTests.of(test_period, test_order, period_count=periods, held_out=False),
    )


def _groups(partition: Partition, periods: int, cut: Cut) -> Indices:
    """The group of each sample, ``[samples]``: the samples of a group are divided together.

    Raises ConfigurationError if there are fewer samples than periods.
    """
    samples = len(partition.train_indices)
    if periods < 1:
        raise ConfigurationError(f"{periods} periods are asked for; there must be at least 1")
    if samples < periods:
        raise ConfigurationError(
            f"{periods} periods need at least one training sample each, but the devices hold {samples}; lower them"
        )
    return owners_of(partition.train_offsets) if cut == "device" else np.zeros(samples, dtype=np.int64)


def _codes(column: NDArray[Any], test_column: NDArray[Any]) -> tuple[int, Indices]:
    """The number of distinct values, and the rank of each sample's value, training samples first."""
    values, code = np.unique(np.concatenate([column, test_column]), return_inverse=True)
    return len(values), code


def _sizes(group: Indices, periods: int) -> Indices:
    """The number of samples of each group in each period: ``[groups, periods]``."""
    totals = np.bincount(group)[:, None]
    late = periods - 1 - np.arange(len(totals))[:, None] % periods
    sizes: Indices = np.diff((totals * np.arange(periods + 1) + late) // periods, axis=1)
    return sizes


def _consecutive_periods(group: Indices, periods: int) -> Indices:
    """The period of each sample, for samples that are sorted by group and, within a group, by arrival."""
    sizes = _sizes(group, periods)
    return np.repeat(np.tile(np.arange(periods), len(sizes)), sizes.ravel())


def _weighted_periods(
    group: Indices, code: Indices, weights: NDArray[np.float64], generator: np.random.Generator
) -> Indices:
    """Draw each sample's period without replacement, by ``weights [periods, values]``."""
    periods = len(weights)
    sizes = _sizes(group, periods)
    period = np.full(len(group), periods - 1)
    left = np.arange(len(group))
    for number in range(periods - 1):
        # The samples with the shortest exponential waiting times are a draw without replacement by these rates.
        wait = generator.exponential(size=len(left))
        rate = np.maximum(weights[number, code[left]], 1e-300)
        left = left[np.lexsort((wait / rate, group[left]))]
        taken = _ranks(group[left]) < sizes[group[left], number]
        period[left[taken]] = number
        left = left[~taken]
    return period


def _last_parts(group: Indices, period: Indices, fraction: float) -> NDArray[np.bool_]:
    """Whether each sample is among the last of its group and period, for samples sorted by both."""
    periods = int(period.max()) + 1
    cell = group * periods + period
    counts = np.bincount(cell, minlength=(int(group.max()) + 1) * periods)
    so_far = counts.reshape(-1, periods).cumsum(axis=0)
    quota = np.diff(np.floor(share_of(fraction, so_far)), axis=0, prepend=0).ravel()
    last: NDArray[np.bool_] = _ranks(cell) >= counts[cell] - quota[cell]
    return last


def _ranks(owner: Indices) -> Indices:
    """The position of each sample among those of its owner, for samples sorted by owner."""
    return np.arange(len(owner)) - np.searchsorted(owner, owner)
