"""The partition that an experiment asks for."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.data.partitioners import dirichlet, dirichlet_equal, resampled, shards
from fedemu.ops.assembly.partition import build_partition
from fedemu.ops.data.corpora import load_corpus
from fedemu.ops.data.source import DataSource
from fedemu.ops.experiment import Experiment
from fedemu.protocol import seeds
from fedemu.protocol.errors import DataError
from fedemu.protocol.ids import Digest


@pytest.fixture
def digits(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return load_corpus(DataSource("digits"), cache=Path(tmp_path_factory.getbasetemp()) / "digits-cache")


def divided(corpus, devices=5, seed=1, **data):
    return build_partition(corpus, Experiment.parse({"data": data}).data, devices=devices, seed=seed)


@pytest.mark.parametrize(
    ("partition", "sizes"),
    [
        ({"kind": "iid"}, [288, 288, 287, 287, 287]),
        ({"kind": "dirichlet_equal", "alpha": 0.1}, [288, 288, 287, 287, 287]),
    ],
)
def test_the_configured_partition_is_built(digits, partition, sizes):
    built = divided(digits, partition=partition)
    assert np.diff(built.train_offsets).tolist() == sizes
    assert sorted(built.train_indices) == list(range(1437))


@pytest.mark.parametrize(
    ("table", "made"),
    [
        (
            {"kind": "dirichlet", "alpha": 0.5, "min_samples": 250, "retry": True, "balanced": True},
            partial(dirichlet, alpha=0.5, min_samples=250, retry=True, balanced=True),
        ),
        ({"kind": "dirichlet", "alpha": 0.5, "min_samples": 200}, partial(dirichlet, alpha=0.5, min_samples=200)),
        ({"kind": "dirichlet_equal", "alpha": 0.5}, partial(dirichlet_equal, alpha=0.5)),
        ({"kind": "shards", "per_device": 3}, partial(shards, shards_per_device=3)),
        (
            {"kind": "resampled", "samples": 7},
            lambda y, n, generator: resampled(len(y), n, per_device=7, generator=generator),
        ),
    ],
)
def test_every_setting_of_a_partition_counts(digits, table, made):
    built = divided(digits, seed=3, partition=table)
    expected = made(digits.train.y, 5, generator=seeds.generator(3, purpose="partition"))
    assert [built.device(i)[0].tolist() for i in range(5)] == [share.tolist() for share in expected]


def test_dirichlet_leaves_no_device_of_a_large_fleet_empty(digits):
    built = divided(digits, devices=300, partition={"kind": "dirichlet", "alpha": 0.1, "min_samples": 1})
    assert np.diff(built.train_offsets).min() == 1
    assert sorted(built.train_indices) == list(range(1437))


def test_shards_limit_the_classes_of_a_device(digits):
    built = divided(digits, devices=50, partition={"kind": "shards", "per_device": 2})
    assert max(len(np.unique(digits.train.y[built.device(i)[0]])) for i in range(50)) == 2


def test_a_partition_follows_from_the_seed_alone(digits):
    first, same, other = (vars(divided(digits, seed=seed, validation=0.1)) for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], same[name]) for name in first)
    assert not np.array_equal(first["train_indices"], other["train_indices"])


def test_validation_is_held_back_at_each_device(digits):
    built = divided(digits, partition={"kind": "iid"}, validation=0.1)
    assert np.diff(built.validation_offsets).tolist() == [28] * 5
    assert sorted([*built.train_indices, *built.validation_indices]) == list(range(1437))


def of_people(*ids):
    split = Split(np.zeros((len(ids), 1), np.float32), np.arange(len(ids)) % 2, {"who": np.array(ids)})
    return Corpus("letters", split, split, ("0", "1"), (1,), np.zeros(1), np.ones(1), Digest("0" * 64))


def test_natural_ids_become_devices():
    built = divided(of_people(*"cabcab"), devices=3, partition={"kind": "natural", "column": "who"})
    assert [built.device(i)[0].tolist() for i in range(3)] == [[1, 4], [2, 5], [0, 3]]


@pytest.mark.parametrize(
    "partition",
    [
        {"kind": "natural", "column": "who"},
        {"kind": "flwr", "partitioner": "NaturalIdPartitioner", "options": {"partition_by": "who"}},
    ],
)
@pytest.mark.parametrize(
    ("ids", "missing"), [(["a", "", "b", ""], "2 training samples"), ([1.0, np.nan, 2.0], "1 training sample")]
)
@pytest.mark.parametrize("public", [0.0, 0.5])
def test_samples_of_nobody_are_no_device(partition, ids, missing, public):
    said = f"the column 'who' of 'letters', by which data.partition divides, is empty for {missing}; fill it in, or"
    with pytest.raises(DataError, match=said):
        divided(of_people(*ids), devices=2, partition=partition, public={"fraction": public})
