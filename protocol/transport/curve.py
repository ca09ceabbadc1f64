"""Keys of connections (CURVE): they encrypt what is sent, and tell each side who the other one is.

A key is 32 bytes, written as 40 characters of Z85. ``KeyGate`` asks about each key that wants to come in.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import zmq
from zmq.auth import Authenticator

from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.transport.interface import ReaderLoop

logger = logging.getLogger(__name__)

KEY_CHARACTERS: Final = 40
"""The length of a key."""
_DOMAIN: Final = "fedemu"


@dataclass(frozen=True)
class ServerKeys:
    """The key pair of a Router. ``approved`` says of a peer's public key whether it may talk, now and in future.

    ``edges`` says whether it may also speak for other machines, as an edge does.
    """

    public: str
    secret: str = field(repr=False)
    approved: Callable[[str], bool]
    edges: Callable[[str], bool] = lambda key: False


@dataclass(frozen=True)
class ClientKeys:
    """The key pair of all Dealers to ``address``, and the public key that the Router there must have."""

    address: str
    public: str
    secret: str = field(repr=False)
    server: str


def require_curve() -> None:
    """Raise ConfigurationError if the ZeroMQ library of this machine has no CURVE."""
    if not zmq.has("curve"):
        raise ConfigurationError(
            f"the ZeroMQ library of this machine ({zmq.zmq_version()}) was built without CURVE, so it cannot use keys; "
            "install pyzmq's own package (pip install --force-reinstall --only-binary :all: pyzmq)"
        )


def serve_with(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Set the options of a Router that has keys, before bind. Without a ``KeyGate`` it lets nobody in."""
    require_curve()
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
    # ZeroMQ itself would let every key in while nobody answers its questions.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def connect_with(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Set the options of a Dealer that has keys, before connect."""
    require_curve()
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.server)


class KeyGate(Authenticator):
    """Answers ZeroMQ's questions (ZAP) about the peers of one context, on an event loop.

    Each question gets an answer: an error while a key is looked up refuses the key, and is logged.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], loop: ReaderLoop, keys: ServerKeys) -> None:
        super().__init__(context)
        self._loop = loop
        self._keys = keys
        self._strangers: set[str] = set()
        self.configure_curve_callback(_DOMAIN, self)
        self.start()
        self._descriptor = int(self.zap_socket.getsockopt(zmq.FD))
        loop.add_reader(self._descriptor, self._drain)
        self._drain()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a key may come in. Keys that may not are logged, each one once."""
        text = key.decode("ascii")
        if self._keys.approved(text):
            return True
        if text not in self._strangers and len(self._strangers) < _MOST_STRANGERS:
            self._strangers.add(text)
            logger.warning(
                "a machine with the key %s was refused; `fedemu keys approve NAME '%s'` lets it in", text, text
            )
        return False

    def close(self) -> None:
        """Stop answering. Nobody can come in any more."""
        self._loop.remove_reader(self._descriptor)
        self.stop()

    def _drain(self) -> None:
        """Answer every question that has come. The descriptor reports changes, so none may be left."""
        while True:
            try:
                question = self.zap_socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                with contextlib.suppress(StopIteration):
                    # It waits for nothing, as our callback does not, so it ends at its first step.
                    self.handle_zap_message(question).send(None)
                    raise AssertionError("the question of a key waits for something")
            except Exception:
                logger.exception("the key of a peer could not be checked, so the peer is refused")
                with contextlib.suppress(zmq.ZMQError, IndexError):  # it was answered before the error
                    self._send_zap_reply(question[1], b"500", b"Internal error")


_MOST_STRANGERS: Final = 100
"""So many keys that were refused are logged by name, so that strangers do not fill the log."""
