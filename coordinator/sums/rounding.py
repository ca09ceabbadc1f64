"""The one rounding of an exact sum, after its division: to the nearest number of the dtype, ties to even."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedemu.coordinator.sums.digits import BITS, Digits
from fedemu.protocol.tensors import DTYPES

_SLACK = 16
"""The most by which a quotient of floats may be wrong, in units of its last place. Three are possible."""
_FAR = 28
"""Floats cannot hold powers of 2**32 of such places. No sum of narrow numbers has them."""
_PRECISION: Final = {"float32": (24, -126), "float16": (11, -14), "bfloat16": (8, -126)}
"""The bits of a normal number, and the exponent of the smallest one."""


def rounded(sums: Digits, divisor: int, dtype: str) -> NDArray[Any]:
    """The sum divided by a positive whole number, ``[size]`` of a dtype of the wire, bfloat16 as uint16 of its bits.

    A float beyond the dtype is infinite, an integer beyond it is the largest or smallest. A bool is true if the
    quotient rounds to 1 or more. A sum of zeros is +0. Results of float64 below 2**-1022 may be off by the last bit.
    """
    out = np.empty(sums.size, DTYPES[dtype])
    hard: list[tuple[NDArray[np.intp], NDArray[np.int64]]] = []
    for part, digits in sums.blocks():
        if "float" not in dtype:
            out[part] = _whole(digits, sums.lowest, divisor, dtype)
        elif dtype == "float64":
            out[part] = _exact(digits, sums.lowest, divisor, nearest=True)
        else:
            values, unsure = _quick(digits, sums.lowest, divisor, dtype)
            out[part] = _narrowed(values, dtype)
            if unsure.any():
                hard.append((part.start + np.flatnonzero(unsure), digits[:, unsure]))
    if hard:
        positions, columns = zip(*hard, strict=True)
        exact = _exact(np.concatenate(columns, axis=1), sums.lowest, divisor, nearest=False)
        out[np.concatenate(positions)] = _narrowed(exact, dtype)
    return out


def _quick(
    digits: NDArray[np.int64], lowest: int, divisor: int, dtype: str
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Quotients in float64, and for which of them it is not sure that they round as the exact ones do.

    Few are: those that come near to the middle between two numbers of the dtype, and those near to zero.
    """
    values, scaled = np.zeros(digits.shape[1]), np.empty(digits.shape[1])
    if max(-lowest, lowest + len(digits)) > _FAR:
        return values, np.ones(len(values), np.bool_)
    for place, row in enumerate(digits, lowest):
        np.multiply(row, 2.0 ** (BITS * place), out=scaled)
        values += scaled
    values /= divisor
    precision, smallest = _PRECISION[dtype]
    below = 53 - precision
    # How far each is behind the point that lies ``_SLACK`` before the middle between two numbers of the dtype.
    behind = values.view(np.int64) + (_SLACK - (1 << (below - 1)))
    behind &= (1 << below) - 1
    unsure = behind <= 2 * _SLACK
    small = np.abs(values, out=scaled) < 2.0 ** (smallest + 1)
    if small.any():
        unsure |= small & (values != 0.0)
    return values, unsure


