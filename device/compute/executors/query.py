"""Questions to a device's memory, which are answered one at a time and without steps.

The samples that a question keeps become the device's replay buffer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.interface import Batch, Facts, Forest, Memory, Outcome, Query, Tree
from fedemu.algorithms.models.randomness.private_functions import keeping_activations
from fedemu.algorithms.replay.buffer import Buffer
from fedemu.algorithms.training.compiler import without_compiler
from fedemu.algorithms.trees import map_leaves
from fedemu.device.compute.executors.cohort import EACH, sample_problem
from fedemu.device.compute.executors.executor import Job, JobResult, Source, failed
from fedemu.device.compute.executors.plain import drawing_by, looping
from fedemu.device.compute.executors.promises import as_leaf
from fedemu.protocol.errors import TrainingError
from fedemu.protocol.seeds import generator, sequence
from fedemu.protocol.wording import an_object

PURPOSE = "replay"
"""The purpose of a selection's random draws. A device has one random source per period, whenever it selects."""
_OTHERWISE = "replay/draws"
"""The purpose of what a question draws by the generators of Python, numpy or torch, and not by that of its memory."""


def run_query(query: Query, shared: Forest, job: Job, source: Source) -> JobResult | TrainingError:
    """Ask one device about its replay buffer and the period's samples.

    The job must be caught up: the device has selected from all earlier periods (``catch_up``).
    """
    if problem := sample_problem(job, len(source.corpus.train)):
        return TrainingError(f"device {job.device}: {problem}")
    try:
        if job.each:
            shared = {**shared, EACH: map_leaves(lambda leaf: leaf.to(source.device), job.each)}
        before = Buffer(period=job.task) if job.buffer is None else job.buffer
        outcome, buffer, counts = _ask(query, shared, job, before, job.indices, source)
    except (Exception, SystemExit) as error:
        return failed(job.device, "the question could not be answered", error)
    return JobResult(
        payload={key: map_leaves(_exported, tree) for key, tree in outcome.payload.items()},
        own=job.own or {},
        examples=int(counts.sum()),
        steps=0,
        metrics={},
        label_counts=tuple(counts.tolist()) if query.declares_label_counts else None,
        buffer=None if job.buffer is None else buffer,
    )


def catch_up(selection: Query, shared: Forest, job: Job, source: Source) -> Job | TrainingError:
    """The job after the device has selected from all sealed periods, the oldest first.

    A sample that the selection does not keep is never used again.
    """
    if job.buffer is None:
        return job
    if problem := sample_problem(job, len(source.corpus.train)):
        return TrainingError(f"device {job.device}: {problem}")
    buffer = job.buffer
    if buffer.period > job.task:
        return TrainingError(
            f"device {job.device}: its replay buffer is of period {buffer.period}, later than the work's {job.task}"
        )
    try:
        while buffer.period < job.task:
            arrived = job.sealed.get(buffer.period, np.empty(0, np.int64))
            period = buffer.period
            _, buffer, _ = _ask(selection, shared, job, buffer, arrived, source)
            if buffer.period != period + 1:
                raise ValueError(
                    f"ask of the method's selection returned None for the positions of the samples to keep, but period "
                    f"{period} is over; let it return them, and an empty tensor for none"
                )
    except (Exception, SystemExit) as error:
        return failed(job.device, "it could not select from sealed samples", error)
    return replace(job, buffer=buffer, sealed={})


