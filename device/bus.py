"""The messages between a supervisor, its device processes and its trainers, on one machine.

They use the codec of the wire. Blobs and own states pass by path; only a device's samples, its own part of an ask and
its payload travel as frames. A peer has to name the bus's token before anything else of it is heeded.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Final, Literal

from pydantic import Field

from fedemu.protocol.codec import Decoder, Limits
from fedemu.protocol.messages import (
    AskText,
    BlobRef,
    DigestText,
    Index,
    Message,
    Name,
    RealSeconds,
    Sentence,
    Size,
    Tensors,
    TensorSpec,
)

FilePath = Annotated[str, Field(max_length=4096)]

INDICES = "."
"""The first tensor of a job: the device's samples of the period. Others have names unlike this."""
SEALED = ".sealed."
"""Begins the names of the tensors that follow: the samples of an earlier period, whose number ends the name, which the
device has yet to select from. The rest is its own part of the ask."""
LIMITS = Limits(header_bytes=64 * 2**20, frames=2**17, frame_bytes=2**40, message_bytes=2**40)
"""Nobody but the supervisor's own processes is heeded on the bus, so the limits only have to hold the largest group."""


def abstract_address() -> str:
    """An ipc address in the kernel's abstract namespace, which leaves no file behind however its owner ends."""
    return f"ipc://@fedemu-{secrets.token_hex(12)}"


class SharedFile(Message):
    """A blob where it lies on this machine."""

    key: Name
    digest: DigestText
    path: FilePath


# ── from device processes ─────────────────────────────────────────────────────


class Attach(Message):
    """The first message of a peer: process or trainer ``number`` of this supervisor."""

    type: Literal["attach"] = "attach"
    token: Name
    role: Literal["process", "trainer"]
    number: Index


class Joined(Message):
    """The coordinator took the device in under this incarnation."""

    type: Literal["joined"] = "joined"
    device: Index
    incarnation: Index


class Submit(Message):
    """A job: run ``program`` on the device's samples.

    ``own`` is the state to start from, ``next_own`` where the next one goes. ``budget`` is how many samples the replay
    buffer keeps, 0 where there is none. The tensors are ``INDICES`` ``[examples]``, those of ``SEALED`` periods (int64)
    and the device's own part of the ask.
    """

    type: Literal["submit"] = "submit"
    device: Index
    ask: AskText
    program: Name
    task: Index
    shared: Annotated[tuple[BlobRef, ...], Field(max_length=64)]
    own: FilePath | None
    next_own: FilePath
    budget: Size = 0
    tensors: Tensors


class Withdraw(Message):
    """Nobody waits for this job any more."""

    type: Literal["withdraw"] = "withdraw"
    device: Index
    ask: AskText


# ── to and from trainers ──────────────────────────────────────────────────────


class TrainJob(Message):
    """One device of a group; ``tensors`` of the group's tensors, after those of the jobs before it, are its own."""

    device: Index
    own: FilePath | None
    next_own: FilePath
    budget: Size
    tensors: Size


class Train(Message):
    """A group of jobs of one ask. The tensors are those of its jobs, one job after the other, named ``device/name``."""

    type: Literal["train"] = "train"
    group: Index
    ask: AskText
    program: Name
    task: Index
    shared: Annotated[tuple[SharedFile, ...], Field(max_length=64)]
    jobs: tuple[TrainJob, ...]
    tensors: tuple[TensorSpec, ...]


class Ready(Message):
    """The trainer is warm. ``capacity`` is how many jobs of a program make a group; ``default`` that of all others."""

    type: Literal["ready"] = "ready"
    capacity: Annotated[dict[Name, Annotated[int, Field(ge=1)]], Field(max_length=256)]
    default: Annotated[int, Field(ge=1)]


class Unusable(Message):
    """The trainer can't start, and no other one would: ``detail`` says why."""

    type: Literal["unusable"] = "unusable"
    detail: Sentence


class Finished(Message):
    """All jobs of a group are answered."""

    type: Literal["finished"] = "finished"
    group: Index
    seconds: float


class Done(Message):
    """What became of one job; from a trainer, and passed on to the device as it is.

    ``seconds`` is the job's share of the real time that its group took, None where nobody measured. ``wrote_own`` says
    whether ``next_own`` was put in place: programs without own state write none. ``buffered`` and
    ``buffered_bytes`` are what the device's replay buffer, if it has one, holds now: samples, and bytes as stored.
    """

    type: Literal["done"] = "done"
    device: Index
    ask: AskText
    examples: Size
    steps: Size
    metrics: Annotated[dict[Name, float], Field(max_length=64)]
    label_counts: Annotated[tuple[Size, ...], Field(max_length=65536)] | None
    seconds: RealSeconds | None = None
    wrote_own: bool
    buffered: Size | None = None
    buffered_bytes: Size | None = None
    tensors: Tensors


class JobFailed(Message):
    """The program failed on this device's data (``reason`` ``training``), or the job ended trainer after trainer."""

    type: Literal["job_failed"] = "job_failed"
    device: Index
    ask: AskText
    reason: Name
    detail: Sentence


# ── to both ───────────────────────────────────────────────────────────────────


class Quit(Message):
    """Say goodbye and end."""

    type: Literal["quit"] = "quit"
    reason: Name = ""


ToSupervisor = Attach | Joined | Submit | Withdraw | Ready | Unusable | Finished | Done | JobFailed
ToProcess = Done | JobFailed | Quit
ToTrainer = Train | Quit

TO_SUPERVISOR: Final = Decoder(ToSupervisor, LIMITS)
TO_PROCESS: Final = Decoder(ToProcess, LIMITS)
TO_TRAINER: Final = Decoder(ToTrainer, LIMITS)