def _exact(digits: NDArray[np.int64], lowest: int, divisor: int, *, nearest: bool) -> NDArray[np.float64]:
    """The quotients in float64, either rounded to nearest, or to the odd one of the two numbers beside.

    What was rounded to odd can be rounded again to fewer bits, with the result of a single rounding.
    """
    extra = 2 + -(-divisor.bit_length() // BITS)
    negative, quotient, rest = _divided(digits, extra, divisor)
    leading = len(quotient) - 1 - np.argmax(quotient[::-1] != 0, axis=0)
    columns = np.arange(quotient.shape[1])
    high, middle, low = (quotient[leading - k, columns].astype(np.float64) for k in range(3))
    rows = np.arange(len(quotient))[:, None]
    more = (rest != 0) | ((quotient != 0) & (rows < leading - 2)).any(axis=0)
    # The three digits as a number and the error of its rounding, both exact. ``more``: something below 1 is missing.
    big, small = high * 2.0 ** (2 * BITS), middle * 2.0**BITS
    total = big + small
    error = small - (total - big) + low
    value = total + error
    error -= value - total
    if nearest:
        above = np.nextafter(value, np.inf)
        value = np.where(more & (error > 0) & (2 * error == above - value), above, value)
    else:
        bits = value.view(np.int64)
        bits += np.where((more | (error != 0)) & (bits & 1 == 0), np.where(error < 0, -1, 1), 0)
    with np.errstate(over="ignore"):
        found: NDArray[np.float64] = np.ldexp(value, BITS * (leading - 2 + lowest - extra))
    return np.where(negative, -found, found)


def _whole(digits: NDArray[np.int64], lowest: int, divisor: int, dtype: str) -> NDArray[np.int64]:
    """The quotients as integers within the limits of the dtype. No digit lies below the point."""
    negative, quotient, rest = _divided(digits, lowest, divisor)
    quotient = np.concatenate([quotient, np.zeros((2, quotient.shape[1]), np.int64)])
    value = (quotient[1] & 0x7FFFFFFF) << BITS | quotient[0]
    up = (2 * rest > divisor) | ((2 * rest == divisor) & (value & 1 == 1))
    limits = np.iinfo(DTYPES[dtype]) if dtype != "bool" else np.iinfo(np.int8)
    least, most = (0, 1) if dtype == "bool" else (int(limits.min), int(limits.max))
    huge = (quotient[1] >> 31 != 0) | quotient[2:].any(axis=0)
    huge |= ~negative & (value == np.iinfo(np.int64).max)  # it could not be rounded up
    value = np.where(negative, -value - up, value + (up & ~huge))
    return np.where(huge, np.where(negative, least, most), np.clip(value, least, most))


def _divided(
    digits: NDArray[np.int64], extra: int, divisor: int
) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[Any]]:
    """Long division: signs, quotients of the sizes ``[places + extra, size]`` with digits from 0 on, and remainders.

    ``extra`` zeros are put below the digits before.
    """
    count, size = digits.shape
    rows = np.zeros((count + extra, size), np.int64)
    rows[extra:] = digits
    first = np.argmax(digits[::-1] != 0, axis=0)
    negative = digits[count - 1 - first, np.arange(size)] < 0
    rows[:, negative] *= -1
    for row, following in pairwise(rows):
        following += row >> BITS
        row &= (1 << BITS) - 1
    if divisor == 1:
        return negative, rows, np.zeros(size, np.int64)
    # A remainder and one more digit must fit into 64 bits. Otherwise the numbers are Python's.
    numbers: NDArray[Any] = rows if divisor < 2**31 else rows.astype(object)
    rest: NDArray[Any] = np.zeros(size, numbers.dtype)
    quotient = np.empty_like(numbers)
    for place in range(len(numbers) - 1, -1, -1):
        rest = rest * (1 << BITS) + numbers[place]
        quotient[place] = rest // divisor
        rest = rest - quotient[place] * divisor
    return negative, quotient.astype(np.int64), rest


def _narrowed(values: NDArray[np.float64], dtype: str) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # a sum beyond the dtype is infinite, as anywhere else
        if dtype != "bfloat16":
            return values.astype(DTYPES[dtype])
        narrow = values.astype(np.float32)
    # To odd first, so that the second rounding gives what a single one would.
    bits = narrow.view(np.int32)
    with np.errstate(invalid="ignore"):
        missing = np.where(np.isfinite(narrow), np.abs(values) - np.abs(narrow), 0.0)
    bits += np.where((missing != 0) & (bits & 1 == 0), np.sign(missing).astype(np.int32), 0)
    wide = narrow.view(np.uint32).astype(np.uint64)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