@torch.no_grad()
def _ask(
    query: Query, shared: Forest, job: Job, buffer: Buffer, arrived: NDArray[np.int64], source: Source
) -> tuple[Outcome, Buffer, NDArray[np.int64]]:
    """The answer, the buffer after the answer, and the label counts ``[classes]`` of the device's samples."""
    device, period = source.device, buffer.period
    memory = _memory(job, buffer, arrived, source)
    counts = torch.bincount(memory.batch.y.cpu(), minlength=source.corpus.classes)
    facts = Facts(
        examples=torch.tensor(len(memory.indices), device=device),
        steps=torch.tensor(0, device=device),
        lr=torch.tensor(0.0, device=device),
        round=torch.tensor(job.round, device=device),
        task=torch.tensor(period, device=device),
        first_visit=torch.tensor(not buffer.answered, device=device),
        label_counts=counts.to(device),
        device=torch.tensor(job.device, device=device),
    )
    own = map_leaves(lambda leaf: leaf.to(device), buffer.answered)
    trees = {"own": own} | {f"shared[{key!r}]": tree for key, tree in shared.items()}
    given = {f"{place}[{name!r}]": leaf for place, tree in trees.items() for name, leaf in tree.items()}
    versions = {name: leaf._version for name, leaf in given.items() if not leaf.is_inference()}
    # Some models cannot be mapped over samples, and the gradients of a mapped one come when it is mapped no more.
    with drawing_by(_key(job, period, source)), without_compiler(), looping(), keeping_activations():
        answer: object = query.ask(memory, shared, own, facts)
    if written := next((name for name, version in versions.items() if given[name]._version != version), None):
        raise TypeError(
            f"ask writes to {written}, which other devices and questions read, too; let it make a new tensor"
        )
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Outcome)):
        raise TypeError(
            f"ask returned {an_object(answer)}; it must return two things, an Outcome and the positions of the samples "
            "to keep, which are None for all"
        )
    outcome, keep = answer
    if keep is None:
        after = replace(buffer, asked=len(arrived), answered=map_leaves(_exported, outcome.own))
    else:
        after = _kept(memory, _positions(keep), map_leaves(_exported, outcome.own))
    return outcome, after, counts.numpy()


def _key(job: Job, period: int, source: Source) -> Tensor:
    """The key ``[2]``, int32, of what a device draws when it is asked in this period."""
    words = sequence(source.seed, round=period, device=job.device, purpose=_OTHERWISE).generate_state(2)
    return torch.from_numpy(words.view(np.int32)).to(source.device)


def _memory(job: Job, buffer: Buffer, arrived: NDArray[np.int64], source: Source) -> Memory:
    indices = np.concatenate([buffer.indices, arrived])
    x, y = source.batch(indices)
    device, period = source.device, buffer.period
    return Memory(
        batch=Batch(x, y, torch.ones(len(y), device=device)),
        indices=indices,
        fresh=np.arange(len(indices)) >= len(buffer),
        periods=np.concatenate([buffer.periods, np.full(len(arrived), period, np.int64)]),
        period=period,
        budget=job.budget,
        seen=buffer.seen + len(arrived),
        generator=generator(source.seed, round=period, device=job.device, purpose=PURPOSE),
        notes=map_leaves(lambda leaf: leaf.to(device), buffer.notes),
    )


def _positions(keep: object) -> NDArray[np.int64]:
    """The positions to keep, of any shape, as an array ``[kept]``. Raises TypeError unless they are whole numbers."""
    found = as_leaf(keep, "ask").cpu().reshape(-1)
    if len(found) and (found.dtype == torch.bool or found.is_floating_point() or found.is_complex()):
        raise TypeError(
            f"ask returned the positions of the samples to keep as {found.dtype}; they must be whole numbers, as "
            "mask.nonzero() makes them of a mask"
        )
    return found.numpy().astype(np.int64)


def _kept(memory: Memory, keep: NDArray[np.int64], notes: Tree) -> Buffer:
    """The buffer at the beginning of the next period, with the samples at the positions ``keep``.

    ``notes`` are those of the samples to keep, in the order of ``keep``. Raises ValueError unless the positions are
    distinct, exist, and are at most ``memory.budget``, and unless each has a row of the notes.
    """
    positions, first = np.unique(keep, return_index=True)
    if len(positions) < len(keep) or len(keep) > memory.budget:
        raise ValueError(
            f"a selection of {len(keep)} positions, {len(positions)} of them distinct, is refused; "
            f"select each position once, and at most {memory.budget}"
        )
    if len(keep) and not 0 <= positions[0] <= positions[-1] < len(memory.indices):
        raise ValueError(
            f"a selection of the positions {positions[0]} to {positions[-1]} is refused; "
            f"they must be from 0 to {len(memory.indices) - 1}"
        )
    for name, leaf in notes.items():
        if (rows := tuple(leaf.shape[:1])) != (len(keep),):
            raise ValueError(
                f"the note {name!r} of {rows[0] if rows else 'no'} rows is refused; it must have one for each of the "
                f"positions to keep, which are {len(keep)}, in their order"
            )
    noted = map_leaves(lambda leaf: leaf[torch.from_numpy(first)], notes)
    return Buffer(memory.indices[positions], memory.periods[positions], memory.period + 1, memory.seen, notes=noted)


def _exported(leaf: Any) -> Any:
    """A tensor in host memory. Anything else stays as it is, and is told where it is compared with the payload."""
    return leaf.detach().cpu().contiguous() if isinstance(leaf, torch.Tensor) else leaf
