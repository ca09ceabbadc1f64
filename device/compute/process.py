"""A trainer process: it decodes groups of jobs, computes them with torch and encodes the results.

The nursery forks it (``nursery.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from fedemu.algorithms.interface import Forest, Tree
from fedemu.algorithms.trees import declared_dtypes, flatten, from_arrays, to_arrays
from fedemu.device.bus import INDICES, SEALED, Done, JobFailed, SharedFile, Train, TrainJob
from fedemu.device.compute.executors.executor import Job, JobResult
from fedemu.device.compute.shell import Answer
from fedemu.device.compute.trainer import Trainer
from fedemu.device.memory.replay_buffer import buffer_leaves, split_own
from fedemu.device.memory.store import read_own, write_own
from fedemu.device.pipe import TrainerSetup
from fedemu.protocol.blobs.tree_file import decode_tree
from fedemu.protocol.code.named import load, restrict
from fedemu.protocol.code.own_code import account, own_frames
from fedemu.protocol.errors import BlobError, ConfigurationError, DataError, FedemuError, MachineFault, TrainingError
from fedemu.protocol.host.files import shortage
from fedemu.protocol.host.paths import exists
from fedemu.protocol.host.phases import mark
from fedemu.protocol.ids import AskId, digest_of_file
from fedemu.protocol.messages import MOST_METRICS
from fedemu.protocol.tensors import pack, unpack
from fedemu.protocol.transport.passing import with_large_ones_sealed
from fedemu.protocol.transport.zmtp import SMALL

log = logging.getLogger(__name__)

KEPT_TREES = 8
"""The number of shared trees that stay decoded. The groups of an ask follow each other, and need the same trees; some
trees stay the same for many asks."""

ENCODING_THREADS = 4
"""The number of threads that encode results while a GPU computes. They mostly copy, without the interpreter's lock. 8
MB take a core about 4 ms, and an H200 trains a network of this size in 2 ms."""


class TorchRunner:
    """Decodes jobs for a trainer and encodes their results. ``clock`` tells monotonic real time in seconds."""

    def __init__(self, trainer: Trainer, clock: Callable[[], float] = time.perf_counter) -> None:
        self.capacity = {program: trainer.capacity(program) for program in trainer.programs}
        self._trainer = trainer
        self._clock = clock
        self._trees: dict[str, Tree] = {}
        self._logged: set[str] = set()

    def run(self, train: Train, frames: Sequence[memoryview]) -> Iterator[Answer]:
        """The answers to the jobs of a group. A job that cannot be decoded or computed is answered with JobFailed.

        Raises OSError or MemoryError where it is this machine that has no memory or no open files left.
        """
        try:
            shared = {blob.key: self._tree(blob) for blob in train.shared}
        except (OSError, BlobError) as error:
            _raise_shortage(error)
            yield from (_failed(train, job, "blob", str(error)) for job in train.jobs)
            return
        decoded: list[tuple[TrainJob, Job]] = []
        place = 0
        for job in train.jobs:
            part = slice(place, place + job.tensors)
            place += job.tensors
            try:
                decoded.append((job, _decode(train, job, frames[part], part)))
            except (BlobError, DataError) as error:
                _raise_shortage(error)
                yield _failed(train, job, "own_state", str(error))
        at_once = self._trainer.at_once(train.program)
        if at_once is None:
            results, seconds = self._computed(train, shared, decoded)
            for job, result in results:
                yield self._answer(train, job, result, seconds)
            return
        # Jobs of one call wait for each other, so those with as many samples go together.
        decoded.sort(key=lambda pair: -len(pair[1].over_all().indices))
        under_way: list[Callable[[], Answer]] = []
        for start in range(0, len(decoded), at_once):
            results, seconds = self._computed(train, shared, decoded[start : start + at_once])
            for answer in under_way:
                yield answer()
            under_way = [self._begun(train, job, result, seconds) for job, result in results]
        for answer in under_way:
            yield answer()

    @cached_property
    def _beside(self) -> ThreadPoolExecutor:
        """The threads that encode large results while this one waits for the next."""
        return ThreadPoolExecutor(ENCODING_THREADS, "encoding")

    def _computed(
        self, train: Train, shared: Forest, decoded: Sequence[tuple[TrainJob, Job]]
    ) -> tuple[list[tuple[TrainJob, JobResult | TrainingError]], float]:
        """The jobs with their results, and the seconds that one of them took."""
        jobs = [job for _, job in decoded]
        began = self._clock()
        try:
            results = self._trainer.run(train.program, shared, jobs)
        except MachineFault:
            raise  # the trainer ends, and another does the jobs
        except Exception as error:
            # The same error would come in any other trainer. So the jobs fail, and the trainer goes on.
            log.exception("program %r failed on %d jobs of ask %s", train.program, len(jobs), train.ask)
            results = [TrainingError(account(error))] * len(jobs)
        seconds = (self._clock() - began) / max(1, len(jobs))
        return [(job, result) for (job, _), result in zip(decoded, results, strict=True)], seconds

    def _begun(
        self, train: Train, job: TrainJob, result: JobResult | TrainingError, seconds: float
    ) -> Callable[[], Answer]:
        """A function that waits for the answer. A large one is made beside; a small one is not worth a thread."""
        if isinstance(result, JobResult) and _nbytes(result) >= SMALL:
            return self._beside.submit(self._sealed, train, job, result, seconds).result
        answer = self._answer(train, job, result, seconds)
        return lambda: answer

    def _sealed(self, train: Train, job: TrainJob, result: JobResult | TrainingError, seconds: float) -> Answer:
        """The answer, with large tensors in sealed memory already. Otherwise they would come there by being sent."""
        answer, frames = self._answer(train, job, result, seconds)
        return answer, with_large_ones_sealed(frames)

    def _answer(self, train: Train, job: TrainJob, result: JobResult | TrainingError, seconds: float) -> Answer:
        if isinstance(result, TrainingError):
            self._log(result, job.device)
            return _failed(train, job, "training", str(result))
        if (result.own or result.buffer is not None) and job.own is not None and not exists(Path(job.own)):
            return _failed(train, job, "own_state", f"the device's own state {job.own} is gone")
        if (many := len(result.metrics)) > MOST_METRICS:
            told = f"the program {train.program!r} tells {many} measures, and a reply holds {MOST_METRICS}; tell fewer"
            return _failed(train, job, "training", told)
        return _encode(train, job, result, self._trainer.sample_bytes, seconds)

    def _log(self, error: TrainingError, device: int) -> None:
        """Write the whole traceback of somebody else's code, once for each different error."""
        said = str(error).removeprefix(f"device {device}: ")
        if error.__cause__ is not None and said not in self._logged:
            self._logged.add(said)
            log.error("%s", error, exc_info=error)

    def _tree(self, blob: SharedFile) -> Tree:
        tree = self._trees.pop(blob.digest, None)
        if tree is None:
            path = Path(blob.path)
            if digest_of_file(path) != blob.digest:
                raise BlobError(f"the blob {path} is damaged: its checksum is wrong")
            tree = from_arrays(decode_tree(path))
        self._trees[blob.digest] = tree
        if len(self._trees) > KEPT_TREES:
            del self._trees[next(iter(self._trees))]
        return tree


