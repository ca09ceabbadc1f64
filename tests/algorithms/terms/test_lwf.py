"""Learning without forgetting: the distillation from the previous model over the classes that it has seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.interface import Batch, Facts
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.terms.local_term import PREVIOUS
from fedemu.algorithms.terms.lwf import lwf
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import Pass, cross_entropy
from fedemu.protocol.errors import ConfigurationError

SHAPE, CLASSES = (1, 12, 12), 4
PLAIN = mlp(SHAPE, CLASSES, (5,))
GROWING = growing(PLAIN, ClassTasks.of(CLASSES, 2, [2, 0, 3, 1]), SHAPE)
ZERO = torch.tensor(0)
FACTS = Facts(ZERO, ZERO, torch.tensor(0.1), ZERO, torch.tensor(1), torch.tensor(True), torch.ones(CLASSES))


def ingredients(model: Any, **fields: Any) -> Ingredients:
    return Ingredients(model, cross_entropy, CLASSES, 1, 5, 0.05, input_shape=SHAPE, **fields)


def divergence(teacher: Any, student: Any, classes: list[int], temperature: float) -> float:
    """``KL(teacher ‖ student)`` of one row of logits, in float64 over these classes only."""
    soft = []
    for logits in (teacher, student):
        powers = np.exp(np.asarray(logits, np.float64)[classes] / temperature)
        soft.append(powers / powers.sum())
    return float((soft[0] * np.log(soft[0] / soft[1])).sum())


@pytest.mark.parametrize(("model", "classes"), [(GROWING, [0, 2]), (PLAIN, [0, 1, 2, 3])], ids=["tasks", "no tasks"])
def test_the_term_is_the_mean_divergence_over_the_classes_of_the_previous_model(
    model: Any, classes: Any, louder: Callable[[Any], Any]
) -> None:
    grows, model = model is GROWING, louder(model)
    previous, variables = model.init(0), model.init(1)
    if grows:
        variables = GROWING.entered(variables, 1, 0)
    x = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0))
    outputs = model.apply(variables, x, True)[0]
    batch = Batch(x, torch.tensor([3, 1, 3]), torch.tensor([1.0, 1.0, 0.0]))
    at = Pass(variables, outputs, batch, {PREVIOUS: previous}, {}, FACTS)
    taught = model.apply(previous, x, False)[0].logits
    rows = [divergence(taught[row], outputs.logits[row], classes, 3.0) for row in (0, 1)]
    term = lwf(ingredients(model), coefficient=0.5, temperature=3.0).term
    assert float(term(model, at)) == pytest.approx(0.5 * sum(rows) / 2, rel=1e-4)
    assert float(term(model, at._replace(shared={}))) == 0


def test_texts_have_no_classes_to_compare() -> None:
    with pytest.raises(ConfigurationError, match=r"algorithm\.terms\.lwf compares classes"):
        lwf(ingredients(PLAIN, language=True))
