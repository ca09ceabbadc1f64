"""Which trainer runs which jobs: a queue that groups the jobs of one ask, without I/O.

Grouping changes how fast results come. It never changes a result, because executors pad to a fixed size. ``now`` is
always the monotonic clock in seconds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from fedemu.device.bus import Submit
from fedemu.protocol.ids import Digest

MAX_DEATHS = 3
"""A job that was running when this many trainers died is given up. Its last try is in a group of its own."""

HELD_SECONDS = 0.1
"""For so long after the death of a trainer no job begins. Others may have died at the same moment, and it takes a while
until that is heard: a job that went to one of them after the other would seem to have killed them all."""

JobKey = tuple[int, str]
"""The name of a job: (device, ask). A device has at most one job of an ask."""


@dataclass
class QueuedJob:
    """A device's job with the frames of its tensors.

    ``origin`` is the peer that gets the answer, None if no peer wants it any more. ``deaths`` counts the trainers that
    died while they ran it.
    """

    submit: Submit
    frames: Sequence[memoryview]
    origin: bytes | None
    deaths: int = 0

    @property
    def key(self) -> JobKey:
        return (self.submit.device, self.submit.ask)

    def asks_the_same(self, other: QueuedJob) -> bool:
        """Whether the other job has the same inputs, so that its answer is the same."""
        return self.submit == other.submit and [*map(bytes, self.frames)] == [*map(bytes, other.frames)]

    @property
    def kind(self) -> Hashable:
        """Jobs of an equal kind may run as a group. A job in its last try equals no other."""
        submit = self.submit
        alone = self.key if self.deaths >= MAX_DEATHS - 1 else None
        return (submit.ask, submit.program, submit.task, submit.shared, alone)


@dataclass
class Group:
    """Jobs of one kind that one trainer runs together. ``running`` are those that are not answered yet."""

    number: int
    trainer: int
    jobs: list[QueuedJob]
    running: dict[JobKey, QueuedJob] = field(init=False)

    def __post_init__(self) -> None:
        self.running = {job.key: job for job in self.jobs}


@dataclass
class _Trainer:
    capacity: Mapping[str, int]
    group: Group | None = None


class JobQueue:
    """Jobs in order of arrival. A job waits until its blobs are here, a trainer is idle and the burst of jobs is over.

    A burst is over when no job has come for ``linger`` seconds, or after five times ``linger`` in any case. Groups are
    formed only then, because they could still grow.
    """

    def __init__(self, linger: float = 0.001) -> None:
        self.linger = linger
        self._jobs: OrderedDict[JobKey, QueuedJob] = OrderedDict()
        self._lacking: dict[JobKey, set[Digest]] = {}
        self._behind: set[JobKey] = set()
        """The jobs that wait for another one of their name, which runs: both write the same file."""
        self._kinds: dict[Hashable, deque[tuple[int, QueuedJob]]] | None = None
        """The jobs that may begin, by kind, each with its place in the queue. None: the queue has changed since."""
        self._trainers: dict[int, _Trainer] = {}
        self._groups = 0
        self._first = self._last = self._held = float("-inf")

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def idle(self) -> int:
        """The number of trainers that have no group."""
        return len(self._trainers) - len(self.busy)

    @property
    def busy(self) -> list[int]:
        """The trainers that have a group."""
        return [number for number, trainer in self._trainers.items() if trainer.group is not None]

    def progress(self, trainer: int) -> tuple[int, int] | None:
        """The number of a trainer's group, and how many of its jobs are not answered yet. None without a group."""
        group = self._trainers[trainer].group if trainer in self._trainers else None
        return None if group is None else (group.number, len(group.running))

    def running_on(self, trainer: int) -> list[QueuedJob]:
        """The jobs of a trainer that are not answered yet."""
        known = self._trainers.get(trainer)
        return list(known.group.running.values()) if known is not None and known.group is not None else []

    def submit(self, job: QueuedJob, now: float, lacking: Sequence[Digest] = ()) -> None:
        """Queue a job. ``lacking`` are its blobs that are not here yet.

        If an equal job is running, its answer goes to the new origin. A different one of the same key is replaced: its
        answer goes to nobody, and the new job begins after it.
        """
        running = self._running(job.key)
        if running is not None and running.asks_the_same(job):
            running.origin = job.origin
            self.withdraw(job.key)  # another one of this name, which waits, is not wanted any more
            return
        if running is not None:
            running.origin = None
            self._behind.add(job.key)
        if not self._jobs:
            self._first = now
        self._last = now
        self._jobs[job.key] = job
        self._kinds = None
        self._lacking.pop(job.key, None)
        if lacking:
            self._lacking[job.key] = set(lacking)

    def arrived(self, digest: Digest) -> None:
        """A blob is here now."""
        for key in list(self._lacking):
            self._lacking[key].discard(digest)
            if not self._lacking[key]:
                del self._lacking[key]
                self._kinds = None

    def lost(self, digest: Digest) -> list[QueuedJob]:
        """A blob cannot be had. Returns the jobs that waited for it, which are no longer queued."""
        keys = [key for key, lacking in self._lacking.items() if digest in lacking]
        jobs = [self._jobs[key] for key in keys]
        for key in keys:
            self.withdraw(key)
        return jobs

    def withdraw(self, key: JobKey) -> None:
        """Forget a job that has not begun. A running job goes on to its end."""
        if self._jobs.pop(key, None) is not None:
            self._kinds = None
        self._lacking.pop(key, None)
        self._behind.discard(key)

    def abandon(self, origin: bytes) -> None:
        """A peer is gone, so forget its jobs that have not begun."""
        for job in [job for job in self._jobs.values() if job.origin == origin]:
            self.withdraw(job.key)

    def add_trainer(self, trainer: int, capacity: Mapping[str, int]) -> None:
        """A trainer can take jobs: as one group ``capacity[program]`` of them, or one of any other program."""
        self._trainers[trainer] = _Trainer(capacity)

    def remove_trainer(self, trainer: int, now: float) -> list[QueuedJob]:
        """A trainer has died. Its jobs go back to the head of the queue, except those returned, which are given up."""
        gone = self._trainers.pop(trainer, None)
        if gone is None or gone.group is None:
            return []
        self._held = now + HELD_SECONDS
        self._kinds = None
        given_up = []
        for job in reversed(gone.group.running.values()):
            if job.key in self._behind:
                self._behind.discard(job.key)
                continue  # nobody wants it any more
            job.deaths += 1
            if job.deaths >= MAX_DEATHS:
                given_up.append(job)
            else:
                self._jobs[job.key] = job
                self._jobs.move_to_end(job.key, last=False)
        return given_up[::-1]

    def answered(self, trainer: int, key: JobKey) -> QueuedJob | None:
        """The trainer has answered one job of its group. Returns the job, None if it is not running there."""
        group = self._trainers[trainer].group if trainer in self._trainers else None
        job = group.running.pop(key, None) if group else None
        if job is not None:
            self._have_run([key])
        return job

    def finished(self, trainer: int, group: int) -> list[QueuedJob]:
        """The trainer is done with its group, and idle now. Returns the jobs that it has wrongly left unanswered."""
        known = self._trainers.get(trainer)
        if known is None or known.group is None or known.group.number != group:
            return []
        unanswered = list(known.group.running.values())
        known.group = None
        self._have_run([job.key for job in unanswered])
        return unanswered

    def due(self) -> float | None:
        """The time at which ``dispatch`` has something to do; None if no job can begin before another event."""
        waiting = len(self._lacking) + sum(key not in self._lacking for key in self._behind)
        if not self.idle or waiting == len(self._jobs):
            return None
        return max(self._held, min(self._last + self.linger, self._first + 5 * self.linger))

    def dispatch(self, now: float) -> list[Group]:
        """The groups that begin now; their jobs leave the queue.

        An idle trainer gets min(capacity, ceil(ready jobs of the kind / idle trainers)) jobs. The kind that has waited
        longest comes first.
        """
        groups: list[Group] = []
        due = self.due()
        if due is None or now < due:
            return groups
        kinds = self._by_kind()
        idle = sorted(self._trainers.keys() - self.busy)
        for kind, ready in sorted(kinds.items(), key=lambda item: item[1][0][0]):
            while ready and idle:
                number = idle.pop(0)
                share = -(-len(ready) // (len(idle) + 1))
                size = min(self._trainers[number].capacity.get(ready[0][1].submit.program, 1), share)
                groups.append(self._send_off(number, [ready.popleft()[1] for _ in range(size)]))
            if not ready:
                del kinds[kind]
        return groups

    def needed(self) -> set[Digest]:
        """The blobs of all jobs that are queued or running."""
        running = [
            job for trainer in self._trainers.values() if trainer.group for job in trainer.group.running.values()
        ]
        return {Digest(ref.digest) for job in (*self._jobs.values(), *running) for ref in job.submit.shared}

    def _by_kind(self) -> dict[Hashable, deque[tuple[int, QueuedJob]]]:
        """The jobs that may begin, by kind. Thousands may wait, so they are gone through once, not for each group."""
        if self._kinds is None:
            self._kinds = {}
            for place, (key, job) in enumerate(self._jobs.items()):
                if key not in self._lacking and key not in self._behind:
                    self._kinds.setdefault(job.kind, deque()).append((place, job))
        return self._kinds

    def _have_run(self, keys: Sequence[JobKey]) -> None:
        """These jobs have run. Those that wait behind them may begin."""
        if not self._behind.isdisjoint(keys):
            self._behind.difference_update(keys)
            self._kinds = None

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
