"""Viewers read a ring of messages, each at its own pace."""

import asyncio
import math

from fedemu.ops.live.stream import KEPT, Stream


def test_a_viewer_catches_up_on_what_it_has_missed() -> None:
    stream = Stream()
    for number in range(3):
        stream.add("tick", {"n": number})
    frames = stream.after(1)
    assert frames is not None
    assert [frame.split(b"\n")[2] for frame in frames] == [b'data: {"n":1}', b'data: {"n":2}']
    assert stream.after(3) == []
    assert stream.number_of(stream.id_of(3)) == 3


def test_a_number_that_json_does_not_know_does_not_end_the_page() -> None:
    stream = Stream()
    stream.add("tick", {"model_digest": math.nan, "updates": [math.inf, 1]})
    assert (stream.after(0) or [b""])[0].endswith(b'data: {"model_digest":null,"updates":[null,1]}\n\n')


def test_a_viewer_that_was_overtaken_needs_a_snapshot() -> None:
    stream = Stream()
    for number in range(KEPT + 1):
        stream.add("tick", {"n": number})
    assert stream.after(0) is None
    assert len(stream.after(1) or ()) == KEPT
    assert stream.after(stream.last + 5) is None, "a number that was never given"


def test_ids_of_another_server_and_nonsense_are_not_understood() -> None:
    stream = Stream()
    assert [stream.number_of(id) for id in ("", "5", f"{Stream().name}-1", f"{stream.name}-x", f"{stream.name}-")] == [
        None
    ] * 5


async def test_all_waiting_viewers_wake_up() -> None:
    stream = Stream()
    waiting = [asyncio.create_task(stream.news(60.0)) for _ in range(20)]
    await asyncio.sleep(0)
    stream.add("tick", {})
    await asyncio.wait_for(asyncio.gather(*waiting), 30.0)