def _raise_shortage(error: Exception) -> None:
    """Raise what has led to this error if that is a shortage of this machine, for which no device must fail."""
    for each in (error, error.__cause__):
        if each is not None and shortage(each):
            raise each


def _decode(train: Train, job: TrainJob, frames: Sequence[memoryview], part: slice) -> Job:
    """A job from its tensors: its sample indices, those of sealed periods, and the device's own part of the ask.

    ``part`` is the place of the job's tensors among all tensors of the group. Raises BlobError if the device's own
    state cannot be read, and DataError if what it says of the replay buffer makes none.
    """
    prefix = f"{job.device}/"
    arrays = {name.removeprefix(prefix): array for name, array in unpack(train.tensors[part], frames).items()}
    indices = arrays.pop(INDICES)
    sealed = {int(name.removeprefix(SEALED)): arrays.pop(name) for name in list(arrays) if name.startswith(SEALED)}
    own = Path(job.own) if job.own is not None else None
    # A program without own state writes no versions. So there may be no file, although an ask was accepted before.
    program, buffer = split_own(read_own(own) if own is not None and exists(own) else {})
    answered, notes = from_arrays(buffer.answered), from_arrays(buffer.notes)
    return Job(
        device=job.device,
        round=AskId.parse(train.ask).round,
        task=train.task,
        indices=indices,
        each=from_arrays(arrays),
        own=from_arrays(program) if program else None,
        buffer=replace(buffer, answered=answered, notes=notes) if job.budget else None,
        budget=job.budget,
        sealed=sealed,
    )


def _encode(train: Train, job: TrainJob, result: JobResult, sample_bytes: int, seconds: float) -> Answer:
    kept, buffered, buffered_bytes = dict(result.own), None, None
    if result.buffer is not None:
        kept |= {name: torch.as_tensor(leaf) for name, leaf in buffer_leaves(result.buffer).items()}
        buffered = len(result.buffer)
        buffered_bytes = buffered * sample_bytes + sum(leaf.nbytes for leaf in result.buffer.notes.values())
    if kept:
        write_own(Path(job.next_own), to_arrays(kept), declared_dtypes(kept))
    payload = flatten(result.payload)
    specs, frames = pack(to_arrays(payload), declared_dtypes(payload))
    done = Done(
        device=job.device,
        ask=train.ask,
        examples=result.examples,
        steps=result.steps,
        metrics={name: float(value) for name, value in result.metrics.items()},
        label_counts=result.label_counts,
        seconds=seconds,
        wrote_own=bool(kept),
        buffered=buffered,
        buffered_bytes=buffered_bytes,
        tensors=specs,
    )
    return done, frames


def _nbytes(result: JobResult) -> int:
    return sum(leaf.nbytes for tree in (*result.payload.values(), result.own) for leaf in tree.values())


def _failed(train: Train, job: TrainJob, reason: str, detail: str) -> Answer:
    return JobFailed(device=job.device, ask=train.ask, reason=reason, detail=detail[:2048]), ()


def open_runner(setup: TrainerSetup) -> TorchRunner:
    """The experiment's trainer, ready for its first job. Raises FedemuError if the experiment cannot be run."""
    torch.set_num_threads(1)
    try:
        open_trainer: Callable[[bytes, str], Trainer] = load(setup.trainer)
        restrict(setup.allow_code)
        if setup.gpu_share < 1 and setup.device_type != "cpu" and torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(setup.gpu_share)
        trainer = open_trainer(Path(setup.experiment).read_bytes(), setup.device_type)
        mark("trainer", "data and method")
        trainer.warm_up()
        mark("trainer", "first step")
    except FedemuError:
        raise
    except Exception as error:
        if not own_frames(error):
            raise
        log.exception("the trainer cannot start")
        raise ConfigurationError(f"a trainer can't start: {account(error)}") from error
    return TorchRunner(trainer)
