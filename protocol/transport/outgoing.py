"""What is sent on one connection: the rest of what was begun, and then the messages that wait."""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Iterable
from typing import Final

from fedemu.protocol.codec import Buffer
from fedemu.protocol.transport.passing import Handed, handed, has_large, send
from fedemu.protocol.transport.zmtp import GREETING, framed

_MOST_PIECES: Final = 512
"""The most pieces that go to the kernel in one call."""


class Outgoing:
    """Begins with the greeting. ``waiting`` are the messages of which nothing was sent, as frames."""

    def __init__(self, waiting: deque[list[Buffer]]) -> None:
        self._waiting = waiting
        self._pieces: deque[memoryview] = deque([memoryview(GREETING)])
        self._passing: Handed | None = None
        """The message that the pieces begin with, until its sealed memory was passed on."""

    @property
    def begun(self) -> bool:
        """Whether something was begun, and is not yet sent as a whole."""
        return bool(self._pieces)

    def answer(self, answers: Iterable[Buffer]) -> None:
        """Send these bytes before the messages that wait."""
        self._pieces.extend(map(memoryview, answers))

    def clear(self) -> None:
        """Give up what was begun."""
        self._pieces.clear()
        self._passing = None

    def send(self, sock: socket.socket, ready: bool, sealed: bool) -> None:
        """Send as much as the kernel takes. Raises OSError.

        Messages are sent when the handshake is over (``ready``). ``sealed``: the other side takes sealed memory.
        """
        pieces = self._pieces
        while True:
            if ready:
                self._begin(sealed)
            if not pieces:
                return
            first = [pieces[place] for place in range(min(len(pieces), _MOST_PIECES))]
            if self._passing is None:
                size = sock.sendmsg(first)
            else:
                size = self._pass(sock, first, self._passing)
                self._passing = None
            self._sent(size)

    def _pass(self, sock: socket.socket, first: list[memoryview], message: Handed) -> int:
        """Send the first pieces of a message with its sealed memory. Returns how many bytes were sent."""
        try:
            return send(sock, first, message.descriptors)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            # This user has too many descriptors under way, says the kernel. So the frames go as bytes.
            self._pieces.clear()
            self._pieces.extend(map(memoryview, framed(message.frames)))
            return 0

    def _begin(self, sealed: bool) -> None:
        """Take messages that wait. Sealed memory goes beside the first byte of a call, so its message is first."""
        pieces = self._pieces
        while self._waiting and len(pieces) < _MOST_PIECES and self._passing is None:
            if not sealed or not has_large(self._waiting[0]):
                pieces.extend(map(memoryview, framed(self._waiting.popleft())))
                continue
            if pieces:
                return
            message = handed(self._waiting.popleft())
            self._passing = message if message.descriptors else None
            pieces.extend(map(memoryview, message.pieces))

    def _sent(self, size: int) -> None:
        pieces = self._pieces
        while size:
            first = len(pieces[0])
            if size < first:
                pieces[0] = pieces[0][size:]
                return
            size -= first
            pieces.popleft()
