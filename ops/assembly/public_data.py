"""The public data of an experiment: samples that only the coordinator has."""

from __future__ import annotations

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.data.public_split import PublicSplit, public_split
from fedemu.algorithms.interface import Labelled, PublicData
from fedemu.ops.experiment import Data, Natural
from fedemu.protocol import seeds


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
