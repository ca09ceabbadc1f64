"""Where the host of an address is. Names are looked up in a thread: a silent name server stops no event loop."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from _thread import start_new_thread
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class Watch(Protocol):
    """Calls back when a descriptor can be read. Every event loop does."""

    def add_reader(self, descriptor: int, callback: Callable[[], object], /) -> object: ...
    def remove_reader(self, descriptor: int, /) -> object: ...


class Target(NamedTuple):
    """What ``socket.socket`` and its ``connect`` are to be called with."""

    family: int
    place: Any


class Lookup:
    """One question under way. It calls all who have asked ``told``: with the target, or with None if there is none."""

    def __init__(self, loop: Watch, host: str, port: int, over: Callable[[], None]) -> None:
        """Calls ``over`` before the others. Raises OSError if no descriptors are left, or no further one is watched."""
        self.told: list[Callable[[Target | None], None]] = []
        self._loop = loop
        self._over = over
        self._found: list[Target] = []
        self._descriptor, writing = os.pipe()
        try:
            loop.add_reader(self._descriptor, self.ready)
        except OSError:
            os.close(self._descriptor)
            os.close(writing)
            raise
        try:
            start_new_thread(_look, (host, port, self._found, writing))
        except RuntimeError:  # this user has too many threads
            os.close(writing)

    @property
    def wants(self) -> tuple[int, int]:
        """The descriptor, and the events of ``select.poll`` that announce the answer."""
        return self._descriptor, select.POLLIN

    def ready(self) -> None:
        """The answer is there."""
        self.close()
        self._over()
        for each in self.told:
            each(self._found[0] if self._found else None)

    def close(self) -> None:
        """Wait no longer."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)


class Lookups:
    """Asks for each name once at a time, however many connections wait for the answer."""

    def __init__(self, loop: Watch) -> None:
        self._loop = loop
        self._under_way: dict[tuple[str, int], Lookup] = {}

    def find(self, host: str, port: int, told: Callable[[Target | None], None]) -> Lookup | None:
        """Call ``told`` with the target at once, and return None, if no name has to be looked up; else later.

        Raises OSError if no descriptors are left.
        """
        if (known := _written(host, port)) is not None:
            told(known)
            return None
        asked = self._under_way.get((host, port))
        if asked is None:
            asked = Lookup(self._loop, host, port, lambda: self._forget(host, port))
            self._under_way[host, port] = asked
        asked.told.append(told)
        return asked

    def close(self) -> None:
        """Wait for no answer any more."""
        while self._under_way:
            self._under_way.popitem()[1].close()

    def _forget(self, host: str, port: int) -> None:
        del self._under_way[host, port]


def _written(host: str, port: int) -> Target | None:
    """The target if the host is written in numbers."""
    family = _family(host)
    plain = host.strip("[]")
    try:
        socket.inet_pton(family, plain)
    except OSError:
        return None
    return Target(family, (plain, port) if family == socket.AF_INET else (plain, port, 0, 0))


def _family(host: str) -> socket.AddressFamily:
    # As with ZeroMQ, a name is one of IPv4. The first address of ``localhost`` may be ::1, where nobody listens.
    return socket.AF_INET6 if host.startswith("[") else socket.AF_INET


def _look(host: str, port: int, found: list[Target], writing: int) -> None:
    """Look up a name, in a thread of its own. The end of the pipe says that the answer is there, or that none comes."""
    name: Any = host.strip("[]")
    if name.isascii():
        name = name.encode()  # a name as text needs a codec whose import takes a millisecond
    with contextlib.suppress(OSError, UnicodeError):
        # As with ZeroMQ, a name in brackets that has addresses of IPv4 only is found under these, written as IPv6.
        flags = socket.AI_V4MAPPED if _family(host) == socket.AF_INET6 else 0
        family, _, _, _, place = socket.getaddrinfo(name, port, _family(host), socket.SOCK_STREAM, flags=flags)[0]
        found.append(Target(family, place))
    os.close(writing)
