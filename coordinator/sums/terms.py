"""The weighted sum of a block of several payloads, without any rounding.

All numbers of a block are multiples of one power of two. If their weighted sum needs more bits than float64 has, they
are cut into slices of fewer bits (``t = (x + M) - M`` and ``x - t`` are exact for a suitable M). Then every partial sum
of a slice is a whole number of units below 2**53, so it is exact in whatever order numpy adds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedemu.coordinator.sums.digits import BITS
from fedemu.coordinator.sums.leaf import widened

T = TypeVar("T", bound=np.generic)

PAYLOADS = 16
"""The number of payloads in a block."""
ELEMENTS = 4096
"""The number of elements in a block. All scratch space together then stays in a core's second-level cache."""
_PART = 26
"""Weights are taken apart into numbers of so many bits. Weights below 67 million have one part."""


class Term(NamedTuple):
    """A part of a sum: ``units [elements]``, each worth ``2**exponent``."""

    units: NDArray[np.int64]
    exponent: int


class Part(NamedTuple):
    """A part of the weights of some payloads: ``numbers * 2**shift``, where numbers are whole and below 2**26."""

    shift: int
    numbers: NDArray[np.float64]


class _Rows(NamedTuple):
    """Numbers ``[payloads, elements]`` of at most ``2**top`` in size, all of them multiples of ``2**low``."""

    values: NDArray[np.float64]
    top: int
    low: int


class Block(threading.local):
    """Adds blocks of payloads. It keeps the scratch space for that, for every thread its own."""

    def __init__(self) -> None:
        self._wide = np.empty(PAYLOADS * ELEMENTS)
        self._slice = np.empty(PAYLOADS * ELEMENTS)
        self._bits = np.empty(PAYLOADS * ELEMENTS, "<u4")
        self._sum = np.empty(ELEMENTS)

    def sum(self, dtype: str, arrays: Sequence[NDArray[Any]], parts: Sequence[Part]) -> Iterator[Term]:
        """The weighted sum of arrays ``[elements]`` of a dtype of the wire, as terms. Use each before the next.

        There are at most ``PAYLOADS`` arrays of ``ELEMENTS`` elements. ``parts`` are those of their weights. Raises
        ValueError if a value is not finite.
        """
        # A slice of 52 bits, as a single payload would get, is one too many for the sum with M in ``_slices``.
        room = 53 - max(2, *(int(part.numbers.sum()).bit_length() for part in parts))
        out = self._sum[: len(arrays[0])]
        for rows in self._rows(dtype, arrays):
            for values, exponent in self._slices(rows, room):
                for shift, numbers in parts:
                    np.dot(numbers, values, out=out)
                    yield Term(_units(out, exponent), exponent + shift)

    def _rows(self, dtype: str, arrays: Sequence[NDArray[Any]]) -> Iterator[_Rows]:
        wide = _shaped(self._wide, arrays)
        if dtype == "int64":
            for row, array in zip(wide, arrays, strict=True):
                np.multiply(array >> 32, 2.0**32, out=row)
            yield _Rows(wide, 63, 32)
            for row, array in zip(wide, arrays, strict=True):
                np.copyto(row, array & 0xFFFFFFFF)
            yield _Rows(wide, 32, 0)
            return
        if dtype not in ("float32", "float16", "bfloat16"):
            np.concatenate(arrays, out=wide.reshape(-1))
            if dtype != "float64":
                yield _Rows(wide, 32, 0)
            elif (span := _span(wide.view("<u8") << 1, 53)) is not None:
                yield _Rows(wide, *span)
            return
        bits = _shaped(self._bits, arrays)
        narrow = [widened(array) for array in arrays] if dtype == "bfloat16" else arrays
        np.concatenate(narrow, out=bits.view("<f4").reshape(-1))
        np.copyto(wide, bits.view("<f4"))
        np.left_shift(bits, 1, out=bits)
        if (span := _span(bits, 24)) is not None:
            yield _Rows(wide, *span)

    def _slices(self, rows: _Rows, room: int) -> Iterator[tuple[NDArray[np.float64], int]]:
        """The rows as slices of at most ``room`` bits, with the exponents of their units. Overwrites the rows."""
        values, top, low = rows
        cut = _shaped(self._slice, values)
        while top - low > room:
            unit = top - room
            aligned = -(-unit // BITS) * BITS
            if aligned - 1 - low <= room:  # the rest will be one slice in any case
                unit = aligned
            if unit > 970:
                raise ValueError("a payload has values beyond 2**960, which cannot be added")
            shifter = 1.5 * 2.0 ** (unit + 52)
            np.add(values, shifter, out=cut)
            np.subtract(cut, shifter, out=cut)
            np.subtract(values, cut, out=values)
            yield cut, unit
            top = unit - 1
        aligned = low - low % BITS
        yield values, aligned if top - aligned <= room else low


def _shaped(space: NDArray[T], rows: Sequence[NDArray[Any]] | NDArray[Any]) -> NDArray[T]:
    """The beginning of scratch space, in the shape of these rows and without gaps between them."""
    count, size = len(rows), len(rows[0])
    return space[: count * size].reshape(count, size)


def _span(bits: NDArray[Any], mantissa: int) -> tuple[int, int] | None:
    """Exponents ``top`` and ``low`` of floats, given as bits without their sign: see _Rows. None if all are zero.

    ``mantissa`` is the number of bits below the exponent, and one. Overwrites the bits.
    """
    largest, smallest = int(bits.max()), int(bits.min())
    if largest == 0:
        return None
    top, beyond = largest >> mantissa, (1 << (8 * bits.itemsize - mantissa)) - 1
    if top == beyond:
        raise ValueError("a payload has values that are not finite, which cannot be added")
    if smallest == 0:
        np.subtract(bits, bits.dtype.type(1), out=bits)  # a zero becomes the largest number of all
        smallest = int(bits.min()) + 1
    bias = beyond // 2
    return top - bias + 1, max(smallest >> mantissa, 1) - bias - mantissa + 1


def parts_of(weights: Sequence[int]) -> list[Part]:
    """Weights as sums of parts."""
    parts: list[Part] = []
    for shift in range(0, max(max(weights).bit_length(), 1), _PART):
        part = np.array([(weight >> shift) & ((1 << _PART) - 1) for weight in weights], np.float64)
        parts.append(Part(shift, part))
    return parts


def _units(values: NDArray[np.float64], exponent: int) -> NDArray[np.int64]:
    """Values that are multiples of ``2**exponent``, as whole numbers."""
    if -1000 < exponent < 1000:
        return (values * 2.0**-exponent).astype(np.int64)
    return np.ldexp(values, -exponent).astype(np.int64)
