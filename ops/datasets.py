"""The data of an experiment: decoded once per machine into the cache, mapped by every process, divided over devices."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import assert_never

from fedemu.algorithms import partitioners
from fedemu.algorithms.corpus import Corpus
from fedemu.algorithms.partition import Partition
from fedemu.ops import config
from fedemu.ops.datasets_cache import Progress, cache_folder, locked, read, write
from fedemu.ops.datasets_source import LABEL, Place, Source, built_in, entry_of, locate, own
from fedemu.protocol import seeds
from fedemu.protocol.errors import DataError
from fedemu.protocol.ids import Digest


def prepare(experiment: bytes, progress: Progress | None = None) -> Digest:
    """Decode the experiment's data unless this machine's cache holds them; returns their digest.

    Safe in several processes at once. Decoding leaves imports and memory behind, so give it a short-lived process.
    """
    return load(experiment, progress).digest


def load(experiment: bytes, progress: Progress | None = None) -> Corpus:
    """Map the experiment's data; decodes first what is not in the cache."""
    return open_corpus(config.Experiment.from_bytes(experiment).data, progress)


def open_corpus(data: config.Data, progress: Progress | None = None) -> Corpus:
    """The data set of a configuration, with the folders that the environment names."""
    folder = os.environ.get("FEDEMU_DATA")
    return load_corpus(
        source_of(data),
        cache=cache_folder(os.environ),
        data=Path(folder).expanduser() if folder else None,
        progress=progress,
    )


def source_of(data: config.Data) -> Source:
    wanted = {data.id_column} - {config.AUTO}
    match data.partition:
        case config.Natural(column=column):
            wanted.add(column)
        case config.Flwr(options={"partition_by": str(column)}) if column != LABEL:
            wanted.add(column)
    return Source(
        dataset=data.dataset,
        image_column=None if data.image_column == config.AUTO else data.image_column,
        label_column=None if data.label_column == config.AUTO else data.label_column,
        columns=tuple(sorted(wanted)),
        test_fraction=data.test_fraction,
    )


def load_corpus(source: Source, *, cache: Path, data: Path | None = None, progress: Progress | None = None) -> Corpus:
    """Map a data set from ``cache``, where it is stored first if need be; ``data`` is the folder to look in first.

    Raises DataError where the data set, a column or a file is missing or can't be read.
    """
    place = locate(source.dataset, data)
    entry = entry_of(source, place, cache)
    if (corpus := read(entry)) is not None:
        return corpus
    with locked(entry):
        if (corpus := read(entry)) is None:
            shutil.rmtree(entry, ignore_errors=True)
            try:
                _store(entry, source, place, progress)
            except OSError as error:
                raise DataError(
                    f"the data set {source.dataset!r} can't be stored in {entry.parent}: {error}"
                ) from error
            corpus = read(entry)
    if corpus is None:
        raise DataError(f"what was just stored in {entry} can't be read; check that disk or set FEDEMU_CACHE")
    return corpus


def _store(entry: Path, source: Source, place: Place, progress: Progress | None) -> None:
    if place.kind == "built_in":
        write(entry, source.name, built_in(place, source.test_fraction), progress)
    elif place.kind == "function":
        write(entry, source.name, own(place.where, source), progress)
    else:
        # Kept out of every process that finds the data decoded: it imports datasets, pyarrow and Pillow.
        from fedemu.ops.datasets_decode import Coloured, decode

        with tempfile.TemporaryDirectory(prefix=f"{entry.name}.partial-", dir=entry.parent) as scratch:
            try:
                write(entry, source.name, decode(source, place, Path(scratch), grey=True), progress)
            except Coloured:
                write(entry, source.name, decode(source, place, Path(scratch), grey=False), progress)


def build_partition(corpus: Corpus, data: config.Data, *, devices: int, seed: int) -> Partition:
    """Divide the training samples over devices by ``data.partition``, with ``data.validation`` of each held back."""
    labels = corpus.train.y
    random = seeds.generator(seed, purpose="partition")
    match data.partition:
        case config.Dirichlet(alpha=alpha, min_samples=min_samples, balanced=balanced, retry=retry):
            shares = partitioners.dirichlet(
                labels,
                devices,
                alpha=alpha,
                min_samples=min_samples,
                generator=random,
                retry=retry,
                balanced=balanced,
            )
        case config.DirichletEqual(alpha=alpha):
            shares = partitioners.dirichlet_equal(labels, devices, alpha=alpha, generator=random)
        case config.Shards(per_device=per_device):
            shares = partitioners.shards(labels, devices, shards_per_device=per_device, generator=random)
        case config.Natural(column=column):
            shares = partitioners.by_id(corpus.train.columns[column], devices)
        case config.Iid():
            shares = partitioners.iid(len(labels), devices, generator=random)
        case config.Flwr(partitioner=name, options=options):
            # Imports flwr-datasets, which takes seconds.
            from fedemu.ops.datasets_flwr import flwr_shares

            chosen = seeds.integer(seed, purpose="partition")
            shares = flwr_shares(corpus.train, devices, name, options, chosen)
        case _:
            assert_never(data.partition)
    return Partition.of(shares, data.validation, seeds.generator(seed, purpose="validation"))
