"""What both sides of the training benchmark train: data, experiment, cohorts of devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.ops.assembly.parts import Parts
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.ids import digest_of

PER_COHORT: Final = 30
CNN_SAMPLES: Final = 100
"""The number of samples of a device of the CNN: two full batches."""
_NO_EXTRAS: Final = ("local.epochs=1", "local.momentum=0", "local.weight_decay=0", "local.augment=[]")


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
    parts, devices = Parts(experiment), experiment.fleet.devices
    members = [parts.partition.device(device % devices)[0] for device in range(cohorts * PER_COHORT)]
    return Workload(experiment, parts.corpus, [members[n : n + PER_COHORT] for n in range(0, len(members), PER_COHORT)])


def cifar(devices: int) -> Workload:
    """Devices that train for one epoch in batches of 50, each on 100 random images of CIFAR's shape."""
    return _images(devices, CNN_SAMPLES)


def fedntd(devices: int) -> Workload:
    """FedNTD's update of the CNN in table 1 of its paper: 500 random images for each device, 5 epochs."""
    return _images(devices, 500, "algorithm.name=fedntd", "local.epochs=5")


def resnet(devices: int) -> Workload:
    """ResNet-18 on one batch of 20 random images of CIFAR's shape for each device."""
    return _images(devices, 20, "model.name=resnet18", "local.batch_size=20")


def pfl_shapes(devices: int) -> Workload:
    """The sizes of pfl's CIFAR-10 benchmark: 50 images for each device, one epoch in batches of 10. The CNN is ours."""
    return _images(devices, 50, "local.batch_size=10")


def bert(devices: int) -> Workload:
    """The small BERT on 32 random texts of 32 tokens for each device, in batches of 8."""
    overrides = ["local.epochs=1", "local.batch_size=8", "local.momentum=0", "local.weight_decay=0"]
    experiment, _ = load_experiment("utterances", [*overrides, "model.name=tinybert_small"], {})
    random = np.random.default_rng(0)
    tokens = tuple(f"token{number}" for number in range(2000))
    x = random.integers(5, len(tokens), (32 * devices, 2, 32), np.int32)
    split = Split(x, np.zeros(len(x), np.int64), {})
    corpus = Corpus(
        "random", split, split, ("text",), (2, 32), np.zeros(2), np.ones(2), digest_of(b"texts"), vocabulary=tokens
    )
    return Workload(experiment, corpus, [list(np.arange(len(x)).reshape(devices, 32))])


def _images(devices: int, each: int, *overrides: str) -> Workload:
    experiment, _ = load_experiment("cifar10-cnn", [*_NO_EXTRAS, *overrides], {})
    random = np.random.default_rng(0)
    samples = devices * each
    x = random.integers(0, 256, (samples, 3, 32, 32), np.uint8)
    y = random.integers(0, 10, samples)
    split = Split(x, y, {})
    moments = np.full(3, 127.5), np.full(3, 73.9)
    corpus = Corpus("random", split, split, tuple("0123456789"), (3, 32, 32), *moments, digest_of(b"random"))
    return Workload(experiment, corpus, [list(np.arange(samples).reshape(devices, each))])


WORKLOADS: Final[dict[str, Callable[[int], Workload]]] = {
    "digits": digits,
    "cifar": cifar,
    "fedntd": fedntd,
    "resnet": resnet,
    "pfl": pfl_shapes,
    "bert": bert,
}
