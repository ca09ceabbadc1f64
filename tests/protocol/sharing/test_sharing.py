"""Shared connections: peers behind a relay are peers of the hub, as if each had a connection of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from fedemu.protocol import messages as wire
from fedemu.protocol.codec import DOWN, UP, Buffer, Envelope, Limits, Packed, encode
from fedemu.protocol.errors import KeyRevoked, MalformedMessage, ProtocolError, TooMuch
from fedemu.protocol.ids import digest_of
from fedemu.protocol.sharing import relay
from fedemu.protocol.sharing.bundle import MOST_BYTES, MOST_CLOSED, Bundle, BundleDecoder, Outbox, parts_of, tag_of
from fedemu.protocol.sharing.edge_messages import Held, up_decoder
from fedemu.protocol.sharing.hub import SPARE_BUNDLES, Charge, Hub, charge_nothing
from fedemu.protocol.sharing.pack import Pack
from fedemu.protocol.sharing.relay import Customs, Relay
from fedemu.protocol.sharing.trunk import Trunk
from fedemu.protocol.transport import connections
from fedemu.protocol.transport.direct import DirectNetwork
from fedemu.protocol.transport.interface import BOUNDLESS, Network, Screen, let_all_pass
from fedemu.protocol.transport.link import Faults
from fedemu.protocol.transport.memory import MemoryNetwork
from fedemu.protocol.transport.zeromq import ZmqNetwork

BLOB = wire.BlobRef(key="experiment", digest=digest_of(b""), size=0)
GRANTED = wire.Granted(
    lease="lease",
    run="run",
    ranges=((0, 9),),
    experiment=BLOB,
    partition=BLOB,
    data=digest_of(b""),
    heartbeat_seconds=1.0,
    patience=3,
)


@dataclass
class Top:
    """A hub that welcomes everybody who asks, and remembers what it hears."""

    network: MemoryNetwork
    heard: list[tuple[bytes, Any]] = field(default_factory=list)
    refused: list[ProtocolError] = field(default_factory=list)
    over: list[bytes] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)
    channels: int = 100

    def open(self, charge: Charge = charge_nothing) -> None:
        bounds = replace(BOUNDLESS, knows=self.known.__contains__)
        loop = asyncio.get_running_loop()
        self.hub = Hub(
            self.network,
            "top",
            UP,
            self._received,
            lambda peer, error: self.refused.append(error),
            let_all_pass,
            bounds,
            loop,
            self.channels,
            self.over.append,
            charge=charge,
        )

    def _received(self, peer: bytes, envelope: Envelope) -> None:
        self.heard.append((peer, envelope.message))
        match envelope.message:
            case wire.Enroll(host="spare"):
                self.hub.send(peer, wire.Refused(reason="fleet_full", detail="All devices of this run are taken."))
            case wire.Enroll():
                self.known.add(peer)
                self.hub.send(peer, GRANTED)
            case wire.Hello(device=device):
                self.hub.send(
                    peer,
                    wire.Welcome(
                        device=device, clock="virtual", horizon=1.0, heartbeat_seconds=1.0, patience=3, durable_round=0
                    ),
                )

    def tags(self) -> list[str]:
        return [message.type for _, message in self.heard]


class Below:
    """A relay with an owner, and devices that connect to it. ``now`` is its clock."""

    def __init__(self, network: MemoryNetwork, customs: Customs | None = None, screen: Screen = let_all_pass) -> None:
        loop = asyncio.get_running_loop()
        self.now = 0.0
        self.network = network
        self.trunk = Trunk(network, loop)
        self.relay = Relay(network, "relay", self.trunk, loop, Limits(), lambda: self.now, customs, screen)
        self.owner: list[Any] = []
        self.join()

    def join(self) -> None:
        self.dealer = self.trunk.connect("top", DOWN, lambda e: self.owner.append(e.message), lambda error: None)
        self.dealer.send(wire.Enroll(count=9))

    def device(self, number: int) -> tuple[Any, list[Any]]:
        got: list[Any] = []
        dealer = self.network.connect("relay", DOWN, lambda e: got.append(e.message), lambda error: None)
        dealer.send(wire.Hello(device=number, incarnation=0, lease="lease"))
        return dealer, got


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.fixture
async def top() -> Top:
    top = Top(MemoryNetwork())
    top.open()
    return top


def kinds(messages: Sequence[Any]) -> list[str]:
    return [message.type for message in messages]


async def test_each_device_behind_a_relay_is_a_peer_of_the_hub(top: Top) -> None:
    below = Below(top.network)
    devices = [below.device(number) for number in range(3)]
    await settle()
    hellos = {message.device: peer for peer, message in top.heard if isinstance(message, wire.Hello)}
    assert sorted(hellos) == [0, 1, 2]
    assert len({*hellos.values()}) == 3
    assert {top.hub.connection_of(peer) for peer in hellos.values()} == top.known
    signs: list[None] = []
    below.trunk.heard = lambda: signs.append(None)
    top.hub.send(hellos[1], wire.Proceed(ask="1.0.0"))
    await settle()
    assert len(signs) == 1, "the owner knows that the other side lives"
    assert [kinds(got) for _, got in devices] == [["welcome"], ["welcome", "proceed"], ["welcome"]]


async def test_no_channel_may_be_an_edge_and_a_connection_only_if_its_key_may(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = Below(top.network)
    below.device(0)
    await settle()
    (connection,) = top.known
    channel = top.heard[-1][0]
    assert [top.hub.may_be_edge(peer) for peer in (connection, channel)] == [True, False]
    monkeypatch.setattr(top.network.routers["top"], "may_be_edge", lambda peer: False)
    assert [top.hub.may_be_edge(peer) for peer in (connection, channel)] == [False, False]


async def test_a_message_with_buffers_passes_unchanged(top: Top) -> None:
    below = Below(top.network)
    dealer, _ = below.device(0)
    await settle()
    tensors = (wire.TensorSpec(name="delta/w", dtype="int8", shape=(3,)),)
    result = wire.Result(ask="1.0.0", examples=1, steps=1, metrics={}, tensors=tensors)
    dealer.send(result, [b"abc"])
    await settle()
    assert top.heard[-1][1] == result


async def test_long_messages_to_many_channels_wait_for_room_and_keep_their_order() -> None:
    top = Top(MemoryNetwork(most_under_way=4))
    top.open()
    below = Below(top.network)
    devices = [below.device(number) for number in range(9)]
    await settle()
    peers = [peer for peer, message in top.heard if isinstance(message, wire.Hello)]
    for turn in range(3):
        for peer in peers:
            chunk = wire.Blob(digest=digest_of(b""), offset=turn, size=MOST_BYTES)
            assert top.hub.send(peer, chunk, [bytes(MOST_BYTES)])
    (connection,) = top.known
    assert top.hub.send(connection, wire.Stop())
    await settle()
    assert kinds(below.owner) == ["granted"], "what was sent before comes before"
    for _ in range(7):
        top.hub.look()
        await settle()
    for _, got in devices:
        assert [message.offset for message in got if isinstance(message, wire.Blob)] == [0, 1, 2]
    assert kinds(below.owner) == ["granted", "stop"]


async def test_a_message_costs_no_look_at_other_connections_of_a_hub(top: Top, monkeypatch: pytest.MonkeyPatch) -> None:
    trunks = [Trunk(top.network, asyncio.get_running_loop()) for _ in range(3)]
    heard: list[int] = []
    for number, trunk in enumerate(trunks):
        trunk.connect("top", DOWN, lambda envelope: None, lambda error: None).send(wire.Enroll(count=9))
        trunk.received = lambda channel, frames, number=number: heard.append(number)  # type: ignore[misc]
    await settle()
    for number, trunk in enumerate(trunks):
        trunk.send(0, encode(wire.Hello(device=number, incarnation=0, lease="lease")))
    await settle()
    peers = {message.device: peer for peer, message in top.heard if isinstance(message, wire.Hello)}
    assert heard == [0, 1, 2]
    looked_at, take = [], Outbox.take
    monkeypatch.setattr(Outbox, "take", lambda outbox: looked_at.append(outbox) or take(outbox))  # type: ignore[func-returns-value]
    top.hub.send(peers[1], wire.Proceed(ask="1.0.0"))
    await settle()
    assert heard == [0, 1, 2, 1]
    assert len({id(outbox) for outbox in looked_at}) == 1


async def test_for_a_connection_that_reads_nothing_a_bounded_number_of_messages_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    top = Top(MemoryNetwork(Faults(delay_seconds=60.0), call_later=lambda delay, callback: None, most_under_way=4))
    top.open()
    dealer = top.network.connect("top", DOWN, lambda envelope: None, lambda error: None)
    hello = encode(wire.Hello(device=0, incarnation=0, lease="lease"))
    (connection,) = top.network.routers["top"].dealers
    top.known.add(connection)
    top.network.routers["top"].take(connection, [*encode(Bundle(channels=(0,), frames=(1,))), *hello])
    (peer, _), *_ = top.heard
    chunk = wire.Blob(digest=digest_of(b""), offset=0, size=MOST_BYTES)
    for _ in range(100):
        top.hub.send(peer, chunk, [bytes(MOST_BYTES)])
    await settle()
    assert len(top.hub._shared[connection].waiting) == SPARE_BUNDLES + 1
    assert caplog.text.count("too much waits for the shared connection") == 1
    assert not top.hub.send(connection, wire.Beat())
    dealer.close()


async def test_signs_of_life_end_at_the_relay(top: Top) -> None:
    below = Below(top.network)
    dealer, got = below.device(0)
    await settle()
    dealer.send(wire.Heartbeat())
    await settle()
    assert kinds(got) == ["welcome", "beat"]
    assert "heartbeat" not in top.tags()


async def test_a_device_that_the_hub_does_not_know_any_more_hears_so_from_the_relay_too(top: Top) -> None:
    below = Below(top.network)
    dealer, got = below.device(0)
    await settle()
    peer = top.heard[-1][0]
    for reason, answer in (("lease_unknown", "beat"), ("unknown_peer", "refused")):
        got.clear()
        top.hub.send(peer, wire.Refused(reason=reason, detail="no"))
        await settle()
        dealer.send(wire.Heartbeat())
        await settle()
        assert kinds(got) == ["refused", answer]


async def test_what_customs_keep_is_not_passed_on_and_the_rest_is(top: Top) -> None:
    class Keeping(Customs):
        def up(self, peer: bytes, tag: str, frames: Sequence[Buffer]) -> Sequence[Buffer] | None:
            return None if tag == "bye" else frames

        def down(self, peer: bytes, tag: str, frames: Sequence[Buffer]) -> Sequence[Buffer] | None:
            return None if tag == "cancel" else frames

    loop, faults = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda loop, context: faults.append(context))
    below = Below(top.network, customs=Keeping())
    dealer, got = below.device(0)
    await settle()
    for message in (wire.Cancel(ask="1.0.0"), wire.Proceed(ask="1.0.0")):
        top.hub.send(top.heard[-1][0], message)
    dealer.send(wire.Bye())
    dealer.send(wire.Enroll(count=1))
    await settle()
    assert (kinds(got), top.tags(), faults) == (["welcome", "proceed", "granted"], ["enroll", "hello", "enroll"], [])


async def test_a_relay_closes_the_connection_of_a_device_whose_message_is_too_much(top: Top) -> None:
    below = Below(
        top.network,
        screen=lambda peer, frames: TooMuch("too much") if tag_of(frames[0]) == "bye" else None,
    )
    (dealer, _), _ = below.device(0), below.device(1)
    await settle()
    connections = {*top.network.routers["relay"].dealers}
    dealer.send(wire.Bye())
    await settle()
    assert "bye" not in top.tags()
    assert (len(top.over), below.relay.peers) == (1, 1)
    assert len(connections & {*top.network.routers["relay"].dealers}) == 1


async def test_a_farewell_comes_through_a_relay_also_if_its_connection_is_gone_before_it_is_read(
    top: Top, eventually: Any
) -> None:
    loop, above = asyncio.get_running_loop(), Trunk(top.network, asyncio.get_running_loop())
    with closing(ZmqNetwork(linger_seconds=0.1)) as below, closing(ZmqNetwork(linger_seconds=5.0)) as device:
        relay = Relay(below, "tcp://127.0.0.1:*", above, loop, Limits(), lambda: 0.0, bounds=replace(BOUNDLESS))
        above.connect("top", DOWN, lambda envelope: None, lambda error: None).send(wire.Enroll(count=9))
        got: list[Any] = []
        dealer = device.connect(relay.hub.address, DOWN, lambda e: got.append(e.message), lambda error: None)
        dealer.send(wire.Hello(device=0, incarnation=0, lease="lease"))
        await eventually(lambda: got)
        [connection] = relay.hub._router._connections._open.values()  # type: ignore[attr-defined]
        dealer.send(wire.Bye(reason="leave"))
        device.close()  # once it is sent
        until = time.monotonic() + 20
        while connections._inode(connection.descriptor) == connection.inode and time.monotonic() < until:
            pass
        relay.look()
        await eventually(lambda: top.over)
        [hello, bye] = [peer for peer, message in top.heard if isinstance(message, wire.Hello | wire.Bye)]
        assert [hello] == [bye] == top.over


@pytest.mark.parametrize("came", ["before", "after"])
async def test_a_device_that_falls_silent_loses_its_channel_and_no_other_does(top: Top, came: str) -> None:
    below = Below(top.network)
    if came == "after":
        below.relay.watch(1.0, 3)
    (_, _), (talker, got) = below.device(0), below.device(1)
    await settle()
    if came == "before":
        below.relay.watch(1.0, 3)
    below.now = 2.5
    talker.send(wire.Heartbeat())
    await settle()
    below.now = 3.5
    below.relay.look()
    await settle()
    [gone] = top.over
    assert gone == next(peer for peer, message in top.heard if isinstance(message, wire.Hello) and message.device == 0)
    assert top.heard[-1] == (gone, wire.Bye(reason="silent")), "the hub hears why"
    assert kinds(got) == ["welcome", "beat"]
    assert below.relay.peers == 1


async def test_a_machine_that_waits_for_places_hears_the_end_of_the_run_also_if_it_asks_seldom(top: Top) -> None:
    below, got = Below(top.network), list[Any]()
    below.relay.watch(1.0, 3)
    spare = top.network.connect("relay", DOWN, lambda e: got.append(e.message), lambda error: None)
    spare.send(wire.Enroll(count=1, host="spare"))
    await settle()
    [peer] = [peer for peer, message in top.heard if message == wire.Enroll(count=1, host="spare")]
    below.now = 3.5
    below.relay.look()
    await settle()
    assert top.over == []
    top.hub.send(peer, GRANTED)
    await settle()
    assert kinds(got) == ["refused", "granted"]
    below.now = 7.0
    below.relay.look()
    await settle()
    assert top.over == [peer], "from its grant on it has to be heard"


async def test_a_device_in_the_middle_of_a_long_message_keeps_its_channel_and_hears_a_beat(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = Below(top.network)
    below.relay.watch(1.0, 3)
    _, got = below.device(0)
    await settle()
    monkeypatch.setattr(below.relay.hub, "is_sending", lambda peer: True)
    for below.now in (1.0, 2.0, 3.0, 4.0):
        below.relay.look()
    await settle()
    assert (top.over, kinds(got)) == ([], ["welcome", "beat", "beat"])
    monkeypatch.setattr(below.relay.hub, "is_sending", lambda peer: False)
    below.now = 7.0
    below.relay.look()
    await settle()
    assert len(top.over) == 1


async def test_when_the_hub_has_forgotten_the_owner_the_devices_say_hello_again(top: Top) -> None:
    below = Below(top.network)
    _, got = below.device(0)
    await settle()
    top.known.clear()
    below.trunk.connect("top", DOWN, lambda e: None, lambda error: None).send(wire.Enroll(count=9))
    _, late = below.device(1)
    await settle()
    assert [(m.type, getattr(m, "reason", "")) for m in got] == [("welcome", ""), ("refused", "unknown_peer")]
    assert kinds(late) == ["welcome"], "its Hello had waited for the owner"


async def test_a_channel_that_is_over_while_its_owner_has_no_session_is_closed_with_the_next_one(top: Top) -> None:
    below = Below(top.network)
    dealer, _ = below.device(0)
    below.device(1)
    await settle()
    (connection,), gone = top.known, top.heard[-2][0]
    top.hub.send(connection, wire.Refused(reason="unknown_peer", detail="Enrol again."))
    await settle()
    dealer.close()
    await settle()
    assert top.over == [], "nothing can be said on a connection without a session"
    below.dealer.send(wire.Enroll(count=9))
    await settle()
    assert top.over == [gone]


async def test_channels_end_with_the_session_of_their_owner_and_with_nothing_else_that_he_hears(top: Top) -> None:
    below = Below(top.network)
    _, got = below.device(0)
    await settle()
    (connection,) = top.known
    top.hub.send(connection, wire.Refused(reason="unknown_blob", detail="It was removed."))
    top.hub.send(connection, GRANTED)
    await settle()
    assert below.trunk.open
    assert kinds(got) == ["welcome"]
    top.hub.send(connection, wire.Refused(reason="unknown_peer", detail="Enrol again."))
    await settle()
    assert not below.trunk.open


async def test_what_channels_have_said_leaves_before_their_owner_goes(top: Top) -> None:
    below = Below(top.network)
    below.device(0)
    await settle()
    below.trunk.beat()
    below.trunk.send(0, encode(wire.Bye(reason="leave")))
    below.dealer.close()
    await settle()
    assert top.tags()[-2:] == ["heartbeat", "bye"]
    assert len(top.over) == 2, "the channel, and the connection"


async def test_bundles_of_a_connection_without_a_session_are_not_read(top: Top) -> None:
    dealer = top.network.connect("top", DOWN, lambda e: None, lambda error: None)
    hello = encode(wire.Hello(device=0, incarnation=0, lease="lease"))
    dealer.send(Bundle(channels=(0,), frames=(1,)), hello)
    await settle()
    assert [error.reason for error in top.refused] == ["unknown_peer"]
    assert not top.heard


async def test_a_message_on_a_channel_that_cannot_be_read_is_rejected_and_the_next_one_taken(top: Top) -> None:
    dealer = top.network.connect("top", DOWN, lambda e: None, lambda error: None)
    dealer.send(wire.Enroll(count=1))
    hello = encode(wire.Hello(device=0, incarnation=0, lease="lease"))
    dealer.send(Bundle(channels=(0, 1), frames=(1, 1)), [b"\xc1", *hello])
    await settle()
    assert [error.reason for error in top.refused] == ["encoding"]
    assert top.tags() == ["enroll", "hello"]


async def test_a_connection_may_have_so_many_channels_with_a_session_and_no_more(top: Top) -> None:
    dealer = top.network.connect("top", DOWN, lambda e: None, lambda error: None)
    dealer.send(wire.Enroll(count=1))
    enroll = encode(wire.Enroll(count=1))
    dealer.send(Bundle(channels=tuple(range(101)), frames=(1,) * 101), enroll * 101)
    await settle()
    assert [error.reason for error in top.refused] == ["too_much"]
    assert top.tags().count("enroll") == 101, "the owner, and a hundred channels"


async def test_the_oldest_channels_without_a_session_make_room_for_new_ones(top: Top) -> None:
    got: list[Any] = []
    decoder = BundleDecoder(DOWN)
    dealer = top.network.connect("top", decoder, lambda envelope: got.append(envelope.message), lambda error: None)
    dealer.send(wire.Enroll(count=1))
    enroll = encode(wire.Enroll(count=1))
    hello = encode(wire.Hello(device=0, incarnation=0, lease="lease"))
    dealer.send(Bundle(channels=(0, 1, 2, 3), frames=(1,) * 4), [*hello, *enroll, *hello, *enroll])
    dealer.send(Bundle(channels=tuple(range(4, 400)), frames=(1,) * 396), hello * 396)
    await settle()
    assert not top.refused
    assert len(top.heard) == 401
    peers = [peer for peer, _ in top.heard[1:]]
    assert top.over == [peers[0], peers[2], *peers[4:302]], "1 and 3 have sessions, and 98 more have room"
    closed = [channel for message in got if isinstance(message, Bundle) for channel in message.closed]
    assert closed == [0, 2, *range(4, 302)]


async def test_the_hub_can_close_a_channel(top: Top) -> None:
    below = Below(top.network)
    dealer, _ = below.device(0)
    await settle()
    peer = top.heard[-1][0]
    connections = {*top.network.routers["relay"].dealers}
    top.hub.cut(peer)
    await settle()
    assert (top.over, below.relay.peers) == ([peer], 0)
    assert connections.isdisjoint(top.network.routers["relay"].dealers), "its connection is closed, too"
    dealer.send(wire.Bye())
    await settle()
    assert top.heard[-1][0] != peer, "what the device says afterwards comes on a new channel"


async def test_a_device_whose_key_was_revoked_at_the_relay_hears_of_it_and_loses_its_channel(top: Top) -> None:
    below = Below(top.network)
    _, got = below.device(0)
    await settle()
    (peer,) = below.relay._channels
    below.relay._rejected(peer, KeyRevoked())
    await settle()
    assert (got[-1].type, got[-1].reason, top.heard[-1][1]) == ("refused", "revoked", wire.Bye(reason=wire.REVOKED))
    assert (len(top.over), below.relay.peers) == (1, 0)


async def test_a_channel_may_be_closed_at_both_ends_at_once(top: Top) -> None:
    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
    below = Below(top.network)
    dealer, _ = below.device(0)
    await settle()
    peer = top.heard[-1][0]
    dealer.close()
    top.hub.cut(peer)
    await settle()
    assert (top.over, below.relay.peers, faults) == ([peer], 0, [])


@pytest.mark.parametrize(
    ("bundle", "frames"), [(((0,), (2,)), 1), (((0, 1), (1,)), 1), (((0,), (1,)), 2)], ids=["few", "uneven", "many"]
)
def test_a_bundle_that_does_not_fit_its_frames_is_malformed(bundle: Any, frames: int) -> None:
    header = encode(Bundle(channels=bundle[0], frames=bundle[1]))
    with pytest.raises(MalformedMessage, match="does not fit"):
        BundleDecoder(UP).decode([*header, *[b"x"] * frames])


def test_an_edge_makes_up_no_reason_for_a_result_that_cannot_be_used() -> None:
    held: dict[str, Any] = {"ask": "1.0.0", "examples": 1, "steps": 1, "metrics": {}}
    up = up_decoder(Limits())
    assert up.decode(encode(Held(**held, reason="norm"))).message.reason == "norm"
    made_up: Any = {"reason": "no\nnorm"}
    with pytest.raises(MalformedMessage, match="reason"):
        up.decode(encode(Held(**held, **made_up)))


@pytest.mark.parametrize(("message", "sizes"), [([b"h", b"buffer", b"buffer"], [8193, 6807]), ([b"h"], [4096, 904])])
def test_an_outbox_never_makes_a_bundle_that_is_too_large(message: list[bytes], sizes: list[int]) -> None:
    outbox, sent = Outbox(), []
    for channel in range(5000):
        sent += outbox.put(channel, message)
    for channel in range(MOST_CLOSED + 1):
        outbox.close(channel)
    sent += outbox.take()
    assert outbox.take() == []
    came = [BundleDecoder(UP).decode(encode(bundle, frames)) for bundle, frames in sent]
    assert [len(envelope.frames) for envelope in came] == [*sizes, 0]
    channels = [part.channel for envelope in came for part in parts_of(envelope.message, envelope.frames)]
    assert channels == list(range(5000))
    assert [channel for envelope in came for channel in envelope.message.closed] == list(range(MOST_CLOSED + 1))


def test_the_type_of_a_message_is_read_in_any_order_of_its_header() -> None:
    assert tag_of(bytes(encode(wire.Heartbeat())[0])) == "heartbeat"
    assert tag_of(msgpack.packb({"v": 1, "t": "hello"})) == "hello"
    assert tag_of(msgpack.packb({"device": 0, "t": "hello", "v": 1})) == "hello"
    assert [tag_of(junk) for junk in (b"\xc1", b"\x93", b"abc", msgpack.packb([1]), b"\x81\xa1t")] == [""] * 5


def test_a_bundle_may_begin_with_the_version_or_with_its_type() -> None:
    fields = {"channels": [7], "frames": [1]}
    for header in ({"v": 1, "t": "bundle", **fields}, {"t": "bundle", "v": 1, **fields}):
        bundle = BundleDecoder(UP).decode([msgpack.packb(header), b"message"]).message
        assert bundle == Bundle(channels=(7,), frames=(1,))


async def test_the_devices_of_a_process_share_its_connection_to_the_relay(
    top: Top, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "DEATH_SECONDS", 0.0)
    below = Below(top.network)
    loop = asyncio.get_running_loop()
    own = Relay(top.network, "own", below.trunk, loop, Limits(), lambda: below.now, own=True)
    own.watch(1.0, 3)
    pack = Pack(top.network, loop)
    got: list[list[Any]] = [[], []]
    dealers = [
        pack.connect("own", DOWN, lambda e, into=into: into.append(e.message), lambda error: None)  # type: ignore[misc]
        for into in got
    ]
    for number, dealer in enumerate(dealers):
        dealer.send(wire.Hello(device=number, incarnation=0, lease="lease"))
    await settle()
    assert [kinds(each) for each in got] == [["welcome"], ["welcome"]]
    below.now = 2.5
    dealers[1].send(wire.Heartbeat())
    await settle()
    below.now = 3.5
    own.look()
    await settle()
    assert len(top.over) == 1, "a device that hangs is not alive because its companions are"
    dealers[1].close()
    assert not dealers[1].send(wire.Heartbeat())
    await settle()
    assert len(top.over) == 2


async def test_a_supervisor_may_tell_of_the_death_of_a_process_before_its_channel_is_closed(top: Top) -> None:
    below = Below(top.network)
    later: list[tuple[float, Any, tuple[Any, ...]]] = []
    loop: Any = SimpleNamespace(
        call_soon=asyncio.get_running_loop().call_soon,
        call_later=lambda seconds, call, *arguments: later.append((seconds, call, arguments)),
    )
    own = Relay(top.network, "own", below.trunk, loop, Limits(), lambda: below.now, own=True)
    dealer = top.network.connect("own", DOWN, lambda envelope: None, lambda error: None)
    dealer.send(wire.Hello(device=0, incarnation=0, lease="lease"))
    await settle()
    dealer.close()
    await settle()
    assert (own.peers, top.over) == (0, [])
    [(seconds, call, arguments)] = later
    call(*arguments)
    await settle()
    assert (seconds, len(top.over)) == (relay.DEATH_SECONDS, 1)


async def test_a_pack_rejects_for_one_device_and_says_its_last_words_when_it_is_closed(top: Top) -> None:
    below = Below(top.network)
    loop = asyncio.get_running_loop()
    own = Relay(top.network, "own", below.trunk, loop, Limits(), lambda: below.now, own=True)
    pack = Pack(top.network, loop)
    got: list[Any] = []
    rejected: list[ProtocolError] = []
    first, second = (pack.connect("own", DOWN, lambda e: got.append(e.message), rejected.append) for _ in range(2))
    for number, dealer in enumerate((first, second)):
        dealer.send(wire.Hello(device=number, incarnation=0, lease="lease"))
    await settle()
    peers = [peer for peer, message in top.heard if isinstance(message, wire.Hello)]
    top.hub.send(peers[0], Packed(b"\xc1"))
    top.hub.send(peers[1], wire.Proceed(ask="1.0.0"))
    await settle()
    assert [error.reason for error in rejected] == ["encoding"]
    assert kinds(got) == ["welcome", "welcome", "proceed"]
    assert first.bytes_sent == len(encode(wire.Hello(device=0, incarnation=0, lease="lease"))[0])
    first.send(wire.Bye())
    pack.close()
    await settle()
    assert top.tags()[-1] == "bye"
    assert own.peers == 0


async def test_what_a_bundle_costs_beside_its_messages_is_counted() -> None:
    charged: list[tuple[int, float]] = []

    def charge(connection: bytes, size: int, messages: float) -> ProtocolError | None:
        charged.append((size, messages))
        return TooMuch("more than it may send") if messages == 0.5 else None

    top = Top(MemoryNetwork())
    top.open(charge)
    dealer = top.network.connect("top", DOWN, lambda envelope: None, lambda error: None)
    dealer.send(wire.Enroll(count=1))
    beat = encode(wire.Heartbeat())
    for bundle, frames in (
        (Bundle(channels=(), frames=(), closed=(*range(64),)), []),
        (Bundle(channels=(5,) * 127, frames=(1,) * 127), 127 * beat),
        (Bundle(channels=(), frames=(), closed=(5, *range(100, 164))), []),
        (Bundle(channels=(), frames=(), closed=(*range(32),)), []),
    ):
        dealer.send(bundle, frames)
    await settle()
    assert [messages for _, messages in charged] == [1 + 1 / 64, 1.0, 2.0, 1 + 1 / 64, 1.0, 1 + 1 / 64, 0.5]
    assert charged[3][0] > 64, "the bytes of a header count"
    assert [error.reason for error in top.refused] == ["too_much"]


async def test_what_a_connection_sent_before_it_was_closed_is_not_read() -> None:
    top = Top(MemoryNetwork())
    top.open()
    dealer = top.network.connect("top", DOWN, lambda envelope: None, lambda error: None)
    dealer.send(wire.Enroll(count=1))
    await settle()
    (connection,) = top.known
    top.hub.cut(connection)
    heard = len(top.heard)
    screened = top.hub._look_over(connection, encode(wire.Heartbeat()))
    assert screened is not None
    assert screened.reason == "too_much"
    assert len(top.heard) == heard
    await settle()
    assert top.hub._look_over(connection, encode(wire.Heartbeat())) is None, "its end was told, and forgotten"


@pytest.mark.parametrize("channels", [(5, 6, 5), (5,)])
@pytest.mark.parametrize("kind", ["zeromq", "plain"])
async def test_a_bundle_is_read_no_further_once_a_message_of_it_has_closed_the_connection(
    eventually: Any, socket_path: Path, kind: str, channels: tuple[int, ...]
) -> None:
    loop, heard, faults = asyncio.get_running_loop(), list[bytes](), list[Any]()
    loop.set_exception_handler(lambda loop, context: faults.append(context))
    network: Network = DirectNetwork(loop) if kind == "plain" else ZmqNetwork(linger_seconds=0.1)

    def received(peer: bytes, envelope: Envelope) -> None:
        heard.append(peer)
        if len(heard) == 1:
            hub.cut(hub.connection_of(peer))

    address = f"ipc://{socket_path}"
    hub = Hub(
        network, address, UP, received, lambda peer, error: None, let_all_pass, BOUNDLESS, loop, 100, lambda peer: None
    )
    dealer = network.connect(address, DOWN, lambda envelope: None, lambda error: None)
    count = len(channels)
    dealer.send(Bundle(channels=channels, frames=(1,) * count, closed=(5,)), count * encode(wire.Heartbeat()))
    await eventually(lambda: heard)
    assert (len(heard), faults) == (1, [])
    network.close()


async def test_whoever_hears_that_a_channel_is_gone_may_send_to_another_of_its_connection(
    eventually: Any, socket_path: Path
) -> None:
    loop, heard, over = asyncio.get_running_loop(), list[bytes](), list[bytes]()
    network = DirectNetwork(loop)

    def gone(peer: bytes) -> None:
        over.append(peer)
        assert not any(hub.send(each, wire.Cancel(ask="1.0.0")) for each in heard)

    address = f"ipc://{socket_path}"
    hub = Hub(
        network,
        address,
        UP,
        lambda peer, envelope: heard.append(peer),
        lambda peer, error: None,
        let_all_pass,
        BOUNDLESS,
        loop,
        100,
        gone,
    )
    dealer = network.connect(address, DOWN, lambda envelope: None, lambda error: None)
    dealer.send(Bundle(channels=(5, 6), frames=(1, 1)), 2 * encode(wire.Heartbeat()))
    await eventually(lambda: len(heard) == 2)
    connection = hub.connection_of(heard[0])
    dealer.close()
    await eventually(lambda: over)
    assert over == [*heard, connection]
    network.close()
