"""The attacks: each is a small function that goes on until it is ended. ``docs/security.md`` says what stops them.

None needs a place in the run, but each may use all that a stranger can learn from a network without keys.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
import zmq

from fedemu.ops.stress.garbage import broken_message
from fedemu.ops.stress.strangers.zmtp import GREETING, MORE, dial, frame, shake_hands
from fedemu.protocol.codec import encode
from fedemu.protocol.messages import ASLEEP, PROTOCOL_VERSION, Bye, Died, Enroll, Heartbeat, Hello, Need
from fedemu.protocol.sharing.bundle import MOST_CLOSED, MOST_MESSAGES, Bundle
from fedemu.protocol.sharing.edge_messages import Station
from fedemu.protocol.transport.curve import ClientKeys, connect_with

DEVICES: Final = 40
"""The devices of the run that is attacked."""
MOST_CONNECTIONS: Final = 1500
"""The connections that an attack opens. The coordinator that is attacked may have fewer."""
SHARED: Final = ("fleet.link='shared'",)
"""The devices of the run share one connection."""
MIB: Final = 2**20
FIRST_NAMES: Final = (0x6B8B4567, 0xE43C9869)
"""The numbers by which ZeroMQ names the first peer of a process whose ``rand`` was not seeded, without and with keys.

It counts on from there."""
TAKEN: Final = 150
"""The names that an attack takes, 50 apart."""
AGAIN_SECONDS: Final = 0.05
"""The pause after a connection that was closed, so that the attacker does not need all of a small machine."""


@dataclass(frozen=True)
class Target:
    """What an attacker knows: the ``address``, a ``lease`` that was overheard, and ``keys`` if it has approved ones.

    ``server`` is the public key of a coordinator with keys.
    """

    address: str
    lease: str = ""
    server: str = ""
    keys: ClientKeys | None = None


@dataclass(frozen=True)
class Attack:
    """An attack, and ``what`` it does.

    With ``approved``, the attacker of a run with keys has a key that is approved, as a machine that takes part would
    have. ``stopped_by_keys`` says that without keys nothing stops it, so it is only played against keys. ``settings``
    are those of the run that is attacked; they change no result.
    """

    name: str
    what: str
    play: Callable[[Target], None]
    approved: bool = False
    stopped_by_keys: bool = False
    settings: tuple[str, ...] = ()


def messages(target: Target) -> None:
    """Short messages, as many as go."""
    with _dealer(target) as dealer:
        while True:
            dealer.send_multipart(encode(Heartbeat()))


def arrays(target: Target) -> None:
    """Presences of a megabyte that consist of empty arrays, and heartbeats with 150,000 fields that do not exist."""
    empty = msgpack.packb({"v": PROTOCOL_VERSION, "t": "presence", "until": 1.0, "intervals": [[]] * MIB})
    fields = {f"{number:x}": 0 for number in range(150_000)}
    wrong = msgpack.packb({"v": PROTOCOL_VERSION, "t": "heartbeat", **fields})
    with _dealer(target) as dealer:
        while True:
            dealer.send(empty)
            dealer.send(wrong)


def garbage(target: Target) -> None:
    """Random bytes in random numbers of frames."""
    chance = random.Random(0)
    with _dealer(target) as dealer:
        while True:
            dealer.send_multipart(broken_message(chance))


def enrolling(target: Target) -> None:
    """Asks for places and blobs again and again, and says Hello with leases that it makes up."""
    with _dealer(target) as dealer:
        for number in itertools.count():
            dealer.send_multipart(encode(Enroll(count=DEVICES, host="x" * 256)))
            dealer.send_multipart(encode(Hello(device=number % DEVICES, incarnation=2**30, lease=f"{number:032x}")))
            dealer.send_multipart(encode(Need(digest="0" * 64, offset=0, length=MIB)))


def endless_message(target: Target) -> None:
    """One message of parts of a megabyte, which never ends. When it is cut off, the next one begins."""
    part = frame(bytes(MIB), MORE)

    def pour(connection: socket.socket) -> None:
        shake_hands(connection)
        while True:
            connection.sendall(part)

    _again(target, pour)


def large_frame(target: Target) -> None:
    """Frames, also of the handshake, that are said to have a terabyte or just as much as may be."""

    def claim(connection: socket.socket) -> None:
        connection.sendall(GREETING)
        connection.recv(64)
        for flags, size in ((4 | 2, 2**29), (2, 2**40), (2, 2**30)):
            connection.sendall(bytes((flags,)) + size.to_bytes(8, "big") + bytes(MIB))

    _again(target, claim)


def idle_connections(target: Target) -> None:
    """Very many connections that say nothing, or end their handshake and say nothing more."""
    held: list[socket.socket] = []
    for number in itertools.count():
        with contextlib.suppress(OSError):
            held.append(dial(target.address))
            if number % 2 and target.keys is None:
                held[-1].sendall(GREETING)
        if len(held) >= MOST_CONNECTIONS:
            time.sleep(1.0)
            while held:
                held.pop().close()


def half_handshakes(target: Target) -> None:
    """Connections that break off at any place of the handshake, one after another."""
    chance = random.Random(0)
    whole = GREETING + frame(b"\x05READY", 4)

    def break_off(connection: socket.socket) -> None:
        connection.sendall(
            chance.choice((whole[: chance.randrange(len(whole))], b"GET / HTTP/1.1\r\n\r\n", os.urandom(99)))
        )

    _again(target, break_off, pause=0.002)


def taken_names(target: Target) -> None:
    """Calls itself as ZeroMQ would call one of the next peers, and connects until one has to get such a name.

    ZeroMQ aborts a process in which this happens.
    """
    with zmq.Context() as context, contextlib.ExitStack() as held:
        for number in itertools.count():
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 0
            if target.keys is not None:
                connect_with(dealer, target.keys)
            if number < TAKEN:
                held.enter_context(dealer)
                name = FIRST_NAMES[target.keys is not None] + 50 * (number + 1)
                dealer.setsockopt(zmq.ROUTING_ID, b"\0" + name.to_bytes(4))
            dealer.connect(target.address)
            dealer.send_multipart(encode(Heartbeat()))
            time.sleep(0.02)
            if number >= TAKEN:
                dealer.close()


def strange_keys(target: Target) -> None:
    """Handshakes with ever new keys that nobody has approved. Without keys they are only connections."""
    while True:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        server = target.server or zmq.curve_keypair()[0].decode()
        with _dealer(Target(target.address, keys=ClientKeys(target.address, public, secret, server))) as dealer:
            dealer.send_multipart(encode(Heartbeat()))
            time.sleep(0.02)


def bundles(target: Target) -> None:
    """An edge of nobody: bundles without messages, wrong ones, and closings of channels that do not exist."""
    kinds = [
        encode(bundle)
        for bundle in (
            Bundle(channels=(), frames=()),
            Bundle(channels=tuple(range(MOST_MESSAGES)), frames=(2,) * MOST_MESSAGES),
            Bundle(channels=(), frames=(), closed=(7,) * MOST_CLOSED),
        )
    ]
    with _dealer(target) as dealer:
        for number in itertools.count():
            if not number % 100:
                dealer.send_multipart(encode(Station()))
            dealer.send_multipart(kinds[number % len(kinds)])


def channels(target: Target) -> None:
    """An edge of nobody: Hello and Bye on ever new channels, for the devices of another machine's lease."""
    bye, dead = encode(Bye(reason=ASLEEP))[0], encode(Died(device=1, incarnation=0))[0]
    with _dealer(target) as dealer:
        for number in itertools.count():
            if not number % 10:
                dealer.send_multipart(encode(Station()))
            first = number * DEVICES % 2**30
            names = [*range(first, first + DEVICES), first, first]
            hellos = [
                encode(Hello(device=device, incarnation=2**30, lease=target.lease))[0] for device in range(DEVICES)
            ]
            bundle = Bundle(channels=tuple(names), frames=(1,) * len(names), closed=tuple(range(first)[-DEVICES:]))
            dealer.send_multipart([*encode(bundle), *hellos, bye, dead])


