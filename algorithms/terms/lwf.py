"""Learning without forgetting (Li and Hoiem, 2016): the previous model teaches its classes on the present samples.

The term is ``coefficient · KL(previous ‖ model)`` with softmax at the temperature over the classes that the previous
model has seen, which are all classes unless a stream brings them task by task. Its gradient is that of the paper's
cross-entropy between recorded and present probabilities, without a factor of the squared temperature. The previous
model is the global model at the end of the last task, in evaluation mode. Defaults are the paper's: a coefficient of 1,
and T = 2.

The paper trains one network on one machine, and its new classes have a classifier of their own. Its recipe first trains
the new rows alone; here all variables are trained from the beginning.
"""

from __future__ import annotations

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedemu.algorithms.interface import Model
from fedemu.algorithms.models.growing import SEEN
from fedemu.algorithms.terms.local_term import PREVIOUS, LocalTerm
from fedemu.algorithms.training.class_losses import distillation_among
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import Pass, Term
from fedemu.protocol.errors import ConfigurationError


def lwf(ingredients: Ingredients, coefficient: NonNegativeFloat = 1.0, temperature: PositiveFloat = 2.0) -> LocalTerm:
    """Learning without forgetting. Raises ConfigurationError if the data are texts, which have no classes."""
    if ingredients.language:
        raise ConfigurationError(
            "algorithm.terms.lwf compares classes, but the data are texts whose tokens are predicted; remove this term"
        )
    return LocalTerm("lwf", taught_by_the_previous(ingredients.model, coefficient, temperature))


def taught_by_the_previous(model: Model, coefficient: float, temperature: float) -> Term:
    """The term of the module's docstring. ``model`` is the experiment's model; a method may train a larger one."""

    def term(trained: Model, at: Pass) -> Tensor:
        if PREVIOUS not in at.shared:
            return at.facts.lr.new_zeros(())
        previous = at.shared[PREVIOUS]
        teacher, _ = model.apply(previous, at.batch.x, False)
        logits = at.outputs.logits
        seen = previous[SEEN] > 0 if SEEN in previous else torch.ones_like(logits[0], dtype=torch.bool)
        return coefficient * distillation_among(logits, teacher.logits, seen, temperature, at.batch.weight)

    return term
