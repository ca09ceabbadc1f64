"""What a device has at a time for its work: the period's samples, its replay buffer, and periods still sealed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.replay.buffer import NEVER, Buffer
from fedemu.device.memory.store import read_own
from fedemu.device.memory.stream import DeviceStream
from fedemu.protocol.errors import BlobError, DataError

PREFIX = ".replay."
"""Begins the names of the buffer's tensors in a version of the device's own state."""


@dataclass(frozen=True)
class Holding:
    """``fresh [examples]`` is X_t; ``sealed`` are the samples of earlier periods that are yet to be selected from.

    ``kept`` is the size of the replay buffer once that is done, so that the work is about ``len(self)`` samples.
    """

    fresh: NDArray[np.int64]
    kept: int = 0
    sealed: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.fresh) + self.kept

    @classmethod
    def at(cls, stream: DeviceStream, version: Path | None, round: int, time: float) -> Holding:
        """``version`` is the own state that counts, None before the first one."""
        fresh = stream.arrived(time, round)
        if not stream.budget:
            return cls(fresh)
        buffer = _buffer(version)
        kept, sealed = len(buffer), {}
        for period in range(buffer.period, stream.period(round)):
            arrived = stream.sealed(period)
            if period == buffer.period and buffer.asked != NEVER:
                # What it answered for is what it chooses from; later arrivals of that period are dropped.
                arrived = arrived[: buffer.asked]
            sealed[period] = arrived
            kept = min(stream.budget, kept + len(arrived))
        return cls(fresh, kept, sealed)


def split_own(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], Buffer]:
    """A version's leaves: what the program keeps, and the replay buffer, empty where it holds none."""
    program = {name: leaf for name, leaf in arrays.items() if not name.startswith(PREFIX)}
    buffer = {name.removeprefix(PREFIX): leaf for name, leaf in arrays.items() if name.startswith(PREFIX)}
    return program, Buffer.from_arrays(buffer) if buffer else Buffer()


def buffer_leaves(buffer: Buffer) -> dict[str, Any]:
    """The inverse, for the buffer."""
    return {PREFIX + name: leaf for name, leaf in buffer.to_arrays().items()}


def _buffer(version: Path | None) -> Buffer:
    """What a version holds. If it can't be read, the job will find out and say so."""
    if version is None:
        return Buffer()
    try:
        return split_own(read_own(version))[1]
    except (BlobError, DataError):
        return Buffer()
