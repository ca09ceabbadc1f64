"""A cohort: jobs that run together, with the samples that each step of each device sees, and with stacked inputs.

Executors make it before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.interface import REPLAYED, Augment, Facts, Forest, LocalProgram, Noting, Stage, Tree
from fedemu.algorithms.models.randomness.draws import keys
from fedemu.device.compute.executors.executor import Job, Source, failed
from fedemu.protocol.errors import TrainingError
from fedemu.protocol.seeds import generator, integer

EACH = "each"
"""The key of a job's own part of the ask among the shared trees."""
BEGIN: Final = -1
FINISH: Final = -2
"""The steps whose keys ``begin`` and ``finish`` get."""


@dataclass(frozen=True)
class Lines:
    """The steps of all devices in one stage. Each step is one line, and a device's lines follow each other.

    ``rows [lines, batch]`` are positions in the cohort's samples, where padding repeats samples of the same batch.
    ``weights [lines, batch]`` are 0 for padding and 1 elsewhere. Device ``d`` has ``steps[d]`` lines, from line
    ``first[d]`` on.
    """

    rows: NDArray[np.int64]
    weights: NDArray[np.float32]
    first: NDArray[np.int64]
    steps: NDArray[np.int64]
    augment: Augment | None
    draws: Mapping[str, Tensor]
    """The random choices of the augmentation, leaves ``[lines, batch, ...]``."""


@dataclass(frozen=True)
class Cohort:
    """Jobs that can run together, with all that their steps read.

    ``x [rows, ...]`` and ``y [rows]`` hold the samples of all jobs; ``examples [jobs]`` and ``label_counts
    [jobs, classes]`` count them. ``own`` and ``each`` have leaves ``[jobs, ...]``. ``noise`` holds one random source
    per job, or none if the program declares no noise.
    """

    jobs: Sequence[Job]
    places: Sequence[int]
    """The place of each job in the call."""
    x: Tensor
    y: Tensor
    examples: NDArray[np.int64]
    label_counts: NDArray[np.int64]
    stages: Sequence[Lines]
    facts: tuple[Tensor, Tensor]
    """The facts in the two tensors that ``unpacked`` takes, with one row per job."""
    own: Tree
    each: Tree
    noise: Sequence[np.random.Generator]
    notes: Tree
    """The notes of the samples, leaves ``[rows, ...]``, in the order of their names."""
    seed: int
    """The seed of all random draws of the experiment."""

    @property
    def steps(self) -> NDArray[np.int64]:
        """The number of steps of each job in all stages, ``[jobs]``."""
        return _total([lines.steps for lines in self.stages])

    def keys(self, places: NDArray[np.int64], steps: NDArray[np.int64]) -> Tensor:
        """The keys ``[n, 2]`` by which jobs (by place in ``jobs``) draw in their steps: functions of both, as pairs.

        ``steps`` count the steps of a job in all stages from 0; BEGIN and FINISH stand for what is before and after.
        """
        return torch.from_numpy(keys(self._seeds[places], steps)).to(self.x.device)

    @cached_property
    def _seeds(self) -> NDArray[np.uint64]:
        """The seeds of all draws of each job, ``[jobs]``."""
        return np.array(
            [integer(self.seed, round=job.round, device=job.device, purpose="draws") for job in self.jobs], np.uint64
        )


def cohorts(
    program: LocalProgram, shared: Forest, jobs: Sequence[Job], source: Source, size: int
) -> Iterator[Cohort | tuple[int, TrainingError]]:
    """The jobs in cohorts of at most ``size``. A job that cannot be run is yielded as its place and its error.

    All jobs of a cohort bring a part of the ask with the same names, shapes and dtypes.
    """
    template = program.initial_own(shared)
    alike: dict[Any, list[int]] = {}
    for place, job in enumerate(jobs):
        if problem := problem_of(job, template, len(source.corpus.train)):
            yield place, TrainingError(f"device {job.device}: {problem}")
        else:
            alike.setdefault(_layout(job.each) if job.each else (), []).append(place)
    for places in alike.values():
        for start in range(0, len(places), size):
            yield from _cohort(program, template, jobs, places[start : start + size], source)


