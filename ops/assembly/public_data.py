"""The public data of an experiment: samples that only the coordinator has."""

from __future__ import annotations

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.data.public_split import PublicSplit, public_split
from fedemu.algorithms.interface import Labelled, Model, PublicData
from fedemu.algorithms.models.growing import Growing
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


def untrained(public: PublicData | None, model: Model) -> str:
    """A line for people if tasks begin before public samples of their classes can be trained on; empty if none does.

    Training on public data leaves out classes that have not come (``algorithms/training/server_training.py``). Without
    samples to train on there is none, and without samples for validation no trained model is found better.
    """
    if public is None or not isinstance(model, Growing):
        return ""
    parts = {
        "to train on": (public.train, "there is no training on public data"),
        "for validation": (public.validation, "training on public data finds no better model than it begins with"),
    }
    since = {use: int(model.since[part.y].min()) for use, (part, _) in parts.items()}
    use = max(since, key=since.__getitem__)
    if not since[use]:
        return ""
    part, effect = parts[use]
    return (
        f"warning: none of the {len(part)} public samples {use} is of a class that comes before period "
        f"{since[use] + 1}; until then {effect}; raise data.public.fraction"
    )
