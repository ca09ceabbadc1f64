"""A process that imports once and forks on command: the zygote for devices, the nursery for trainers.

It has no thread and no ZeroMQ context, so that forking is safe. When its pipe closes, it kills its children and ends.
If it is killed itself, the kernel kills its children.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from fedemu.device.pipe import Ended, Forked, NotForked, Unpacker, pack_message
from fedemu.protocol.codec import Decoder
from fedemu.protocol.host.files import shortage
from fedemu.protocol.host.kernel import end_with_parent, name_process
from fedemu.protocol.messages import Message
from fedemu.protocol.wording import refusal

READ_BYTES = 2**16
FAILED = 1
"""The exit code of such a process, or of a child, after an error that it did not handle."""


class Waiting:
    """Waits at once for what ``line`` brings and for the end of children. A process has one, in its main thread."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._wake, self._wake_writer = socket.socketpair()
        for end in (self._wake, self._wake_writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector = selectors.DefaultSelector()
        self._selector.register(line, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def serve(self, hear: Callable[[], bool], reap: Callable[[], None]) -> None:
        """Call ``hear`` whenever the line has something, and ``reap`` whenever a child may have ended.

        Returns when ``hear`` says by False that the other side has closed the line, or when the line breaks.
        """
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                while True:
                    for key, _ in self._selector.select():
                        if key.fileobj is self._wake:
                            self._wake.recv(READ_BYTES)
                            reap()
                        elif not hear():
                            return
        finally:
            signal.set_wakeup_fd(-1)  # children that end later find no closed descriptor

    def leave(self) -> None:
        """Give up, in a forked child, the line and what belongs to this process alone."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for end in (self._line, self._wake, self._wake_writer):
            end.close()


class Forker:
    """Obeys the messages that come from the supervisor through ``pipe``, and tells it of every birth and death."""

    def __init__(self, pipe: socket.socket, decoder: Decoder, obey: Callable[[Message], None]) -> None:
        self._pipe = pipe
        self._unpacker = Unpacker(decoder)
        self._obey = obey
        self._children: dict[int, int] = {}  # process id -> number
        self._waiting = Waiting(pipe)

    def serve(self) -> None:
        """Obey and report until the supervisor closes the pipe, then kill all children."""
        try:
            self._waiting.serve(self._hear, self._reap)
        finally:
            self._end_children()

    def say(self, message: Message) -> None:
        """Tell the supervisor something."""
        self._pipe.sendall(pack_message(message))

    def fork(self, number: int, name: str, live: Callable[[], int]) -> None:
        """Fork child ``number``. It is called ``name`` by ``ps``, calls ``live`` and ends with the code that this
        returns. If the system refuses, the supervisor is told, and the other children live on."""
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self.say(NotForked(number=number, detail=refusal(error)))
            return
        if pid == 0:
            self._be_child(parent, name, live)
        self._children[pid] = number
        self.say(Forked(number=number, pid=pid))

    def _be_child(self, parent: int, name: str, live: Callable[[], int]) -> NoReturn:
        """Be the child, and exit. This never returns into the loop."""
        code = FAILED
        try:
            end_with_parent(parent)
            name_process(name)
            self._waiting.leave()
            code = live()
        except BaseException as error:
            tell_end(name, error)
        finally:
            os._exit(code)

    def _hear(self) -> bool:
        data = self._pipe.recv(READ_BYTES)
        for message in self._unpacker.feed(data):
            self._obey(message)
        return bool(data)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:
                number = self._children.pop(pid)
                self.say(Ended(number=number, code=os.waitstatus_to_exitcode(status)))

    def _end_children(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)


def tell_end(name: str, error: BaseException) -> None:
    """Tell on stderr why the process ``name`` ends. A shortage of this machine is a line, and a bug its traceback."""
    if said := shortage(error):
        print(f"{name} ends: {said}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)


def begin(name: str, arguments: list[str]) -> socket.socket:
    """Begin a process that forks, and return its end of the pipe.

    ``arguments`` are the descriptor of that end and the process id of the supervisor, with which the process ends.
    """
    descriptor, parent = map(int, arguments)
    end_with_parent(parent)
    name_process(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return socket.socket(fileno=descriptor)
