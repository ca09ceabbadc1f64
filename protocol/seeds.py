"""Sources of random draws. Every draw of an experiment is a function of (seed, round, device, purpose) only."""

from __future__ import annotations

import zlib

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
