"""Builds the partition of an experiment: which device has which training samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data import partitioners
from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.data.flat import Indices
from fedemu.algorithms.data.partition import Partition
from fedemu.ops.assembly.public_data import split_public
from fedemu.ops.experiment import Data, Dirichlet, DirichletEqual, Flwr, Iid, Natural, PartitionSpec, Resampled, Shards
from fedemu.protocol import seeds
from fedemu.protocol.errors import ConfigurationError


def build_partition(corpus: Corpus, data: Data, *, devices: int, seed: int) -> Partition:
    """Divide the training samples over devices by ``data.partition``. A share ``data.validation`` of each is held back.

    No device gets public data. Raises ConfigurationError or DataError if the samples cannot be divided in this way.
    """
    train = corpus.train
    public = split_public(corpus, data, seed)
    if public is None:
        shares = _shares(train.y, train.columns, data.partition, devices, seed)
    else:
        rest = public.rest
        columns = {name: column[rest] for name, column in train.columns.items()}
        try:
            shares = [rest[share] for share in _shares(train.y[rest], columns, data.partition, devices, seed)]
        except ConfigurationError as error:
            taken = len(train) - len(rest)
            raise type(error)(f"{error} (public data took {taken} of {len(train)} training samples)") from error
    return Partition.of(shares, data.validation, seeds.generator(seed, purpose="validation"))


def _shares(
    labels: NDArray[np.int64], columns: Mapping[str, NDArray[Any]], wanted: PartitionSpec, devices: int, seed: int
) -> list[Indices]:
    """For each device the ascending positions of its samples among ``labels``."""
    random = seeds.generator(seed, purpose="partition")
    match wanted:
        case Dirichlet(alpha=alpha, min_samples=min_samples, balanced=balanced, retry=retry):
            return partitioners.dirichlet(
                labels,
                devices,
                alpha=alpha,
                min_samples=min_samples,
                generator=random,
                retry=retry,
                balanced=balanced,
            )
        case DirichletEqual(alpha=alpha):
            return partitioners.dirichlet_equal(labels, devices, alpha=alpha, generator=random)
        case Shards(per_device=per_device):
            return partitioners.shards(labels, devices, shards_per_device=per_device, generator=random)
        case Natural(column=column):
            return partitioners.by_id(columns[column], devices)
        case Iid():
            return partitioners.iid(len(labels), devices, generator=random)
        case Resampled(samples=samples):
            return partitioners.resampled(len(labels), devices, per_device=samples, generator=random)
        case Flwr(partitioner=name, options=options):
            # It imports datasets and flwr-datasets, which takes seconds.
            from fedemu.ops.assembly.flwr import flwr_shares

            return flwr_shares(labels, columns, devices, name, options, seeds.integer(seed, purpose="partition"))
        case _:
            assert_never(wanted)
