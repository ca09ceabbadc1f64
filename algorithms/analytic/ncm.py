"""Nearest class mean: devices send the sum of features and the number of samples of each class, and nothing is trained.

A sample belongs to the class whose mean of features is nearest (Mensink et al., "Distance-Based Image Classification:
Generalizing to New Classes at Near-Zero Cost", 2013, without its learnt metric). The totals do not depend on the
partition or on the order of tasks, so nothing is forgotten.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import NonNegativeInt

from fedemu.algorithms.analytic.classifiers import class_sums, nearest_means
from fedemu.algorithms.analytic.learner import Analytic, Devices, analytic, classifier_head
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.protocol.errors import ConfigurationError


def ncm(
    ingredients: Ingredients,
    distance: Literal["euclidean", "cosine"] = "euclidean",
    warm_up: NonNegativeInt = 0,
    devices: Devices = "selected",
) -> Analytic:
    """Nearest class mean on the features of the experiment's model.

    ``distance`` ``cosine`` scales features and means to norm 1. ``warm_up`` rounds of FedAvg train the features first,
    in the first task; with 0 they are those of the initial model. ``devices`` are asked for their sums each round.
    Raises ConfigurationError for data without classes, for replay, for a model without a linear classifier, and for
    ``euclidean`` if this classifier has no bias.
    """
    head, width = classifier_head(ingredients, "ncm")
    if distance == "euclidean" and head.bias is None:
        raise ConfigurationError(
            "the method 'ncm' needs a bias for Euclidean distances, but the model's classifier has none; "
            "set algorithm.options.distance = 'cosine', or choose another model"
        )
    normalised = distance == "cosine"
    summed = class_sums(ingredients.classes, normalised)
    solve = partial(nearest_means, normalised=normalised)
    return analytic(ingredients, head, width, summed, solve, warm_up, devices)
