"""Why a Dealer does not come in.

ZeroMQ itself tells nobody. If the other side has refused the key or speaks otherwise, it stops for good; if the other
side has only closed the connection, it tries again for ever. If the other side does not speak ZeroMQ's protocol at all,
as a web server, it stops for good with no other event than the loss of the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from fedemu.protocol.errors import HandshakeFailed, ProtocolError
from fedemu.protocol.transport.curve import ClientKeys
from fedemu.protocol.transport.interface import ReaderLoop

EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
BROKEN: Final = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
"""The events of a connection to a Router that breaks off in the handshake."""
BROKEN_OFF: Final = (
    "connections that broke off in the handshake so far: %d (they had no keys, or another key of this coordinator, or "
    "were no devices)"
)
_FAILURES: Final = 3
"""Failures in a row without a reason from the other side. Fewer may be a coordinator that ends just now."""
_INTERNAL_ERROR: Final = 500
_DIALLED: Final = EVENTS | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED


class HandshakeWatch:
    """Listens to the handshakes of one Dealer, and calls ``failed`` when it cannot come in, with the reason.

    Must be made before the Dealer connects: the other side may refuse it at once, and ZeroMQ tells of that only once.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        loop: ReaderLoop,
        address: str,
        keys: ClientKeys | None,
        failed: Callable[[ProtocolError], None],
    ) -> None:
        self._address = address
        self._keys = keys
        self._failed = failed
        self._failures = 0
        self._shaken = False
        """Whether the handshake of the connection has come to an end, a good or a bad one."""
        self._ear = Ear(socket, loop, _DIALLED, self._heard)

    def close(self) -> None:
        """Stop listening. Must be called before the Dealer is closed."""
        self._ear.close()

    def _heard(self, event: int, value: int) -> None:
        if event == zmq.EVENT_DISCONNECTED and not self._shaken:
            self._failed(HandshakeFailed(self._no_coordinator(), final=True))
        self._shaken = event != zmq.EVENT_CONNECTED
        if event in (zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED):
            return
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failures = 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._failed(HandshakeFailed(self._refused(value), final=True))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._failed(HandshakeFailed(self._broken_off(), final=True))
        else:
            self._failures += 1
            if self._failures == _FAILURES:
                self._failed(HandshakeFailed(f"{self._broken_off()}, or the network between the two is unstable"))

    def _refused(self, status: int) -> str:
        if status == _INTERNAL_ERROR or self._keys is None:
            return f"the coordinator at {self._address} could not check this machine's key; its log says why"
        return (
            f"the coordinator at {self._address} has not approved this machine's key; "
            f"say there: fedemu keys approve NAME '{self._keys.public}'"
        )

    def _no_coordinator(self) -> str:
        return (
            f"what answers at {self._address} is no coordinator; it may be a web server, a proxy, or a wrong port "
            "of its machine"
        )

    def _broken_off(self) -> str:
        if self._keys is None:
            return (
                f"the coordinator at {self._address} breaks off the connection: most likely it wants keys (give its "
                "public key with --server-key; `fedemu keys list` shows it there)"
            )
        return (
            f"the coordinator at {self._address} breaks off the connection: its key is not the one of --server-key "
            "(`fedemu keys list` shows it there), or it runs without keys"
        )


class Ear:
    """Hears the events of one socket, and calls ``heard`` with the event and its value."""

    def __init__(
        self, socket: zmq.Socket[bytes], loop: ReaderLoop, events: int, heard: Callable[[int, int], None]
    ) -> None:
        self._socket = socket
        self._loop = loop
        self._heard = heard
        self._monitor = socket.get_monitor_socket(events)
        self._descriptor = int(self._monitor.getsockopt(zmq.FD))
        loop.add_reader(self._descriptor, self._drain)
        loop.call_soon(self._drain)

    def close(self) -> None:
        """Stop listening. Must be called before the socket is closed."""
        if not self._monitor.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.disable_monitor()
            self._monitor.close()

    def _drain(self) -> None:
        """Hear everything that has come. The descriptor reports changes, so nothing may be left."""
        while not self._monitor.closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._heard(int(event["event"]), int(event["value"]))
