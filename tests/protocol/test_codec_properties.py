"""Every message that is encoded is decoded to the same. All bytes become an Envelope or a ProtocolError."""

from __future__ import annotations

import typing
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedemu.protocol import messages as m
from fedemu.protocol.codec import DOWN, ITEM_BYTES, UP, Decoder, Envelope, encode
from fedemu.protocol.errors import ProtocolError

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

index = st.integers(0, 2**31 - 1)
size = st.integers(0, 2**53 - 1)
number = st.integers(-(2**63), 2**63 - 1)
name = st.text(max_size=20)
seconds = st.floats(min_value=0, allow_nan=False)
ask = st.builds("{}.{}.{}".format, *[st.integers(0, 10**9 - 1)] * 3)
digest = st.text("0123456789abcdef", min_size=64, max_size=64)
patience = st.integers(1, 100)
blob = st.builds(m.BlobRef, key=name, digest=digest, size=size)
pairs = st.lists(st.tuples(index, index), max_size=4).map(tuple)
blobs = st.lists(blob, max_size=3).map(tuple)
specs = st.lists(
    st.builds(
        m.TensorSpec,
        name=name,
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
        shape=st.lists(st.integers(0, 3), max_size=3).map(tuple),
    ),
    max_size=3,
    unique_by=lambda spec: spec.name,
).map(tuple)

MESSAGES: dict[type[m.Message], st.SearchStrategy[Any]] = {
    m.Hello: st.builds(m.Hello, device=index, incarnation=index, lease=name, capabilities=st.just(("gzip", "é"))),
    m.Heartbeat: st.builds(m.Heartbeat),
    m.Presence: st.builds(
        m.Presence, until=seconds, intervals=st.lists(st.tuples(seconds, seconds), max_size=5).map(tuple)
    ),
    m.Scheduled: st.builds(
        m.Scheduled,
        ask=ask,
        event=st.sampled_from(["finish", "drop"]),
        at=seconds,
        cause=st.sampled_from([None, *typing.get_args(m.DropCause)]),
        back=st.none() | seconds,
    ),
    m.Result: st.builds(
        m.Result,
        ask=ask,
        examples=size,
        steps=size,
        metrics=st.dictionaries(name, st.floats(), max_size=3),
        label_counts=st.none() | st.lists(size, max_size=4).map(tuple),
        seconds=st.none() | st.floats(min_value=0, max_value=1e9),
        tensors=specs,
    ),
    m.Failed: st.builds(m.Failed, ask=ask, reason=name, detail=name, planned=st.booleans()),
    m.Declined: st.builds(m.Declined, ask=ask, reason=name),
    m.Bye: st.builds(m.Bye, reason=name),
    m.Enroll: st.builds(m.Enroll, count=st.integers(1, 10**6), lease=st.none() | name, host=name),
    m.Need: st.builds(m.Need, digest=digest, offset=size, length=st.integers(1, 2**24)),
    m.Died: st.builds(m.Died, device=index, incarnation=index),
    m.Welcome: st.builds(
        m.Welcome,
        device=index,
        clock=st.sampled_from(["virtual", "wall"]),
        horizon=seconds,
        heartbeat_seconds=seconds,
        patience=patience,
        durable_round=number,
        elapsed=seconds,
    ),
    m.Granted: st.builds(
        m.Granted,
        lease=name,
        run=name,
        ranges=pairs,
        experiment=blob,
        partition=blob,
        data=digest,
        heartbeat_seconds=seconds,
        patience=patience,
    ),
    m.Refused: st.builds(m.Refused, reason=name, detail=name),
    m.Work: st.builds(
        m.Work,
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
    m.Proceed: st.builds(m.Proceed, ask=ask),
    m.Blob: st.builds(m.Blob, digest=digest, offset=size, size=size),
    m.Offer: st.builds(m.Offer, blobs=blobs, round=index),
    m.Extend: st.builds(m.Extend, until=seconds),
    m.Accepted: st.builds(m.Accepted, ask=ask),
    m.Duplicate: st.builds(m.Duplicate, ask=ask, verdict=st.sampled_from(typing.get_args(m.Verdict))),
    m.Late: st.builds(m.Late, ask=ask),
    m.Invalid: st.builds(m.Invalid, ask=ask, reason=name, detail=name),
    m.Cancel: st.builds(m.Cancel, ask=ask),
    m.Beat: st.builds(m.Beat),
    m.Stop: st.builds(m.Stop, reason=name),
}


def frames_of(message: Any) -> list[bytes]:
    """The message with the buffers that it declares."""
    tensors = getattr(message, "tensors", ())
    buffers = [bytes(int(np.prod(spec.shape)) * ITEM_BYTES[spec.dtype]) for spec in tensors]
    return [bytes(frame) for frame in encode(message, buffers or [b"chunk"] * message.raw_frames)]


def decoder_of(kind: type[m.Message]) -> Decoder:
    return UP if kind in typing.get_args(m.Up) else DOWN


def either(decoder: Decoder, frames: list[bytes]) -> None:
    """Decode the frames, or be refused in one short sentence. Anything else fails the test."""
    outcome: Envelope | ProtocolError
    try:
        outcome = decoder.decode(frames)
    except ProtocolError as error:
        outcome = error
    assert isinstance(outcome, Envelope) or (outcome.reason.isidentifier() and len(str(outcome)) < 500)


def test_every_message_is_tried() -> None:
    assert set(MESSAGES) == {*typing.get_args(m.Up), *typing.get_args(m.Down)}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_survives_the_wire(kind: type[m.Message]) -> None:
    @settings(QUICK, max_examples=15)
    @given(MESSAGES[kind])
    def survives(message: m.Message) -> None:
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
    st.sampled_from(sorted(kind.model_fields["type"].default for kind in MESSAGES)),
    st.dictionaries(st.sampled_from(sorted({f for kind in MESSAGES for f in kind.model_fields})), VALUES),
)
def test_wrongly_typed_fields_are_refused_or_decoded(tag: str, fields: dict[str, Any]) -> None:
    header = msgpack.packb({"v": 1, "t": tag, **fields})
    either(UP, [header])
    either(DOWN, [header])


@QUICK
@given(st.one_of(list(MESSAGES.values())), st.data())
def test_truncated_and_mutated_messages_are_refused_or_decoded(message: m.Message, data: st.DataObject) -> None:
    frames = frames_of(message)
    position = data.draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[position])
    for _ in range(data.draw(st.integers(0, 3))):
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frames[position] = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    either(decoder_of(type(message)), frames)
    either(decoder_of(type(message)), frames[: data.draw(st.integers(0, len(frames)))])
