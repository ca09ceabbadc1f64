"""One direction of a connection within a process, and the faults that its messages may have."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

from fedemu.protocol.codec import Buffer
from fedemu.protocol.errors import ConfigurationError

MOST_UNDER_WAY: Final = 2000
"""The most messages that are on their way in one direction of one connection, where nobody says how many."""


@dataclass(frozen=True)
class Faults:
    """What happens to messages: three probabilities, and a delay drawn uniformly from 0 to ``delay_seconds``.

    A delay keeps the order. A reordered message overtakes some of the messages that are on their way.
    """

    loss: float = 0.0
    delay_seconds: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not 0 <= value < float("inf") or (value > 1 and entry.name != "delay_seconds"):
                raise ConfigurationError(
                    f"the fault {entry.name} = {value} is out of range; probabilities are from 0 to 1, "
                    "and delay_seconds is finite and at least 0"
                )


class Link:
    """A queue of at most ``most`` messages, and one timer for each message in it.

    ``draws`` decides about faults. ``later`` calls a function when the next message is due.
    """

    def __init__(
        self, faults: Faults, draws: random.Random, later: Callable[[Callable[[], None]], None], most: int
    ) -> None:
        self._faults = faults
        self._draws = draws
        self._later = later
        self._most = most
        self._queue: deque[list[Buffer]] = deque()
        self._deliver: Callable[[list[Buffer]], None] | None = None
        self._ended: Callable[[], None] | None = None

    def open(self, deliver: Callable[[list[Buffer]], None]) -> None:
        """Let messages arrive from now on, also those that are already queued."""
        self._deliver = deliver
        for _ in self._queue:
            self._later(self._arrive)

    def put(self, frames: list[Buffer]) -> bool:
        """Queue a message, which may suffer faults. Returns False if the queue is full; a lost message returns True."""
        if len(self._queue) >= self._most:
            return False
        faults, draw = self._faults, self._draws.random
        if faults.loss and draw() < faults.loss:
            return True
        copies = 2 if faults.duplication and draw() < faults.duplication else 1
        for _ in range(copies):
            if faults.reordering and draw() < faults.reordering:
                self._queue.insert(self._draws.randint(0, len(self._queue)), frames)
            else:
                self._queue.append(frames)
            if self._deliver is not None:
                self._later(self._arrive)
        return True

    def end(self, ended: Callable[[], None]) -> None:
        """Nothing more is put. Call ``ended`` when all that is on its way has arrived."""
        self._ended = ended
        if not self._queue:
            self._later(ended)

    def _arrive(self) -> None:
        if self._deliver is not None:
            self._deliver(self._queue.popleft())
            if self._ended is not None and not self._queue:
                self._ended()
