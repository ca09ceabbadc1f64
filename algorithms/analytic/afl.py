"""Analytic federated learning: the classifier is the solution of one ridge regression on the features of all devices.

He et al., "AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained Models", CVPR 2025.

In the paper a device sends the solution of its own regression and its regularised Gram matrix, and the coordinator
joins them two by two (the absolute aggregation law); in the end it takes the devices' regularisation away again. Here a
device sends the Gram matrix X^T X and X^T Y, whose totals give the same solution directly. It does not depend on how
samples are divided, nor on the order in which they come, and equals the solution on all samples up to rounding.

``ridge`` is what remains of the regularisation in the end. It is 0 in the authors' code, where it would leave a Gram
matrix of a few samples without an inverse. The authors' classifier has no bias; here a model's bias is one more weight,
of a feature that is always 1.
"""

from __future__ import annotations

from functools import partial

from pydantic import NonNegativeInt, PositiveFloat

from fedemu.algorithms.analytic.classifiers import products, ridge_regression
from fedemu.algorithms.analytic.learner import Analytic, Devices, analytic, classifier_head
from fedemu.algorithms.training.ingredients import Ingredients


def afl(
    ingredients: Ingredients,
    ridge: PositiveFloat = 1.0,
    warm_up: NonNegativeInt = 0,
    devices: Devices = "selected",
) -> Analytic:
    """AFL on the features of the experiment's model (He et al., CVPR 2025).

    ``ridge`` is the weight of the squared norm of the classifier. ``warm_up`` rounds of FedAvg train the features
    first, in the first task; with 0 they are those of the initial model. ``devices`` are asked for their sums each
    round. Raises ConfigurationError for data without classes, for replay, and for a model without a linear classifier.
    """
    head, width = classifier_head(ingredients, "afl")
    constant = head.bias is not None
    summed = products(ingredients.classes, constant)
    solve = partial(ridge_regression, ridge=ridge, constant=constant)
    return analytic(ingredients, head, width, summed, solve, warm_up, devices)
