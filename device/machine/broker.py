"""The bus of a machine: takes jobs from device processes, hands them to trainers in groups, and brings answers back.

Payloads are passed on as they came and never decoded here. ``jobs.py`` decides which trainer runs which jobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from fedemu.device.bus import (
    LIMITS,
    TO_SUPERVISOR,
    Asleep,
    Attach,
    Crashed,
    Done,
    Faulty,
    Finished,
    JobFailed,
    JobTensor,
    Joined,
    Quit,
    Reachable,
    Ready,
    Rouse,
    SharedFile,
    Submit,
    Train,
    TrainJob,
    Unusable,
    Withdraw,
)
from fedemu.device.machine.jobs import Group, JobQueue, QueuedJob
from fedemu.device.machine.observer import MachineObserver
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.codec import Envelope
from fedemu.protocol.errors import BlobError, ConfigurationError, FedemuError, ProtocolError
from fedemu.protocol.host.open_files import open_files
from fedemu.protocol.ids import Digest
from fedemu.protocol.messages import BlobRef
from fedemu.protocol.transport.interface import Bounds, Network
from fedemu.protocol.wording import is_milestone

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""The time between two looks at the connections of the bus."""
SPARE_FILES = 64
"""Descriptors that the connections of the bus leave to the supervisor."""


