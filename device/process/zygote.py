"""The zygote: it imports everything once, forks device processes on command, and reports when one has ended.

It has no thread and no ZeroMQ context, so that forking is safe. It ends with its supervisor: when its pipe closes, it
kills its children and exits. If it is killed itself, the kernel kills its children.

``device/machine/processes.py`` starts it as ``python -m fedemu.device.process.zygote FD PARENT``. FD is the descriptor
of its end of the pipe, PARENT is the supervisor's process id.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from fedemu.device.pipe import TO_ZYGOTE, Broken, Ended, Fork, Forked, Setup, Unpacker, ZygoteReady, pack_message
from fedemu.device.process import process
from fedemu.device.process.birth import Birthplace
from fedemu.protocol.errors import FedemuError
from fedemu.protocol.host.kernel import end_with_parent, name_process
from fedemu.protocol.host.phases import mark
from fedemu.protocol.messages import Message

READ_BYTES = 2**16


class Zygote:
    """Obeys the messages that come from the supervisor through ``pipe``."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._unpacker = Unpacker(TO_ZYGOTE)
        self._setup: Setup
        self._birthplace: Birthplace
        self._children: dict[int, int] = {}  # process id -> number
        self._wake, wake = socket.socketpair()
        for end in (self._wake, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wake_writer = wake
        self._selector = selectors.DefaultSelector()
        self._selector.register(pipe, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def serve(self) -> None:
        """Obey and report until the supervisor closes the pipe, then kill all children."""
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._wake:
                        self._wake.recv(READ_BYTES)
                        self._reap()
                        continue
                    data = self._pipe.recv(READ_BYTES)
                    if not data:
                        return
                    for message in self._unpacker.feed(data):
                        self._obey(message)
        except (BrokenPipeError, ConnectionResetError):
            return
        finally:
            self._end_children()

    def _obey(self, message: Message) -> None:
        match message:
            case Setup():
                self._prepare(message)
            case Fork():
                self._fork(message)

    def _prepare(self, setup: Setup) -> None:
        try:
            self._birthplace = Birthplace.open(
                lease=setup.lease,
                heartbeat_seconds=setup.heartbeat_seconds,
                patience=setup.patience,
                behaviours=setup.behaviours,
                experiment=Path(setup.experiment),
                stream=Path(setup.partition),
                folder=Path(setup.devices),
            )
        except FedemuError as error:
            self._say(Broken(detail=str(error)[:2000]))
            return
        self._setup = setup
        mark("zygote", "behaviours")
        # All children share the memory of what exists now, as long as the garbage collector does not write into it.
        gc.collect()
        gc.freeze()
        self._say(ZygoteReady())

    def _fork(self, fork: Fork) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._live(fork, parent)
        self._children[pid] = fork.number
        self._say(Forked(number=fork.number, pid=pid))

    def _live(self, fork: Fork, parent: int) -> NoReturn:
        """Be the child, and exit. This never returns into the zygote's loop."""
        code = process.FAILED
        try:
            end_with_parent(parent)
            name_process("fedemu-device")
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for end in (self._pipe, self._wake, self._wake_writer):
                end.close()
            code = process.run(self._setup, self._birthplace, fork.number, fork.lives)
        except BaseException:
            process.log.exception("device process %d ends", fork.number)
        finally:
            os._exit(code)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self._children.pop(pid)
            self._say(Ended(number=number, pid=pid, code=os.waitstatus_to_exitcode(status)))

    def _end_children(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)

    def _say(self, message: Message) -> None:
        self._pipe.sendall(pack_message(message))


def main(arguments: list[str]) -> int:
    """Run the zygote and return its exit code. ``arguments`` are the pipe's descriptor and the supervisor's id."""
    descriptor, parent = map(int, arguments)
    end_with_parent(parent)
    name_process("fedemu-zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mark("zygote", "imports")
    with socket.socket(fileno=descriptor) as pipe:
        zygote = Zygote(pipe)
        try:
            zygote.serve()
            mark("zygote", "forks")
        except Exception:
            traceback.print_exc()
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
