"""The calls of a method's own code at the coordinator. What it draws there follows from the experiment's seed.

This is for draws by torch, Python's ``random`` or ``numpy.random``. Methods of this package draw only from ``seeds``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from fedemu.algorithms.interface import Algorithm, Ask, Context, Remarking, Reply, S, Script, ServerJob, Tree
from fedemu.algorithms.models.randomness.generators import all_seeded, generators_for
from fedemu.protocol import seeds


def first_state(algorithm: Algorithm[S], variables: Tree, context: Context) -> S:
    """The method's state before the first round, with these variables of the model."""
    seed = seeds.integer(context.seed, purpose="init")
    with _drawing_by(seed):
        return algorithm.init(variables, context)


def next_request(script: Script[S], answer: Reply | Tree | None, context: Context, position: int) -> Ask | ServerJob:
    """What the script of a round yields when it gets ``answer``; the first answer is None.

    ``position`` is the number of earlier requests. Every try of a round draws the same. Raises StopIteration, with the
    state, if the script returns.
    """
    seed = seeds.integer(context.seed, round=context.round, purpose=f"script/{position}")
    with _drawing_by(seed):
        return script.send(answer)


def remarks_of(algorithm: Algorithm[S], state: S, context: Context) -> Mapping[str, object]:
    """What the method says of the state after a round. It is empty for a method that says nothing."""
    if not isinstance(algorithm, Remarking):
        return {}
    seed = seeds.integer(context.seed, round=context.round, purpose="remarks")
    with _drawing_by(seed):
        return algorithm.remarks(state)


def _drawing_by(seed: int) -> AbstractContextManager[None]:
    """A context in which all generators of the processor draw by ``seed``."""
    return all_seeded(seed, generators_for(torch.device("cpu")))
