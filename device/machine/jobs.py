"""Which trainer runs which jobs: a queue that groups the jobs of one ask, without I/O.

How jobs are grouped never changes a result, only how fast it comes: executors pad to a fixed size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedemu.device.bus import Submit
from fedemu.protocol.ids import Digest

MAX_DEATHS = 3
"""A job that was running when this many trainers died is given up. For its last try it is set apart from others."""

JobKey = tuple[int, str]
"""(device, ask): a device has at most one job of an ask."""


@dataclass
class QueuedJob:
    """A device's job with its tensors' frames. ``origin`` is who wants the answer, if anybody still does."""

    submit: Submit
    frames: Sequence[Any]
    origin: Hashable
    deaths: int = 0

    @property
    def key(self) -> JobKey:
        return (self.submit.device, self.submit.ask)

    @property
    def kind(self) -> Hashable:
        """Jobs of one kind may run as a group; one that has outlived trainers runs alone."""
        submit = self.submit
        alone = self.key if self.deaths >= MAX_DEATHS - 1 else None
        return (submit.ask, submit.program, submit.task, submit.shared, alone)


@dataclass
class Group:
    """Jobs of one kind that one trainer runs together; ``running`` are those not yet answered."""

    number: int
    trainer: int
    jobs: list[QueuedJob]
    running: dict[JobKey, QueuedJob] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.running = {job.key: job for job in self.jobs}


@dataclass
class _Trainer:
    capacity: Callable[[str], int]
    group: Group | None = None


class JobQueue:
    """Jobs in order of arrival. A job waits until its blobs are at hand, a trainer is idle and the burst is over.

    ``linger`` (seconds) is how long the queue must be quiet before a group leaves that could still grow; a burst that
    never ends is cut after five times that.
    """

    def __init__(self, linger: float = 0.001) -> None:
        self.linger = linger
        self._jobs: OrderedDict[JobKey, QueuedJob] = OrderedDict()
        self._lacking: dict[JobKey, set[Digest]] = {}
        self._trainers: dict[int, _Trainer] = {}
        self._groups = 0
        self._first = self._last = float("-inf")

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def idle(self) -> int:
        return sum(trainer.group is None for trainer in self._trainers.values())

    def submit(self, job: QueuedJob, now: float, lacking: Sequence[Digest] = ()) -> None:
        """Queue a job. If the very same is running, its answer goes to the new origin; another is replaced."""
        running = self._running(job.key)
        if running is not None and running.submit == job.submit:
            running.origin = job.origin
            return
        if running is not None:
            running.origin = None
        if not self._jobs:
            self._first = now
        self._last = now
        self._jobs[job.key] = job
        self._lacking.pop(job.key, None)
        if lacking:
            self._lacking[job.key] = set(lacking)

    def arrived(self, digest: Digest) -> None:
        """A blob is at hand."""
        for key in list(self._lacking):
            self._lacking[key].discard(digest)
            if not self._lacking[key]:
                del self._lacking[key]

    def lost(self, digest: Digest) -> list[QueuedJob]:
        """A blob can't be had; returns the jobs that waited for it."""
        keys = [key for key, lacking in self._lacking.items() if digest in lacking]
        jobs = [self._jobs[key] for key in keys]
        for key in keys:
            self.withdraw(key)
        return jobs

    def withdraw(self, key: JobKey) -> None:
        """Forget a job that has not begun; a running one is left to end."""
        self._jobs.pop(key, None)
        self._lacking.pop(key, None)

    def abandon(self, origin: Hashable) -> None:
        """Whoever wanted these answers is gone."""
        for job in [job for job in self._jobs.values() if job.origin == origin]:
            self.withdraw(job.key)

    def add_trainer(self, trainer: int, capacity: Callable[[str], int]) -> None:
        self._trainers[trainer] = _Trainer(capacity)

    def remove_trainer(self, trainer: int) -> list[QueuedJob]:
        """A trainer died: its jobs go back to the head of the queue. Returns those that are given up."""
        gone = self._trainers.pop(trainer, None)
        if gone is None or gone.group is None:
            return []
        given_up = []
        for job in reversed(gone.group.running.values()):
            job.deaths += 1
            if job.deaths >= MAX_DEATHS:
                given_up.append(job)
            else:
                self._jobs[job.key] = job
                self._jobs.move_to_end(job.key, last=False)
        return given_up[::-1]

    def answered(self, trainer: int, key: JobKey) -> QueuedJob | None:
        """One job of the trainer's group came back; None if nobody asked for it."""
        group = self._trainers[trainer].group if trainer in self._trainers else None
        return group.running.pop(key, None) if group else None

    def finished(self, trainer: int, group: int) -> list[QueuedJob]:
        """The trainer is done with the group and idle. Returns jobs it has left unanswered, which is its fault."""
        known = self._trainers.get(trainer)
        if known is None or known.group is None or known.group.number != group:
            return []
        unanswered = list(known.group.running.values())
        known.group = None
        return unanswered

    def due(self) -> float | None:
        """When ``dispatch`` has something to do; None if there is nothing to wait for."""
        if not self.idle or len(self._lacking) == len(self._jobs):
            return None
        return min(self._last + self.linger, self._first + 5 * self.linger)

    def dispatch(self, now: float) -> list[Group]:
        """The groups to send off now.

        An idle trainer gets min(capacity, ceil(ready jobs of the kind / idle trainers)) jobs, oldest kind first.
        """
        groups: list[Group] = []
        due = self.due()
        if due is None or now < due:
            return groups
        kinds: dict[Hashable, list[QueuedJob]] = {}
        for key, job in self._jobs.items():
            if key not in self._lacking:
                kinds.setdefault(job.kind, []).append(job)
        idle = sorted(number for number, trainer in self._trainers.items() if trainer.group is None)
        for ready in kinds.values():
            while ready and idle:
                number = idle.pop(0)
                share = -(-len(ready) // (len(idle) + 1))
                size = min(self._trainers[number].capacity(ready[0].submit.program), share)
                groups.append(self._send_off(number, ready[:size]))
                del ready[:size]
        return groups

    def needed(self) -> set[Digest]:
        """The blobs of all jobs that are queued or running."""
        running = [
            job for trainer in self._trainers.values() if trainer.group for job in trainer.group.running.values()
        ]
        return {Digest(ref.digest) for job in (*self._jobs.values(), *running) for ref in job.submit.shared}

    def _send_off(self, trainer: int, jobs: list[QueuedJob]) -> Group:
        for job in jobs:
            del self._jobs[job.key]
        group = Group(self._groups, trainer, jobs)
        self._groups = (self._groups + 1) % 2**31
        self._trainers[trainer].group = group
        return group

    def _running(self, key: JobKey) -> QueuedJob | None:
        for trainer in self._trainers.values():
            if trainer.group and key in trainer.group.running:
                return trainer.group.running[key]
        return None