def stolen_lease(target: Target) -> None:
    """Says Hello for the devices of another machine, with its lease and very high incarnations, and enrols with it."""
    incarnation = 2**20
    with _dealer(target) as dealer:
        while True:
            incarnation += 1
            dealer.send_multipart(encode(Enroll(count=DEVICES, lease=target.lease)))
            for device in range(DEVICES):
                dealer.send_multipart(encode(Hello(device=device, incarnation=incarnation, lease=target.lease)))
            time.sleep(0.5)


ATTACKS: Final = {
    attack.name: attack
    for attack in (
        Attack("messages", "short messages, as many as go", messages, approved=True),
        Attack("arrays", "megabytes of empty arrays, and of fields that do not exist", arrays, approved=True),
        Attack("garbage", "random bytes in random frames", garbage, approved=True),
        Attack("enrolling", "asks for places, blobs and sessions again and again", enrolling, approved=True),
        Attack("endless-message", "one message whose parts never end", endless_message),
        Attack("large-frame", "frames that are said to have a terabyte", large_frame),
        Attack("idle-connections", f"{MOST_CONNECTIONS:,} connections that say nothing", idle_connections),
        Attack("half-handshakes", "connections that break off in the handshake", half_handshakes),
        Attack("taken-names", "the names that ZeroMQ is about to give", taken_names, approved=True),
        Attack("strange-keys", "keys that nobody has approved", strange_keys),
        Attack("bundles", "an edge of nobody, whose bundles hold nothing", bundles, approved=True, settings=SHARED),
        Attack("channels", "ever new channels, for the devices of others", channels, approved=True, settings=SHARED),
        Attack(
            "stolen-lease",
            "another machine's lease, and Hello for its devices",
            stolen_lease,
            approved=True,
            stopped_by_keys=True,
        ),
    )
}
"""All attacks by name."""


@contextlib.contextmanager
def _dealer(target: Target) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.sndhwm = 100
        if target.keys is not None:
            connect_with(dealer, target.keys)
        dealer.connect(target.address)
        yield dealer


def _again(target: Target, play: Callable[[socket.socket], Any], pause: float = AGAIN_SECONDS) -> None:
    """Play with a new connection each time that the last one was closed."""
    while True:
        with contextlib.suppress(OSError), dial(target.address) as connection:
            play(connection)
        time.sleep(pause)
