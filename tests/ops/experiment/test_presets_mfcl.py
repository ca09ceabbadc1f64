"""The presets for MFCL's experiments, held against the paper's tables 3 and 7, and built without their data."""

import numpy as np
import pytest

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.ops.assembly.learning import open_algorithm
from fedemu.ops.data.regroup import regrouping
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.experiment.tables.stream import Classes
from fedemu.protocol.ids import Digest

TABLE = {
    # Tasks, classes per task, devices, a round, rounds per task, epochs, pixels, training samples of a class.
    "mfcl-cifar100": (10, 10, 50, 5, 100, 10, 32, 500),
    "mfcl-tinyimagenet": (10, 20, 100, 10, 100, 10, 64, 500),
    "mfcl-superimagenet-l": (10, 5, 300, 30, 100, 1, 224, 7500),
}
OURS = {
    "mfcl-superimagenet-m": (15, 5, 200, 20, 100, 1, 224, 5000),
    "mfcl-superimagenet-s": (10, 10, 200, 20, 100, 1, 224, 2500),
    "mfcl-cifar100-subset": (10, 10, 20, 5, 10, 5, 32, 120),
}


def loaded(name: str) -> tuple[Experiment, Classes]:
    experiment, _ = load_experiment(name, [], {})
    assert isinstance(experiment.stream, Classes)
    return experiment, experiment.stream


@pytest.mark.parametrize("name", [*TABLE, *OURS])
def test_tasks_fleets_and_training_are_those_of_the_tables(name: str) -> None:
    tasks, classes, devices, per_round, rounds, epochs, pixels, samples = (TABLE | OURS)[name]
    experiment, stream = loaded(name)
    assert (stream.tasks, stream.rounds_per_task, experiment.rounds) == (tasks, rounds, tasks * rounds)
    assert (experiment.fleet.devices, experiment.fleet.per_round) == (devices, per_round)
    assert (experiment.local.epochs, experiment.local.batch_size) == (epochs, 10 if name.endswith("subset") else 32)
    assert experiment.data.partition.model_dump(include={"kind", "alpha", "min_samples"}) == {
        "kind": "dirichlet",
        "alpha": 1.0,
        "min_samples": 0,
    }
    if experiment.data.regroup != "none":
        by = regrouping(experiment.data.regroup)
        assert (len(by.groups), by.train, experiment.data.image_size) == (tasks * classes, samples, pixels)
        assert samples * classes / devices == 125


@pytest.mark.parametrize("name", [*TABLE, *OURS])
def test_the_learning_rate_falls_to_a_tenth_in_each_task(name: str) -> None:
    experiment, stream = loaded(name)
    local = experiment.local
    assert local.lr_restart
    assert local.lr_decay**stream.rounds_per_task == pytest.approx(0.1)
    assert local.lr == (0.1 if name != "mfcl-cifar100-subset" else 0.05)
    assert local.weight_decay == 1e-5


@pytest.mark.parametrize("name", [*TABLE, "mfcl-cifar100-subset"])
def test_model_and_generator_fit_the_data(name: str) -> None:
    tasks, classes, *_, pixels, _ = (TABLE | OURS)[name]
    narrow = [] if name.endswith("subset") else ["model.width=4"]
    experiment, _ = load_experiment(name, ["algorithm.name=mfcl", *narrow], {})
    split = Split(np.zeros((1, 3, pixels, pixels), np.uint8), np.zeros(1, np.int64), {})
    names = tuple(map(str, range(tasks * classes)))
    corpus = Corpus(name, split, split, names, (3, pixels, pixels), np.zeros(3), np.ones(3), Digest("0" * 64))
    model, algorithm = open_algorithm(experiment, corpus)
    assert model.kind == "convolutional"
    assert algorithm.programs
