"""The work of one ask at a device, from its arrival to the coordinator's verdict, and the messages that it leads to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec.structs import replace

from fedemu.device.behaviour.behaviour import Assignment, Behaviour, Schedule
from fedemu.device.behaviour.corruption import corrupt
from fedemu.device.bus import INDICES, SEALED, Done, JobFailed, Submit
from fedemu.device.memory.holding import Holding
from fedemu.device.memory.store import OwnStore
from fedemu.device.memory.stream import DeviceStream
from fedemu.device.runtime.actions import Send, Tell
from fedemu.protocol.codec import Buffer
from fedemu.protocol.ids import AskId, DeviceId
from fedemu.protocol.messages import Failed, Result, Scheduled, TensorSpec, Work


@dataclass
class WorkInHand:
    """Work that has come, the schedule that the device has for it, and how far it is.

    ``frames`` are the device's own part of the ask, ``holding`` the samples that it has at the start of the work.
    """

    ask: AskId
    work: Work
    frames: Sequence[Buffer]
    schedule: Schedule
    holding: Holding
    phase: Literal["scheduled", "training", "trained"] = "scheduled"
    replies: list[Send] = field(default_factory=list)
    """The messages that are sent when the work is done, and again until the coordinator gives its verdict."""
    pause: float = 0.0
    """The seconds until the result is sent again if it is not answered; 0 before it was sent on this connection."""
    due: float = math.inf
    """The time on the monotonic clock at which to do the next thing: drop out as planned, or send the result."""

    @property
    def failed(self) -> bool:
        """Whether the job failed, of which the coordinator is told, and for which it has no verdict."""
        return any(isinstance(reply.message, Failed) for reply in self.replies)

    def renew(self, work: Work, frames: Sequence[Buffer]) -> bool:
        """Take ``work`` for the work in hand if it asks the same. Otherwise return False, and change nothing.

        The coordinator's durable round may have advanced, and it may have begun another life: if it asks the same, the
        result is the same, and belongs to the new epoch.
        """
        known = self.work
        if known is work:
            return True
        if known != replace(work, durable_round=known.durable_round, epoch=known.epoch):
            return False
        if known.epoch != work.epoch:
            if [*map(bytes, frames)] != [*map(bytes, self.frames)]:
                return False
            self.replies = [Send(replace(reply.message, epoch=work.epoch), reply.frames) for reply in self.replies]
        self.work = work
        return True


def take_in_hand(
    work: Work, frames: Sequence[Buffer], behaviour: Behaviour, stream: DeviceStream, store: OwnStore
) -> WorkInHand:
    """Schedule work that has come, by the device's samples and behaviour."""
    ask = AskId.parse(work.ask)
    holding = Holding.at(stream, Path(store.path(work.state)) if work.state else None, ask.round, work.start)
    assignment = Assignment(
        ask=ask,
        start=work.start,
        download_bytes=work.download_bytes,
        upload_bytes=work.upload_bytes,
        samples=work.passes * len(holding) + (work.processed if len(holding) else 0.0),
    )
    return WorkInHand(ask, work, frames, behaviour.schedule(assignment), holding)


def announcement(held: WorkInHand) -> Send:
    """The device's answer to its work: when it will finish, or when and how it will drop out."""
    schedule = held.schedule
    return Send(
        Scheduled(
            ask=held.work.ask,
            event=schedule.event,
            at=schedule.at,
            cause=schedule.cause,
            back=schedule.back,
            epoch=held.work.epoch,
        )
    )


def submission(held: WorkInHand, device: DeviceId, stream: DeviceStream, store: OwnStore) -> Tell:
    """The message that asks a trainer to do the work."""
    work, holding = held.work, held.holding
    samples = {INDICES: holding.fresh, **{f"{SEALED}{period}": part for period, part in holding.sealed.items()}}
    specs = [TensorSpec(name=name, dtype="int64", shape=part.shape) for name, part in samples.items()]
    job = Submit(
        device=device,
        ask=work.ask,
        program=work.program,
        task=work.task,
        shared=work.shared,
        own=store.path(work.state) if work.state else None,
        next_own=store.path(work.ask),
        budget=stream.budget,
        tensors=(*specs, *work.tensors),
    )
    frames = [np.ascontiguousarray(part, dtype="<i8").tobytes() for part in samples.values()]
    return Tell(job, (*frames, *held.frames))


def replies(held: WorkInHand, answer: Done | JobFailed, frames: Sequence[Buffer]) -> list[Send]:
    """The messages that tell the coordinator how a job ended, with the planned faults of the schedule."""
    if isinstance(answer, JobFailed):
        failed = Failed(ask=answer.ask, reason=answer.reason, detail=answer.detail, epoch=held.work.epoch)
        return [Send(failed)]
    result = Result(
        ask=answer.ask,
        examples=answer.examples,
        steps=answer.steps,
        metrics=answer.metrics,
        label_counts=answer.label_counts,
        seconds=answer.seconds,
        epoch=held.work.epoch,
        tensors=answer.tensors,
    )
    if held.schedule.corruption is not None:
        result, frames = corrupt(result, frames, held.schedule.corruption)
    return [Send(result, frames)] * (2 if held.schedule.reply == "duplicate" else 1)
