"""What a device is capable of: quantities drawn once per device, and the transfer speeds of a round.

Units: seconds, seconds per sample, kbps (1,000 bit/s).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from fedemu.protocol.seeds import generator

SLOWEST = 0.1
"""A speed that varies from round to round never falls below this part of its mean."""


@dataclass(frozen=True)
class Fixed:
    value: float

    def draw(self, random: Generator) -> float:
        return self.value


@dataclass(frozen=True)
class Uniform:
    low: float
    high: float

    def draw(self, random: Generator) -> float:
        return float(random.uniform(self.low, self.high))


@dataclass(frozen=True)
class Normal:
    """Truncated to [low, high] by drawing again; ``mean`` must lie within."""

    mean: float
    std: float
    low: float = 0.0
    high: float = float("inf")

    def draw(self, random: Generator) -> float:
        while True:
            value = float(random.normal(self.mean, self.std))
            if self.low <= value <= self.high:
                return value


@dataclass(frozen=True)
class Lognormal:
    median: float
    sigma: float

    def draw(self, random: Generator) -> float:
        return float(self.median * np.exp(self.sigma * random.standard_normal()))


@dataclass(frozen=True)
class Recorded:
    """One row per measured device; quantities that share a ``file`` are taken from the same row.

    ``deviations`` are the spread of the values from round to round. Rows are drawn in proportion to ``weights``.
    """

    file: str
    values: tuple[float, ...]
    deviations: tuple[float, ...]
    weights: tuple[float, ...]

    def row(self, random: Generator) -> int:
        edges = np.cumsum(self.weights)
        return int(np.searchsorted(edges, random.random() * edges[-1], side="right"))


Distribution = Fixed | Uniform | Normal | Lognormal
Quantity = Distribution | Recorded


@dataclass(frozen=True)
class Profile:
    """One device. ``latency`` is one way; the spreads are standard deviations of the speeds from round to round."""

    seconds_per_sample: float
    down_kbps: float
    up_kbps: float
    latency: float
    down_spread: float = 0.0
    up_spread: float = 0.0

    def speeds(self, seed: int, device: int, round: int) -> tuple[float, float]:
        """Down and up in kbps, as they are in this round."""
        if self.down_spread == 0.0 and self.up_spread == 0.0:
            return self.down_kbps, self.up_kbps
        random = generator(seed, round=round, device=device, purpose="network")
        down = Normal(self.down_kbps, self.down_spread, low=SLOWEST * self.down_kbps).draw(random)
        up = Normal(self.up_kbps, self.up_spread, low=SLOWEST * self.up_kbps).draw(random)
        return down, up


def draw_profile(seed: int, device: int, quantities: Mapping[str, Quantity]) -> Profile:
    """The profile of a device, a function of (seed, device); the keys are those of ``Profile`` without the spreads."""
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
    """Time for ``size`` bytes at ``kbps``."""
    return size * 8 / (kbps * 1000)
