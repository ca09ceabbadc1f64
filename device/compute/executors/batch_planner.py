"""The plan of a device's batches: which of its samples it sees at which step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.interface import Plan, Stage
from fedemu.protocol.seeds import generator

MAX_REMEMBERED = 4096
"""The number of plans that are remembered."""


class Planner:
    """Makes plans, and remembers those that draw no random numbers: they depend on the number of examples alone."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawless: dict[tuple[Plan, int], NDArray[np.int64]] = {}

    def plan(self, stage: Stage, number: int, examples: int, round: int, device: int) -> NDArray[np.int64]:
        """Positions ``[steps, batch]`` into the device's samples, where -1 is padding. No samples make no steps.

        ``number`` is that of the stage. Raises ValueError if the stage's plan has another form, or positions of samples
        that do not exist.
        """
        if not examples:
            return np.empty((0, 0), np.int64)
        known = self._drawless.get((stage.plan, examples))
        if known is not None:
            return known
        source = generator(self._seed, round=round, device=device, purpose=f"batches/{number}")
        untouched = source.bit_generator.state
        positions = stage.plan(examples, source)
        if positions.ndim != 2 or (positions.size and not -1 <= positions.min() <= positions.max() < examples):
            raise ValueError(
                f"the plan of stage {number} has the shape {positions.shape} and positions that are no samples; "
                f"it must have two dimensions, and positions from -1 to {examples - 1}"
            )
        if source.bit_generator.state == untouched:
            if len(self._drawless) >= MAX_REMEMBERED:
                self._drawless.clear()
            self._drawless[stage.plan, examples] = positions
        return positions
