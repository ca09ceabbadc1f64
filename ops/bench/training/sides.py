"""Both sides of the training benchmark: the trainer that trainer processes use, and the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedemu.device.compute.executors.executor import Job
from fedemu.device.compute.trainer import Trainer
from fedemu.ops.assembly.learning import open_algorithm
from fedemu.ops.bench.measuring.measure import Sample, timed
from fedemu.ops.bench.measuring.plain_loop import convolutional, device_update, perceptron, residual, snapshot
from fedemu.ops.bench.training.workloads import WORKLOADS, Workload
from fedemu.protocol.errors import TrainingError


def ours(workload: str, size: int, part: int, parts: int, device_type: str = "cpu") -> Callable[[], Sample]:
    """A measurement of device updates by ``Trainer``, in groups of the size that it asks for."""
    work = WORKLOADS[workload](size)
    model, algorithm = open_algorithm(work.experiment, work.corpus)
    trainer = Trainer(algorithm.programs, work.corpus, work.experiment.seed, device_type=device_type, kind=model.kind)
    shared = {"model": model.init(1)}
    capacity = trainer.capacity("train")
    round = 0

    def train() -> int:
        nonlocal round
        round += 1
        done = 0
        for cohort in work.share(part, parts):
            jobs = [Job(device=number, round=round, task=0, indices=indices) for number, indices in enumerate(cohort)]
            for start in range(0, len(jobs), capacity):
                for result in trainer.run("train", shared, jobs[start : start + capacity]):
                    if isinstance(result, TrainingError):
                        raise result
                    done += 1
        return done

    return timed(train)


def plain(workload: str, size: int, part: int, parts: int) -> Callable[[], Sample]:
    """A measurement of the same number of updates by the plain loop."""
    torch.set_num_threads(1)
    work = WORKLOADS[workload](size)
    local = work.experiment.local
    model = _network(workload, work)
    start = snapshot(model)
    corpus = work.corpus
    cohorts = [[corpus.batch(corpus.train, indices) for indices in cohort] for cohort in work.share(part, parts)]
    if corpus.language:
        cohorts = [[(x[:, 0], x[:, 1]) for x, _ in cohort] for cohort in cohorts]
    order = np.random.default_rng(0)

    def train() -> int:
        updates = [
            device_update(
                model, start, data, epochs=local.epochs, batch_size=local.batch_size, lr=local.lr, order=order
            )
            for cohort in cohorts
            for data in cohort
        ]
        return len(updates)

    return timed(train)


def _network(workload: str, work: Workload) -> nn.Module:
    match workload:
        case "digits":
            return perceptron()
        case "resnet":
            return residual()
        case "bert":
            return _Bert(open_algorithm(work.experiment, work.corpus)[0])
        case _:
            return convolutional()


class _Bert(nn.Module):
    """transformers' own BERT, of the size of ours. The logits are ``[batch, vocabulary, length]``."""

    def __init__(self, ours: Any) -> None:
        super().__init__()
        self.bert = ours._build(0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bert(input_ids=tokens).logits.transpose(1, 2)  # type: ignore[no-any-return]