def problem_of(job: Job, template: Tree, samples: int) -> str | None:
    """What is wrong with a job's own state or samples; None if nothing is wrong.

    An own state must have the names, shapes and dtypes of ``template``.
    """
    if job.own is not None and _layout(job.own) != _layout(template):
        return (
            f"its own state has the form {_layout(job.own)}, but the program keeps the form {_layout(template)}; all "
            "programs of a method share one own state, so let initial_own() of each give the same form"
        )
    return sample_problem(job, samples)


def sample_problem(job: Job, samples: int) -> str | None:
    """What is wrong with a job's sample indices; None if nothing is. The training split has ``samples`` samples."""
    held = [job.indices, *job.sealed.values(), *([] if job.buffer is None else [job.buffer.indices])]
    if any(part.size and not 0 <= int(part.min()) <= int(part.max()) < samples for part in held):
        return f"its sample indices reach beyond the {samples} training samples"
    return None


def _layout(tree: Tree) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
    return tuple(sorted((name, tuple(leaf.shape), leaf.dtype) for name, leaf in tree.items()))


def _cohort(
    program: LocalProgram, template: Tree, jobs: Sequence[Job], places: Sequence[int], source: Source
) -> Iterator[Cohort | tuple[int, TrainingError]]:
    plans: dict[int, list[NDArray[np.int64]]] = {}
    for place in places:
        job = jobs[place]
        try:
            plans[place] = [
                source.planner.plan(stage, i, job.indices.size, job.round, job.device)
                for i, stage in enumerate(program.stages)
            ]
        except (Exception, SystemExit) as error:
            yield place, failed(job.device, "planning its batches failed", error)
    for group in _of_one_size(plans):
        yield _prepared(
            program, template, [jobs[place] for place in group], group, [plans[place] for place in group], source
        )


