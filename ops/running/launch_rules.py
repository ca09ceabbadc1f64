"""How ``fedemu run`` reacts to signals and to the ends of its children: events go in, actions come out, without I/O.

Both are started at once, so that they import beside each other. The devices begin when they are called, which is when
the coordinator waits for them. So an experiment that cannot be put together begins no device. When the coordinator
ends, the run ends; it is not started again. A supervisor that was killed is started again, as the operator of a real
fleet would do: an unplanned death must not change the outcome. So is one that a library has ended by a code which is
none of fedemu's, as Ray has done where a node was lost.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, field
from enum import Enum, auto
from signal import Signals
from typing import Literal

from fedemu.ops.running.codes import GONE, INTERNAL_ERROR, INTERRUPTED, TOGETHER_SECONDS, USAGE
from fedemu.ops.running.processes import LEFT_EARLY
from fedemu.protocol.wording import ending

Child = Literal["coordinator", "devices"]

MOST_RESTARTS = 5
_OWN_CODES = frozenset({0, USAGE, GONE, INTERRUPTED, INTERNAL_ERROR, LEFT_EARLY})
"""The codes with which a child ends by itself. Any other one is that of something else, as is a signal."""
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class Patience:
    """How long the children may take, in real seconds."""

    checkpoint: float = 30.0
    """How long an interrupted coordinator may take to write its checkpoint."""
    departure: float = 10.0
    """How long the devices may take to leave by themselves after a completed run."""
    retreat: float = 2.0
    """How long they may take after any other run. It is less, because the coordinator may not have told them."""
    termination: float = 5.0
    """The time between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class Send:
    """Send a signal to a child. Nothing happens if the child is gone."""

    child: Child
    signal: Signals


@dataclass(frozen=True)
class CallDevices:
    """Let the devices' supervisor begin."""


@dataclass(frozen=True)
class StartDevices:
    """Start the devices' supervisor again. If it was called before, it may begin at once."""


@dataclass(frozen=True)
class Say:
    """Tell people a line."""

    text: str


Action = Send | CallDevices | StartDevices | Say


class Phase(Enum):
    """Where a launch stands: the run is on, the coordinator is to stop, or the coordinator has ended."""

    RUNNING = auto()
    STOPPING = auto()
    LEAVING = auto()


@dataclass
class Launch:
    """The state of one launch of two children. ``exit_code`` is set when both are gone."""

    patience: Patience = Patience()
    exit_code: int | None = None
    phase: Phase = Phase.RUNNING
    wake: float | None = None
    """The latest time at which ``tick`` has to be called, on the caller's clock. None: no time is set."""
    devices_gave_up: bool = False
    """Whether the run ends because of an error of the devices."""
    _called: bool = False
    """Whether the devices have been told to begin."""
    _ended: dict[Child, int] = field(default_factory=dict)
    _restarts: int = 0
    _signalled: float = -math.inf
    """When the user last asked to stop."""
    _sent: set[Send] = field(default_factory=set)

    @property
    def devices_said_why(self) -> bool:
        """Whether the run ends because of an error that the devices' supervisor has told. One that is killed cannot."""
        return self.devices_gave_up and self._ended["devices"] > 0

    def signalled(self, now: float) -> list[Action]:
        """The user wants to stop. The first signal asks for a checkpoint, the second one stops at once.

        What comes within ``TOGETHER_SECONDS`` of a signal is the same request.
        """
        if now < self._signalled + TOGETHER_SECONDS:
            return []
        self._signalled = now
        if self.phase is Phase.RUNNING:
            return [Say("stopping after a checkpoint; once more to stop at once"), *self._stop(now)]
        if self.phase is Phase.STOPPING:
            return [self._send("coordinator", signal.SIGKILL)]
        return [self._send("devices", signal.SIGTERM)]

    def coordinator_opened(self) -> list[Action]:
        """The coordinator has put the experiment together and waits for devices."""
        if self.phase is not Phase.RUNNING:
            return []
        self._called = True
        return [CallDevices()]

    def coordinator_ended(self, code: int, now: float) -> list[Action]:
        """The coordinator has ended. ``code`` is as in subprocess: negative for a signal."""
        self._ended["coordinator"] = code
        self.phase = Phase.LEAVING
        self.wake = now + (self.patience.departure if code == 0 else self.patience.retreat)
        actions: list[Action] = []
        if code not in _OWN_CODES:
            sent_here = Send("coordinator", signal.SIGKILL) in self._sent
            actions.append(Say(f"the coordinator {'was ended by SIGKILL' if sent_here else ending(code)}"))
        if code not in _OWN_CODES or code == LEFT_EARLY or not self._called:
            # Nobody has told the devices. They would wait for a coordinator that does not come.
            actions.append(self._send("devices", signal.SIGTERM))
            self.wake = now + self.patience.termination
        return self._unless_over(actions)

    def devices_ended(self, code: int, now: float) -> list[Action]:
        """The supervisor of the devices has ended. ``code`` is as in subprocess: negative for a signal."""
        if self.phase is Phase.RUNNING and code not in _OWN_CODES and self._restarts < MOST_RESTARTS:
            self._restarts += 1
            return [Say(f"the devices' supervisor {ending(code)}; starting it again"), StartDevices()]
        self._ended["devices"] = code
        if self.phase is Phase.RUNNING and code != 0:
            self.devices_gave_up = True
            why: list[Action] = []
            if code not in _OWN_CODES:
                why.append(
                    Say(f"the devices' supervisor {ending(code)} after it was started again {MOST_RESTARTS} times")
                )
            return self._unless_over([*why, *self._stop(now)])
        return self._unless_over([])

    def tick(self, now: float) -> list[Action]:
        """If the time that was set has come, signal the children that are still there."""
        if self.wake is None or now < self.wake:
            return []
        self.wake = now + self.patience.termination
        match self.phase:
            case Phase.RUNNING:
                return []
            case Phase.STOPPING:
                return [self._send("coordinator", signal.SIGKILL)]
            case Phase.LEAVING:
                kindly = Send("devices", signal.SIGTERM)
                return [self._send("devices", signal.SIGKILL if kindly in self._sent else signal.SIGTERM)]

    def _stop(self, now: float) -> list[Action]:
        self.phase = Phase.STOPPING
        self.wake = now + self.patience.checkpoint
        return [self._send("coordinator", signal.SIGINT)]

    def _send(self, child: Child, sign: Signals) -> Send:
        send = Send(child, sign)
        self._sent.add(send)
        return send

    def _unless_over(self, actions: list[Action]) -> list[Action]:
        if len(self._ended) < 2:
            return actions
        self.wake = None
        self.exit_code = self._exit_code_after(self._ended["coordinator"])
        return [action for action in actions if isinstance(action, Say)]

    def _exit_code_after(self, code: int) -> int:
        if self.devices_gave_up and code != 0:
            code = max(self._ended["devices"], 0) or INTERNAL_ERROR
        if code < 0:
            return INTERNAL_ERROR if -code in _CRASHES else INTERRUPTED
        if code == LEFT_EARLY:
            return INTERRUPTED
        return code if code in _OWN_CODES else INTERNAL_ERROR
