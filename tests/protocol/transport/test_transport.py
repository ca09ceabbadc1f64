"""What every transport does, over tcp, over ipc and in memory."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from fedemu.protocol.codec import UP, Decoder, Limits
from fedemu.protocol.errors import ConfigurationError, ProtocolError
from fedemu.protocol.messages import (
    Accepted,
    Beat,
    Blob,
    Bye,
    Heartbeat,
    Hello,
    Proceed,
    Result,
    Stop,
    TensorSpec,
)


def hello(device: int) -> Hello:
    return Hello(device=device, incarnation=0, lease="lease")


async def test_messages_go_both_ways(wire: Any, eventually: Any) -> None:
    coordinator = wire.listen()
    device = wire.join(coordinator.router.address)
    assert device.dealer.send(hello(3))
    await eventually(lambda: coordinator.messages)
    assert coordinator.messages == [hello(3)]
    assert coordinator.router.send(coordinator.peers[0], Proceed(ask="1.0.0"))
    await eventually(lambda: device.messages)
    assert device.messages == [Proceed(ask="1.0.0")]


async def test_each_device_is_a_peer_of_its_own(wire: Any, eventually: Any) -> None:
    coordinator = wire.listen()
    devices = [wire.join(coordinator.router.address) for _ in range(5)]
    for number, device in enumerate(devices):
        device.dealer.send(hello(number))
    await eventually(lambda: len(coordinator.messages) == 5)
    for message, peer in zip(coordinator.messages, coordinator.peers, strict=True):
        coordinator.router.send(peer, Stop(reason=str(message.device)))
    await eventually(lambda: all(device.messages for device in devices))
    assert [device.messages for device in devices] == [[Stop(reason=str(number))] for number in range(5)]


async def test_order_is_kept_through_bursts_longer_than_one_drain(wire: Any, eventually: Any) -> None:
    coordinator = wire.listen()
    device = wire.join(coordinator.router.address)
    for start in range(0, 3000, 750):
        for number in range(start, start + 750):
            assert device.dealer.send(hello(number))
        await eventually(lambda end=start + 750: len(coordinator.messages) == end)
    assert [message.device for message in coordinator.messages] == list(range(3000))


async def test_answers_sent_while_messages_arrive_stall_neither_side(wire: Any, eventually: Any) -> None:
    coordinator = wire.listen()
    coordinator.react = lambda message, peer: coordinator.router.send(peer, Accepted(ask=f"{message.device}.0.0"))
    devices = [wire.join(coordinator.router.address) for _ in range(4)]
    for device in devices:
        device.react = lambda message, _, device=device: (
            len(device.messages) < 200 and device.dealer.send(hello(len(device.messages) + 2))
        )
        for number in range(3):
            device.dealer.send(hello(number))
    await eventually(lambda: all(len(device.messages) >= 200 for device in devices))
    await eventually(lambda: all(len(device.messages) == 202 for device in devices))
    for device in devices:
        assert [message.ask for message in device.messages] == [f"{number}.0.0" for number in range(202)]


@pytest.mark.parametrize("size", [0, 100, 65_536, 3_000_000])
async def test_buffers_arrive_whole_whatever_their_size(wire: Any, eventually: Any, size: int) -> None:
    coordinator = wire.listen()
    device = wire.join(coordinator.router.address)
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    result = Result(
        ask="1.0.0",
        examples=1,
        steps=1,
        metrics={},
        tensors=(TensorSpec(name="x", dtype="uint8", shape=(size,)), TensorSpec(name="y", dtype="int8", shape=(1,))),
    )
    device.dealer.send(result, [payload, b"!"])
    await eventually(lambda: coordinator.messages)
    assert coordinator.messages == [result]
    assert bytes(coordinator.frames[0][0]) == payload
    assert coordinator.frames[0][0].readonly or size < 65_536 or wire.kind != "memory"
    assert bytes(coordinator.frames[0][1]) == b"!"


async def test_a_message_of_the_most_frames_arrives_and_one_of_more_is_rejected(wire: Any, eventually: Any) -> None:
    coordinator = wire.listen(decoder=Decoder(Result, Limits(frames=3)))
    device = wire.join(coordinator.router.address)
    results = [
        Result(
            ask="1.0.0",
            examples=1,
            steps=1,
            metrics={},
            tensors=tuple(TensorSpec(name=str(number), dtype="int8", shape=(1,)) for number in range(tensors)),
        )
        for tensors in (3, 4, 9, 2)
    ]
    for result in results:
        device.dealer.send(result, [b"!"] * len(result.tensors))
    await eventually(lambda: len(coordinator.messages) == 2)
    assert coordinator.messages == [results[0], results[3]]
    assert [error.reason for error in coordinator.rejected] == ["frames", "frames"]


async def test_received_buffers_outlive_the_network(wire: Any, eventually: Any) -> None:
    coordinator = wire.listen()
    device = wire.join(coordinator.router.address)
    device.dealer.send(hello(0))
    await eventually(lambda: coordinator.peers)
    chunk = b"x" * 200_000
    coordinator.router.send(coordinator.peers[0], Blob(digest="a" * 64, offset=0, size=200_000), [chunk])
    await eventually(lambda: device.messages)
    wire.close()
    assert bytes(device.frames[0][0]) == chunk


async def test_a_peer_that_was_never_there_is_unroutable(wire: Any) -> None:
    assert not wire.listen().router.send(b"nobody", Beat())


async def test_a_peer_that_closed_becomes_unroutable(wire: Any, eventually: Any) -> None:
    coordinator = wire.listen()
    device = wire.join(coordinator.router.address)
    device.dealer.send(Heartbeat())
    await eventually(lambda: coordinator.peers)
    device.dealer.close()
    await eventually(lambda: not coordinator.router.send(coordinator.peers[0], Beat()))
    assert device.messages == []


async def test_messages_that_were_sent_before_closing_arrive(wire: Any, eventually: Any) -> None:
    coordinator = wire.listen()
    device = wire.join(coordinator.router.address)
    device.dealer.send(hello(1))
    await eventually(lambda: coordinator.messages)
    device.dealer.send(Bye())
    device.dealer.close()
    device.dealer.close()
    assert not device.dealer.send(Bye())
    await eventually(lambda: coordinator.messages[-1] == Bye())


async def test_a_router_may_close_right_after_a_farewell(wire: Any, eventually: Any) -> None:
    coordinator = wire.listen()
    device = wire.join(coordinator.router.address)
    device.dealer.send(hello(1))
    await eventually(lambda: coordinator.messages)
    coordinator.router.send(coordinator.peers[0], Stop())
    coordinator.router.close()
    coordinator.router.close()
    assert not coordinator.router.send(coordinator.peers[0], Stop())
    await eventually(lambda: device.messages == [Stop()])


async def test_a_device_waits_for_a_coordinator_that_comes_later(wire: Any, eventually: Any) -> None:
    first = wire.listen()
    address = first.router.address
    first.router.close()
    device = wire.join(address)
    assert device.dealer.send(hello(7))
    for _ in range(5):
        await asyncio.sleep(0)  # the first attempt to connect fails
    second = await wire.listen_again(address)
    await eventually(lambda: second.messages)
    assert second.messages == [hello(7)]


async def test_a_device_reconnects_as_a_new_peer(wire: Any, eventually: Any) -> None:
    first = wire.listen()
    device = wire.join(first.router.address)
    device.dealer.send(hello(1))
    await eventually(lambda: first.messages)
    first.router.close()
    second = await wire.listen_again(first.router.address)
    assert not second.router.send(first.peers[0], Beat())
    await eventually(lambda: device.dealer.send(Heartbeat()) and second.messages)
    assert second.router.send(second.peers[0], Beat())
    await eventually(lambda: device.messages)


async def test_a_message_of_the_wrong_union_is_rejected_and_the_next_one_taken(wire: Any, eventually: Any) -> None:
    coordinator = wire.listen(decoder=Decoder(Heartbeat))
    device = wire.join(coordinator.router.address, decoder=Decoder(Stop))
    device.dealer.send(hello(1))
    device.dealer.send(Heartbeat())
    await eventually(lambda: coordinator.messages)
    assert coordinator.messages == [Heartbeat()]
    assert [error.reason for error in coordinator.rejected] == ["type"]
    assert coordinator.refused_peers == coordinator.peers
    coordinator.router.send(coordinator.peers[0], Beat())
    coordinator.router.send(coordinator.peers[0], Stop())
    await eventually(lambda: device.messages)
    assert device.messages == [Stop()]
    assert [error.reason for error in device.rejected] == ["type"]


async def test_both_sides_count_the_same_bytes(wire: Any, eventually: Any) -> None:
    coordinator = wire.listen()
    device = wire.join(coordinator.router.address)
    device.dealer.send(Heartbeat())
    await eventually(lambda: coordinator.messages)
    assert coordinator.router.bytes_received == device.dealer.bytes_sent == 16
    coordinator.router.send(coordinator.peers[0], Blob(digest="a" * 64, offset=0, size=100_000), [bytes(100_000)])
    await eventually(lambda: device.messages)
    assert coordinator.router.bytes_sent == device.dealer.bytes_received > 100_000


async def test_too_many_unsent_messages_are_refused_and_the_others_arrive(wire: Any, eventually: Any) -> None:
    first = wire.listen()
    address = first.router.address
    first.router.close()
    device = wire.join(address)
    taken = 0
    while device.dealer.send(hello(taken)):
        taken += 1
        assert taken < 5000
    assert taken >= 1000
    coordinator = await wire.listen_again(address)
    await eventually(lambda: len(coordinator.messages) == taken)
    assert [message.device for message in coordinator.messages] == list(range(taken))
    assert device.dealer.send(hello(taken))


async def test_a_network_forgets_a_side_that_is_closed(wire: Any, eventually: Any) -> None:
    gc.freeze()  # the collector need not look at what other tests have left
    coordinator = wire.listen()
    device = wire.join(coordinator.router.address)
    device.dealer.send(hello(1))
    await eventually(lambda: coordinator.messages)
    sides = [weakref.ref(device.dealer), weakref.ref(coordinator.router)]
    device.dealer.close()
    coordinator.router.close()
    del device.dealer, coordinator.router
    await eventually(lambda: gc.collect() >= 0 and not any(side() for side in sides))


async def test_a_callback_may_close_its_own_endpoint(wire: Any, eventually: Any) -> None:
    coordinator = wire.listen()
    device = wire.join(coordinator.router.address)
    device.dealer.send(hello(1))
    await eventually(lambda: coordinator.peers)
    device.react = lambda message, _: device.dealer.close()
    for _ in range(3):
        coordinator.router.send(coordinator.peers[0], Beat())
    await eventually(lambda: not coordinator.router.send(coordinator.peers[0], Beat()))
    assert device.messages == [Beat()]


async def test_a_router_that_a_callback_closes_hands_on_nothing_more(wire: Any, eventually: Any) -> None:
    coordinator = wire.listen()
    device = wire.join(coordinator.router.address)

    def end(message: Any, peer: bytes) -> None:
        coordinator.router.cut(peer)
        coordinator.router.close()

    coordinator.react = end
    for number in range(5):
        device.dealer.send(hello(number))
    await eventually(lambda: coordinator.messages)
    for _ in range(50):
        await asyncio.sleep(0)
    assert coordinator.messages == [hello(0)]


async def test_what_the_screen_stops_is_not_decoded(wire: Any, eventually: Any) -> None:
    seen: list[tuple[bytes, int]] = []

    def screen(peer: bytes, frames: Sequence[Any]) -> ProtocolError | None:
        seen.append((peer, len(frames)))
        return ProtocolError("too many frames") if len(frames) > 1 else None

    coordinator = wire.listen(screen=screen)
    device = wire.join(coordinator.router.address)
    device.dealer.send(Heartbeat(), [b"more"])
    device.dealer.send(Heartbeat())
    await eventually(lambda: coordinator.messages)
    assert coordinator.messages == [Heartbeat()]
    assert [str(error) for error in coordinator.rejected] == ["too many frames"]
    assert seen == [(coordinator.refused_peers[0], 2), (coordinator.peers[0], 1)]


async def test_a_taken_address_is_refused_in_one_sentence(wire: Any) -> None:
    coordinator = wire.listen()
    with pytest.raises(ConfigurationError, match=f"cannot listen at {coordinator.router.address}: it is in use"):
        wire.network.bind(coordinator.router.address, UP, coordinator.from_peer, coordinator.reject_peer)


async def test_a_closed_router_leaves_its_address_free(wire: Any) -> None:
    coordinator = wire.listen()
    coordinator.router.close()
    again = await wire.listen_again(coordinator.router.address)
    assert again.router.address == coordinator.router.address
