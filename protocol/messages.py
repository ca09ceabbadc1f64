"""The messages between devices, supervisors and the coordinator: typed, frozen, validated once at the edge.

``docs/protocol.md`` tells the exchange as a story; ``codec.py`` turns a message and its buffers into frames.
Times are seconds of the experiment's clock unless a name says otherwise; sizes are bytes.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

PROTOCOL_VERSION = 1

AskText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9}$")]
DigestText = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(max_length=256)]
Sentence = Annotated[str, StringConstraints(max_length=2048)]
Index = Annotated[int, Field(ge=0, lt=2**31)]
Size = Annotated[int, Field(ge=0, lt=2**53)]
Seconds = Annotated[float, Field(ge=0)]
RealSeconds = Annotated[float, Field(ge=0, le=1e9)]

Verdict = Literal["accepted", "cancelled", "late", "dropped", "failed", "rejected"]
OUTCOMES: tuple[Verdict, ...] = get_args(Verdict)
"""How the work of a selected device can end, in the order in which people see the six. Each device has exactly one."""
DropCause = Literal["offline", "crash", "leave", "silence"]


class Message(BaseModel):
    """Base of all messages; ``type`` is the tag that tells them apart."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    raw_frames: ClassVar[int] = 0
    """Frames that follow a message without declared tensors."""


class TensorSpec(Message):
    """One tensor of a payload; its bytes are the frame of the same position, little-endian, C order."""

    name: Name
    dtype: Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    shape: Annotated[tuple[Size, ...], Field(max_length=16)]


class BlobRef(Message):
    """A blob by name; ``size`` in bytes. ``key`` is what it is to the program (``model``, ``generator``)."""

    key: Name
    digest: DigestText
    size: Size


Tensors = Annotated[tuple[TensorSpec, ...], Field(max_length=8192)]


# ── from devices ──────────────────────────────────────────────────────────────


class Hello(Message):
    """A device takes its place. The lease proves that the index was granted."""

    type: Literal["hello"] = "hello"
    device: Index
    incarnation: Index
    lease: Name
    capabilities: Annotated[tuple[Name, ...], Field(max_length=16)] = ()


class Heartbeat(Message):
    type: Literal["heartbeat"] = "heartbeat"


class Presence(Message):
    """The virtual on-line intervals [start, end) of the device up to ``until`` (both may be infinite), ascending."""

    type: Literal["presence"] = "presence"
    until: Seconds
    intervals: Annotated[tuple[tuple[Seconds, Seconds], ...], Field(max_length=65536)]


class Scheduled(Message):
    """The answer to Work under the virtual clock: the device would finish, or drop out, ``at`` this time.

    After a drop-out it is away until ``back``.
    """

    type: Literal["scheduled"] = "scheduled"
    ask: AskText
    event: Literal["finish", "drop"]
    at: Seconds
    cause: DropCause | None = None
    back: Seconds | None = None


class Result(Message):
    """What a program made; the payload's tensors are named ``key/leaf`` and follow as frames.

    ``seconds`` is the real time that the work took, which is recorded and decides nothing; None where nobody measured.
    """

    type: Literal["result"] = "result"
    ask: AskText
    examples: Size
    steps: Size
    metrics: Annotated[dict[Name, float], Field(max_length=64)]
    label_counts: Annotated[tuple[Size, ...], Field(max_length=65536)] | None = None
    seconds: RealSeconds | None = None
    tensors: Tensors


class Failed(Message):
    type: Literal["failed"] = "failed"
    ask: AskText
    reason: Name
    detail: Sentence = ""
    planned: bool = False


class Declined(Message):
    type: Literal["declined"] = "declined"
    ask: AskText
    reason: Name


class Bye(Message):
    type: Literal["bye"] = "bye"
    reason: Name = ""


# ── from supervisors (and, for Enroll and Need, from devices that have none) ──


class Enroll(Message):
    """Ask for ``count`` device indices, or for the ones that ``lease`` holds."""

    type: Literal["enroll"] = "enroll"
    count: Annotated[int, Field(ge=1, le=1_000_000)]
    lease: Name | None = None
    host: Name = ""


