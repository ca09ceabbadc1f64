"""Divides the samples of an experiment: which are public, and which of the others each device has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data import partitioners
from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.data.flat import Indices
from fedemu.algorithms.data.partition import Partition
from fedemu.algorithms.data.public_split import PublicSplit, public_split
from fedemu.algorithms.interface import Labelled, PublicData
from fedemu.ops.assembly.flwr import flwr_shares
from fedemu.ops.data.split import require_ids
from fedemu.ops.experiment import Data, Dirichlet, DirichletEqual, Flwr, Iid, Natural, PartitionSpec, Resampled, Shards
from fedemu.protocol import seeds
from fedemu.protocol.errors import ConfigurationError


def build_partition(corpus: Corpus, data: Data, *, devices: int, seed: int) -> Partition:
    """Divide the training samples over devices by ``data.partition``. A share ``data.validation`` of each is held back.

    No device gets public data. Raises ConfigurationError or DataError if the samples cannot be divided in this way.
    """
    train = corpus.train
    _require_ids(corpus, data.partition)
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


def split_public(corpus: Corpus, data: Data, seed: int) -> PublicSplit | None:
    """Choose the public samples by ``data.public`` and the seed. None if the experiment asks for none."""
    if not data.public.fraction:
        return None
    divided = data.partition
    return public_split(
        len(corpus.train),
        fraction=data.public.fraction,
        validation=data.public.validation,
        generator=seeds.generator(seed, purpose="public"),
        ids=corpus.train.columns[divided.column] if isinstance(divided, Natural) else None,
        labels=corpus.train.y,
        imbalance=data.public.imbalance,
    )


def open_public(corpus: Corpus, data: Data, seed: int) -> PublicData | None:
    """The public samples as normalised tensors. None if the experiment asks for none."""
    split = split_public(corpus, data, seed)
    if split is None:
        return None
    return PublicData(
        train=Labelled(*corpus.batch(corpus.train, split.train)),
        validation=Labelled(*corpus.batch(corpus.train, split.validation)),
    )


def _require_ids(corpus: Corpus, wanted: PartitionSpec) -> None:
    """Raise DataError if a sample has no value in the column by which samples are divided."""
    match wanted:
        case Natural(column=name) | Flwr(options={"partition_by": str(name)}) if name in corpus.train.columns:
            require_ids(corpus.name, name, corpus.train.columns[name], "data.partition divides", "training")


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
            return flwr_shares(labels, columns, devices, name, options, seeds.integer(seed, purpose="partition"))
        case _:
            assert_never(wanted)
