"""What flwr-datasets draws, and where its partitioners and ours mean the same."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.data.partitioners import by_id, dirichlet, shards
from fedemu.ops.assembly.flwr import flwr_shares
from fedemu.ops.assembly.partition import build_partition
from fedemu.ops.data import corpora
from fedemu.ops.experiment import Experiment
from fedemu.protocol.errors import ConfigurationError, DataError
from fedemu.protocol.ids import Digest

LABELS = np.random.default_rng(0).integers(0, 4, 200)
WRITERS = np.array([f"writer{i % 7}" for i in range(200)])
SPLIT = Split(np.zeros((200, 1), dtype=np.float32), LABELS, {"writer": WRITERS})


def label_counts(shares):
    return [np.bincount(LABELS[share], minlength=4).tolist() for share in shares]


@pytest.mark.parametrize("minimum", [0, 5])
def test_dirichlet_with_retry_draws_what_flwr_draws_from_the_same_seed(minimum):
    theirs = flwr_shares(
        LABELS,
        {},
        8,
        "DirichletPartitioner",
        {"alpha": 0.5, "min_partition_size": minimum, "self_balancing": False},
        seed=3,
    )
    ours = dirichlet(LABELS, 8, alpha=0.5, min_samples=minimum, generator=np.random.default_rng(3), retry=True)
    assert label_counts(theirs) == label_counts(ours)


def test_natural_ids_are_the_same_devices():
    theirs = flwr_shares(LABELS, {"writer": WRITERS}, 7, "NaturalIdPartitioner", {"partition_by": "writer"}, seed=3)
    assert [share.tolist() for share in theirs] == [share.tolist() for share in by_id(WRITERS, 7)]


@pytest.mark.parametrize("name", ["index", "row", "row_"])
def test_a_column_may_have_any_name(name):
    columns = {name: WRITERS, "row": WRITERS[::-1], "label": WRITERS}
    theirs = flwr_shares(LABELS, columns | {name: WRITERS}, 7, "NaturalIdPartitioner", {"partition_by": name}, seed=3)
    assert [share.tolist() for share in theirs] == [share.tolist() for share in by_id(WRITERS, 7)]
    by_label = flwr_shares(LABELS, columns, 4, "NaturalIdPartitioner", {}, seed=3)
    assert [share.tolist() for share in by_label] == [share.tolist() for share in by_id(LABELS, 4)]


def test_grouped_ids_are_the_same_devices_where_flwr_may_make_bigger_groups():
    options = {"partition_by": "writer", "group_size": 3, "mode": "allow-bigger", "sort_unique_ids": True}
    theirs = flwr_shares(LABELS, {"writer": WRITERS}, 2, "GroupedNaturalIdPartitioner", options, seed=3)
    assert [share.tolist() for share in theirs] == [share.tolist() for share in by_id(WRITERS, 2)]


def test_shards_differ_because_flwr_cuts_them_across_classes():
    # 25 of one class and 15 of another: a quarter of all is 10, so flwr's third shard holds both.
    labels = np.repeat([0, 1], [25, 15])
    theirs = flwr_shares(labels, {}, 4, "ShardPartitioner", {"num_shards_per_partition": 1}, seed=3)
    ours = shards(labels, 4, shards_per_device=1, generator=np.random.default_rng(3))
    assert max(len(np.unique(labels[share])) for share in theirs) == 2
    assert max(len(np.unique(labels[share])) for share in ours) == 1


def test_an_experiment_may_name_any_partitioner_with_its_options():
    corpus = Corpus("tiny", SPLIT, SPLIT, tuple("abcd"), (1,), np.zeros(1), np.ones(1), Digest("0" * 64))
    chosen = {"kind": "flwr", "partitioner": "PathologicalPartitioner", "options": {"num_classes_per_partition": 2}}
    data = Experiment.parse({"data": {"partition": chosen}}).data
    partition, again, other = (build_partition(corpus, data, devices=10, seed=seed) for seed in (1, 1, 2))
    shares = [partition.device(i)[0] for i in range(10)]
    assert all(len(np.unique(LABELS[share])) == 2 for share in shares)
    assert sorted(np.concatenate(shares)) == list(range(200))
    assert partition.train_indices.tolist() == again.train_indices.tolist()
    assert partition.train_indices.tolist() != other.train_indices.tolist()


def test_the_column_to_divide_by_is_kept_with_the_data():
    chosen = {"kind": "flwr", "partitioner": "NaturalIdPartitioner", "options": {"partition_by": "writer"}}
    data = Experiment.parse({"data": {"dataset": "omniglot", "partition": chosen}}).data
    assert corpora.source_of(data).columns == ("writer",)


@pytest.mark.parametrize(
    ("name", "options", "error", "complaint"),
    [
        ("ZipfPartitioner", {}, ConfigurationError, "has no partitioner 'ZipfPartitioner' for samples; it has Cont"),
        ("VerticalEvenPartitioner", {}, ConfigurationError, "no partitioner 'VerticalEvenPartitioner' for samples"),
        ("LinearPartitioner", {"slope": 2}, ConfigurationError, "takes num_partitions, but not slope"),
        (
            "NaturalIdPartitioner",
            {"partition_by": "writer"},
            ConfigurationError,
            "makes 7 devices of these data, not 5",
        ),
        (
            "DirichletPartitioner",
            {"alpha": -1.0},
            DataError,
            "can't divide 200 samples: Alpha values should be strictly",
        ),
        ("DirichletPartitioner", {}, DataError, "missing 1 required positional argument: 'alpha'"),
        (
            "ExponentialPartitioner",
            {"num_partitions": 5},
            DataError,
            "leaves .* of 5 devices without samples|can't divide",
        ),
    ],
)
def test_a_partition_that_flwr_cannot_draw_is_refused_in_one_sentence(name, options, error, complaint):
    devices = 5
    labels = LABELS if name != "ExponentialPartitioner" else LABELS[:6]
    with pytest.raises(error, match=complaint) as caught:
        flwr_shares(labels, {"writer": WRITERS[: len(labels)]}, devices, name, options, seed=1)
    assert "\n" not in str(caught.value)


def test_without_the_package_a_sentence_says_how_to_get_it(monkeypatch):
    corpus = Corpus("tiny", SPLIT, SPLIT, tuple("abcd"), (1,), np.zeros(1), np.ones(1), Digest("0" * 64))
    data = Experiment.parse({"data": {"partition": {"kind": "flwr", "partitioner": "IidPartitioner"}}}).data
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(ConfigurationError) as caught:
        build_partition(corpus, data, devices=10, seed=1)
    assert str(caught.value) == (
        "data.partition.kind = 'flwr' needs the package flwr-datasets; install it with pip install 'fedemu[flwr]', "
        "or choose another kind of partition"
    )


def test_a_package_that_is_there_but_broken_is_no_missing_package(monkeypatch):
    broken = ModuleType("flwr_datasets")
    broken.__spec__ = ModuleSpec("flwr_datasets", None, origin="broken")
    monkeypatch.setitem(sys.modules, "flwr_datasets", broken)
    monkeypatch.delitem(sys.modules, "flwr_datasets.partitioner", raising=False)
    with pytest.raises(ImportError, match="partitioner"):
        flwr_shares(LABELS, {}, 10, "IidPartitioner", {}, seed=1)
