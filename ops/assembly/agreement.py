"""What the machines of a fleet must have in common beside the experiment: its data, and what is frozen in its model.

Neither travels. Each machine has its own copy, and a digest tells whether the copies are the same.
"""

from __future__ import annotations

import hashlib

from fedemu.algorithms.interface import Tree
from fedemu.ops.assembly.named_code import received
from fedemu.ops.data.corpora import open_corpus
from fedemu.protocol.ids import Digest

FREEZING = ("random_features",)
"""The models of fedemu with frozen tensors."""


def prepare(experiment: bytes) -> Digest:
    """Decode the data of an experiment, given as bytes, and return the digest that a fleet must have in common.

    Raises DataError if the data cannot be decoded, and ConfigurationError if a model of the user's own cannot be built,
    or if this process may not run the code that the experiment names.
    """
    parsed = received(experiment)
    corpus = open_corpus(parsed)
    if ":" not in parsed.model.name and parsed.model.name not in FREEZING:
        return corpus.digest  # Nothing is frozen, and this process need not import torch.
    from fedemu.algorithms.models.frozen import frozen_of
    from fedemu.ops.assembly.learning import open_model

    return common(corpus.digest, frozen_of(open_model(parsed, corpus)))


def common(data: Digest, frozen: Tree) -> Digest:
    """The digest of the data and of the model's frozen tensors. If nothing is frozen, it is that of the data."""
    if not frozen:
        return data
    from fedemu.algorithms.trees import model_digest

    return Digest(hashlib.sha256(f"{data} {model_digest(frozen)}".encode()).hexdigest())
