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
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.wording import an_object


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


def global_model(algorithm: Algorithm[S], state: S, model: Tree) -> Tree:
    """The global model in a state. ``model`` has the variables of the experiment's model, whose values do not matter.

    Raises ConfigurationError if variables are missing, or have other shapes or dtypes. A module of torch would be
    evaluated all the same, with what it was built with in the place of what is missing.
    """
    found: object = algorithm.variables(state)
    if not isinstance(found, Mapping):
        raise ConfigurationError(
            f"the algorithm's variables(state) is {an_object(found)}; it must be the model, as tensors by name"
        )
    if wrong := misfit(found, model):
        raise ConfigurationError(
            f"the algorithm's variables(state) {wrong}; it must be the whole model, with all parameters and buffers"
        )
    return found


def misfit(found: Tree, model: Tree) -> str:
    """How variables differ from those of a model, as what they lack or have. Empty if they have all of the model's."""
    if lacking := sorted(model.keys() - found.keys()):
        return f"lacks the variable {lacking[0]!r}"
    for name, own in model.items():
        leaf: object = found[name]
        if not isinstance(leaf, torch.Tensor):
            return f"has {an_object(leaf)} as {name!r}, which is a tensor in the model"
        if leaf.shape != own.shape:
            return f"has {name!r} as {list(leaf.shape)}, where the model has {list(own.shape)}"
        if leaf.dtype != own.dtype:
            return f"has {name!r} of {leaf.dtype}, where the model has {own.dtype}"
    return ""


def _drawing_by(seed: int) -> AbstractContextManager[None]:
    """A context in which all generators of the processor draw by ``seed``."""
    return all_seeded(seed, generators_for(torch.device("cpu")))
