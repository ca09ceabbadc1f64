"""Public data belong to the coordinator: no device holds any, and without them partitions stay what they were."""

from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.ops.assembly.partition import build_partition, open_public, split_public
from fedemu.ops.experiment import Data, Experiment
from fedemu.protocol.errors import ConfigurationError, DataError
from fedemu.protocol.ids import Digest

LABELS = np.random.default_rng(0).integers(0, 4, 400)
WRITERS = np.array([f"writer{i % 40:02}" for i in range(400)])
X = np.arange(400, dtype=np.float32).reshape(400, 1)
TRAIN = Split(X, LABELS, {"writer": WRITERS})
CORPUS = Corpus("tiny", TRAIN, TRAIN, tuple("abcd"), (1,), np.array([2.0]), np.array([4.0]), Digest("0" * 64))

DIRICHLET = {"kind": "dirichlet", "alpha": 0.3, "min_samples": 1}
NATURAL = {"kind": "natural", "column": "writer"}
PARTITIONS: list[dict[str, Any]] = [
    DIRICHLET,
    {"kind": "dirichlet_equal", "alpha": 0.3},
    {"kind": "shards", "per_device": 2},
    NATURAL,
    {"kind": "iid"},
]


def data(partition: dict[str, Any], fraction: float = 0.1, **more: Any) -> Data:
    return Experiment.parse({"data": {"partition": partition, "public": {"fraction": fraction}, **more}}).data


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda partition: partition["kind"])
def test_devices_hold_the_rest_of_the_samples_each_of_them_once(partition: dict[str, Any]) -> None:
    chosen = data(partition, validation=0.2)
    public = split_public(CORPUS, chosen, seed=1)
    assert public is not None
    assert len(public.train) + len(public.validation) == 40
    built = build_partition(CORPUS, chosen, devices=20, seed=1)
    assert sorted([*built.train_indices, *built.validation_indices]) == public.rest.tolist()
    for device in range(20):
        assert all((np.diff(part) > 0).all() for part in built.device(device))


def test_a_device_of_a_partition_by_writers_still_holds_one_writer() -> None:
    built = build_partition(CORPUS, data(NATURAL), devices=36, seed=1)
    held = [set(WRITERS[built.device(device)[0]]) for device in range(36)]
    assert all(len(writers) == 1 for writers in held)
    assert len(set.union(*held)) == 36


def test_a_partition_of_flwr_divides_what_is_left() -> None:
    chosen = data({"kind": "flwr", "partitioner": "NaturalIdPartitioner", "options": {"partition_by": "writer"}})
    public = split_public(CORPUS, chosen, seed=1)
    assert public is not None
    built = build_partition(CORPUS, chosen, devices=40, seed=1)
    assert sorted(built.train_indices) == public.rest.tolist()
    assert all(len(set(WRITERS[built.device(device)[0]])) == 1 for device in range(40))


def test_without_public_data_a_partition_is_what_it_always_was() -> None:
    built = build_partition(CORPUS, data(DIRICHLET, fraction=0.0), devices=8, seed=1)
    assert np.diff(built.train_offsets).tolist() == [92, 40, 35, 8, 59, 68, 57, 41]
    assert built.train_indices[:8].tolist() == [3, 8, 19, 23, 27, 28, 32, 34]
    assert open_public(CORPUS, data(DIRICHLET, fraction=0.0), seed=1) is None


def test_the_coordinator_gets_normalised_samples_of_both_parts() -> None:
    chosen = data(DIRICHLET)
    split, public = split_public(CORPUS, chosen, seed=1), open_public(CORPUS, chosen, seed=1)
    assert split is not None
    assert public is not None
    assert (len(public.train), len(public.validation)) == (30, 10)
    assert public.train.x[:, 0].tolist() == [(index - 2.0) / 4.0 for index in split.train]
    assert public.validation.y.tolist() == LABELS[split.validation].tolist()
    assert (public.train.x.dtype, public.train.y.dtype) == (torch.float32, torch.int64)


def test_which_samples_are_public_depends_on_the_seed_and_not_on_the_partition() -> None:
    drawn = [
        split_public(CORPUS, data(partition), seed=seed) for partition, seed in zip(PARTITIONS, (1, 1, 2), strict=False)
    ]
    first, same, other = ([] if split is None else split.train.tolist() for split in drawn)
    assert first == same != other


@pytest.mark.parametrize(
    ("partition", "devices", "error", "said"),
    [
        (DIRICHLET | {"min_samples": 19}, 20, ConfigurationError, "20 devices with at least 19 samples each need 380"),
        (DIRICHLET | {"min_samples": 18, "retry": True}, 20, DataError, "none of 1000 draws"),
        (DIRICHLET | {"min_samples": 0}, 361, ConfigurationError, "361 devices are more than the 360 training samples"),
        ({"kind": "dirichlet_equal"}, 361, ConfigurationError, "361 devices are more than the 360 training samples"),
        ({"kind": "shards", "per_device": 19}, 20, ConfigurationError, "too few for its 95 shards"),
        ({"kind": "shards", "per_device": 1}, 3, ConfigurationError, "too few for 4 classes"),
        (NATURAL, 37, ConfigurationError, "37 devices are more than the 36 distinct ids"),
        ({"kind": "iid"}, 361, ConfigurationError, "361 devices are more than the 360 training samples"),
        (
            {"kind": "flwr", "partitioner": "IidPartitioner"},
            361,
            DataError,
            "IidPartitioner of flwr-datasets (leaves|can't)",
        ),
    ],
)
def test_a_partition_that_the_remaining_samples_do_not_suffice_for_is_one_sentence(
    partition: dict[str, Any], devices: int, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        build_partition(CORPUS, data(partition), devices=devices, seed=1)
    assert str(caught.value).endswith(" (public data took 40 of 400 training samples)")
    assert "\n" not in str(caught.value)
