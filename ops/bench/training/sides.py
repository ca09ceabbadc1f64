"""Both sides of the training benchmark: the trainer that trainer processes use, and the plain loop."""

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
from fedemu.ops.bench.measuring.measure import Sample
from fedemu.ops.bench.measuring.plain_loop import convolutional, device_update, perceptron, snapshot
from fedemu.ops.data.corpora import open_corpus
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.errors import TrainingError
from fedemu.protocol.ids import digest_of

PER_COHORT = 30
CNN_SAMPLES = 100
"""The number of samples of a device of the CNN: two full batches."""


@dataclass(frozen=True)
class Workload:
    """What both sides train: cohorts of devices. A device is the list of its samples in ``corpus.train``."""

    experiment: Experiment
    corpus: Corpus
    cohorts: list[list[NDArray[np.int64]]]

    def share(self, part: int, parts: int) -> list[list[NDArray[np.int64]]]:
        """The part of every cohort that process ``part`` of ``parts`` gets."""
        return [cohort[part::parts] for cohort in self.cohorts]


def digits(cohorts: int) -> Workload:
    """The 300 devices of the preset ``digits`` with their real partition, in cohorts of 30, again and again."""
    experiment, _ = load_experiment("digits", [], {})
    corpus = open_corpus(experiment)
    devices = experiment.fleet.devices
    partition = build_partition(corpus, experiment.data, devices=devices, seed=experiment.seed)
    members = [partition.device(device % devices)[0] for device in range(cohorts * PER_COHORT)]
    return Workload(experiment, corpus, [members[n : n + PER_COHORT] for n in range(0, len(members), PER_COHORT)])


def cifar(devices: int) -> Workload:
    """Devices that train for one epoch in batches of 50, each on 100 random images of CIFAR's shape."""
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
    return Workload(experiment, corpus, [list(indices)])


WORKLOADS: dict[str, Callable[[int], Workload]] = {"digits": digits, "cifar": cifar}


def ours(workload: str, size: int, part: int, parts: int) -> Callable[[], Sample]:
    """A measurement of device updates by ``Trainer``, in groups of the size that it asks for."""
    work = WORKLOADS[workload](size)
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


def plain(workload: str, size: int, part: int, parts: int) -> Callable[[], Sample]:
    """A measurement of the same number of updates by the plain loop."""
    torch.set_num_threads(1)
    work = WORKLOADS[workload](size)
    local = work.experiment.local
    model = perceptron(64, 64, 10) if workload == "digits" else convolutional(10)
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
