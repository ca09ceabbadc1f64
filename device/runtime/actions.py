"""The actions that a ``DeviceRuntime`` returns, and that the ``DevicePeer`` around it performs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedemu.device.bus import Joined, Submit, Withdraw
from fedemu.protocol.codec import Buffer
from fedemu.protocol.messages import Up


@dataclass(frozen=True)
class Send:
    """Send a message to the coordinator."""

    message: Up
    frames: Sequence[Buffer] = ()


@dataclass(frozen=True)
class Tell:
    """Send a message to the supervisor, over the bus."""

    message: Joined | Submit | Withdraw
    frames: Sequence[Buffer] = ()


@dataclass(frozen=True)
class Connect:
    """Open a new connection. An old one is closed first."""


@dataclass(frozen=True)
class Disconnect:
    """Close the connection. Messages that were sent before still leave."""


@dataclass(frozen=True)
class Crash:
    """End at once, without a message to anybody. The next life begins ``away`` real seconds later."""

    away: float = 0.0


@dataclass(frozen=True)
class Leave:
    """End this life in an orderly way. The next one begins ``away`` real seconds later."""

    away: float = 0.0


@dataclass(frozen=True)
class Retire:
    """End this device for good: the run is over, or a later incarnation has taken its place."""


@dataclass(frozen=True)
class Sleep:
    """End this life, because nothing is wanted of the device. The next one begins when it is woken."""


Action = Send | Tell | Connect | Disconnect | Crash | Leave | Sleep | Retire
