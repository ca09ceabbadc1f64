"""What one device would do with a request: how long each part takes, and whether it gets to the end.

A pure function of (seed, device, request); the device runtime acts it out, the coordinator only hears of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fedemu.device.behaviour import faults
from fedemu.device.behaviour.availability import Interval, Timetable
from fedemu.device.behaviour.faults import Corruption, FaultRates, ReplyKind
from fedemu.device.behaviour.profile import Profile, transfer_seconds
from fedemu.protocol.ids import AskId
from fedemu.protocol.messages import DropCause


@dataclass(frozen=True)
class Assignment:
    """A request as a device's behaviour sees it: sizes in bytes, ``samples`` = passes · examples, times in seconds."""

    ask: AskId
    start: float
    download_bytes: int
    upload_bytes: int
    samples: float
    deadline: float


@dataclass(frozen=True)
class Schedule:
    """What will come of a request: a reply that is sent ``at`` a time, or a drop-out then, until ``back``.

    ``back`` is infinite for a device that never returns. ``reply`` and ``corruption`` are normal and None for a
    drop-out.
    """

    event: Literal["finish", "drop"]
    at: float
    cause: DropCause | None = None
    back: float | None = None
    reply: ReplyKind = "normal"
    corruption: Corruption | None = None


class Behaviour:
    """One device: its availability, its profile and its planned faults."""

    def __init__(
        self,
        seed: int,
        device: int,
        intervals: Iterator[Interval],
        profile: Profile,
        rates: FaultRates,
    ) -> None:
        self.device = device
        self.profile = profile
        self._seed = seed
        self._rates = rates
        self._timetable = Timetable(intervals)

    def presence(self, until: float) -> tuple[Interval, ...]:
        """The on-line intervals [start, end) that start before ``until``, whole and ascending."""
        return self._timetable.until(until)

    def online_end(self, time: float) -> float | None:
        """When the device goes off-line next; None if it is off-line at ``time``."""
        return self._timetable.end_at(time)

    def next_online(self, time: float) -> float:
        """The first moment after ``time`` at which the device comes on-line; infinite if it never does."""
        return self._timetable.next_start(time)

    def seconds(self, assignment: Assignment) -> tuple[float, float, float]:
        """Download, compute and upload, without latency."""
        down, up = self.profile.speeds(self._seed, self.device, assignment.ask.round)
        return (
            transfer_seconds(assignment.download_bytes, down),
            assignment.samples * self.profile.seconds_per_sample,
            transfer_seconds(assignment.upload_bytes, up),
        )

    def schedule(self, assignment: Assignment) -> Schedule:
        """The earliest of going off-line, a planned fault and the finish; a finish at an interval's very end counts."""
        start = assignment.start
        end = self._timetable.end_at(start)
        if end is None:
            return Schedule("drop", start, "offline", self._timetable.next_start(start))
        duration = 2 * self.profile.latency + sum(self.seconds(assignment))
        plan = faults.plan(self._rates, self._seed, self.device, assignment.ask)
        fault = start + plan.fraction * duration
        if plan.drop is not None and fault <= end:
            return Schedule("drop", fault, plan.drop, fault + plan.downtime)
        if start + duration > end:
            return Schedule("drop", end, "offline", self._timetable.next_start(end))
        return Schedule("finish", start + duration, reply=plan.reply, corruption=plan.corruption)
