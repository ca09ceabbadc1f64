"""ZMTP by hand, for what ZeroMQ's own sockets would never send: half handshakes, and messages without an end."""

from __future__ import annotations

import socket
from typing import Final

GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""The 64 bytes by which a side without keys begins."""
MORE: Final = 1
"""The flag of a frame that another one follows."""
_LONG: Final = 2
_COMMAND: Final = 4


def dial(address: str, seconds: float = 5.0) -> socket.socket:
    """A plain connection to a ``tcp://`` or ``ipc://`` address, on which nothing has been said."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(seconds)
        made.connect(rest)
        return made
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), seconds)


def shake_hands(connection: socket.socket) -> None:
    """Become a DEALER of the other side, which has no keys."""
    connection.sendall(GREETING)
    left = len(GREETING)
    while left:  # libzmq ends a connection on which more than a greeting comes at once
        heard = len(connection.recv(left))
        if not heard:
            raise ConnectionError("the other side has closed the connection before its greeting")
        left -= heard
    ready = b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b"")
    connection.sendall(frame(ready, _COMMAND))


def frame(body: bytes, flags: int = 0) -> bytes:
    """A frame as it goes over the wire."""
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + len(body).to_bytes(8, "big") + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value
