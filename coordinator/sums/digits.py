"""The exact sum of many vectors, as whole numbers in base 2**32. Integers are added, so no order can matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BITS = 32
_HALF = 1 << (BITS - 1)
_BLOCK = 8192
_FARTHEST = 40
"""No float64 has places as far from 0 as this."""
_FULL = 256
"""After so many additions digits are carried. 1,024 of them would be the first that could overflow 64 bits."""


class Packed(NamedTuple):
    """A sum in its one canonical form: ``digits [places, size]`` int32, the lowest place first.

    The value of an element is the sum of ``digits[k] * 2**(32 * (lowest + k))``. Neither the first nor the last place
    is all zeros, so equal sums are equal to the bit. ``places`` is 0 if all sums are zero.
    """

    lowest: int
    digits: NDArray[np.int32]


class Digits:
    """The sum of vectors of ``size`` elements. A place holds int64 numbers ``[size]`` that count 2**(32 * place).

    Only places that something was added to exist. Two to four are common. However many terms there are, float32 has
    no more than ten.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._places: dict[int, NDArray[np.int64]] = {}
        self._additions = 0

    def add(self, units: NDArray[np.int64], exponent: int, start: int) -> None:
        """Add ``units * 2**exponent`` to the elements from ``start`` on. Units are at most 2**53 in size."""
        place, shift = divmod(exponent, BITS)
        part = slice(start, start + len(units))
        if shift:
            self._at(place + 1)[part] += units >> (BITS - shift)
            units = (units & ((1 << (BITS - shift)) - 1)) << shift
        self._at(place)[part] += units

    def added(self, additions: int) -> None:
        """No element got more than so many additions since the last call. Carries if it is time to."""
        self._additions += additions
        if self._additions > _FULL:
            self._carry()

    def merge(self, other: Digits) -> None:
        """Add another sum."""
        for place, digits in other._places.items():
            self._at(place)[:] += digits
        self.added(other._additions + 1)

    @property
    def lowest(self) -> int:
        """The place of the first digit of ``canonical``."""
        return min(self._places, default=0)

    def canonical(self, start: int, stop: int) -> NDArray[np.int64]:
        """The digits ``[places, elements]`` of some elements, the lowest place first. Places may be all zeros.

        Digits are between -2**31 and 2**31 - 1. A number has exactly one such form.
        """
        places = range(self.lowest, max(self._places, default=-1) + 2)
        rows = np.empty((len(places), stop - start), np.int64)
        carried = np.zeros(stop - start, np.int64)
        for place, row in zip(places, rows, strict=True):
            if place in self._places:
                np.add(self._places[place][start:stop], carried, out=row)
            else:
                row[:] = carried
            np.add(row, _HALF, out=carried)
            np.right_shift(carried, BITS, out=carried)
            row -= carried << BITS
        return rows

    def blocks(self) -> Iterator[tuple[slice, NDArray[np.int64]]]:
        """The canonical digits of all elements, in blocks that a core's cache can hold."""
        for start in range(0, self.size, _BLOCK):
            stop = min(start + _BLOCK, self.size)
            yield slice(start, stop), self.canonical(start, stop)

    def pack(self) -> Packed:
        """The canonical form of the sum."""
        digits = np.zeros((max(self._places, default=-1) - self.lowest + 2, self.size), np.int32)
        for part, rows in self.blocks():
            digits[:, part] = rows
        used = np.flatnonzero(digits.any(axis=1))
        if not len(used):
            return Packed(0, digits[:0])
        return Packed(self.lowest + int(used[0]), digits[used[0] : used[-1] + 1])

    @classmethod
    def unpack(cls, packed: Packed) -> Digits:
        """The sum that was packed. Raises ValueError if no sum of floats has such places."""
        if packed.lowest < -_FARTHEST or packed.lowest + len(packed.digits) > _FARTHEST:
            raise ValueError(f"{len(packed.digits)} places from {packed.lowest} on are none of a sum of floats")
        sums = cls(packed.digits.shape[1])
        sums._places = {packed.lowest + k: digits.astype(np.int64) for k, digits in enumerate(packed.digits)}
        sums._additions = 1
        return sums

    def _at(self, place: int) -> NDArray[np.int64]:
        if place not in self._places:
            self._places[place] = np.zeros(self.size, np.int64)
        return self._places[place]

    def _carry(self) -> None:
        """Replace the numbers of all places by their canonical digits."""
        lowest, highest = self.lowest, max(self._places, default=-1)
        for part, rows in self.blocks():
            for place, row in enumerate(rows, lowest):
                if place <= highest or row.any():
                    self._at(place)[part] = row
        self._additions = 1
