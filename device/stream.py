"""Which of its samples a device has seen by a given time.

A stream only names samples; where they lie, and what a replay buffer keeps of them, is told elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Stream(Protocol):
    """The arrivals of one device, a pure function of the experiment."""

    def arrived(self, time: float, round: int) -> NDArray[np.int64]:
        """Indices ``[examples]`` into the training split that have arrived by ``time`` (seconds) in ``round``."""
        ...


@dataclass(frozen=True)
class StaticStream:
    """Everything is there from the beginning."""

    indices: NDArray[np.int64]

    def arrived(self, time: float, round: int) -> NDArray[np.int64]:
        return self.indices
