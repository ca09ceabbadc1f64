"""Many descriptors that share the turns of an event loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from fedemu.protocol.transport.descriptors import Descriptors
from fedemu.protocol.transport.interface import TURN_SECONDS
from fedemu.protocol.transport.line import SocketLoop


class Turns(Descriptors):
    """Calls what is due, until a turn is over. What is left is called in the next ones, before anything new.

    So the loop's other callbacks get their turns, however many descriptors are busy, and so do all descriptors.
    """

    def __init__(self, loop: SocketLoop) -> None:
        super().__init__()
        self._loop = loop
        self._due: deque[Callable[[], object]] = deque()
        self._turn_comes = False
        loop.add_reader(self.fileno(), self._readable)

    def soon(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` in a turn to come."""
        self._due.append(callback)
        self._come_again()

    def close(self) -> None:
        self._loop.remove_reader(self.fileno())
        super().close()

    def _readable(self) -> None:
        if not self._due:
            self._due.extend(self.ready())
            self._serve()

    def _turn(self) -> None:
        self._turn_comes = False
        self._serve()

    def _serve(self) -> None:
        """Call what is due by now. If a callback raises, the rest is called later."""
        until = time.monotonic() + TURN_SECONDS
        try:
            for _ in range(len(self._due)):
                self._due.popleft()()
                if time.monotonic() > until:
                    break
        finally:
            if self._due:
                self._come_again()

    def _come_again(self) -> None:
        if not self._turn_comes:
            self._turn_comes = True
            self._loop.call_soon(self._turn)
