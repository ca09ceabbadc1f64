"""A device process: one device or several, on one event loop, without torch.

The zygote forks it, and it ends with the zygote. Its exit code is 0 if it is to be started again, ``RETIRED`` if its
devices are not wanted any more, and ``FAILED`` after a bug, or if it has no connection to the supervisor.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from fedemu.device.bus import (
    ATTACH_SECONDS,
    MOST_ON_BUS,
    TO_PROCESS,
    Asleep,
    Attach,
    Crashed,
    Done,
    JobFailed,
    Quit,
    Reachable,
    Rouse,
)
from fedemu.device.forking import FAILED
from fedemu.device.pipe import Setup
from fedemu.device.process.birth import Birthplace
from fedemu.device.process.peer import DevicePeer, End
from fedemu.device.process.poll_loop import PollLoop
from fedemu.device.runtime.actions import Crash, Leave, Retire, Sleep
from fedemu.protocol.codec import Buffer, Envelope
from fedemu.protocol.errors import ProtocolError
from fedemu.protocol.host.files import refusal_of
from fedemu.protocol.messages import Message
from fedemu.protocol.sharing.pack import Pack
from fedemu.protocol.transport.direct import DirectNetwork
from fedemu.protocol.transport.interface import Dialer

if TYPE_CHECKING:
    from fedemu.device.process.peer import DeviceLoop

RETIRED = 3
MOST_AWAKE = 1000
"""The devices of a pack for which there is room, where each has a connection of its own with keys."""

log = logging.getLogger("fedemu.device")


def kill_this_process(device: int, incarnation: int) -> None:
    """Crash as a real process does: no handler runs, no message is sent, nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


class DeviceProcess:
    """Devices that share an event loop. Calls ``over`` with an exit code when none of them is left.

    ``lives`` are pairs of a device and its first incarnation. ``crash`` is called with (device, incarnation) when a
    device is to crash; if it is given, a device that has crashed or left begins a new life in this process. By default
    a device that is alone takes its process with it. One that has companions crashes alone: its connection closes
    without a word, all that it held in memory is gone, and the supervisor is told, who tells the coordinator as after
    the death of a process. The bus may be on another network than the coordinator. A process that begins without any
    life is a pack: devices wake in it and fall asleep again, and it goes on until it is told to end.
    """

    def __init__(
        self,
        loop: DeviceLoop,
        network: Dialer,
        coordinator: str,
        bus_network: Dialer,
        bus: str,
        attach: Attach,
        birthplace: Birthplace,
        lives: Sequence[tuple[int, int]],
        over: Callable[[int], None],
        crash: Callable[[int, int], None] | None = None,
    ) -> None:
        self._over = over
        self._loop = loop
        self._network = network
        self._address = coordinator
        self._birthplace = birthplace
        self._alone = len(lives) == 1 and crash is None
        self._pack = not lives
        self._crash = crash or (kill_this_process if self._alone else self._crash_alone)
        self._bus = bus_network.connect(bus, TO_PROCESS, self._received, self._rejected)
        self._bus.send(attach)
        self._peers: dict[int, DevicePeer] = {}
        for device, incarnation in lives:
            self._bear(device, incarnation)

    def close(self) -> None:
        """End all devices without a message to anybody."""
        for peer in self._peers.values():
            peer.close()
        self._bus.close()

    def quit(self) -> None:
        """Have all devices say goodbye to the coordinator and end."""
        for peer in list(self._peers.values()):
            peer.quit()

    def lost(self) -> None:
        """A connection to the coordinator has broken."""
        for peer in self._peers.values():
            peer.lost()

    def _bear(self, device: int, incarnation: int) -> None:
        peer = DevicePeer(
            self._birthplace.runtime(device, incarnation),
            self._loop,
            self._network,
            self._address,
            self._tell,
            lambda end: self._ended(device, end),
        )
        self._peers[device] = peer
        peer.start(self._birthplace.away(device))

    def _crash_alone(self, device: int, incarnation: int) -> None:
        self._bus.send(Crashed(device=device, incarnation=incarnation))

    def _tell(self, message: Message, frames: Sequence[Buffer]) -> None:
        self._bus.send(message, frames)

    def _received(self, envelope: Envelope) -> None:
        match envelope.message:
            case Done() | JobFailed() as answer:
                if answer.device in self._peers:
                    self._peers[answer.device].trained(answer, envelope.frames)
            case Rouse(lives=lives):
                for device, incarnation in lives:
                    if device not in self._peers:
                        self._bear(device, incarnation)
            case Reachable():
                for peer in self._peers.values():
                    peer.reachable()
            case Quit():
                self.quit()
                if self._pack:
                    self._over(RETIRED)

    def _rejected(self, error: ProtocolError) -> None:
        log.warning("unreadable message on the bus: %s", error)

    def _ended(self, device: int, end: End) -> None:
        incarnation = self._peers[device].runtime.member.incarnation
        if isinstance(end, Retire | Sleep):
            del self._peers[device]
            if self._pack:
                self._bus.send(Asleep(device=device, incarnation=incarnation))
            elif not self._peers:
                self._over(RETIRED)
            return
        self._birthplace.send_away(device, end.away)
        match end:
            case Crash():
                self._crash(device, incarnation)
            case Leave() if self._alone:
                self._over(0)
                return
            case Leave():
                pass  # its companions stay, so its next life begins in this process
            case _:
                assert_never(end)
        self._bear(device, incarnation + 1)


