"""Questions to a device's memory: answered one at a time, without steps."""

from __future__ import annotations

import numpy as np
import torch

from fedemu.algorithms.interface import Batch, Facts, Forest, Memory, Query, Tree
from fedemu.algorithms.trees import map_leaves
from fedemu.device.executors import Job, JobResult, Source
from fedemu.device.executors_cohort import EACH, problem_of
from fedemu.device.tracing import without_compiler
from fedemu.protocol.errors import TrainingError


def run_query(query: Query, shared: Forest, job: Job, source: Source) -> JobResult | TrainingError:
    """Ask one device; ``facts.steps`` and ``facts.lr`` are 0."""
    template = query.initial_own(shared)
    if problem := problem_of(job, template, len(source.corpus.train)):
        return TrainingError(f"device {job.device}: {problem}")
    try:
        with torch.no_grad(), without_compiler():
            return _ask(query, shared, template, job, source)
    except Exception as error:
        return TrainingError(f"device {job.device}: the question could not be answered: {error}")


def _ask(query: Query, shared: Forest, template: Tree, job: Job, source: Source) -> JobResult:
    x, y = source.corpus.batch(source.corpus.train, job.indices)
    device = source.device
    counts = torch.bincount(y, minlength=source.corpus.classes)
    examples = len(y)
    facts = Facts(
        examples=torch.tensor(examples, device=device),
        steps=torch.tensor(0, device=device),
        lr=torch.tensor(0.0, device=device),
        round=torch.tensor(job.round, device=device),
        task=torch.tensor(job.task, device=device),
        first_visit=torch.tensor(job.own is None, device=device),
        label_counts=counts.to(device),
    )
    if job.own is None:
        own = map_leaves(torch.zeros_like, template)
    else:
        own = map_leaves(lambda leaf: leaf.to(device), job.own)
    if job.each:
        shared = {**shared, EACH: map_leaves(lambda leaf: leaf.to(device), job.each)}
    memory = Memory(Batch(x.to(device), y.to(device), torch.ones(examples, device=device)), job.indices, job.budget)
    outcome, keep = query.ask(memory, shared, own, facts)
    return JobResult(
        payload={key: map_leaves(_exported, tree) for key, tree in outcome.payload.items()},
        own=map_leaves(_exported, outcome.own),
        examples=examples,
        steps=0,
        metrics={},
        label_counts=tuple(counts.tolist()) if query.declares_label_counts else None,
        keep=None if keep is None else keep.cpu().numpy().astype(np.int64),
    )


def _exported(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach().cpu().contiguous()
