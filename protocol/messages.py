"""The messages between devices, supervisors and the coordinator: typed, frozen, and validated once when they arrive.

``docs/protocol.md`` explains the exchange step by step. ``codec.py`` turns a message and its buffers into frames. Times
are seconds of the experiment's clock if a name does not say otherwise; sizes are in bytes.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform, get_args

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 1
UNABLE = "unable"
"""The reason of the Bye by which a machine tells that it cannot take part, or go on. Its ``detail`` says why."""
REVOKED = "revoked"
"""The reason of the Bye by which an edge tells that a machine behind it is not approved any more."""
SILENT = "silent"
"""The reason of the Bye by which a supervisor or an edge tells that nothing is heard any more of who is behind it."""
ASLEEP = "asleep"
"""The reason of the Bye of a device that was told to sleep."""


AskText = Annotated[str, Meta(pattern=r"^[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9}\Z")]
DigestText = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Name = Annotated[str, Meta(max_length=256)]
Sentence = Annotated[str, Meta(max_length=2048)]
Fact = Annotated[str, Meta(pattern=r"^[ -~]{0,64}\Z")]
"""A word or two about a machine, in ASCII."""
Index = Annotated[int, Meta(ge=0, lt=2**31)]
Size = Annotated[int, Meta(ge=0, lt=2**53)]
Seconds = Annotated[float, Meta(ge=0)]
Epoch = Size | None
"""The life of the coordinator to which an ask belongs; see Work."""
SHORTEST_BEAT, LONGEST_BEAT = 0.001, 1e9
BeatSeconds = Annotated[float, Meta(ge=SHORTEST_BEAT, le=LONGEST_BEAT)]
"""Real seconds between two signs of life. With none in between a peer would do nothing else than say them."""
RealSeconds = Annotated[float, Meta(ge=0, le=1e9)]

MOST_METRICS = 64
"""The most measurements of one reply."""
Metrics = Annotated[dict[Name, float], Meta(max_length=MOST_METRICS)]

Verdict = Literal["accepted", "cancelled", "late", "dropped", "failed", "rejected"]
OUTCOMES: tuple[Verdict, ...] = get_args(Verdict)
"""The six outcomes: how the work of a selected device can end, in the order in which people see them.

Each device of a cohort has exactly one outcome.
"""
DropCause = Literal["offline", "crash", "leave", "silence"]
"""Why a device drops out: it goes off-line, or it has one of three planned failures."""


class _Kind(msgspec.StructMeta):
    """Makes the fields of all messages keyword-only, so that one with a default may come before one without."""

    def __new__(mcls, name: str, bases: Any, namespace: Any, **config: Any) -> Any:
        return super().__new__(mcls, name, bases, namespace, **{"kw_only": True, **config})


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Fields(msgspec.Struct, metaclass=_Kind, frozen=True, forbid_unknown_fields=True, gc=False):
    """The base of messages, and of what they are made of. Fields are checked when they arrive, and not before."""


def _tag(name: str) -> str:
    """The type of a message on the wire, by the name of its class: ``job_failed`` for ``JobFailed``."""
    return re.sub(r"(?<=.)([A-Z])", r"_\1", name).lower()


class Message(Fields, tag_field="t", tag=_tag):
    """The base of all messages. ``v`` is the protocol's version."""

    raw_frames: ClassVar[int] = 0
    """The number of frames that follow a message without declared tensors."""
    v: int = PROTOCOL_VERSION

    @property
    def type(self) -> str:
        """The type of this message on the wire."""
        return str(self.__struct_config__.tag)


class TensorSpec(Fields):
    """One tensor of a payload. Its bytes are the frame at the same position, little-endian and in C order."""

    name: Name
    dtype: Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    shape: Annotated[tuple[Size, ...], Meta(max_length=16)]


class BlobRef(Fields):
    """A blob by its digest, with its size in bytes. ``key`` is its name in a program, such as ``model``."""

    key: Name
    digest: DigestText
    size: Size


