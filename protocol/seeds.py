"""Sources of random draws. Every draw of an experiment is a function of (seed, round, device, purpose) only."""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Final

import numpy as np

NO_ROUND = 2**32 - 1
"""The round of a draw that belongs to no round, such as a profile or the partition."""
NO_DEVICE = 2**32 - 2
"""The device of a draw that belongs to no device, such as a cohort."""


def sequence(seed: int, *, round: int = NO_ROUND, device: int = NO_DEVICE, purpose: str) -> np.random.SeedSequence:
    """The seed sequence of one purpose. It is the same on all machines and in all Python versions."""
    return np.random.SeedSequence((seed, round, device, zlib.crc32(purpose.encode())))


def generator(seed: int, *, round: int = NO_ROUND, device: int = NO_DEVICE, purpose: str) -> np.random.Generator:
    """A numpy generator (PCG64) for one purpose."""
    return np.random.Generator(np.random.PCG64(sequence(seed, round=round, device=device, purpose=purpose)))


def integer(seed: int, *, round: int = NO_ROUND, device: int = NO_DEVICE, purpose: str) -> int:
    """A 63-bit seed for another library's generator (``torch.Generator.manual_seed``)."""
    words = sequence(seed, round=round, device=device, purpose=purpose).generate_state(1, np.uint64)
    return int(words[0]) >> 1


def uniforms(count: int, seed: int, *, round: int, device: int, purpose: str) -> list[float]:
    """What ``generator(...).random(count)`` gives, computed without numpy.

    A device process draws once for each ask, with cold caches. numpy's generators touch much more memory than this.
    O'Neill, "PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms for Random Number Generation"
    (2014); the seeding is that of numpy's SeedSequence.
    """
    if max(seed, round, device) > _WORD:  # numpy takes such a number for several
        return [*map(float, generator(seed, round=round, device=device, purpose=purpose).random(count))]
    pool = []
    for word, (add, factor) in zip((seed, round, device, zlib.crc32(purpose.encode())), _HASH[:_POOL], strict=True):
        word = (word ^ add) * factor & _WORD
        pool.append(word ^ word >> 16)
    for source, target, add, factor in _MIX:
        word = (pool[source] ^ add) * factor & _WORD
        word = 0xCA01F9DD * pool[target] - 0x4973F715 * (word ^ word >> 16) & _WORD
        pool[target] = word ^ word >> 16
    words = []
    for word, (add, factor) in zip((*pool, *pool), _OUT, strict=True):
        word = (word ^ add) * factor & _WORD
        words.append(word ^ word >> 16)
    a, b, c, d, e, f, g, h = words
    start = b << 96 | a << 64 | d << 32 | c
    step = (f << 96 | e << 64 | h << 32 | g) << 1 & _STATE | 1
    state = (step + start) * _MULTIPLIER + step & _STATE
    found = []
    for _ in range(count):
        state = state * _MULTIPLIER + step & _STATE
        low, turn = (state >> 64 ^ state) & _DOUBLE_WORD, state >> 122
        found.append((low >> turn | low << 64 - turn & _DOUBLE_WORD) >> 11)
    return [number * 2.0**-53 for number in found]


def _constants(first: int, factor: int, count: int) -> list[tuple[int, int]]:
    """Pairs of successive powers, from which SeedSequence makes each of its hashes another function."""
    powers = [first * pow(factor, power, 2**32) & _WORD for power in range(count + 1)]
    return list(pairwise(powers))


_WORD: Final = 2**32 - 1
_DOUBLE_WORD: Final = 2**64 - 1
_STATE: Final = 2**128 - 1
_POOL: Final = 4
_MULTIPLIER: Final = 0x2360ED051FC65DA44385DF649FCCF645
_HASH: Final = _constants(0x43B0D7E5, 0x931E8875, _POOL * _POOL)
_OUT: Final = _constants(0x8B51F9DD, 0x58F38DED, 2 * _POOL)
_MIX: Final = [
    (source, target, *constants)
    for (source, target), constants in zip(
        [(source, target) for source in range(_POOL) for target in range(_POOL) if source != target],
        _HASH[_POOL:],
        strict=True,
    )
]
