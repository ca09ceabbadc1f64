"""When which training sample arrives at which device: flat arrays, ready for a blob.

``periods.py`` (time, drift) and ``tasks.py`` (classes) make arrivals; all samples arrive at the beginning of their
period. ``times.py`` spreads them over the period. Periods count from 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.flat import Indices, offsets_of, owners_of
from fedemu.algorithms.data.partition import Partition
from fedemu.protocol.errors import DataError

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Arrivals:
    """Device ``i`` receives ``indices[offsets[i]:offsets[i + 1]]``, in this order.

    ``offsets [devices + 1]``. ``indices [samples]`` point into ``Corpus.train``, and none of them occurs twice
    at a device.
    ``periods [samples]`` never fall within a device. ``seconds [samples]`` count from the beginning of the period, and
    never fall within a device's period. A device may have no samples in a period, or none at all.
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
        """The samples of one period that have arrived ``seconds`` after its beginning, without other periods (a view).

        A sample that arrives at exactly this moment has arrived. Raises IndexError if there is no such device or
        period.
        """
        return self.indices[self._begin(device, period) : self._end(device, period, seconds)]

    def everything(self, device: int, up_to_period: int, seconds: float = math.inf) -> Indices:
        """All samples of the earlier periods, and those of ``up_to_period`` that have arrived by ``seconds`` (a view).

        Raises IndexError if there is no such device or period.
        """
        return self.indices[self._begin(device, 0) : self._end(device, up_to_period, seconds)]

    def complete(self, device: int, period: int) -> float:
        """The time of the last sample of a period, in seconds from its beginning; minus infinity if there is none.

        Raises IndexError if there is no such device or period.
        """
        begin, end = self._begin(device, period), self._end(device, period, math.inf)
        return float(self.seconds[end - 1]) if begin < end else -math.inf

    def owners(self) -> Indices:
        """The device of each sample, ``[samples]``."""
        return owners_of(self.offsets)

    def counts(self) -> Indices:
        """The number of samples that arrive, ``[devices, periods]``."""
        cell = self.owners() * self.period_count + self.periods
        return np.bincount(cell, minlength=len(self) * self.period_count).reshape(len(self), self.period_count)

    def label_counts(self, labels: NDArray[np.integer[Any]], classes: int, device: int | None = None) -> Indices:
        """The number of samples of each class that arrive, ``[periods, classes]``, at one device or at all of them.

        ``labels`` are those of the whole training split.
        """
        rows = slice(None) if device is None else slice(self._begin(device, 0), self.offsets[device + 1])
        cell = self.periods[rows] * classes + labels[self.indices[rows]]
        return np.bincount(cell, minlength=self.period_count * classes).reshape(self.period_count, classes)

    def with_seconds(self, seconds: Times) -> Arrivals:
        """The same samples at other times, ``[samples]``. The samples of one period are sorted by time."""
        order = np.lexsort((seconds, self.periods, self.owners()))
        return replace(self, indices=self.indices[order], seconds=seconds[order])

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The arrivals as arrays for a blob."""
        return {
            "offsets": self.offsets,
            "indices": self.indices,
            "periods": self.periods,
            "seconds": self.seconds,
            "period_count": np.array([self.period_count], dtype=np.int64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Arrivals:
        """The inverse of ``to_arrays``. Raises DataError if the arrays do not describe a stream."""
        offsets, indices, periods, count = (
            _row(arrays, name, np.int64) for name in ("offsets", "indices", "periods", "period_count")
        )
        seconds = _row(arrays, "seconds", np.float64)
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(indices) or np.any(np.diff(offsets) < 0):
            raise DataError(f"the offsets of the stream do not fit its {len(indices)} indices")
        if len(indices) and indices.min() < 0:
            raise DataError(f"the stream holds the negative index {indices.min()}")
        if not len(indices) == len(periods) == len(seconds):
            raise DataError(
                f"the stream has {len(indices)} indices, {len(periods)} periods and {len(seconds)} times; "
                "it needs the same number of each"
            )
        if len(count) != 1:
            raise DataError(f"period_count of the stream has {len(count)} values; it needs exactly 1")
        arrivals = cls(offsets, indices, periods, seconds, int(count[0]))
        arrivals._check()
        return arrivals

    @classmethod
    def of(cls, partition: Partition, positions: Indices, period: Indices, period_count: int) -> Arrivals:
        """Some of the partition's training samples, all at the beginning of their periods.

        ``positions [samples]`` are positions in ``partition.train_indices``. Their order is kept within a device's
        period. ``period [samples]`` is the period of each.
        """
        device = owners_of(partition.train_offsets)[positions]
        order = np.lexsort((period, device))
        indices = partition.train_indices[positions[order]]
        return cls(
            offsets_of(device, len(partition)), indices, period[order], np.zeros(len(order), np.float64), period_count
        )

    def _begin(self, device: int, period: int) -> int:
        if not 0 <= device < len(self):
            raise IndexError(f"device {device} of {len(self)}")
        if not 0 <= period < self.period_count:
            raise IndexError(f"period {period} of {self.period_count}")
        first, stop = self.offsets[device], self.offsets[device + 1]
        return int(first + self.periods[first:stop].searchsorted(period))

    def _end(self, device: int, period: int, seconds: float) -> int:
        begin = self._begin(device, period)
        stop = begin + self.periods[begin : self.offsets[device + 1]].searchsorted(period, side="right")
        return int(begin + self.seconds[begin:stop].searchsorted(seconds, side="right"))

    def _check(self) -> None:
        """Raise DataError if the arrays break a rule of this class."""
        if self.period_count < 1:
            raise DataError(f"the stream has {self.period_count} periods; it needs at least 1")
        owners = self.owners()
        if len(self.indices):
            once = np.sort(owners * (int(self.indices.max()) + 1) + self.indices)
            if np.any(once[1:] == once[:-1]):
                raise DataError("the stream lets a sample arrive twice at a device")
        outside = self.periods[(self.periods < 0) | (self.periods >= self.period_count)]
        if len(outside):
            raise DataError(f"the stream names period {outside[0]} of {self.period_count}")
        if not np.all(np.isfinite(self.seconds) & (self.seconds >= 0.0)):
            raise DataError("the stream has times that are not finite, or before the beginning of their period")
        (earlier, later), (before, after) = ((row[:-1], row[1:]) for row in (self.periods, self.seconds))
        wrong = (later < earlier) | ((later == earlier) & (after < before))
        if np.any(wrong & (owners[1:] == owners[:-1])):
            raise DataError("the samples of the stream are not in the order of their arrival")


def _row(arrays: Mapping[str, NDArray[Any]], name: str, dtype: type[np.generic]) -> NDArray[Any]:
    """The one-dimensional array ``name``. Raises DataError if there is none of this dtype."""
    if name not in arrays:
        raise DataError(f"the stream lacks {name}")
    found = np.asarray(arrays[name])
    if found.dtype != dtype or found.ndim != 1:
        raise DataError(f"{name} of the stream is {found.dtype} {list(found.shape)}, not a row of {dtype.__name__}")
    return found