Tensors = Annotated[tuple[TensorSpec, ...], Meta(max_length=8192)]


# Messages from devices.


class Hello(Message):
    """A device asks to be a member with its index. The lease proves that the index was granted."""

    device: Index
    incarnation: Index
    lease: Name
    capabilities: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()


class Heartbeat(Message):
    """The peer is alive. It sends this if it has sent nothing else for a heartbeat interval."""


class Presence(Message):
    """The virtual on-line intervals [start, end) of the device up to ``until``, ascending.

    The last end and ``until`` may be infinite.
    """

    until: Seconds
    intervals: Annotated[tuple[tuple[Seconds, Seconds], ...], Meta(max_length=65536)]


class Scheduled(Message):
    """The answer to Work under the virtual clock: the time at which the device would finish or drop out.

    ``cause`` and ``back`` belong to a dropout: the device is then away until ``back``.
    """

    ask: AskText
    event: Literal["finish", "drop"]
    at: Seconds
    cause: DropCause | None = None
    back: Seconds | None = None
    epoch: Epoch = None


class Result(Message):
    """The result of a program. The payload's tensors are named ``key/leaf``, and follow as frames.

    ``seconds`` is the real time that the work took. It is only recorded, and decides nothing; None means not measured.
    """

    ask: AskText
    examples: Size
    steps: Size
    metrics: Metrics
    label_counts: Annotated[tuple[Size, ...], Meta(max_length=65536)] | None = None
    seconds: RealSeconds | None = None
    epoch: Epoch = None
    tensors: Tensors


class Failed(Message):
    """The device could not do its work. ``planned`` failures are part of the experiment, others are accidents."""

    ask: AskText
    reason: Name
    detail: Sentence = ""
    planned: bool = False
    epoch: Epoch = None


class Declined(Message):
    """The device does not take the work."""

    ask: AskText
    reason: Name
    epoch: Epoch = None


class Bye(Message):
    """The device or the machine leaves. ``detail`` goes with the reason ``UNABLE``: a sentence for people."""

    reason: Name = ""
    detail: Sentence = ""


# Messages from supervisors. A device without a supervisor also sends Enroll and Need.


class Compute(Fields):
    """How a machine computes. Machines that agree in all of this give the same bits for the same work.

    ``fedemu``, ``torch``, ``numpy``, ``cuda`` and ``driver`` are versions. ``processor`` is its maker. ``instructions``
    are those that torch takes, with the environment's variables by which other libraries take others. ``gpus`` are the
    models of the GPUs, each once. ``device`` is what trainers compute on.
    """

    fedemu: Fact
    torch: Fact
    numpy: Fact
    device: Literal["cpu", "cuda"]
    processor: Fact = ""
    instructions: Fact = ""
    gpus: Annotated[tuple[Fact, ...], Meta(max_length=8)] = ()
    driver: Fact = ""
    cuda: Fact = ""


class Enroll(Message):
    """Ask for ``count`` device indices, or for the indices of a ``lease`` that was granted before.

    ``compute`` says how the machine computes. Without it the coordinator does not ask.
    """

    count: Annotated[int, Meta(ge=1, le=1_000_000)]
    lease: Name | None = None
    host: Name = ""
    compute: Compute | None = None


class Need(Message):
    """Ask for the bytes [offset, offset + length) of a blob."""

    digest: DigestText
    offset: Size
    length: Annotated[int, Meta(ge=1, le=16 * 2**20)]


class Died(Message):
    """The supervisor saw that a device's process ended."""

    device: Index
    incarnation: Index


# Messages from the coordinator.


class Welcome(Message):
    """The device is a member. Under the virtual clock it announces its presence, at least up to ``horizon``.

    ``elapsed`` is the experiment's time at this moment. ``durable_round`` is as in Work. A peer that says nothing for
    ``heartbeat_seconds * patience`` real seconds counts as dead.
    """

    device: Index
    clock: Literal["virtual", "wall"]
    horizon: Seconds
    heartbeat_seconds: BeatSeconds
    patience: Annotated[int, Meta(ge=1)]
    durable_round: int
    elapsed: Seconds = 0.0