class Broker:
    """The supervisor's side of the bus, bound to ``address``. Only processes that know ``token`` are heard.
    Other connections that take much memory, send what cannot be read, or say nothing for long, are closed.

    Calls ``want`` with a blob that a job needs and this machine lacks, and ``failed`` with an error that ends the
    machine.
    """

    def __init__(
        self,
        network: Network,
        address: str,
        token: str,
        store: BlobStore,
        observer: MachineObserver,
        *,
        want: Callable[[BlobRef], None],
        failed: Callable[[FedemuError], None],
    ) -> None:
        self.joined: Callable[[int, int], None] = lambda device, incarnation: None
        """Called with a device and its incarnation when the coordinator has made it a member."""
        self.crashed: Callable[[int, int], None] = lambda device, incarnation: None
        """Called with a device and its incarnation when it has crashed as planned, but its process has not."""
        self.asleep: Callable[[int, int], None] = lambda device, incarnation: None
        """Called with a device and its incarnation when it has fallen asleep."""
        self.attached: Callable[[int], None] = lambda number: None
        """Called with the number of a device process that can be spoken to."""
        self.trainer_ready: Callable[[int], None] = lambda number: None
        """Called with the number of a trainer that can take jobs."""
        self.trainer_faulty: Callable[[int, str], None] = lambda number, why: None
        """Called with the number of a trainer that cannot go on, and the reason. It is to be killed."""
        self._roles: dict[bytes, tuple[str, int]] = {}
        self._strange: Counter[str] = Counter()
        most = open_files() - SPARE_FILES
        bounds = Bounds(
            connections=most,
            most_strangers=lambda: most,
            knows=self._roles.__contains__,
            ended=lambda reason: self._tell(f"was parted from ({reason})"),
            closed=lambda peer: None,
            most_unfinished=lambda: LIMITS.message_bytes,
            queue=0,  # a process with many devices gets as many answers at once, and none may be lost
        )
        self._router = network.bind(address, TO_SUPERVISOR, self._received, self._rejected, bounds=bounds)
        self._token = token
        self._store = store
        self._observer = observer
        self._want = want
        self._failed = failed
        self._queue = JobQueue()
        self._processes: dict[int, bytes] = {}
        self._trainers: dict[int, bytes] = {}
        self._tally: dict[int, list[int]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._looking = self._loop.call_later(LOOK_SECONDS, self._look)
        self._depth = 0
        self._quitting = False

    @property
    def address(self) -> str:
        """The address at which processes reach the bus."""
        return self._router.address

    @property
    def busy(self) -> list[int]:
        """The numbers of the trainers that have jobs."""
        return self._queue.busy

    @property
    def waiting(self) -> int:
        """The number of jobs that wait for a trainer."""
        return self._depth

    def progress(self, trainer: int) -> object:
        """A value that changes whenever this trainer answers a job, or gets new ones."""
        return self._queue.progress(trainer)

    def work_of(self, trainer: int) -> str:
        """What a trainer is to do, in words: the first of its jobs, and how many more there are."""
        jobs = self._queue.running_on(trainer)
        if not jobs:
            return "nothing"
        others = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
        return f"device {jobs[0].submit.device}{others} of ask {jobs[0].submit.ask}"

    def needed(self) -> Iterable[Digest]:
        """The blobs of all jobs that are queued or running."""
        return self._queue.needed()

    def arrived(self, digest: Digest) -> None:
        """A blob is here now: jobs that waited for it may begin."""
        self._queue.arrived(digest)
        self._pump()

    def lost(self, digest: Digest, error: BlobError) -> None:
        """A blob cannot be had: jobs that need it fail."""
        for job in self._queue.lost(digest):
            self._give_up(job, "blob", str(error))

    def process_ended(self, number: int) -> None:
        """A device process has ended: its jobs that have not begun are forgotten."""
        peer = self._processes.pop(number, None)
        if peer is not None:
            del self._roles[peer]
            self._queue.abandon(peer)

    def trainer_ended(self, number: int, why: str = "") -> None:
        """A trainer has ended: its jobs are queued again, or fail if too many trainers died over them.

        ``why`` stands after its name, such as ``ended with code 1``.
        """
        peer = self._trainers.pop(number, None)
        if peer is not None:
            del self._roles[peer]
        for job in self._queue.remove_trainer(number, self._loop.time()):
            self._give_up(job, "trainer", f"{job.deaths} trainers died over it{why and f'; the last one {why}'}")
        self._pump()

    def rouse(self, number: int, lives: Iterable[tuple[int, int]]) -> bool:
        """Have device process ``number`` begin these lives. False if it has not attached."""
        peer = self._processes.get(number)
        return peer is not None and self._router.send(peer, Rouse(lives=tuple(lives)))

    def coordinator_reachable(self) -> None:
        """Tell all device processes that the coordinator has given this machine its place again."""
        for peer in self._processes.values():
            self._router.send(peer, Reachable())

    def quit_processes(self) -> None:
        """Tell all device processes to end, also those that attach later."""
        self._quitting = True
        for peer in self._processes.values():
            self._router.send(peer, Quit())

    def close(self) -> None:
        """Free the address. Jobs that are not answered get no answer."""
        if self._timer is not None:
            self._timer.cancel()
        self._looking.cancel()
        self._router.close()

    def _received(self, peer: bytes, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, Attach):
            self._attach(peer, message)
            return
        role, number = self._roles.get(peer, ("", -1))
        match message:
            case Done() | JobFailed() if role == "trainer":
                self._answered(number, message, envelope.frames)
            case Submit() if role == "process":
                self._submit(peer, message, envelope.frames)
            case Joined() if role == "process":
                self.joined(message.device, message.incarnation)
            case Crashed() if role == "process":
                self.crashed(message.device, message.incarnation)
            case Asleep() if role == "process":
                self.asleep(message.device, message.incarnation)
            case Withdraw() if role == "process":
                self._queue.withdraw((message.device, message.ask))
            case Ready() if role == "trainer":
                self._queue.add_trainer(number, message.capacity)
                self.trainer_ready(number)
                self._pump()
            case Faulty() if role == "trainer":
                self.trainer_faulty(number, message.detail)
            case Unusable() if role == "trainer":
                self._failed((FedemuError if message.in_work else ConfigurationError)(message.detail))
            case Finished() if role == "trainer":
                self._finished(number, message)
            case _:
                # This is mostly the last message of a process that has ended meanwhile.
                log.debug("ignored %s from a %s on the bus", type(message).__name__, role or "stranger")

    def _rejected(self, peer: bytes, error: ProtocolError) -> None:
        role = self._roles.get(peer)
        if role is None:
            self._tell("sent what cannot be read", str(error))
            self._router.cut(peer)
        else:
            log.warning("unreadable message on the bus from %s: %s", role, error)

    def _tell(self, what: str, detail: str = "") -> None:
        """A stranger did something. The log tells the 1st, 10th, 100th time and so on: he must not fill the disk."""
        self._strange[what] += 1
        if is_milestone(count := self._strange[what]):
            log.warning("a stranger on the bus %s (%d so far)%s", what, count, detail and f": {detail}")

    def _attach(self, peer: bytes, attach: Attach) -> None:
        if attach.token != self._token:
            self._tell("tried to attach")
            self._router.cut(peer)
            return
        members = self._processes if attach.role == "process" else self._trainers
        if attach.number in members:  # the last words of one that had ended came late
            (self.process_ended if attach.role == "process" else self.trainer_ended)(attach.number)
        self._roles[peer] = (attach.role, attach.number)
        members[attach.number] = peer
        if attach.role == "process":
            self.attached(attach.number)
            if self._quitting:
                self._router.send(peer, Quit())

    def _submit(self, peer: bytes, submit: Submit, frames: Sequence[memoryview]) -> None:
        lacking = [ref for ref in submit.shared if not self._store.has(Digest(ref.digest))]
        job = QueuedJob(submit, frames, peer)
        self._queue.submit(job, self._loop.time(), [Digest(ref.digest) for ref in lacking])
        for ref in lacking:
            self._want(ref)
        self._arm()

    def _answered(self, trainer: int, answer: Done | JobFailed, frames: Sequence[memoryview]) -> None:
        job = self._queue.answered(trainer, (answer.device, answer.ask))
        if job is None:
            return
        self._tally.setdefault(trainer, [0, 0])[isinstance(answer, JobFailed)] += 1
        if isinstance(answer, JobFailed) and answer.reason == "blob":
            for ref in job.submit.shared:
                self._store.doubt(Digest(ref.digest))
        if isinstance(answer, Done) and answer.buffered is not None and answer.buffered_bytes is not None:
            self._observer.buffered(answer.device, answer.buffered, answer.buffered_bytes)
        if job.origin is not None:
            self._router.send(job.origin, answer, frames)

    def _finished(self, trainer: int, finished: Finished) -> None:
        for job in self._queue.finished(trainer, finished.group):
            self._give_up(job, "trainer", "the trainer left it unanswered")
        done, failed = self._tally.pop(trainer, (0, 0))
        self._observer.trained(finished.seconds, done, failed)
        self._pump()

    def _give_up(self, job: QueuedJob, reason: str, why: str) -> None:
        log.error("the job of device %d for ask %s is given up: %s", *job.key, why)
        self._observer.given_up()
        answer = JobFailed(device=job.submit.device, ask=job.submit.ask, reason=reason, detail=why[:2048])
        if job.origin is not None:
            self._router.send(job.origin, answer)

    def _look(self) -> None:
        """Close the connections of strangers that take too much."""
        try:
            self._router.look()
        except FedemuError as error:
            self._failed(error)
            return
        self._looking = self._loop.call_later(LOOK_SECONDS, self._look)

    def _pump(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for group in self._queue.dispatch(self._loop.time()):
            message, frames = train_message(group, self._store)
            self._router.send(self._trainers[group.trainer], message, frames)
        self._arm()

    def _arm(self) -> None:
        if len(self._queue) != self._depth:
            self._depth = len(self._queue)
            self._observer.queue_depth(self._depth)
        due = self._queue.due()
        if due is not None and self._timer is None:
            self._timer = self._loop.call_at(due, self._pump)


def train_message(group: Group, store: BlobStore) -> tuple[Train, list[memoryview]]:
    """The message that gives a group to its trainer, and its frames: those of the jobs, one job after the other."""
    first = group.jobs[0].submit
    message = Train(
        group=group.number,
        ask=first.ask,
        program=first.program,
        task=first.task,
        shared=tuple(
            SharedFile(key=ref.key, digest=ref.digest, path=str(store.path(Digest(ref.digest)))) for ref in first.shared
        ),
        jobs=tuple(
            TrainJob(
                device=job.submit.device,
                own=job.submit.own,
                next_own=job.submit.next_own,
                budget=job.submit.budget,
                tensors=len(job.frames),
            )
            for job in group.jobs
        ),
        tensors=tuple(
            JobTensor(name=f"{job.submit.device}/{spec.name}", dtype=spec.dtype, shape=spec.shape)
            for job in group.jobs
            for spec in job.submit.tensors
        ),
    )
    return message, [frame for job in group.jobs for frame in job.frames]
