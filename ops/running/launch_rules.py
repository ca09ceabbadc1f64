"""How ``fedemu run`` reacts to what its two children do and to signals: events in, actions out, no I/O.

The coordinator comes first, and the devices once it waits for them: an experiment that can't be put together starts no
device. It is never revived: its end is the end of the run. A supervisor that was killed is started again, as an
operator of a real fleet would, because an unplanned death must not change the outcome.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum, auto
from signal import Signals
from typing import Literal

from fedemu.ops.running.codes import INTERNAL_ERROR, INTERRUPTED
from fedemu.ops.running.processes import LEFT_EARLY

Child = Literal["coordinator", "devices"]

MOST_RESTARTS = 5
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class Patience:
    """Real seconds."""

    checkpoint: float = 30.0
    """That an interrupted coordinator has to write its checkpoint."""
    departure: float = 10.0
    """That the devices have to leave by themselves after a run that was completed."""
    retreat: float = 2.0
    """The same after a run that was not: the coordinator may have ended before it could tell anybody."""
    termination: float = 5.0
    """Between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class Send:
    """Send a signal to a child; the shell ignores children that are gone."""

    child: Child
    signal: Signals


@dataclass(frozen=True)
class StartDevices:
    """Start the devices' supervisor, for the first time or again."""


@dataclass(frozen=True)
class Say:
    text: str


Action = Send | StartDevices | Say


class Stage(Enum):
    RUNNING = auto()
    STOPPING = auto()
    LEAVING = auto()


@dataclass
class Launch:
    """The state of one launch; ``exit_code`` is set once every child is gone that was started."""

    patience: Patience = Patience()
    exit_code: int | None = None
    stage: Stage = Stage.RUNNING
    wake: float | None = None
    """When ``tick`` has to be called at the latest, on the caller's clock."""
    devices_gave_up: bool = False
    """Whether the end began with the devices, by an error of theirs."""
    _started: bool = False
    """Whether the devices have been; the coordinator is from the beginning."""
    _ended: dict[Child, int] = field(default_factory=dict)
    _restarts: int = 0
    _sent: set[Send] = field(default_factory=set)

    def signalled(self, sign: Signals, now: float) -> list[Action]:
        """The user wants to stop: the first time kindly, the second time at once."""
        if self.stage is Stage.RUNNING:
            return [Say("stopping after a checkpoint; once more to stop at once"), *self._stop(now)]
        if self.stage is Stage.STOPPING:
            self.wake = now + self.patience.termination
            return [self._send("coordinator", signal.SIGKILL)]
        return [self._send("devices", signal.SIGTERM)]

    def coordinator_opened(self) -> list[Action]:
        """It has put the experiment together and waits for devices."""
        if self.stage is not Stage.RUNNING:
            return []
        self._started = True
        return [StartDevices()]

    def coordinator_ended(self, code: int, now: float) -> list[Action]:
        """``code`` as subprocess gives it: negative for a signal."""
        self._ended["coordinator"] = code
        self.stage = Stage.LEAVING
        self.wake = now + (self.patience.departure if code == 0 else self.patience.retreat)
        actions: list[Action] = []
        if code < 0:
            actions.append(Say(f"the coordinator was ended by {Signals(-code).name}"))
        if code < 0 or code == LEFT_EARLY:
            # Nobody told the devices; without this they would wait for a coordinator that doesn't come back.
            actions.append(self._send("devices", signal.SIGTERM))
        return self._unless_over(actions)

    def devices_ended(self, code: int, now: float) -> list[Action]:
        if self.stage is Stage.RUNNING and code < 0 and self._restarts < MOST_RESTARTS:
            self._restarts += 1
            name = Signals(-code).name
            return [Say(f"the devices' supervisor was ended by {name}; starting it again"), StartDevices()]
        self._ended["devices"] = code
        if self.stage is Stage.RUNNING and code != 0:
            self.devices_gave_up = True
            return self._unless_over([*self._stop(now)])
        return self._unless_over([])

    def tick(self, now: float) -> list[Action]:
        """Patience ran out with whoever is still there."""
        if self.wake is None or now < self.wake:
            return []
        self.wake = now + self.patience.termination
        match self.stage:
            case Stage.RUNNING:
                return []
            case Stage.STOPPING:
                return [self._send("coordinator", signal.SIGKILL)]
            case Stage.LEAVING:
                kindly = Send("devices", signal.SIGTERM)
                return [self._send("devices", signal.SIGKILL if kindly in self._sent else signal.SIGTERM)]

    def _stop(self, now: float) -> list[Action]:
        self.stage = Stage.STOPPING
        self.wake = now + self.patience.checkpoint
        return [self._send("coordinator", signal.SIGINT)]

    def _send(self, child: Child, sign: Signals) -> Send:
        send = Send(child, sign)
        self._sent.add(send)
        return send

    def _unless_over(self, actions: list[Action]) -> list[Action]:
        if "coordinator" not in self._ended or (self._started and "devices" not in self._ended):
            return actions
        self.wake = None
        self.exit_code = self._verdict(self._ended["coordinator"])
        return [action for action in actions if isinstance(action, Say)]

    def _verdict(self, code: int) -> int:
        if self.devices_gave_up and code != 0:
            return max(self._ended["devices"], 0) or INTERNAL_ERROR
        if code >= 0:
            return INTERRUPTED if code == LEFT_EARLY else code
        return INTERNAL_ERROR if Signals(-code) in _CRASHES else INTERRUPTED
