"""What a machine's metrics are made of, and who hears of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class MachineObserver(Protocol):
    """``devices`` counts them by state (connected, starting, stopped); ``kind`` is device, trainer or zygote."""

    def devices(self, counts: Mapping[str, int]) -> None: ...

    def restarted(self, kind: str) -> None: ...

    def queue_depth(self, depth: int) -> None: ...

    def trained(self, seconds: float, done: int, failed: int) -> None:
        """A trainer took so long for a group of jobs."""

    def buffered(self, device: int, samples: int, size: int) -> None:
        """What a device's replay buffer holds after a job, in samples and bytes."""


class Silent:
    """An observer that keeps nothing."""

    def devices(self, counts: Mapping[str, int]) -> None: ...

    def restarted(self, kind: str) -> None: ...

    def queue_depth(self, depth: int) -> None: ...

    def trained(self, seconds: float, done: int, failed: int) -> None: ...

    def buffered(self, device: int, samples: int, size: int) -> None: ...
