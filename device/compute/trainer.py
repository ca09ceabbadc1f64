"""The trainer: it runs an experiment's programs on jobs, each with the executor that the compute rule names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.graphs.captures import Captures, GraphRecorder
from fedemu.algorithms.interface import Forest, Kind, LocalProgram, Query, Tree
from fedemu.algorithms.replay.buffer import Buffer
from fedemu.algorithms.training.job_device import round_to_tf32
from fedemu.algorithms.trees import flatten, map_leaves
from fedemu.device.compute.executors.checked import GPU_TOLERANCE, TOLERANCE, Checked
from fedemu.device.compute.executors.executor import Executor, Job, JobResult, Source, failed
from fedemu.device.compute.executors.lowering import Lowered
from fedemu.device.compute.executors.promises import broken
from fedemu.device.compute.executors.query import catch_up, run_query
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.device.compute.rule import DeviceType, compute_rule, kind_of
from fedemu.protocol.errors import ConfigurationError, TrainingError
from fedemu.protocol.host.hardware import settle_gpu_libraries

KEPT_TREES = 8
"""The number of shared trees that stay on a GPU after their call."""


class Trainer:
    """Runs the programs of one experiment on the samples of ``corpus``.

    ``executor`` is a name of ``ExecutorName``, and ``stack`` the number of devices in its stacks; 0 leaves it to the
    table, on a GPU to the number of devices that an ask selects, ``cohort``, and on a processor to the number of the
    model's ``variables``. ``kind`` is the kind of the model, and of every program that names none of its own.
    ``examples`` are shared forests by program, in the shapes to expect.
    ``selection`` selects what a device with a replay buffer keeps of a sealed period. ``tf32`` lets a GPU round the
    inputs of products to TF32. Raises ConfigurationError for an unknown executor or device type, and for CUDA if there
    is none.
    """

    def __init__(
        self,
        programs: Mapping[str, LocalProgram | Query],
        corpus: Corpus,
        seed: int,
        device_type: str = "auto",
        executor: str = "auto",
        stack: int = 0,
        cohort: int = 0,
        variables: int = 0,
        kind: Kind = "convolutional",
        examples: Mapping[str, Forest] | None = None,
        selection: Query | None = None,
        tf32: bool = False,
    ) -> None:
        self.programs = programs
        self._selection = selection
        self.device = open_device(device_type, tf32)
        self._source = Source(corpus, seed, self.device)
        type: DeviceType = "cuda" if self.device.type == "cuda" else "cpu"
        kinds: set[Kind] = {kind, *(kind_of(program, kind) for program in programs.values())}
        self._kind = kind
        self._executors = {each: open_executor(executor, each, type, stack, cohort, variables) for each in kinds}
        self._examples = examples or {}
        self._placed: dict[int, tuple[Tree, Tree]] = {}
        self._as_told: set[str] = set()
        """The programs whose results were as they tell beforehand. Later results of theirs are not looked at."""

    def capacity(self, program: str) -> int:
        """The number of jobs of a program that make best use of a trainer."""
        found = self.programs.get(program)
        return 1 if _is_query(found) else self._executor_of(found).capacity

    def at_once(self, program: str) -> int | None:
        """The most jobs in one call of ``run`` if a GPU computes: a stack. None if a processor does.

        Results of a call are encoded while the next one runs. A processor that computes has no time for anything else,
        and takes all jobs in one call.
        """
        if self.device.type == "cpu":
            return None
        found = self.programs.get(program)
        executor = self._executor_of(found)
        if _is_query(found) or not isinstance(executor, Vmapped):
            return self.capacity(program)
        return executor.stack_size

    def warm_up(self) -> None:
        """Trace the programs for the shapes to expect, so that the first job need not wait for the tracing."""
        for name, shared in self._examples.items():
            program = self.programs[name]
            if _is_query(program) or not len(self._source.corpus.train):
                continue
            batch = max(stage.plan(1, np.random.default_rng(0)).shape[1] for stage in program.stages)  # type: ignore[union-attr]
            indices = np.arange(min(batch, len(self._source.corpus.train)), dtype=np.int64)
            self.run(name, shared, [Job(device=0, round=1, task=0, indices=indices)])

    def run(self, program: str, shared: Forest, jobs: Sequence[Job]) -> list[JobResult | TrainingError]:
        """The results in the order of the jobs. A job that cannot be done is a TrainingError; the others go on.

        The shared trees may be memory-mapped and read-only; nothing writes to them.
        """
        if program not in self.programs:
            known = ", ".join(sorted(self.programs))
            return [TrainingError(f"the experiment has no program {program!r}; it has {known}") for _ in jobs]
        placed = {key: self._place(tree) for key, tree in shared.items()}
        try:
            ready = [self._caught_up(placed, job) for job in jobs]
            results = iter(self._run(program, placed, [job for job in ready if isinstance(job, Job)]))
            return [next(results) if isinstance(job, Job) else job for job in ready]
        except (Exception, SystemExit) as error:
            return [failed(job.device, f"program {program!r} failed", error) for job in jobs]

    @cached_property
    def sample_bytes(self) -> int:
        """The size of one sample in a device's storage, with its label, in bytes."""
        split = self._source.corpus.train
        return int(split.x.dtype.itemsize * np.prod(split.x.shape[1:]) + split.y.dtype.itemsize)

    def _caught_up(self, shared: Forest, job: Job) -> Job | TrainingError:
        return job if self._selection is None else catch_up(self._selection, shared, job, self._source)

    def _run(self, name: str, shared: Forest, jobs: Sequence[Job]) -> list[JobResult | TrainingError]:
        program: Any = self.programs[name]
        if _is_query(program):
            results = [run_query(program, shared, job, self._source) for job in jobs]
        else:
            found = self._executor_of(program).run(program, shared, [job.over_all() for job in jobs], self._source)
            results = [_with_buffer(result, job.buffer) for result, job in zip(found, jobs, strict=True)]
        if name not in self._as_told:
            results = self._held_to_what_it_tells(name, shared, results, jobs)
            if not any(isinstance(result, TrainingError) for result in results):
                self._as_told.add(name)  # what it returns has one form, and looking at it each time would cost
        return results

    def _held_to_what_it_tells(
        self, name: str, shared: Forest, results: Sequence[JobResult | TrainingError], jobs: Sequence[Job]
    ) -> list[JobResult | TrainingError]:
        """The results. Those that are not as the program tells are TrainingErrors.

        The coordinator would refuse such a payload, and could not say whose code it comes from.
        """
        program: Any = self.programs[name]
        asked = _is_query(program)
        payload = flatten(program.payload(shared))
        own = None if asked else program.initial_own(shared)

        def kept(result: JobResult | TrainingError, job: Job) -> JobResult | TrainingError:
            if isinstance(result, TrainingError):
                return result
            wrong = broken("payload", payload, flatten(result.payload), "ask" if asked else "finish")
            if own is not None and job.own is None:
                wrong = wrong or broken("initial_own", own, result.own)
            return result if wrong is None else TrainingError(f"device {job.device}: the program {name!r} {wrong}")

        return list(map(kept, results, jobs))

    def _executor_of(self, program: object) -> Executor:
        return self._executors[kind_of(program, self._kind)]

    def _place(self, tree: Tree) -> Tree:
        """The tree on the compute device. A tree that comes again is not copied again."""
        if self.device.type == "cpu":
            return tree
        found = self._placed.pop(id(tree), None)
        if found is None:
            found = tree, map_leaves(lambda leaf: leaf.to(self.device), tree)
        self._placed[id(tree)] = found
        if len(self._placed) > KEPT_TREES:
            del self._placed[next(iter(self._placed))]
        return found[1]


