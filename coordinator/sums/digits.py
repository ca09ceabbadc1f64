"""The exact sum of many vectors, as whole numbers in base 2**32. Integers are added, so no order can matter."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BITS = 32
_HALF = 1 << (BITS - 1)
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

    Only places that something was added to exist. Three or four are common. However many terms there are, float32 has
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

    def pack(self) -> Packed:
        """The canonical form of the sum."""
        self._carry()
        used = [place for place in sorted(self._places) if self._places[place].any()]
        if not used:
            return Packed(0, np.zeros((0, self.size), np.int32))
        digits = np.zeros((used[-1] + 1 - used[0], self.size), np.int32)
        for place in used:
            digits[place - used[0]] = self._places[place]
        return Packed(used[0], digits)

    @classmethod
    def unpack(cls, packed: Packed) -> Digits:
        """The sum that was packed."""
        sums = cls(packed.digits.shape[1])
        sums._places = {packed.lowest + k: digits.astype(np.int64) for k, digits in enumerate(packed.digits)}
        sums._additions = 1
        return sums

    def _at(self, place: int) -> NDArray[np.int64]:
        if place not in self._places:
            self._places[place] = np.zeros(self.size, np.int64)
        return self._places[place]

    def _carry(self) -> None:
        """Bring every digit between -2**31 and 2**31 - 1. A number has exactly one such form."""
        place = min(self._places, default=0)
        while place <= max(self._places, default=-1):
            if place in self._places:
                digits = self._places[place]
                carried = (digits + _HALF) >> BITS
                if carried.any():
                    self._at(place + 1)[:] += carried
                    digits -= carried << BITS
            place += 1
        self._additions = 1
