"""Both sides of the training benchmark: the trainer as trainer processes have it, and the plain loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.device.compute.executors.executor import Job
from fedemu.device.compute.trainer import Trainer
from fedemu.ops.assembly.learning import open_algorithm
from fedemu.ops.assembly.partition import build_partition
from fedemu.ops.bench.measure import Sample
from fedemu.ops.bench.plain_loop import convolutional, device_update, perceptron, snapshot
from fedemu.ops.data.corpora import open_corpus
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.errors import TrainingError
from fedemu.protocol.ids import digest_of

PER_COHORT = 30
CNN_SAMPLES = 100
"""Per device of the CNN's work: two full batches."""


@dataclass(frozen=True)
class Task:
    """What both sides train: cohorts of devices, each with its samples in ``corpus.train``."""

    experiment: Experiment
    corpus: Corpus
    cohorts: list[list[NDArray[np.int64]]]

    def share(self, part: int, parts: int) -> list[list[NDArray[np.int64]]]:
        """The part of every cohort that one of several processes gets."""
        return [cohort[part::parts] for cohort in self.cohorts]


def digits_task(cohorts: int) -> Task:
    """The preset's 300 devices with their real partition, round and round in cohorts of 30."""
    experiment, _ = load_experiment("digits", [], {})
    corpus = open_corpus(experiment)
    devices = experiment.fleet.devices
    partition = build_partition(corpus, experiment.data, devices=devices, seed=experiment.seed)
    members = [partition.device(device % devices)[0] for device in range(cohorts * PER_COHORT)]
    return Task(experiment, corpus, [members[n : n + PER_COHORT] for n in range(0, len(members), PER_COHORT)])


def cifar_task(devices: int) -> Task:
    """Devices with 100 random images of CIFAR's shape each, one epoch in batches of 50; pixels do not matter here."""
    experiment, _ = load_experiment(
        "cifar10-cnn", ["local.epochs=1", "local.momentum=0", "local.weight_decay=0", "local.augment=[]"], {}
    )
    random = np.random.default_rng(0)
    samples = devices * CNN_SAMPLES
    x = random.integers(0, 256, (samples, 3, 32, 32), np.uint8)
    y = random.integers(0, 10, samples)
    split = Split(x, y, {})
    moments = np.full(3, 127.5), np.full(3, 73.9)
    corpus = Corpus("random", split, split, tuple("0123456789"), (3, 32, 32), *moments, digest_of(b"random"))
    indices = np.arange(samples).reshape(devices, CNN_SAMPLES)
    return Task(experiment, corpus, [list(indices)])


TASKS: dict[str, Callable[[int], Task]] = {"digits": digits_task, "cifar": cifar_task}


def ours(task: str, size: int, part: int, parts: int) -> Callable[[], Sample]:
    """Device updates by ``Trainer``, in groups as large as it likes them."""
    work = TASKS[task](size)
    model, algorithm = open_algorithm(work.experiment, work.corpus)
    trainer = Trainer(algorithm.programs, work.corpus, work.experiment.seed, device_type="cpu", kind=model.kind)
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

    return _timed(train)


def plain(task: str, size: int, part: int, parts: int) -> Callable[[], Sample]:
    """The same updates by the plain loop."""
    torch.set_num_threads(1)
    work = TASKS[task](size)
    local = work.experiment.local
    model = perceptron(64, 64, 10) if task == "digits" else convolutional(10)
    start = snapshot(model)
    corpus = work.corpus
    cohorts = [[corpus.batch(corpus.train, indices) for indices in cohort] for cohort in work.share(part, parts)]
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

    return _timed(train)


def _timed(train: Callable[[], int]) -> Callable[[], Sample]:
    def measure() -> Sample:
        cpu, wall = time.process_time(), time.perf_counter()
        done = train()
        return Sample(done, time.perf_counter() - wall, time.process_time() - cpu)

    return measure
