"""How one device behaves: when it is on-line, how long its work takes, and whether it finishes the work.

All of it is a pure function of (seed, device, ask). The device runtime acts on it; the coordinator sees only effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """The work of one ask, as a device's behaviour sees it.

    Sizes are in bytes. ``samples`` is passes · examples, and what is processed beside. ``start`` is in seconds of the
    experiment's clock.
    """

    ask: AskId
    start: float
    download_bytes: int
    upload_bytes: int
    samples: float


@dataclass(frozen=True)
class Schedule:
    """What a device answers to work: whether it will finish or drop out, and when.

    ``at`` is the time of this event, ``back`` the time at which a device that dropped out returns. Both are in seconds
    of the experiment's clock. ``back`` is infinity for a device that never returns, and None for a device that
    finishes. If the device drops out, ``reply`` is normal and ``corruption`` is None.
    """

    event: Literal["finish", "drop"]
    at: float
    cause: DropCause | None = None
    back: float | None = None
    reply: ReplyKind = "normal"
    corruption: Corruption | None = None


class Behaviour:
    """One device: its availability, its profile and its planned faults.

    ``intervals`` gives its on-line times from the first on, at each call.
    """

    def __init__(
        self,
        seed: int,
        device: int,
        intervals: Callable[[], Iterator[Interval]],
        profile: Profile,
        rates: FaultRates,
    ) -> None:
        self.device = device
        self.profile = profile
        self._seed = seed
        self._rates = rates
        self._timetable = Timetable(intervals)

    def presence(self, until: float, since: float = 0.0) -> tuple[Interval, ...]:
        """The on-line intervals [start, end) that start before ``until`` and end after ``since``.

        They ascend, and are not cut at these times.
        """
        return self._timetable.until(until, since)

    def seconds(self, assignment: Assignment) -> tuple[float, float, float]:
        """The seconds of download, computing and upload, without latency."""
        down, up = self.profile.speeds(self._seed, self.device, assignment.ask.round)
        return (
            transfer_seconds(assignment.download_bytes, down),
            assignment.samples * self.profile.seconds_per_sample,
            transfer_seconds(assignment.upload_bytes, up),
        )

    def schedule(self, assignment: Assignment) -> Schedule:
        """The schedule by the event that comes first: the device goes off-line, has a planned fault, or finishes.

        Work that ends exactly at the end of an on-line interval counts as finished.
        """
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