class Need(Message):
    """Ask for bytes [offset, offset + length) of a blob."""

    type: Literal["need"] = "need"
    digest: DigestText
    offset: Size
    length: Annotated[int, Field(ge=1, le=16 * 2**20)]


class Died(Message):
    """The machine saw a device's process end."""

    type: Literal["died"] = "died"
    device: Index
    incarnation: Index


# ── from the coordinator ──────────────────────────────────────────────────────


class Welcome(Message):
    """The device is a member. It announces its presence up to ``horizon`` at least (virtual clock)."""

    type: Literal["welcome"] = "welcome"
    device: Index
    clock: Literal["virtual", "wall"]
    horizon: Seconds
    heartbeat_seconds: Seconds
    patience: Annotated[int, Field(ge=1)]
    durable_round: int
    elapsed: Seconds = 0.0


class Granted(Message):
    """Indices [start, stop) for a supervisor, its lease, and the digests of what the fleet has to agree on."""

    type: Literal["granted"] = "granted"
    lease: Name
    run: Name
    ranges: Annotated[tuple[tuple[Index, Index], ...], Field(max_length=65536)]
    experiment: BlobRef
    partition: BlobRef
    data: DigestText
    heartbeat_seconds: Seconds
    patience: Annotated[int, Field(ge=1)]


class Refused(Message):
    """``reason``: unknown_peer, lease_taken, lease_unknown, fleet_full, superseded, unknown_blob, version, malformed.

    ``detail`` says the same to a person.
    """

    type: Literal["refused"] = "refused"
    reason: Name
    detail: Sentence


class Work(Message):
    """A device's part of an ask.

    ``state`` names the version of the device's own state to start from, None for a first visit. ``start`` is when the
    device gets the message; ``download_bytes`` and ``upload_bytes`` are what its profile is charged, ``passes`` how
    many times it goes over its examples. The tensors are its own part (``Ask.each``).
    """

    type: Literal["work"] = "work"
    ask: AskText
    program: Name
    task: Index
    start: Seconds
    shared: Annotated[tuple[BlobRef, ...], Field(max_length=64)]
    state: AskText | None
    download_bytes: Size
    upload_bytes: Size
    passes: Seconds
    deadline: Seconds
    durable_round: int
    tensors: Tensors = ()


class Proceed(Message):
    """Do as you scheduled: train and answer, or drop out."""

    type: Literal["proceed"] = "proceed"
    ask: AskText


class Blob(Message):
    """Bytes from ``offset`` of a blob of ``size`` bytes; one frame follows."""

    raw_frames: ClassVar[int] = 1
    type: Literal["blob"] = "blob"
    digest: DigestText
    offset: Size
    size: Size


class Offer(Message):
    """Blobs that devices of this machine are about to need; a supervisor answers with Need for those it lacks."""

    type: Literal["offer"] = "offer"
    blobs: Annotated[tuple[BlobRef, ...], Field(max_length=64)]
    round: Index


class Extend(Message):
    """Announce your presence up to ``until`` at least."""

    type: Literal["extend"] = "extend"
    until: Seconds


class Accepted(Message):
    type: Literal["accepted"] = "accepted"
    ask: AskText


class Duplicate(Message):
    """The contribution was decided before, with this verdict."""

    type: Literal["duplicate"] = "duplicate"
    ask: AskText
    verdict: Verdict


class Late(Message):
    type: Literal["late"] = "late"
    ask: AskText


class Invalid(Message):
    type: Literal["invalid"] = "invalid"
    ask: AskText
    reason: Name
    detail: Sentence = ""


class Cancel(Message):
    type: Literal["cancel"] = "cancel"
    ask: AskText


class Beat(Message):
    """The answer to a heartbeat."""

    type: Literal["beat"] = "beat"


class Stop(Message):
    """The run is over for this peer."""

    type: Literal["stop"] = "stop"
    reason: Name = ""


Up = Hello | Heartbeat | Presence | Scheduled | Result | Failed | Declined | Bye | Enroll | Need | Died
Down = (
    Welcome
    | Granted
    | Refused
    | Work
    | Proceed
    | Blob
    | Offer
    | Extend
    | Accepted
    | Duplicate
    | Late
    | Invalid
    | Cancel
    | Beat
    | Stop
)