def run(setup: Setup, birthplace: Birthplace, number: int, lives: Sequence[tuple[int, int]]) -> int:
    """Run the devices until the last of their lives is over. Returns the exit code of the process."""
    _HANDLER.begin(Path(setup.logs) / f"device-{number}.log" if setup.logs else None)
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        loop.stop()

    def fail(error: Exception) -> None:
        # A device that went on after an error might only be silent. Its next life starts from its own state.
        log.error("device process %d ends", number, exc_info=error)
        end(FAILED)

    def end_without_bus() -> None:
        # Jobs and answers may be lost. The next process attaches anew, and its devices are asked again.
        log.error("device process %d ends: it has no connection to the supervisor", number)
        end(FAILED)

    loop = PollLoop(fail)
    direct = DirectNetwork(loop, lost=lambda: process.lost())
    within = DirectNetwork(loop, most_waiting=MOST_ON_BUS, lost=end_without_bus, patience=ATTACH_SECONDS)
    network: Dialer = direct
    if setup.keys is not None:
        network = _with_keys(setup.coordinator, setup.keys, len(lives) or MOST_AWAKE, loop)
    if setup.shared and len(lives) != 1:
        network = Pack(direct, loop)
    attach = Attach(token=setup.token, role="process", number=number)
    process = DeviceProcess(loop, network, setup.coordinator, within, setup.bus, attach, birthplace, lives, end)
    loop.run()
    for each in dict.fromkeys((network, direct, within)):
        each.close()
    loop.close()
    return codes[0]


def prepare(setup: Setup) -> None:
    """Import what only some runs need. The zygote calls this, so that its children share it."""
    if setup.keys is not None:
        import_module("fedemu.protocol.transport.zeromq")


def _with_keys(coordinator: str, keys: tuple[str, str, str], devices: int, loop: PollLoop) -> Dialer:
    """Connections with keys need the ZeroMQ library, which takes memory in each process that forks from the zygote."""
    from fedemu.protocol.transport.curve import ClientKeys
    from fedemu.protocol.transport.zeromq import ZmqNetwork

    return ZmqNetwork(max_sockets=64 + 4 * devices, loop=loop, keys=ClientKeys(coordinator, *keys))


class _Late(logging.Handler):
    """Passes records on to the standard error output, or into a file, which is opened with the first record."""

    _path: Path | None = None
    _target: logging.Handler | None = None

    def begin(self, path: Path | None) -> None:
        """Pass records on into the file at ``path`` from now on, or to the standard error output."""
        self._path, self._target = path, None

    def emit(self, record: logging.LogRecord) -> None:
        if self._target is None:
            try:
                self._target = _File(self._path) if self._path else logging.StreamHandler()
            except OSError as error:
                _tell(record, self._path, error)
                return
            self._target.setFormatter(self.formatter)
        self._target.emit(record)


class _File(logging.FileHandler):
    """The log of a device process."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            _tell(record, self.baseFilename, error)
        else:
            super().handleError(record)


def _tell(record: logging.LogRecord, path: Path | str | None, error: OSError) -> None:
    """Tell on stderr what a log does not take. Its disk is full, or its folder is gone; no work ends for that."""
    print(f"{record.getMessage()} (the log {path} cannot be written: {refusal_of(error)})", file=sys.stderr, flush=True)


_HANDLER = _Late()


def log_warnings() -> None:
    """Log warnings. The zygote calls this, because it takes a while; ``run`` says where a process logs."""
    logging.basicConfig(level=logging.WARNING, handlers=[_HANDLER], format="%(asctime)s %(levelname)s %(message)s")
