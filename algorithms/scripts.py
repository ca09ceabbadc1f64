"""The calls of a method's own code at the coordinator. What it draws there follows from the experiment's seed.

This is for draws by torch, Python's ``random`` or ``numpy.random``. Methods of this package draw only from ``seeds``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from fedemu.algorithms.interface import Algorithm, Ask, Context, Remarking, Reply, S, Script, ServerJob, Tree
from fedemu.protocol import seeds
from fedemu.protocol.generators import seeded

T = TypeVar("T")


def first_state(algorithm: Algorithm[S], variables: Tree, context: Context) -> S:
    """The method's state before the first round, with these variables of the model."""
    seed = seeds.integer(context.seed, purpose="init")
    return _drawing_by(seed, lambda: algorithm.init(variables, context))


def next_request(script: Script[S], answer: Reply | Tree | None, context: Context, position: int) -> Ask | ServerJob:
    """What the script of a round yields when it gets ``answer``; the first answer is None.

    ``position`` is the number of earlier requests. Every try of a round draws the same. Raises StopIteration, with the
    state, if the script returns.
    """
    seed = seeds.integer(context.seed, round=context.round, purpose=f"script/{position}")
    return _drawing_by(seed, lambda: script.send(answer))


def remarks_of(algorithm: Algorithm[S], state: S, context: Context) -> Mapping[str, object]:
    """What the method says of the state after a round. It is empty for a method that says nothing."""
    if not isinstance(algorithm, Remarking):
        return {}
    seed = seeds.integer(context.seed, round=context.round, purpose="remarks")
    return _drawing_by(seed, lambda: algorithm.remarks(state))


def _drawing_by(seed: int, call: Callable[[], T]) -> T:
    """What ``call`` returns if all generators of the processor draw by ``seed``. At the end they are as before."""
    with seeded(seed):
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            return call()
        finally:
            torch.default_generator.set_state(before)
