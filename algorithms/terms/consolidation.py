"""Elastic weight consolidation and memory aware synapses: important variables are held near the previous model.

Both are the term ``coefficient / 2 · Σ_k F_k (θ_k - θ*_k)²`` over the trained variables θ. θ* is the global model at
the end of the last task. The importance F_k of a variable is a mean over samples, added up over tasks:

- EWC (Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", 2017) takes the diagonal of the
  Fisher information, the squared gradient of the log-likelihood. Here the label is the true one and not one that the
  model draws: the empirical Fisher information. The paper has a penalty for each earlier task. One penalty around the
  latest model, with the sum of the diagonals, is the online form (Schwarz et al., "Progress & Compress", 2018), whose
  ``decay`` lets earlier tasks fade.
- MAS (Aljundi et al., "Memory Aware Synapses: Learning what (not) to forget", 2018) takes the absolute value of the
  gradient of the squared norm of the logits. It needs no labels. The paper has the coefficient λ without the half. Of
  texts all positions count but those that only fill up a sample.

Neither paper is about federated learning. Here each device sums over its own samples of the task that ends, and the
coordinator divides the fleet's sum by the fleet's number of samples. So F is what one machine with the samples of all
answering devices would find. On a cumulative stream the samples of a device are those of all tasks so far. Their mean
is F, and nothing is added up over tasks: earlier tasks would count once more with each task.

Rows of the classifier for classes that have not come yet get no gradient, so their importance is 0.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor

from fedemu.algorithms.data.language import PAD
from fedemu.algorithms.interface import Batch, Facts, Model, Tree
from fedemu.algorithms.terms.local_term import PREVIOUS, Importance, LocalTerm, importance_key
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import Pass, Term
from fedemu.algorithms.trees import widened

Decay = Annotated[float, Field(ge=0, le=1)]


def ewc(
    ingredients: Ingredients, coefficient: NonNegativeFloat = 100.0, decay: Decay = 1.0, samples: PositiveInt = 500
) -> LocalTerm:
    """EWC. ``coefficient`` is λ. Each device takes at most ``samples`` samples for the Fisher information.

    The likelihood is that of ``algorithm.loss``.
    """
    importance = Importance(ingredients.criterion, torch.square, samples, _decay(ingredients, decay))
    return LocalTerm("ewc", held("ewc", coefficient), importance=importance)


def mas(
    ingredients: Ingredients, coefficient: NonNegativeFloat = 0.1, decay: Decay = 1.0, samples: PositiveInt = 500
) -> LocalTerm:
    """MAS. ``coefficient`` is twice the paper's λ. Each device takes at most ``samples`` samples."""
    importance = Importance(squared_length, torch.abs, samples, _decay(ingredients, decay))
    return LocalTerm("mas", held("mas", coefficient), importance=importance)


def _decay(ingredients: Ingredients, decay: float) -> float:
    """What F is multiplied by before a task is added: 0 if the samples of this task are those of all tasks so far."""
    return 0.0 if ingredients.cumulative else decay


def squared_length(logits: Tensor, batch: Batch, facts: Facts) -> Tensor:
    """The squared Euclidean norm of the logits. Those of padding are left out: ``[batch, length, tokens]`` of texts."""
    squares = logits.square()
    if logits.dim() == 3:
        squares = torch.where((batch.x[:, 0] == PAD)[..., None], 0.0, squares)
    return squares.sum()


def held(name: str, coefficient: float) -> Term:
    """``coefficient / 2 · Σ_k F_k (θ_k - θ*_k)²``, where F are the importances of the term ``name``.

    It is 0 as long as nothing is remembered.
    """
    key = importance_key(name)

    def term(model: Model, at: Pass) -> Tensor:
        if key not in at.shared:
            return at.facts.lr.new_zeros(())
        return coefficient / 2 * weighted_distance(at.variables, at.shared[PREVIOUS], at.shared[key])

    return term


def weighted_distance(variables: Tree, reference: Tree, importance: Tree) -> Tensor:
    """``Σ_k F_k (θ_k - θ*_k)²`` over the leaves of ``importance``, zero-dimensional.

    Leaves of half precision are multiplied as float32. In float16 a large F would be infinite, and its pull no number.
    """
    here = widened(variables)
    parts = [(leaf * (here[name] - reference[name]).square()).sum() for name, leaf in importance.items()]
    return torch.stack(parts).sum()
