"""The messages between a supervisor, its device processes and its trainers, on one machine.

They use the codec of the wire. Blobs and own states are named by path. Only a device's samples, its own part of an ask
and its payload travel as frames. The supervisor ignores a process until it has attached with the bus's token.
"""

from __future__ import annotations

import os
from typing import Annotated, Final, Literal

from msgspec import Meta

from fedemu.protocol.codec import Decoder, Limits
from fedemu.protocol.messages import (
    AskText,
    BlobRef,
    DigestText,
    Fields,
    Index,
    Message,
    Metrics,
    Name,
    RealSeconds,
    Sentence,
    Size,
    Tensors,
    TensorSpec,
)

FilePath = Annotated[str, Meta(max_length=4096)]
Lives = Annotated[tuple[tuple[Index, Index], ...], Meta(max_length=1_000_000)]
"""Devices that come to life, each with the first incarnation that its life may use."""

INDICES = "."
"""The name of a job's first tensor: the indices of the device's samples in the present period."""
SEALED = ".sealed."
"""The beginning of the names of the next tensors of a job. The rest of the name is the number of an earlier period.
Such a tensor holds the indices of the samples of that period, from which the device has not yet selected. All other
tensors are the device's own part of the ask."""
ATTACH_SECONDS: Final = 60.0
"""A process that has had no connection to the bus for so long ends. Its supervisor starts another one."""
MOST_ON_BUS: Final = 2**31
"""The most messages that wait for the supervisor: all of them. A job or an answer that it does not get would be waited
for without end."""
_QUARTER = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
LIMITS = Limits(header_bytes=64 * 2**20, frames=2**17, frame_bytes=_QUARTER, message_bytes=4 * _QUARTER)
"""The processes of the bus may send what fits into the memory of this machine."""


class SharedFile(Fields):
    """A blob, and the path of its file on this machine."""

    key: Name
    digest: DigestText
    path: FilePath


class Attach(Message):
    """The first message of device process ``number``, or of trainer ``number``."""

    token: Name
    role: Literal["process", "trainer"]
    number: Index


class Joined(Message):
    """The coordinator has made the device a member, with this incarnation."""

    device: Index
    incarnation: Index


class Crashed(Message):
    """A life of a device has crashed as planned. Its process goes on, because it holds other devices, too."""

    device: Index
    incarnation: Index


class Asleep(Message):
    """The device has ended its life, because nothing is wanted of it. Its process goes on."""

    device: Index
    incarnation: Index


class Rouse(Message):
    """Bring devices to life in this process."""

    lives: Lives


class Submit(Message):
    """A job: run ``program`` on the device's samples.

    ``own`` is the file of the own state to start from, ``next_own`` the file for the next one. ``budget`` is the number
    of samples that the replay buffer keeps, 0 without a buffer. The tensors are ``INDICES`` (int64 ``[examples]``),
    those of ``SEALED`` periods (int64 ``[samples]``) and the device's own part of the ask.
    """

    device: Index
    ask: AskText
    program: Name
    task: Index
    shared: Annotated[tuple[BlobRef, ...], Meta(max_length=64)]
    own: FilePath | None
    next_own: FilePath
    budget: Size = 0
    tensors: Tensors


class Withdraw(Message):
    """The device does not wait for this job any more."""

    device: Index
    ask: AskText


class TrainJob(Fields):
    """One job of a group. Its own tensors are the next ``tensors`` of the group's, after those of the job before it."""

    device: Index
    own: FilePath | None
    next_own: FilePath
    budget: Size
    tensors: Size


class JobTensor(TensorSpec):
    """A tensor of a job in a group. Two devices may have tensors of one name, so it is named ``device/name`` here."""

    name: Annotated[str, Meta(max_length=11 + 256)]


class Train(Message):
    """A group of jobs of one ask. The tensors are those of its jobs, job after job."""

    group: Index
    ask: AskText
    program: Name
    task: Index
    shared: Annotated[tuple[SharedFile, ...], Meta(max_length=64)]
    jobs: tuple[TrainJob, ...]
    tensors: tuple[JobTensor, ...]


class Ready(Message):
    """The trainer can take jobs. A group has at most ``capacity[program]`` jobs, or one of any other program."""

    capacity: Annotated[dict[Name, Annotated[int, Meta(ge=1)]], Meta(max_length=256)]


class Unusable(Message):
    """The trainer cannot work, and no other trainer could either; ``detail`` says why.

    ``in_work`` says that it could take jobs before. So the experiment is right, and the machine is not, as with a full
    disk.
    """

    detail: Sentence
    in_work: bool = False


class Faulty(Message):
    """The trainer cannot go on, and another process may be able to; ``detail`` says why. It waits to be killed."""

    detail: Sentence


class Finished(Message):
    """All jobs of a group are answered. The group took ``seconds`` of real time."""

    group: Index
    seconds: float


class Done(Message):
    """The result of one job. A trainer sends it; the supervisor passes it on to the device unchanged.

    ``seconds`` is the job's share of the real time that its group took, None if it was not measured. ``wrote_own`` says
    whether ``next_own`` was written; programs without own state write none. ``buffered`` and ``buffered_bytes`` are
    the number of samples in the device's replay buffer and their size as stored, with their notes; None without a
    buffer.
    """

    device: Index
    ask: AskText
    examples: Size
    steps: Size
    metrics: Metrics
    label_counts: Annotated[tuple[Size, ...], Meta(max_length=65536)] | None
    seconds: RealSeconds | None = None
    wrote_own: bool
    buffered: Size | None = None
    buffered_bytes: Size | None = None
    tensors: Tensors


class JobFailed(Message):
    """A job has no result; ``detail`` says why.

    ``reason`` is ``training`` if the program failed on this device's data, ``own_state`` if the own state is gone or
    cannot be read, ``trainer`` if trainers died over the job or left it unanswered, ``blob`` if a blob that the job
    needs cannot be had or is damaged.
    """

    device: Index
    ask: AskText
    reason: Name
    detail: Sentence


class Reachable(Message):
    """The coordinator has given this machine its place again. Devices that look for it connect anew."""


class Quit(Message):
    """The device process is to end. It first says goodbye to the coordinator."""


ToSupervisor = (
    Attach | Joined | Crashed | Asleep | Submit | Withdraw | Ready | Unusable | Faulty | Finished | Done | JobFailed
)
ToProcess = Done | JobFailed | Rouse | Reachable | Quit

TO_SUPERVISOR: Final = Decoder(ToSupervisor, LIMITS)
TO_PROCESS: Final = Decoder(ToProcess, LIMITS)
TO_TRAINER: Final = Decoder(Train, LIMITS)
