"""The shell of a trainer process: it connects to the bus, runs one group of jobs at a time, and ends when it is told.

The process blocks while it computes. Its supervisor watches the process itself, so the process sends nothing meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from fedemu.device.bus import (
    ATTACH_SECONDS,
    MOST_ON_BUS,
    TO_TRAINER,
    Attach,
    Done,
    Faulty,
    Finished,
    JobFailed,
    Ready,
    Train,
    Unusable,
)
from fedemu.device.pipe import TrainerSetup
from fedemu.protocol.code.own_code import account
from fedemu.protocol.codec import Buffer, Envelope
from fedemu.protocol.errors import FedemuError, MachineFault, ProtocolError
from fedemu.protocol.host.files import shortage
from fedemu.protocol.transport.direct import DirectNetwork
from fedemu.protocol.transport.interface import Dialer

log = logging.getLogger(__name__)

PARTING_SECONDS = 1.0
"""The time that a trainer without a connection gives its supervisor to be dead, before it calls that a fault."""
PUSHING_SECONDS = 1.0
"""The most time that a trainer waits within a group for its supervisor to read answers. Further ones wait for the end
of the group."""
Answer = tuple[Done | JobFailed, Sequence[Buffer]]
"""The answer to one job, and the frames of its tensors."""


class Runner(Protocol):
    """The part of a trainer process that computes."""

    @property
    def capacity(self) -> Mapping[str, int]:
        """The number of jobs that make a group, by program."""
        ...

    def run(self, train: Train, frames: Sequence[memoryview]) -> Iterable[Answer]:
        """The answers to the group's jobs, in any order. Each comes as soon as it is known."""
        ...


class TrainerShell:
    """A trainer's side of the bus.

    ``push`` waits at most so many seconds until what was sent is on its way, and returns how long it took. Networks
    that send while this process computes need none.
    """

    def __init__(
        self, network: Dialer, setup: TrainerSetup, push: Callable[[float], float] = lambda seconds: 0.0
    ) -> None:
        self.runner: Runner | None = None
        self._push = push
        self.bus = network.connect(setup.bus, TO_TRAINER, self._received, self._rejected)
        self.bus.send(Attach(token=setup.token, role="trainer", number=setup.number))

    def open(self, setup: TrainerSetup, open_runner: Callable[[TrainerSetup], Runner]) -> None:
        """Open the runner and tell the supervisor that it is ready.

        A FedemuError is told as ``Unusable``, because every other trainer would meet the same error. Another error, and
        a MachineFault, are told as ``Faulty``.
        """
        try:
            runner = open_runner(setup)
        except Exception as error:
            self._give_up(error)
        else:
            self.take(runner)

    def take(self, runner: Runner) -> None:
        """Have ``runner`` run groups from now on, and tell the supervisor that there may be some."""
        self.runner = runner
        self.bus.send(Ready(capacity=dict(runner.capacity)))

    def _received(self, envelope: Envelope) -> None:
        match envelope.message:
            case Train() as train:
                self.train(train, envelope.frames)

    def _rejected(self, error: ProtocolError) -> None:
        log.warning("unreadable message on the bus: %s", error)

    def train(self, train: Train, frames: Sequence[memoryview]) -> None:
        """Run a group of jobs: send the answer to each job, and then ``Finished``.

        A FedemuError, such as that of a full disk, is told as ``Unusable``: no other trainer could do the jobs. Another
        error, and a MachineFault, such as that of a GPU without memory, are told as ``Faulty``. Groups that come after
        it are not run.
        """
        if self.runner is None:
            return
        began, left = time.monotonic(), PUSHING_SECONDS
        try:
            for answer, payload in self.runner.run(train, frames):
                self.bus.send(answer, payload)
                left -= self._push(left)  # the event loop, which would send the rest, does not run before the end
        except Exception as error:
            self._give_up(error, in_work=True)
            return
        self.bus.send(Finished(group=train.group, seconds=time.monotonic() - began))

    def _give_up(self, error: Exception, *, in_work: bool = False) -> None:
        """Tell the supervisor why this process cannot go on. It is killed, so that another takes its place."""
        self.runner = None
        if isinstance(error, FedemuError) and not isinstance(error, MachineFault):
            self.bus.send(Unusable(detail=str(error)[:2048], in_work=in_work))
            return
        lacking = "" if isinstance(error, MachineFault) else shortage(error)
        log.error("the trainer cannot go on%s", lacking and f": {lacking}", exc_info=None if lacking else error)
        self.bus.send(Faulty(detail=(lacking or account(error))[:2048]))


def run_trainer(setup: TrainerSetup, open_runner: Callable[[TrainerSetup], Runner]) -> int:
    """Run as a trainer until the supervisor kills the process, or an error ends it. Returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s trainer %(process)d %(levelname)s %(message)s")
    return asyncio.run(_serve(setup, open_runner))


async def _serve(setup: TrainerSetup, open_runner: Callable[[TrainerSetup], Runner]) -> int:
    loop = asyncio.get_running_loop()
    over: asyncio.Future[int] = loop.create_future()

    def give_up(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        lacking = "" if error is None else shortage(error)
        log.error("the trainer ends: %s", lacking or context["message"], exc_info=None if lacking else error)
        if not over.done():
            over.set_result(1)

    def lost() -> None:
        # Jobs and answers may be lost with the connection. The next trainer attaches anew, and gets the jobs again.
        if over.done():
            return
        # If the supervisor was killed, the kernel ends this process meanwhile, and there is nothing to tell.
        time.sleep(PARTING_SECONDS)
        give_up(loop, {"message": "it has no connection to the supervisor"})

    network = DirectNetwork(loop, most_waiting=MOST_ON_BUS, lost=lost, patience=ATTACH_SECONDS)
    shell = TrainerShell(network, setup, network.push)
    loop.set_exception_handler(give_up)
    try:
        shell.open(setup, open_runner)
        return await over
    finally:
        network.close()
