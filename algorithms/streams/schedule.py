"""When which training sample arrives at which device, and what each period is tested on: flat arrays, ready for a blob.

Makers are in ``streams_periods.py`` (time, drift) and ``streams_tasks.py`` (classes); they let everything arrive at its
period's beginning, and ``streams_arrivals.py`` spreads that over the period. Periods count from 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.data.partition import Indices, Partition
from fedemu.protocol.errors import ConfigurationError, DataError

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Schedule:
    """Device ``i`` receives ``indices[offsets[i]:offsets[i + 1]]``, in this order.

    ``offsets [devices + 1]``. ``indices [samples]`` point into ``Corpus.train``, none of them twice. ``periods
    [samples]`` never fall within a device, and ``seconds [samples]``, after the period's beginning, never fall within a
    device's period. A device may have nothing in some period, or in any.
    """

    offsets: Indices
    indices: Indices
    periods: Indices
    seconds: Times
    period_count: int

    def __len__(self) -> int:
        """The number of devices."""
        return len(self.offsets) - 1

    def arrived(self, device: int, period: int, seconds: float) -> Indices:
        """What a device has received in the period, and in no other, by so many seconds after its beginning (a view).

        A sample that arrives at that very moment has arrived.
        """
        return self.indices[self._begin(device, period) : self._end(device, period, seconds)]

    def everything(self, device: int, up_to_period: int, seconds: float = math.inf) -> Indices:
        """All of the earlier periods and what has arrived of this one, as if nothing were ever gone (a view)."""
        return self.indices[self._begin(device, 0) : self._end(device, up_to_period, seconds)]

    def owners(self) -> Indices:
        """The device of each sample, ``[samples]``."""
        return owners_of(self.offsets)

    def counts(self) -> Indices:
        """How many samples arrive, ``[devices, periods]``."""
        cell = self.owners() * self.period_count + self.periods
        return np.bincount(cell, minlength=len(self) * self.period_count).reshape(len(self), self.period_count)

    def label_counts(self, labels: NDArray[np.integer[Any]], classes: int, device: int | None = None) -> Indices:
        """How many samples of each class arrive, ``[periods, classes]``, at one device or at all of them.

        ``labels`` are those of the whole training split.
        """
        rows = slice(None) if device is None else slice(self._begin(device, 0), self.offsets[device + 1])
        cell = self.periods[rows] * classes + labels[self.indices[rows]]
        return np.bincount(cell, minlength=self.period_count * classes).reshape(self.period_count, classes)

    def with_seconds(self, seconds: Times) -> Schedule:
        """The same samples at other times, ``[samples]``; those of one period are brought into the order of time."""
        order = np.lexsort((seconds, self.periods, self.owners()))
        return replace(self, indices=self.indices[order], seconds=seconds[order])

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        return {
            "offsets": self.offsets,
            "indices": self.indices,
            "periods": self.periods,
            "seconds": self.seconds,
            "period_count": np.array([self.period_count], dtype=np.int64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Schedule:
        """The inverse of ``to_arrays``; raises DataError on anything that is no schedule."""
        what = "schedule"
        offsets, indices, periods, count = (
            _row(arrays, name, np.int64, what) for name in ("offsets", "indices", "periods", "period_count")
        )
        seconds = _row(arrays, "seconds", np.float64, what)
        _check_offsets(offsets, indices, what)
        if not len(indices) == len(periods) == len(seconds):
            raise DataError(
                f"the schedule has {len(indices)} indices, {len(periods)} periods and {len(seconds)} times; "
                "it needs as many of each"
            )
        schedule = cls(offsets, indices, periods, seconds, _scalar(count, "period_count", what))
        schedule._check()
        return schedule

    @classmethod
    def of(cls, partition: Partition, positions: Indices, period: Indices, period_count: int) -> Schedule:
        """Some of the partition's training samples, all at the beginning of their periods.

        ``positions [samples]`` are those in ``partition.train_indices``, in an order that is kept within a device's
        period; ``period [samples]`` belongs to them.
        """
        device = owners_of(partition.train_offsets)[positions]
        order = np.lexsort((period, device))
        indices = partition.train_indices[positions[order]]
        return cls(
            _offsets(device, len(partition)), indices, period[order], np.zeros(len(order), np.float64), period_count
        )

    def _begin(self, device: int, period: int) -> int:
        if not 0 <= device < len(self):
            raise IndexError(f"device {device} of {len(self)}")
        if not 0 <= period < self.period_count:
            raise IndexError(f"period {period} of {self.period_count}")
        first, stop = self.offsets[device], self.offsets[device + 1]
        return int(first + np.searchsorted(self.periods[first:stop], period))

    def _end(self, device: int, period: int, seconds: float) -> int:
        begin = self._begin(device, period)
        stop = begin + np.searchsorted(self.periods[begin : self.offsets[device + 1]], period, side="right")
        return int(begin + np.searchsorted(self.seconds[begin:stop], seconds, side="right"))

    def _check(self) -> None:
        if self.period_count < 1:
            raise DataError(f"the schedule has {self.period_count} periods; it needs at least 1")
        if len(np.unique(self.indices)) < len(self.indices):
            raise DataError("the schedule lets a sample arrive twice")
        outside = self.periods[(self.periods < 0) | (self.periods >= self.period_count)]
        if len(outside):
            raise DataError(f"the schedule names period {outside[0]} of {self.period_count}")
        if not np.all(np.isfinite(self.seconds) & (self.seconds >= 0.0)):
            raise DataError("the schedule has times before the beginning of their period, or none at all")
        if np.any(np.lexsort((self.seconds, self.periods, self.owners())) != np.arange(len(self.indices))):
            raise DataError("the schedule's samples are not in the order of their arrival")


@dataclass(frozen=True)
class PeriodTests:
    """What a model is tested on for period ``t``: ``indices[offsets[t]:offsets[t + 1]]``, whatever it was trained on.

    ``offsets [periods + 1]``. With ``held_out`` the indices point into ``Corpus.train``, to samples that never arrive
    at a device; without, into ``Corpus.test``.
    """

    offsets: Indices
    indices: Indices
    held_out: bool

    def __len__(self) -> int:
        """The number of periods."""
        return len(self.offsets) - 1

    def split(self, corpus: Corpus) -> Split:
        """The part of the corpus that the indices point into."""
        return corpus.train if self.held_out else corpus.test

    def of_period(self, period: int) -> Indices:
        if not 0 <= period < len(self):
            raise IndexError(f"period {period} of {len(self)}")
        return self.indices[self.offsets[period] : self.offsets[period + 1]]

    def up_to(self, period: int) -> Indices:
        """The test samples of all periods so far, the given one included."""
        return self.indices[: self.offsets[period] + len(self.of_period(period))]

    def to_arrays(self) -> dict[str, Indices]:
        held_out = np.array([self.held_out], dtype=np.int64)
        return {"offsets": self.offsets, "indices": self.indices, "held_out": held_out}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> PeriodTests:
        """The inverse of ``to_arrays``; raises DataError on anything that is no test plan."""
        what = "test plan"
        offsets, indices, held_out = (_row(arrays, name, np.int64, what) for name in ("offsets", "indices", "held_out"))
        _check_offsets(offsets, indices, what)
        return cls(offsets, indices, bool(_scalar(held_out, "held_out", what)))

    @classmethod
    def of(cls, period: Indices, indices: Indices, *, period_count: int, held_out: bool) -> PeriodTests:
        """The plan of samples ``[samples]`` in any order, which it keeps within a period."""
        return cls(_offsets(period, period_count), indices[np.argsort(period, kind="stable")], held_out)


def checked(schedule: Schedule, tests: PeriodTests) -> tuple[Schedule, PeriodTests]:
    """Both, as they are; ConfigurationError where all devices together have nothing to train on in some period, or
    there is nothing to test it on.
    """
    for missing, purpose in (
        (schedule.counts().sum(axis=0) == 0, "train on at any device"),
        (np.diff(tests.offsets) == 0, "test on"),
    ):
        if np.any(missing):
            raise ConfigurationError(
                f"period {np.argmax(missing)} of {len(missing)} has no sample to {purpose}; "
                "ask for fewer periods, or use more data"
            )
    return schedule, tests


def owners_of(offsets: Indices) -> Indices:
    """Who owns each sample, ``[samples]``, from the owners' ``offsets [owners + 1]``."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _offsets(owner: Indices, owners: int) -> Indices:
    return np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=owners))])


def _row(arrays: Mapping[str, NDArray[Any]], name: str, dtype: type[np.generic], what: str) -> NDArray[Any]:
    if name not in arrays:
        raise DataError(f"the {what} lacks {name}")
    row = np.asarray(arrays[name])
    if row.dtype != dtype or row.ndim != 1:
        raise DataError(f"{name} of the {what} is {row.dtype} {list(row.shape)}, not a row of {dtype.__name__}")
    return row


def _scalar(row: Indices, name: str, what: str) -> int:
    if len(row) != 1:
        raise DataError(f"{name} of the {what} has {len(row)} values; it needs exactly 1")
    return int(row[0])


def _check_offsets(offsets: Indices, indices: Indices, what: str) -> None:
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(indices) or np.any(np.diff(offsets) < 0):
        raise DataError(f"the offsets of the {what} do not fit its {len(indices)} indices")
    if len(indices) and indices.min() < 0:
        raise DataError(f"the {what} holds the negative index {indices.min()}")