def _of_one_size(plans: Mapping[int, Sequence[NDArray[np.int64]]]) -> list[list[int]]:
    """The places in groups whose batches have the same sizes, since a batch's size changes the bits of a result.

    Devices without samples have no batch, and fit to any others.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, stages in plans.items():
        groups.setdefault(tuple(plan.shape[1] for plan in stages), []).append(place)
    idle = [groups.pop(sizes) for sizes in list(groups) if not any(sizes)]
    found = [*groups.values()] or [[]]
    found[0] += [place for some in idle for place in some]
    return [group for group in found if group]


def _prepared(
    program: LocalProgram,
    template: Tree,
    group: Sequence[Job],
    places: Sequence[int],
    plans: Sequence[Sequence[NDArray[np.int64]]],
    source: Source,
) -> Cohort:
    """The cohort of the jobs ``group`` with these places and plans."""
    examples = np.array([job.indices.size for job in group], np.int64)
    indices = np.concatenate([job.indices for job in group])
    x, y = source.batch(indices)
    offsets = np.cumsum(examples) - examples
    stages = [
        _lines(stage, i, group, [plan[i] for plan in plans], offsets, source) for i, stage in enumerate(program.stages)
    ]
    owner = np.repeat(np.arange(len(group)), examples)
    classes = source.corpus.classes
    labels = source.corpus.train.y.take(indices)
    label_counts = np.bincount(owner * classes + labels, minlength=len(group) * classes).reshape(-1, classes)
    steps = _total([lines.steps for lines in stages])
    noise = [
        generator(source.seed, round=job.round, device=job.device, purpose="noise") for job in group if program.noise
    ]
    return Cohort(
        jobs=group,
        places=places,
        x=x,
        y=y,
        examples=examples,
        label_counts=label_counts,
        stages=stages,
        facts=_facts(program, group, examples, steps, label_counts, source.device),
        own=_stacked([job.own for job in group], template, source.device),
        each=_stacked([job.each for job in group], group[0].each, source.device),
        noise=noise,
        notes={
            name: torch.cat([_noted(job, name, shape) for job in group]).to(source.device)
            for name, shape in notes_of(program).items()
        },
        seed=source.seed,
    )


def notes_of(program: LocalProgram) -> Mapping[str, tuple[int, ...]]:
    """The shapes of the notes that a program asks for, in the order of their names."""
    return dict(sorted(program.notes.items())) if isinstance(program, Noting) else {}


def _noted(job: Job, name: str, shape: tuple[int, ...]) -> Tensor:
    """A note of all samples of a job, ``[examples, *shape]``."""
    if name == REPLAYED:
        return (torch.arange(job.indices.size) < job.replayed).float()
    rows = torch.full((job.indices.size, *shape), torch.nan)
    if name in job.notes:
        rows[: job.replayed] = job.notes[name]
    return rows


def _lines(
    stage: Stage,
    number: int,
    jobs: Sequence[Job],
    plans: Sequence[NDArray[np.int64]],
    offsets: NDArray[np.int64],
    source: Source,
) -> Lines:
    steps = np.array([len(plan) for plan in plans], np.int64)
    batch = max(plan.shape[1] for plan in plans)
    positions = np.full((int(steps.sum()), batch), -1, np.int64)
    first = np.cumsum(steps) - steps
    for start, plan in zip(first.tolist(), plans, strict=True):
        positions[start : start + len(plan), : plan.shape[1]] = plan
    valid = positions >= 0
    counts = np.maximum(valid.sum(1), 1)
    if batch and (counts < batch).any():
        repeated = np.take_along_axis(positions, np.arange(batch) % counts[:, None], axis=1)
        positions = np.where(valid, positions, np.maximum(repeated, 0))
    rows = positions + np.repeat(offsets, steps)[:, None]
    draws: Mapping[str, Tensor] = {}
    if stage.augment is not None and batch and len(rows):
        drawn = [
            stage.augment.draw(
                generator(source.seed, round=job.round, device=job.device, purpose=f"augment/{number}"),
                int(count) * batch,
                source.corpus.input_shape,
            )
            for job, count in zip(jobs, steps, strict=True)
        ]
        draws = {
            name: torch.from_numpy(np.concatenate([part[name] for part in drawn]))
            .reshape(len(rows), batch, *drawn[0][name].shape[1:])
            .to(source.device)
            for name in drawn[0]
        }
    return Lines(rows, valid.astype(np.float32), first, steps, stage.augment, draws)


def _total(counts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    total: NDArray[np.int64] = np.stack(counts).sum(0)
    return total


def unpacked(counts: Tensor, lr: Tensor) -> Facts:
    """The facts of one device, from counts ``[6 + classes]`` int64 and its learning rate.

    They travel as these two tensors, because moving eight small ones takes longer.
    """
    examples, steps, round, task, first_visit, device = counts[:6].unbind()
    return Facts(examples, steps, lr, round, task, first_visit.bool(), counts[6:], device)


def _facts(
    program: LocalProgram,
    jobs: Sequence[Job],
    examples: NDArray[np.int64],
    steps: NDArray[np.int64],
    label_counts: NDArray[np.int64],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    rates = {key: program.learning_rate(*key) for key in {(job.round, job.task) for job in jobs}}
    rows = [(job.round, job.task, job.own is None, job.device) for job in jobs]
    counts = np.concatenate([examples[:, None], steps[:, None], np.array(rows, np.int64), label_counts], axis=1)
    lr = np.array([rates[job.round, job.task] for job in jobs], np.float32)
    return torch.from_numpy(counts).to(device), torch.from_numpy(lr).to(device)


def _stacked(trees: Sequence[Tree | None], template: Tree, device: torch.device) -> Tree:
    """The trees of the jobs as one tree with leaves ``[jobs, ...]``. A job without a tree has zeros."""
    return {
        name: torch.stack(
            [torch.zeros(leaf.shape, dtype=leaf.dtype) if tree is None else tree[name].cpu() for tree in trees]
        ).to(device)
        for name, leaf in template.items()
    }
