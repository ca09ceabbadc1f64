"""Every message that is encoded is decoded to the same. All bytes become an Envelope or a ProtocolError."""

from __future__ import annotations

import typing
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemu.protocol import messages as wire
from fedemu.protocol.codec import DOWN, ITEM_BYTES, UP, Decoder, Envelope, encode
from fedemu.protocol.errors import ProtocolError

QUICK = settings(max_examples=60)

index = st.integers(0, 2**31 - 1)
size = st.integers(0, 2**53 - 1)
number = st.integers(-(2**63), 2**63 - 1)
name = st.text(max_size=20)
seconds = st.floats(min_value=0, allow_nan=False)
pause = st.floats(min_value=0.001, max_value=1e9)
ask = st.builds("{}.{}.{}".format, *[st.integers(0, 10**9 - 1)] * 3)
digest = st.text("0123456789abcdef", min_size=64, max_size=64)
patience = st.integers(1, 100)
blob = st.builds(wire.BlobRef, key=name, digest=digest, size=size)
pairs = st.lists(st.tuples(index, index), max_size=4).map(tuple)
blobs = st.lists(blob, max_size=3).map(tuple)
specs = st.lists(
    st.builds(
        wire.TensorSpec,
        name=name,
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
        shape=st.lists(st.integers(0, 3), max_size=3).map(tuple),
    ),
    max_size=3,
    unique_by=lambda spec: spec.name,
).map(tuple)

MESSAGES: dict[type[wire.Message], st.SearchStrategy[Any]] = {
    wire.Hello: st.builds(wire.Hello, device=index, incarnation=index, lease=name, capabilities=st.just(("gzip", "é"))),
    wire.Heartbeat: st.builds(wire.Heartbeat),
    wire.Presence: st.builds(
        wire.Presence, until=seconds, intervals=st.lists(st.tuples(seconds, seconds), max_size=5).map(tuple)
    ),
    wire.Scheduled: st.builds(
        wire.Scheduled,
        ask=ask,
        event=st.sampled_from(["finish", "drop"]),
        at=seconds,
        cause=st.sampled_from([None, *typing.get_args(wire.DropCause)]),
        back=st.none() | seconds,
    ),
    wire.Result: st.builds(
        wire.Result,
        ask=ask,
        examples=size,
        steps=size,
        metrics=st.dictionaries(name, st.floats(), max_size=3),
        label_counts=st.none() | st.lists(size, max_size=4).map(tuple),
        seconds=st.none() | st.floats(min_value=0, max_value=1e9),
        tensors=specs,
    ),
    wire.Failed: st.builds(wire.Failed, ask=ask, reason=name, detail=name, planned=st.booleans()),
    wire.Declined: st.builds(wire.Declined, ask=ask, reason=name),
    wire.Bye: st.builds(wire.Bye, reason=name),
    wire.Enroll: st.builds(wire.Enroll, count=st.integers(1, 10**6), lease=st.none() | name, host=name),
    wire.Need: st.builds(wire.Need, digest=digest, offset=size, length=st.integers(1, 2**24)),
    wire.Died: st.builds(wire.Died, device=index, incarnation=index),
    wire.Welcome: st.builds(
        wire.Welcome,
        device=index,
        clock=st.sampled_from(["virtual", "wall"]),
        horizon=seconds,
        heartbeat_seconds=pause,
        patience=patience,
        durable_round=number,
        elapsed=seconds,
    ),
    wire.Granted: st.builds(
        wire.Granted,
        lease=name,
        run=name,
        ranges=pairs,
        experiment=blob,
        partition=blob,
        data=digest,
        heartbeat_seconds=pause,
        patience=patience,
    ),
    wire.Refused: st.builds(wire.Refused, reason=name, detail=name),
    wire.Work: st.builds(
        wire.Work,
        ask=ask,
        program=name,
        task=index,
        start=seconds,
        shared=blobs,
        state=st.none() | ask,
        download_bytes=size,
        upload_bytes=size,
        passes=seconds,
        deadline=seconds,
        durable_round=number,
        tensors=specs,
    ),
    wire.Proceed: st.builds(wire.Proceed, ask=ask),
    wire.Blob: st.builds(wire.Blob, digest=digest, offset=size, size=size),
    wire.Offer: st.builds(wire.Offer, blobs=blobs, round=index),
    wire.Wake: st.builds(wire.Wake, devices=st.lists(index, max_size=3).map(tuple)),
    wire.Sleep: st.builds(wire.Sleep),
    wire.Extend: st.builds(wire.Extend, until=seconds),
    wire.Accepted: st.builds(wire.Accepted, ask=ask),
    wire.Duplicate: st.builds(wire.Duplicate, ask=ask, verdict=st.sampled_from(typing.get_args(wire.Verdict))),
    wire.Late: st.builds(wire.Late, ask=ask),
    wire.Invalid: st.builds(wire.Invalid, ask=ask, reason=name, detail=name),
    wire.Cancel: st.builds(wire.Cancel, ask=ask),
    wire.Beat: st.builds(wire.Beat),
    wire.Stop: st.builds(wire.Stop, reason=name),
}


