"""Messages that go through a pipe in pieces, small and large."""

from __future__ import annotations

from fedemu.device.pipe import TO_ZYGOTE, Fork, Unpacker, pack_message


def test_messages_come_out_whole_however_the_bytes_are_cut() -> None:
    messages = [Fork(number=number, lives=((number, 16),)) for number in range(3)]
    data = b"".join(map(pack_message, messages))
    unpacker = Unpacker(TO_ZYGOTE)
    assert [message for place in range(len(data)) for message in unpacker.feed(data[place : place + 1])] == messages


def test_a_process_may_hold_as_many_devices_as_a_message_can_name() -> None:
    fork = Fork(number=0, lives=tuple((device, 2**31 - 1) for device in range(1_000_000)))
    assert Unpacker(TO_ZYGOTE).feed(pack_message(fork)) == [fork]
