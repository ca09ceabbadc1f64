"""Callbacks for descriptors that can be read or written: the part of an event loop that plain sockets need."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from fedemu.protocol.transport.interface import TURN_SECONDS, ReaderLoop

_MOST_AT_ONCE: Final = 256
"""The most descriptors of which one call tells. The others come next, so that all get their turns."""


class Descriptors:
    """Watches descriptors with one ``epoll``, whose own descriptor an event loop can watch."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._readers: dict[int, Callable[[], object]] = {}
        self._writers: dict[int, Callable[[], object]] = {}

    def fileno(self) -> int:
        """The descriptor that can be read when one of the others is ready."""
        return self._poll.fileno()

    def add_reader(self, descriptor: int, callback: Callable[[], object]) -> None:
        """Call ``callback`` whenever the descriptor can be read."""
        self._watch(self._readers, descriptor, callback)

    def remove_reader(self, descriptor: int) -> bool:
        """Stop watching whether the descriptor can be read. Returns whether this was watched."""
        return self._unwatch(self._readers, descriptor)

    def add_writer(self, descriptor: int, callback: Callable[[], object]) -> None:
        """Call ``callback`` whenever the descriptor can be written."""
        self._watch(self._writers, descriptor, callback)

    def remove_writer(self, descriptor: int) -> bool:
        """Stop watching whether the descriptor can be written. Returns whether this was watched."""
        return self._unwatch(self._writers, descriptor)

    def ready(self, patience: float | None = 0) -> Iterator[Callable[[], object]]:
        """The callbacks that are due, after at most ``patience`` seconds of waiting; None waits for ever."""
        for descriptor, events in self._poll.poll(patience, _MOST_AT_ONCE):
            # An error or the other side's end is for both.
            if events & ~select.EPOLLOUT and (reader := self._readers.get(descriptor)) is not None:
                yield reader
            if events & ~select.EPOLLIN and (writer := self._writers.get(descriptor)) is not None:
                yield writer

    def close(self) -> None:
        """Stop watching."""
        self._readers.clear()
        self._writers.clear()
        self._poll.close()

    def _watch(
        self, callbacks: dict[int, Callable[[], object]], descriptor: int, callback: Callable[[], object]
    ) -> None:
        known = self._events(descriptor)
        callbacks[descriptor] = callback
        if known:
            self._poll.modify(descriptor, self._events(descriptor))
            return
        try:
            self._poll.register(descriptor, self._events(descriptor))
        except OSError:  # the limit of watched descriptors is reached, or no memory is left
            del callbacks[descriptor]
            raise

    def _unwatch(self, callbacks: dict[int, Callable[[], object]], descriptor: int) -> bool:
        if callbacks.pop(descriptor, None) is None:
            return False
        if left := self._events(descriptor):
            self._poll.modify(descriptor, left)
        else:
            self._poll.unregister(descriptor)
        return True

    def _events(self, descriptor: int) -> int:
        reading, writing = descriptor in self._readers, descriptor in self._writers
        return (select.EPOLLIN if reading else 0) | (select.EPOLLOUT if writing else 0)


class Turns(Descriptors):
    """Calls what is due, until a turn is over. What is left is called in the next ones, before anything new.

    So the loop's other callbacks get their turns, however many descriptors are busy, and so do all descriptors.
    """

    def __init__(self, loop: ReaderLoop) -> None:
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
