"""What a machine's metrics are made of, and who hears of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Observer(Protocol):
    """``devices`` counts them by state (connected, starting, stopped); ``kind`` is device, trainer or zygote."""

    def devices(self, counts: Mapping[str, int]) -> None: ...

    def restarted(self, kind: str) -> None: ...

    def queue_depth(self, depth: int) -> None: ...

    def trained(self, seconds: float, done: int, failed: int) -> None:
        """A trainer took so long for a group of jobs."""


class Silent:
    """An observer that keeps nothing."""

    def devices(self, counts: Mapping[str, int]) -> None: ...

    def restarted(self, kind: str) -> None: ...

    def queue_depth(self, depth: int) -> None: ...

    def trained(self, seconds: float, done: int, failed: int) -> None: ...
