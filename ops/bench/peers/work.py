"""The work that all sides do, as a file that needs no fedemu to be read.

``work.npz`` holds ``x [n, ...]`` float32 (normalised) and ``y [n]`` int64 of all samples, ``test_x`` and ``test_y``,
``samples`` (the samples of device 0, then those of device 1, and so on), ``starts [devices + 1]`` (the part of
``samples`` that is a device's), ``cohorts [rounds, per_round]`` and ``settings``, a JSON text with ``model`` (``mlp``
or ``cnn``), ``epochs``, ``batch_size``, ``lr`` and ``device`` (``cpu`` or ``cuda``), and for our own sides ``preset``
and ``overrides``.

A program that does the work gets the paths of this file and of its progress. It appends a line to the progress after
each round. After the first round it waits for a line on its stdin, after the last one until its stdin is closed. Then
it prints ``{"accuracy": ...}`` of its model on the test samples. Each round it trains ``per_round`` devices from the
same model, with plain SGD on cross-entropy, on all their samples in a random order in each epoch, and adds the mean of
their changes, weighted by their samples. A simulator that can be told which devices to train takes those of
``cohorts``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from fedemu.ops.assembly.parts import Parts
from fedemu.ops.bench.measuring.images import IMAGES, MANY_IMAGES, PLAIN_SGD
from fedemu.ops.experiment.sources import load_experiment


class Work(NamedTuple):
    """One kind of work. ``overrides`` make of ``preset`` the experiment that our sides do."""

    title: str
    preset: str
    overrides: tuple[str, ...]
    model: str
    rounds: int


SAME: Final = (
    "availability={kind='always'}",
    "faults.crash_rate=0",
    "fleet.over_selection=1",
    "evaluate.every=1000000",
)
"""Settings of our whole system that make its work that of the others: all devices reply, and no round is evaluated."""
DIGITS: Final = Work("digits, MLP 64-64-10, 300 devices, 30 a round", "digits", SAME, "mlp", 40)
CNN: Final = Work(
    "CNN of 2,156,490, random images of 3 x 32 x 32, 40 devices, 10 a round",
    "cifar10-cnn",
    (*SAME, *PLAIN_SGD, IMAGES, "fleet.devices=40"),
    "cnn",
    4,
)
PFL: Final = Work(
    "the sizes of pfl-research's CIFAR-10 benchmark: 50 devices of 50 images a round, one epoch in batches of 10, with "
    "the CNN of 2,156,490 and random images",
    "cifar10-cnn",
    (
        *SAME,
        *PLAIN_SGD,
        MANY_IMAGES,
        "fleet.devices=200",
        "fleet.per_round=50",
        "local.batch_size=10",
    ),
    "cnn",
    20,
)


def write(work: Work, rounds: int, path: Path, device: str = "cpu") -> int:
    """Write the work of some rounds on ``device`` to the file ``path``. Returns the number of devices in a round."""
    experiment, _ = load_experiment(work.preset, list(work.overrides), {})
    parts, fleet, local = Parts(experiment), experiment.fleet, experiment.local
    corpus = parts.corpus
    held = [parts.partition.device(device)[0] for device in range(fleet.devices)]
    random = np.random.default_rng(0)
    x, y = corpus.batch(corpus.train, np.arange(len(corpus.train)))
    test_x, test_y = corpus.batch(corpus.test, np.arange(len(corpus.test)))
    np.savez(
        path,
        x=x.numpy(),
        y=y.numpy(),
        test_x=test_x.numpy(),
        test_y=test_y.numpy(),
        samples=np.concatenate(held),
        starts=np.cumsum([0, *map(len, held)]),
        cohorts=np.array([random.choice(fleet.devices, fleet.per_round, replace=False) for _ in range(rounds)]),
        settings=json.dumps(
            {
                "preset": work.preset,
                "overrides": work.overrides,
                "model": work.model,
                "epochs": local.epochs,
                "batch_size": local.batch_size,
                "lr": local.lr,
                "device": device,
            }
        ),
    )
    return fleet.per_round
