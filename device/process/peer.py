"""A device on an event loop: it carries out the actions of its ``DeviceRuntime``, with its own connection and timer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, assert_never

from fedemu.device.bus import Done, JobFailed, Joined, Submit, Withdraw
from fedemu.device.process.poll_loop import PollLoop, Timer
from fedemu.device.runtime.actions import Action, Connect, Crash, Disconnect, Leave, Retire, Send, Sleep, Tell
from fedemu.device.runtime.runtime import DeviceRuntime
from fedemu.protocol.codec import DOWN, Buffer, Envelope
from fedemu.protocol.errors import ProtocolError
from fedemu.protocol.transport.interface import Dealer, Dialer

if TYPE_CHECKING:  # a device process has a loop of its own, and does not import asyncio
    import asyncio

    DeviceLoop = PollLoop | asyncio.AbstractEventLoop

End = Crash | Leave | Sleep | Retire
TellSupervisor = Callable[[Joined | Submit | Withdraw, Sequence[Buffer]], None]


class DevicePeer:
    """One life of a device, whose coordinator is at ``address`` of ``network``.

    Calls ``tell`` with messages for the supervisor and their frames. Calls ``ended`` once, with the action that ended
    the life, after its connection is closed.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        loop: DeviceLoop,
        network: Dialer,
        address: str,
        tell: TellSupervisor,
        ended: Callable[[End], None],
    ) -> None:
        self.runtime = runtime
        self._network = network
        self._address = address
        self._tell = tell
        self._ended = ended
        self._dealer: Dealer | None = None
        self._timer: asyncio.TimerHandle | Timer | None = None
        self._over = False
        self._loop = loop

    def start(self, away: float = 0.0) -> None:
        """Begin this life after ``away`` seconds."""
        self._perform(self.runtime.start(self._loop.time(), away))

    def trained(self, answer: Done | JobFailed, frames: Sequence[Buffer]) -> None:
        """A trainer has answered a job of this device."""
        self._perform(self.runtime.trained(answer, frames, self._loop.time()))

    def lost(self) -> None:
        """A connection of this process has broken."""
        self.runtime.member.lost(self._loop.time())
        self._arm()

    def reachable(self) -> None:
        """Others of this machine reach the coordinator again."""
        self.runtime.member.reachable(self._loop.time())
        self._arm()

    def quit(self) -> None:
        """Say goodbye to the coordinator and end. ``ended`` is called."""
        self._perform(self.runtime.quit())

    def close(self) -> None:
        """End without a message to anybody. ``ended`` is not called."""
        self._over = True
        self._disconnect()
        if self._timer is not None:
            self._timer.cancel()

    def _received(self, envelope: Envelope) -> None:
        self._perform(self.runtime.receive(envelope.message, envelope.frames, self._loop.time()))

    def _rejected(self, error: ProtocolError) -> None:
        """A message that this device cannot read counts as lost."""

    def _tick(self) -> None:
        self._timer = None
        self._perform(self.runtime.tick(self._loop.time()))

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if self._over:
                return
            match action:
                case Send():
                    if self._dealer is not None:
                        self._dealer.send(action.message, action.frames)
                case Tell():
                    self._tell(action.message, action.frames)
                case Connect():
                    self._disconnect()
                    self._dealer = self._network.connect(self._address, DOWN, self._received, self._rejected)
                case Disconnect():
                    self._disconnect()
                case Crash() | Leave() | Sleep() | Retire():
                    self.close()
                    self._ended(action)
                case _:
                    assert_never(action)
        self._arm()

    def _disconnect(self) -> None:
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None

    def _arm(self) -> None:
        """Set the one timer, so that it fires no later than the runtime is due.

        A timer that is due earlier is left as it is: firing early does no harm, and setting timers often costs time.
        """
        due = self.runtime.due
        if self._over or due == math.inf:
            return
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._tick)
