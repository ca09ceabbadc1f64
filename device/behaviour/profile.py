"""A device's profile: how fast it computes, downloads and uploads.

Most quantities are drawn once per device; transfer speeds may vary from round to round. Units: seconds, seconds per
sample, kbps (1,000 bit/s).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from fedemu.protocol.seeds import generator

SLOWEST = 0.1
"""A speed that varies from round to round never falls below this fraction of its mean."""
SMALLEST, LARGEST = math.ulp(0.0), sys.float_info.max
"""The numbers of float64 that are the nearest to 0 and to infinity."""


@dataclass(frozen=True)
class Fixed:
    """The same value for every device."""

    value: float

    def draw(self, random: Generator) -> float:
        """One value."""
        return self.value


@dataclass(frozen=True)
class Uniform:
    """A uniform distribution over [low, high)."""

    low: float
    high: float

    def draw(self, random: Generator) -> float:
        """One value."""
        return random.uniform(self.low, self.high)


@dataclass(frozen=True)
class Normal:
    """A normal distribution that is truncated to [low, high]: a value outside is drawn again.

    ``mean`` must lie within [low, high].
    """

    mean: float
    std: float
    low: float = 0.0
    high: float = float("inf")

    def draw(self, random: Generator) -> float:
        """One value."""
        while True:
            value = random.normal(self.mean, self.std)
            if self.low <= value <= self.high:
                return value


@dataclass(frozen=True)
class Lognormal:
    """A log-normal distribution. ``sigma`` is the standard deviation of the logarithm.

    Every value is above 0 and finite, also where ``sigma`` is so large that float64 does not hold the exact one.
    """

    median: float
    sigma: float

    def draw(self, random: Generator) -> float:
        """One value."""
        with np.errstate(over="ignore"):
            value = float(self.median * np.exp(self.sigma * random.standard_normal()))
        return min(max(value, SMALLEST), LARGEST)


@dataclass(frozen=True)
class Recorded:
    """Measured values, one row per measured device. Quantities that share a ``file`` are taken from the same row.

    ``deviations`` are the standard deviations of the values from round to round. Rows are drawn in proportion to
    ``weights``.
    """

    file: str
    values: tuple[float, ...]
    deviations: tuple[float, ...]
    weights: tuple[float, ...]

    def row(self, random: Generator) -> int:
        """The number of a row, drawn at random."""
        edges = np.cumsum(self.weights)
        return int(np.searchsorted(edges, random.random() * edges[-1], side="right"))


Distribution = Fixed | Uniform | Normal | Lognormal
Quantity = Distribution | Recorded


@dataclass(frozen=True)
class Profile:
    """How fast one device is.

    ``latency`` is in seconds, one way. The spreads are the standard deviations of the speeds from round to round, in
    kbps.
    """

    seconds_per_sample: float
    down_kbps: float
    up_kbps: float
    latency: float
    down_spread: float = 0.0
    up_spread: float = 0.0

    def speeds(self, seed: int, device: int, round: int) -> tuple[float, float]:
        """The speeds of download and upload in this round, in kbps."""
        if self.down_spread == 0.0 and self.up_spread == 0.0:
            return self.down_kbps, self.up_kbps
        random = generator(seed, round=round, device=device, purpose="network")
        down = Normal(self.down_kbps, self.down_spread, low=SLOWEST * self.down_kbps).draw(random)
        up = Normal(self.up_kbps, self.up_spread, low=SLOWEST * self.up_kbps).draw(random)
        return down, up


def draw_profile(seed: int, device: int, quantities: Mapping[str, Quantity]) -> Profile:
    """The profile of a device, as a function of (seed, device).

    The keys of ``quantities`` are the fields of ``Profile`` without the spreads.
    """
    values: dict[str, float] = {}
    spreads: dict[str, float] = {}
    for key, quantity in quantities.items():
        if isinstance(quantity, Recorded):
            row = quantity.row(generator(seed, device=device, purpose=f"profile/rows/{quantity.file}"))
            values[key], spreads[key] = quantity.values[row], quantity.deviations[row]
        else:
            values[key] = quantity.draw(generator(seed, device=device, purpose=f"profile/{key}"))
    return Profile(**values, down_spread=spreads.get("down_kbps", 0.0), up_spread=spreads.get("up_kbps", 0.0))


def transfer_seconds(size: int, kbps: float) -> float:
    """The time in seconds that ``size`` bytes take at ``kbps``."""
    return size * 8 / (kbps * 1000)
