"""What a device has for its work at a given time: the period's samples, its replay buffer, and sealed periods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.replay.buffer import NEVER
from fedemu.device.memory.replay_buffer import read_buffer
from fedemu.device.memory.stream import DeviceStream


@dataclass(frozen=True)
class Holding:
    """What a device has for its work in one ask.

    ``fresh [examples]`` are the period's samples X_t. ``sealed`` are the samples of earlier periods, by period, that
    the device has yet to select from. ``kept`` is the size of the replay buffer after these selections, so that the
    work is about ``len(self)`` samples.
    """

    fresh: NDArray[np.int64]
    kept: int = 0
    sealed: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.fresh) + self.kept

    @classmethod
    def at(cls, stream: DeviceStream, version: Path | None, round: int, time: float) -> Holding:
        """What a device has in a round at ``time``, in seconds of the experiment's clock.

        ``version`` is the file of the own state that counts, None before there is one.
        """
        fresh = stream.arrived(time, round)
        if not stream.budget:
            return cls(fresh)
        buffer = read_buffer(version)
        kept, sealed = len(buffer), {}
        for period in range(buffer.period, stream.period(round)):
            arrived = stream.sealed(period)
            if period == buffer.period and buffer.asked != NEVER:
                # The device selects from the samples that its last answer was about. Later arrivals are dropped.
                arrived = arrived[: buffer.asked]
            sealed[period] = arrived
            kept = min(stream.alone, kept + len(arrived))
        return cls(fresh, kept, sealed)