def frames_of(message: Any) -> list[bytes]:
    """The message with the buffers that it declares."""
    tensors = getattr(message, "tensors", ())
    buffers = [bytes(int(np.prod(spec.shape)) * ITEM_BYTES[spec.dtype]) for spec in tensors]
    return [bytes(frame) for frame in encode(message, buffers or [b"chunk"] * message.raw_frames)]


def decoder_of(kind: type[wire.Message]) -> Decoder:
    return UP if kind in typing.get_args(wire.Up) else DOWN


def either(decoder: Decoder, frames: list[bytes]) -> None:
    """Decode the frames, or be refused in one short sentence. Anything else fails the test."""
    outcome: Envelope | ProtocolError
    try:
        outcome = decoder.decode(frames)
    except ProtocolError as error:
        outcome = error
    assert isinstance(outcome, Envelope) or (outcome.reason.isidentifier() and len(str(outcome)) < 500)


def test_every_message_is_tried() -> None:
    assert set(MESSAGES) == {*typing.get_args(wire.Up), *typing.get_args(wire.Down)}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_survives_the_wire(kind: type[wire.Message]) -> None:
    @settings(QUICK, max_examples=15)
    @given(MESSAGES[kind])
    def survives(message: wire.Message) -> None:
        frames = frames_of(message)
        envelope = decoder_of(kind).decode(frames)
        assert type(envelope.message) is kind
        # Compared as bytes, since a metric may be NaN.
        assert encode(envelope.message, envelope.frames) == frames

    survives()


@QUICK
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_are_refused_or_decoded(frames: list[bytes]) -> None:
    either(UP, frames)


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | number | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=3), children, max_size=4),
    max_leaves=12,
)


@QUICK
@given(
    st.sampled_from(sorted(kind.__struct_config__.tag for kind in MESSAGES)),
    st.dictionaries(st.sampled_from(sorted({f for kind in MESSAGES for f in kind.__struct_fields__})), VALUES),
)
def test_wrongly_typed_fields_are_refused_or_decoded(tag: str, fields: dict[str, Any]) -> None:
    header = msgpack.packb({"v": 1, "t": tag, **fields})
    either(UP, [header])
    either(DOWN, [header])


@QUICK
@given(st.one_of(list(MESSAGES.values())), st.data())
def test_truncated_and_mutated_messages_are_refused_or_decoded(message: wire.Message, data: st.DataObject) -> None:
    frames = frames_of(message)
    position = data.draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[position])
    for _ in range(data.draw(st.integers(0, 3))):
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frames[position] = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    either(decoder_of(type(message)), frames)
    either(decoder_of(type(message)), frames[: data.draw(st.integers(0, len(frames)))])
