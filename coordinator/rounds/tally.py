"""What one round adds up while it is played."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

from fedemu.coordinator.asks.exchange import Contribution
from fedemu.coordinator.evaluation.diagnosis import RoundDiagnosis
from fedemu.protocol.ids import DeviceId


@dataclass
class Tally:
    """Over all asks and attempts of the round. ``metrics`` are sums over ``measured`` accepted replies.

    Real times, in seconds: ``server_seconds`` of server jobs, ``waited`` for devices, and ``device_seconds`` that each
    device says its accepted replies took it. No device is there that did not say.
    """

    online: int | None = None
    attempts: int = 0
    announced: int = -1
    """The attempt that observers know of."""
    outcomes: Counter[str] = field(default_factory=Counter)
    bytes_down: int = 0
    bytes_up: int = 0
    server_seconds: float = 0.0
    waited: float = 0.0
    device_seconds: dict[DeviceId, float] = field(default_factory=dict)
    perturbed: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    measured: Counter[str] = field(default_factory=Counter)
    diagnosis: RoundDiagnosis | None = None
    """Of the attempt under way, if the round is to be diagnosed."""

    def count(self, contribution: Contribution) -> None:
        """An accepted reply."""
        for name, value in contribution.reply.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
            self.measured[name] += 1
        if contribution.seconds is not None:
            device = contribution.reply.device
            self.device_seconds[device] = self.device_seconds.get(device, 0.0) + contribution.seconds

    def real_times(self, round_seconds: float) -> dict[str, float | None]:
        """The columns of real time, for a round that took so long in all."""
        devices = list(self.device_seconds.values())
        return {
            "round_seconds": round_seconds,
            "server_seconds": self.server_seconds,
            "coordinator_seconds": round_seconds - self.waited,
            "device_seconds": statistics.fmean(devices) if devices else None,
        }