class Granted(Message):
    """Device indices [start, stop) for a supervisor, its lease, and the digests of what all machines must share."""

    lease: Name
    run: Name
    ranges: Annotated[tuple[tuple[Index, Index], ...], Meta(max_length=65536)]
    experiment: BlobRef
    partition: BlobRef
    data: DigestText
    heartbeat_seconds: BeatSeconds
    patience: Annotated[int, Meta(ge=1)]


class Refused(Message):
    """The coordinator refuses a request. ``detail`` is a sentence for people.

    ``reason`` is unknown_peer, lease_taken, lease_unknown, fleet_full, quota, compute, superseded, revoked, version,
    unknown_blob, malformed or no_edge.
    """

    reason: Name
    detail: Sentence


class Work(Message):
    """A device's part of an ask.

    ``state`` is the version of the device's own state to begin with, None for a first visit. ``start`` is the time at
    which the device gets the message. ``download_bytes``, ``upload_bytes``, ``passes`` over its examples and
    ``processed`` samples beside these determine the emulated times, by the device's profile. ``task`` is the period of
    the stream. The coordinator never goes back to before the end of ``durable_round``. The tensors are the device's own
    tree (``Ask.each``).

    ``epoch`` is the life of the coordinator: a number that each start of a coordinator draws. A coordinator that was
    started again plays its last rounds again, and their asks have the same names. So every message about an ask names
    the epoch of its Work, and one of another epoch has no effect.
    """

    ask: AskText
    program: Name
    task: Index
    start: Seconds
    shared: Annotated[tuple[BlobRef, ...], Meta(max_length=64)]
    state: AskText | None
    download_bytes: Size
    upload_bytes: Size
    passes: Seconds
    processed: Seconds = 0.0
    deadline: Seconds
    durable_round: int
    epoch: Epoch = None
    tensors: Tensors = ()


class Proceed(Message):
    """The device may do what it scheduled: train and answer, or drop out."""

    ask: AskText


class Blob(Message):
    """A part of a blob of ``size`` bytes: its bytes from ``offset`` on. They follow in one frame."""

    raw_frames: ClassVar[int] = 1
    digest: DigestText
    offset: Size
    size: Size


class Offer(Message):
    """Blobs that devices of this machine will need soon. The supervisor answers with Need for those that it lacks."""

    blobs: Annotated[tuple[BlobRef, ...], Meta(max_length=64)]
    round: Index


class Wake(Message):
    """Devices of this machine are asked that sleep. The supervisor brings them to life, and each says Hello."""

    devices: Annotated[tuple[Index, ...], Meta(max_length=65536)]


class Sleep(Message):
    """Nothing is wanted of the device for now: it says Bye and ends. Its machine gets Wake when that changes."""


class Extend(Message):
    """The device has to announce its presence, at least up to ``until``. What is over by ``since`` may be left out."""

    until: Seconds
    since: Seconds = 0.0


class Accepted(Message):
    """The result was accepted. The device may keep its next own state."""

    ask: AskText


class Duplicate(Message):
    """The same result came before, and had this verdict."""

    ask: AskText
    verdict: Verdict


class Late(Message):
    """The result came too late."""

    ask: AskText


class Invalid(Message):
    """The result cannot be used."""

    ask: AskText
    reason: Name
    detail: Sentence = ""


class Cancel(Message):
    """The work is no longer wanted."""

    ask: AskText


class Beat(Message):
    """The answer to a heartbeat."""


class Stop(Message):
    """The run is over for this peer."""

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
    | Wake
    | Sleep
    | Extend
    | Accepted
    | Duplicate
    | Late
    | Invalid
    | Cancel
    | Beat
    | Stop
)