def open_device(device_type: str, tf32: bool = False) -> torch.device:
    """The device to compute on. From now on the calling thread computes reproducibly: by itself, and with TF32 or not.

    On CUDA an operation that has no deterministic algorithm is an error, and its job fails with torch's words.

    Raises ConfigurationError for an unknown type, and for ``cuda`` if torch finds no CUDA device.
    """
    # A thread that has not asked yet takes the number that any thread has set last, such as a coordinator's in memory.
    torch.get_num_threads()
    torch.set_num_threads(1)
    if device_type not in ("auto", "cpu", "cuda"):
        raise ConfigurationError(f"device_type = {device_type!r} is none of auto, cpu and cuda")
    if device_type == "cpu" or not torch.cuda.is_available():
        if device_type == "cuda":
            raise ConfigurationError(
                "a trainer computes on CUDA here, but torch finds no CUDA device for it; see what nvidia-smi says, or "
                "let the run compute on processors from its beginning (device_type = 'cpu')"
            )
        return torch.device("cpu")
    settle_gpu_libraries()
    round_to_tf32(tf32, tf32)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    # torch.use_deterministic_algorithms does the same, but imports torch's compiler, which takes seconds.
    torch.set_deterministic_debug_mode("error")
    # No program reads memory that nobody wrote, and filling it would take time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return torch.device("cuda")


def open_executor(
    name: str, kind: Kind, device_type: DeviceType, stack_size: int = 0, cohort: int = 0, variables: int = 0
) -> Executor:
    """The executor that ``compute_rule`` names for these arguments. On CUDA its stacks have captured steps."""
    rule = compute_rule(name, kind, device_type, stack_size, cohort, variables)
    run_step = Captures(GraphRecorder()).run if device_type == "cuda" and rule.stack_size > 1 else Lowered.run
    match rule.executor:
        case "serial":
            return Serial()
        case "plain":
            return Serial(plain=True)
        case "vmapped":
            return Vmapped(rule.stack_size, run_step)
        case "checked":
            tolerance = GPU_TOLERANCE if device_type == "cuda" else TOLERANCE
            return Checked(Serial(), Vmapped(rule.stack_size, run_step), tolerance)


def _with_buffer(result: JobResult | TrainingError, buffer: Buffer | None) -> JobResult | TrainingError:
    if buffer is None or isinstance(result, TrainingError):
        return result
    return replace(result, buffer=buffer, metrics={**result.metrics, "replay_samples": float(len(buffer))})


def _is_query(program: LocalProgram | Query | None) -> bool:
    return hasattr(program, "ask")
