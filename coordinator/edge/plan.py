"""Everything that an edge is told, as one frozen object, and the largest messages that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedemu.protocol.codec import Limits

LARGEST: Final = Limits(frame_bytes=2**31, message_bytes=2**31)


@dataclass(frozen=True, kw_only=True)
class EdgePlan:
    """What an edge is told. ``up`` and ``down`` are addresses, ``folder`` is for blobs and large results.

    ``up`` is that of a coordinator or of another edge, which knows this one by the name ``host``. The edge waits
    ``connect_seconds`` for its first coordinator, and ``lost_seconds`` for one that is gone. The time for which the
    edge itself stood still does not count. ``opened`` is called with the address at which it listens, ``told`` with
    sentences for people.
    """

    up: str
    down: str
    folder: Path
    host: str = ""
    connections: int = 4096
    connect_seconds: float = 60.0
    lost_seconds: float = 120.0
    opened: Callable[[str], None] = lambda address: None
    told: Callable[[str], None] = lambda sentence: None
