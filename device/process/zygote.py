"""The zygote: it imports everything once, and forks device processes on command (``device/forking.py``).

``device/machine/processes.py`` starts it as ``python -m fedemu.device.process.zygote FD PARENT``. FD is the descriptor
of its end of the pipe, PARENT is the supervisor's process id.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from fedemu.device.forking import FAILED, Forker, begin, tell_end
from fedemu.device.pipe import TO_ZYGOTE, Broken, Fork, Setup, ZygoteReady
from fedemu.device.process import process
from fedemu.device.process.birth import Birthplace
from fedemu.device.process.rehearsal import rehearse
from fedemu.protocol.code.named import load, restrict
from fedemu.protocol.errors import FedemuError
from fedemu.protocol.host.files import refusal_of
from fedemu.protocol.host.garbage import settle
from fedemu.protocol.host.phases import mark
from fedemu.protocol.messages import Message


class Zygote:
    """Obeys the messages that come from the supervisor through ``pipe``."""

    def __init__(self, pipe: socket.socket) -> None:
        self._forker = Forker(pipe, TO_ZYGOTE, self._obey)
        self._setup: Setup
        self._birthplace: Birthplace

    def serve(self) -> None:
        """Obey and report until the supervisor closes the pipe, then kill all children."""
        self._forker.serve()

    def _obey(self, message: Message) -> None:
        match message:
            case Setup():
                self._prepare(message)
            case Fork():
                self._forker.fork(message.number, "fedemu-device", lambda: self._live(message))

    def _prepare(self, setup: Setup) -> None:
        try:
            behaviours = load(setup.behaviours)
            restrict(setup.allow_code)
            self._birthplace = Birthplace.open(
                lease=setup.lease,
                heartbeat_seconds=setup.heartbeat_seconds,
                patience=setup.patience,
                behaviours=behaviours,
                experiment=Path(setup.experiment),
                stream=Path(setup.partition),
                folder=Path(setup.devices),
            )
        except (FedemuError, OSError) as error:
            said = f"{error.filename} cannot be read: {refusal_of(error)}" if isinstance(error, OSError) else str(error)
            self._forker.say(Broken(detail=said[:2000]))
            return
        self._setup = setup
        process.prepare(setup)
        mark("zygote", "behaviours")
        rehearse(self._birthplace)
        mark("zygote", "rehearsal")
        settle()
        self._forker.say(ZygoteReady())

    def _live(self, fork: Fork) -> int:
        try:
            return process.run(self._setup, self._birthplace, fork.number, fork.lives)
        except BaseException:
            process.log.exception("device process %d ends", fork.number)
            return FAILED


def main(arguments: list[str]) -> int:
    """Run the zygote and return its exit code. ``arguments`` are the pipe's descriptor and the supervisor's id."""
    with begin("fedemu-zygote", arguments) as pipe:
        process.log_warnings()
        mark("zygote", "imports")
        try:
            Zygote(pipe).serve()
            mark("zygote", "forks")
        except Exception as error:
            tell_end("fedemu-zygote", error)
            return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
