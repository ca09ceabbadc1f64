"""How a device comes to life on this machine, and what it leaves on disk for its next life."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.device.behaviour.behaviour import Behaviour
from fedemu.device.memory.store import OwnStore
from fedemu.device.memory.stream import DeviceStream
from fedemu.device.runtime.membership import Membership
from fedemu.device.runtime.runtime import DeviceRuntime
from fedemu.protocol.blobs.tree_file import decode_tree
from fedemu.protocol.ids import DeviceId

KEPT_BEHAVIOURS: Final = 1024
"""The behaviours of so many devices are kept from life to life. One takes a few kilobytes."""


@dataclass(frozen=True)
class Birthplace:
    """What all devices of a machine begin with. ``folder`` holds a folder for each device."""

    lease: str
    heartbeat_seconds: float
    patience: int
    behaviour: Callable[[int], Behaviour]
    stream: StreamPlan
    folder: Path

    @classmethod
    def open(
        cls,
        *,
        lease: str,
        heartbeat_seconds: float,
        patience: int,
        behaviours: Callable[[bytes], Callable[[int], Behaviour]],
        experiment: Path,
        stream: Path,
        folder: Path,
    ) -> Birthplace:
        """The birthplace of an experiment's devices.

        ``behaviours`` is a function of the experiment's bytes, which are in the file ``experiment``. ``stream`` is the
        file of the stream's blob. Raises ConfigurationError or BlobError if one of them cannot be opened.
        """
        return cls(
            lease=lease,
            heartbeat_seconds=heartbeat_seconds,
            patience=patience,
            # A life that begins late in a long experiment goes on reading the timetable where the life before was.
            behaviour=lru_cache(KEPT_BEHAVIOURS)(behaviours(experiment.read_bytes())),
            stream=StreamPlan.from_arrays(decode_tree(stream)),
            folder=folder,
        )

    def runtime(self, device: int, incarnation: int) -> DeviceRuntime:
        """A new life of a device. It finds the own state that its earlier lives have left."""
        return DeviceRuntime(
            Membership(DeviceId(device), incarnation, self.lease, self.heartbeat_seconds, self.patience),
            self.behaviour(device),
            DeviceStream(self.stream, device),
            OwnStore(self.folder / str(device)),
        )

    def send_away(self, device: int, seconds: float) -> None:
        """Note on disk that the device's next life is to begin ``seconds`` of real time from now."""
        if seconds > 0:
            path = self._away(device)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{time.time() + seconds!r} {seconds!r}")

    def away(self, device: int) -> float:
        """The real seconds for which the device still has to stay away.

        They are never more than it was sent away for, also if the system's clock was set back meanwhile.
        """
        path = self._away(device)
        try:
            until, seconds = map(float, path.read_text().split())
            left = min(until - time.time(), seconds)
        except FileNotFoundError:
            return 0.0
        except ValueError:
            left = 0.0  # a crash has cut the file short
        if left <= 0:
            path.unlink(missing_ok=True)
        return max(0.0, left)

    def _away(self, device: int) -> Path:
        return self.folder / str(device) / "away"
