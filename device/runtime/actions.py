"""What a device's machine asks of the shell around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedemu.device.bus import Joined, Submit, Withdraw
from fedemu.protocol.messages import Up


@dataclass(frozen=True)
class Send:
    """To the coordinator."""

    message: Up
    frames: Sequence[Any] = ()


@dataclass(frozen=True)
class Tell:
    """To the supervisor, over the bus."""

    message: Joined | Submit | Withdraw
    frames: Sequence[Any] = ()


@dataclass(frozen=True)
class Connect:
    """Open a fresh connection; an old one is closed, what it still has to send is let go."""


@dataclass(frozen=True)
class Disconnect:
    """Close the connection once what was sent has left."""


@dataclass(frozen=True)
class Crash:
    """End as a crash does: at once and without a word. The next life begins ``away`` real seconds later."""

    away: float = 0.0


@dataclass(frozen=True)
class Leave:
    """End this life in order. The next one begins ``away`` real seconds later."""

    away: float = 0.0


@dataclass(frozen=True)
class Retire:
    """This device is not wanted any more: the run is over, or a later incarnation has its place."""

    reason: str


Action = Send | Tell | Connect | Disconnect | Crash | Leave | Retire
