"""Frames of messages, and the bytes that are refused."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from msgspec.structs import replace

from fedemu.protocol.codec import DOWN, UP, Decoder, Limits, encode
from fedemu.protocol.errors import MalformedMessage, ProtocolError, VersionMismatch
from fedemu.protocol.messages import (
    Accepted,
    Beat,
    Blob,
    Bye,
    Heartbeat,
    Message,
    Presence,
    Result,
    Scheduled,
    Tensors,
    TensorSpec,
    Welcome,
)

RESULT = Result(
    ask="3.0.1",
    examples=12,
    steps=60,
    metrics={"loss": 0.5},
    tensors=(
        TensorSpec(name="delta/bias", dtype="float32", shape=(2,)),
        TensorSpec(name="delta/step", dtype="int64", shape=()),
    ),
)
BUFFERS = [bytes(8), bytes(8)]


def header(**fields: object) -> bytes:
    packed = msgpack.packb({"v": 1, **fields})
    assert isinstance(packed, bytes)
    return packed


def reason(decoder: Decoder, frames: Sequence[Any]) -> str:
    with pytest.raises(ProtocolError) as caught:
        decoder.decode(frames)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()
    return caught.value.reason


def test_the_frames_of_a_message_are_these_bytes() -> None:
    frames = encode(Scheduled(ask="1.0.0", event="finish", at=12.5))
    assert [bytes(frame).hex(" ") for frame in frames] == [
        "88 a1 74 a9 73 63 68 65 64 75 6c 65 64 a1 76 01 a3 61 73 6b a5 31 2e 30 2e 30 a5 65 76 65 6e 74 "
        "a6 66 69 6e 69 73 68 a2 61 74 cb 40 29 00 00 00 00 00 00 a5 63 61 75 73 65 c0 a4 62 61 63 6b c0 "
        "a5 65 70 6f 63 68 c0"
    ]


def test_nested_specs_are_maps_and_buffers_follow_uncopied() -> None:
    frames = encode(RESULT, BUFFERS)
    assert msgpack.unpackb(frames[0])["tensors"] == [
        {"name": "delta/bias", "dtype": "float32", "shape": [2]},
        {"name": "delta/step", "dtype": "int64", "shape": []},
    ]
    assert frames[1] is BUFFERS[0]
    assert frames[2] is BUFFERS[1]


def test_a_message_comes_back_with_views_of_its_buffers() -> None:
    envelope = UP.decode(encode(RESULT, BUFFERS))
    assert envelope.message == RESULT
    assert [frame.obj is buffer for frame, buffer in zip(envelope.frames, BUFFERS, strict=True)] == [True, True]


def test_fields_with_defaults_may_be_left_out() -> None:
    frame = header(t="scheduled", ask="1.0.0", event="finish", at=3)
    assert UP.decode([frame]).message == Scheduled(ask="1.0.0", event="finish", at=3.0)


def test_infinite_times_are_times() -> None:
    presence = Presence(until=math.inf, intervals=((0.0, math.inf),))
    assert UP.decode(encode(presence)).message == presence


def test_not_a_number_may_be_a_metric_but_not_a_time() -> None:
    result = header(t="result", ask="1.0.0", examples=1, steps=1, metrics={"loss": math.nan}, tensors=[])
    assert math.isnan(UP.decode([result]).message.metrics["loss"])
    assert reason(UP, [header(t="scheduled", ask="1.0.0", event="finish", at=math.nan)]) == "field"
    assert reason(UP, [header(t="presence", until=math.inf, intervals=[[math.nan, 1.0]])]) == "field"


@pytest.mark.parametrize("seconds", [0.0, 1e-300, 1e300, math.inf])
def test_signs_of_life_are_neither_without_a_pause_nor_never(seconds: float) -> None:
    welcome = Welcome(device=0, clock="virtual", horizon=1.0, heartbeat_seconds=seconds, patience=5, durable_round=0)
    with pytest.raises(MalformedMessage, match="heartbeat_seconds"):
        DOWN.decode(encode(welcome))
    assert DOWN.decode(encode(replace(welcome, heartbeat_seconds=0.002)))


def test_a_blob_has_exactly_one_frame() -> None:
    blob = Blob(digest="a" * 64, offset=0, size=5)
    assert [bytes(frame) for frame in DOWN.decode(encode(blob, [b"bytes"])).frames] == [b"bytes"]
    assert reason(DOWN, encode(blob)) == "frames"
    assert reason(DOWN, encode(blob, [b"a", b"b"])) == "frames"


def test_other_messages_have_no_frames() -> None:
    assert reason(UP, encode(Heartbeat(), [b"more"])) == "frames"


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([], "frames"),
        ([b""], "encoding"),
        ([b"\xc1"], "encoding"),
        ([b"\x81"], "encoding"),
        ([b"\x81\xa1v\x01 trailing"], "encoding"),
        ([msgpack.packb([1, 2])], "encoding"),
        ([msgpack.packb({1: 2})], "encoding"),
        ([b"\x81\xa1\xff\x01"], "version"),
        ([b"\x83\xa1v\x01\xa1t\xa3bye\xa6reason\xa1\xff"], "field"),
        ([b"\x91" * 2000], "encoding"),
        ([header(t="enroll", count=[[[[[[[[]]]]]]]])], "field"),
        ([header(t="enroll", count={"a": {"b": {"c": {"d": {"e": {"f": {"g": {}}}}}}}})], "field"),
        ([b"\x83\xa1v\x01\xa1t\xa6enroll\xa5count" + b"\x91" * 200_000 + b"\xc0"], "encoding"),
        ([header(t="heartbeat", **{str(number): 0 for number in range(100)})], "field"),
        ([header(t="heartbeat", **{str(number): 0 for number in range(200)})], "field"),
        (
            [header(t="result", ask="1.0.0", examples=1, steps=1, metrics={str(number): 0.0 for number in range(65)})],
            "field",
        ),
        ([msgpack.packb({"t": "heartbeat"})], "version"),
        ([msgpack.packb({"v": 2, "t": "heartbeat"})], "version"),
        ([msgpack.packb({"v": True, "t": "heartbeat"})], "version"),
        ([msgpack.packb({"v": "x" * 5000, "t": "heartbeat"})], "version"),
        ([header()], "type"),
        ([header(t=["heartbeat"])], "type"),
        ([header(t="welcome")], "type"),
        ([header(t="\x1b[2J" * 100)], "type"),
        ([header(t="heartbeat", type="heartbeat")], "field"),
        ([header(t="heartbeat", unknown=1)], "field"),
        ([header(t="heartbeat", **{"\n" * 5000: 1})], "field"),
        ([header(t="hello", device=0)], "field"),
        ([header(t="hello", device=0.0, incarnation=0, lease="")], "field"),
        ([header(t="hello", device=True, incarnation=0, lease="")], "field"),
        ([header(t="hello", device=2**31, incarnation=0, lease="")], "field"),
        ([header(t="hello", device=-1, incarnation=0, lease="")], "field"),
        ([header(t="hello", device=0, incarnation=0, lease="x" * 257)], "field"),
        ([header(t="hello", device=0, incarnation=0, lease=b"bytes")], "field"),
        ([header(t="hello", device=0, incarnation=0, lease=msgpack.Timestamp(1))], "field"),
        ([header(t="scheduled", ask="1.0.0\n", event="finish", at=1.0)], "field"),
        ([header(t="scheduled", ask="1.0", event="finish", at=1.0)], "field"),
        ([header(t="scheduled", ask="1.0.0", event="vanish", at=1.0)], "field"),
        ([header(t="scheduled", ask="1.0.0", event="finish", at=-1.0)], "field"),
        ([header(t="scheduled", ask="1.0.0", event="finish", at=True)], "field"),
        *(
            ([header(t="result", ask="1.0.0", examples=1, steps=1, metrics={}, seconds=seconds, tensors=[])], "field")
            for seconds in (-0.5, float("inf"), float("nan"), 1e10, True, "1")
        ),
        ([header(t="presence", until=1.0, intervals=[["a", "b"]] * 500)], "field"),
        ([header(t="presence", until=1.0, intervals=[[0.0, 1.0]] * 65537)], "field"),
        ([header(t="need", digest="A" * 64, offset=0, length=1)], "field"),
        ([header(t="need", digest="a" * 64, offset=2**53, length=1)], "field"),
        ([header(t="need", digest="a" * 64, offset=0, length=0)], "field"),
    ],
)
def test_unusable_frames_are_refused_with_the_name_of_the_reason(frames: list[bytes], expected: str) -> None:
    assert reason(UP, frames) == expected


@pytest.mark.parametrize(
    ("specs", "buffers"),
    [
        ([("a", "float32", [2])], []),
        ([], [b"1234"]),
        ([("a", "float32", [2])], [bytes(7)]),
        ([("a", "float64", [])], [bytes(4)]),
        ([("a", "bool", [2**52, 2**52])], [b""]),
        ([("a", "float32", [1]), ("a", "float32", [1])], [bytes(4), bytes(4)]),
    ],
)
def test_declared_tensors_agree_with_the_frames(specs: list[tuple[str, str, list[int]]], buffers: list[bytes]) -> None:
    tensors = [{"name": name, "dtype": dtype, "shape": shape} for name, dtype, shape in specs]
    first = header(t="result", ask="1.0.0", examples=1, steps=1, metrics={}, tensors=tensors)
    assert reason(UP, [first, *buffers]) == "tensors"


def test_an_unknown_dtype_is_refused() -> None:
    tensors = [{"name": "a", "dtype": "object", "shape": [1]}]
    first = header(t="result", ask="1.0.0", examples=1, steps=1, metrics={}, tensors=tensors)
    assert reason(UP, [first, bytes(8)]) == "field"


def test_a_payload_may_be_as_large_as_the_limit() -> None:
    assert Decoder(Result, Limits(frame_bytes=8, message_bytes=16)).decode(encode(RESULT, BUFFERS)).message == RESULT


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(header_bytes=100), "size"),
        (Limits(frame_bytes=7), "size"),
        (Limits(message_bytes=15), "size"),
        (Limits(frames=1), "frames"),
    ],
)
def test_limits_are_kept(limits: Limits, expected: str) -> None:
    frames = [bytes(frame) for frame in encode(RESULT, BUFFERS)]
    assert UP.decode(frames).message == RESULT
    assert reason(Decoder(Result, limits), frames) == expected


def test_the_longest_presence_fits_the_default_limits() -> None:
    presence = Presence(until=math.inf, intervals=tuple((float(i), i + 0.5) for i in range(65536)))
    assert UP.decode(encode(presence)).message == presence


def test_arrays_that_claim_more_than_they_hold_cost_no_memory() -> None:
    nested = b"\x82\xa1v\x01\xa1x" + b"\xdd\x00\x0f\xff\xff" * 1000 + bytes(2**20)
    intervals = b"\x84\xa1v\x01\xa1t\xa8presence\xa5until\xcb" + bytes(8) + b"\xa9intervals\xdd\x0f\xff\xff\xff"
    for claims in (nested, intervals + b"\x92\x00\x00" * 100):
        tracemalloc.start()
        try:
            assert reason(UP, [claims]) == "encoding"
            assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
        finally:
            tracemalloc.stop()


def test_a_decoder_takes_any_union_of_messages() -> None:
    class Job(Message):
        device: int
        tensors: Tensors

    class Pair(Message):
        raw_frames = 2

    decoder = Decoder(Job | Pair)
    job = Job(device=3, tensors=(TensorSpec(name="x", dtype="uint8", shape=(3,)),))
    assert decoder.decode(encode(job, [b"abc"])).message == job
    assert decoder.decode(encode(Pair(), [b"a", b""])).message == Pair()
    assert reason(decoder, encode(Pair(), [b"a"])) == "frames"
    assert reason(decoder, encode(Beat())) == "type"
    assert Decoder(Beat).decode(encode(Beat())).message == Beat()


def test_the_two_directions_do_not_mix() -> None:
    accepted = encode(Accepted(ask="1.0.0"))
    assert DOWN.decode(accepted).message == Accepted(ask="1.0.0")
    assert reason(UP, accepted) == "type"


def test_a_value_that_a_message_cannot_hold_fails_when_encoding() -> None:
    with pytest.raises(TypeError, match="holds an object"):
        encode(Bye(reason=cast(str, object())))


def test_a_number_of_numpy_that_is_a_python_float_goes_as_one() -> None:
    assert UP.decode(encode(Scheduled(ask="1.0.0", event="finish", at=np.float64(0.1)))).message.at == 0.1


def test_a_version_in_another_encoding_is_the_same_version() -> None:
    assert UP.decode([b"\x82\xa1v\xcc\x01\xa1t\xa9heartbeat"]).message == Heartbeat()


def test_refusals_say_which_value_of_which_field_is_wrong() -> None:
    with pytest.raises(MalformedMessage, match=r"need: 'length': Expected `int` >= 1"):
        UP.decode([header(t="need", digest="a" * 64, offset=0, length=0)])
    with pytest.raises(VersionMismatch, match="version 7, this side speaks 1"):
        UP.decode([msgpack.packb({"v": 7})])
    with pytest.raises(MalformedMessage, match=r"presence: 'intervals\[0\]\[0\]': Expected `float`, got `str`"):
        UP.decode([header(t="presence", until=1.0, intervals=[["a", "b"]] * 500)])
    with pytest.raises(MalformedMessage, match="heartbeat: Object contains unknown field `extra`"):
        UP.decode([header(t="heartbeat", extra=1)])
    many = {str(number): 0.0 for number in range(65)}
    with pytest.raises(MalformedMessage, match="result: 'metrics': Expected `object` of length <= 64"):
        UP.decode([header(t="result", ask="1.0.0", examples=1, steps=1, metrics=many, tensors=[])])


@pytest.mark.parametrize(
    "make",
    [
        lambda: header(t="presence", until=1.0, intervals=[[]] * 60_000),
        lambda: header(t="result", ask="1.0.0", examples=1, steps=1, metrics={}, tensors=[{}] * 8000),
        lambda: header(
            t="result", ask="1.0.0", examples=1, steps=1, metrics={}, label_counts=["x"] * 65_536, tensors=[]
        ),
        lambda: header(t="presence", until=1.0, intervals=[[]] * 1_000_000),
        lambda: header(t="heartbeat", **{str(number): 0 for number in range(150_000)}),
    ],
)
def test_a_message_full_of_mistakes_costs_no_more_memory_than_a_good_one(make: Callable[[], bytes]) -> None:
    first = make()
    tracemalloc.start()
    try:
        assert reason(UP, [first]) in ("field", "size")
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()
