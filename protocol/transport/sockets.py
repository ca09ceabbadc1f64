"""ZeroMQ sockets with the options of this protocol, and their errors in plain words.

Without keys nothing is encrypted, and any peer may connect.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from typing import Final

import zmq

from fedemu.protocol.addresses import BACKLOG, check_address, reason, refuse_taken, socket_file
from fedemu.protocol.codec import Limits
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.transport.curve import ClientKeys, ServerKeys, connect_with, serve_with

_ROUTER_INTAKE: Final = 256
"""The most messages that are read ahead from one peer: enough for a burst, and few enough for 10,000 busy peers."""
_DEALER_QUEUE: Final = 1000
"""The most messages that wait in each direction at a Dealer."""
_HANDSHAKE_MS: Final = 10_000
_RECONNECT_MS: Final = 100
_RECONNECT_MOST_MS: Final = 1000
_LIBC: Final = ctypes.CDLL(None)
_UNSEEDED: Final = 1
"""The seed of C's ``rand`` in a process that has not set one."""


def make_context(max_sockets: int) -> zmq.Context[zmq.Socket[bytes]]:
    """A ZeroMQ context. Raises ConfigurationError if it cannot hold ``max_sockets`` sockets."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    limit = context.get(zmq.SOCKET_LIMIT)
    if not 1 <= max_sockets <= limit:
        raise ConfigurationError(f"one process holds 1 to {limit} sockets, not {max_sockets}; use more processes")
    context.set(zmq.MAX_SOCKETS, max_sockets)
    return context


def bound(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    limits: Limits,
    linger_ms: int,
    keys: ServerKeys | None,
    queue: int,
) -> zmq.Socket[bytes]:
    """A ROUTER at ``address``, which reports peers that it cannot reach. ``queue`` is that of Bounds."""
    check_address(address, listening=True)
    refuse_taken(address)
    with _unforeseeable_names():
        socket = _socket(context, zmq.ROUTER, address, limits, linger_ms)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, queue)
    socket.setsockopt(zmq.RCVHWM, _ROUTER_INTAKE)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    if keys is not None:
        serve_with(socket, keys)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigurationError(f"cannot listen at {address}: {reason(error)}") from None
    return socket


def unconnected(
    context: zmq.Context[zmq.Socket[bytes]], address: str, limits: Limits, linger_ms: int, keys: ClientKeys | None
) -> zmq.Socket[bytes]:
    """A DEALER for ``address``, which ``connect`` connects. Who wants to hear of its handshakes begins before that."""
    check_address(address, listening=False)
    socket = _socket(context, zmq.DEALER, address, limits, linger_ms)
    socket.setsockopt(zmq.SNDHWM, _DEALER_QUEUE)
    socket.setsockopt(zmq.RCVHWM, _DEALER_QUEUE)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MOST_MS)
    if keys is not None:
        connect_with(socket, keys)
    return socket


def connect(socket: zmq.Socket[bytes], address: str) -> None:
    """Connect a DEALER to ``address`` as soon as somebody listens there. If that cannot be, ConfigurationError."""
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise ConfigurationError(f"cannot connect to {address}: {reason(error)}") from None


def _socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, limits: Limits, linger_ms: int
) -> zmq.Socket[bytes]:
    """A socket with the options that Routers and Dealers share."""
    with enough_sockets():
        socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, linger_ms)
    # A peer that connects and never finishes its handshake is cut off.
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    # IPv6 needs this option. It is off for IPv4, whose addresses would otherwise be shown in the form of IPv6.
    socket.setsockopt(zmq.IPV6, int(address.startswith("tcp://[")))
    # A larger frame ends the connection before memory is allocated for it.
    socket.setsockopt(zmq.MAXMSGSIZE, max(limits.frame_bytes, limits.header_bytes))
    # The kernel notices within two minutes that the machine at the other end is gone, and then frees its queue.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 15)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 4)
    return socket


@contextlib.contextmanager
def _unforeseeable_names() -> Iterator[None]:
    """A ROUTER that is made in the block names its peers from a random number on.

    ZeroMQ counts these names from a draw of C's ``rand``, which it does not seed: they would begin at the same number
    in every process. A peer may name itself, too, and ZeroMQ aborts the process if that is the name of the next one.
    """
    _LIBC.srand(ctypes.c_uint(int.from_bytes(os.urandom(4))))
    try:
        yield
    finally:
        _LIBC.srand(_UNSEEDED)


@contextlib.contextmanager
def enough_sockets() -> Iterator[None]:
    """Raise ConfigurationError if a socket cannot be made in the block because there are too many."""
    try:
        yield
    except zmq.ZMQError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise ConfigurationError(
            "this process has no file descriptors or sockets left; raise the limit (ulimit -n) or use more processes"
        ) from None


def unbind(socket: zmq.Socket[bytes], address: str) -> None:
    """Stop listening, and remove the file of an ipc address, which ZeroMQ leaves."""
    with contextlib.suppress(zmq.ZMQError):
        socket.unbind(address)
    if (path := socket_file(address)) is not None:
        with contextlib.suppress(OSError):
            os.unlink(path)
