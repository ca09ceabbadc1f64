"""A criterion with its terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from fedemu.algorithms.interface import Batch, Facts, Forest, Tree
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.training.objective import Loss, NamedTerm, Objective, cross_entropy, loss_with_terms, proximity
from fedemu.protocol.errors import ConfigurationError

ZERO = torch.tensor(0)
FACTS = Facts(ZERO, ZERO, torch.tensor(0.1), ZERO, ZERO, torch.tensor(True), torch.tensor([1, 1, 1]))


def batch(weight: list[float]) -> Batch:
    torch.manual_seed(0)
    return Batch(torch.randn(4, 6), torch.tensor([0, 2, 1, 2]), torch.tensor(weight))


def test_cross_entropy_is_the_mean_that_torch_computes() -> None:
    logits = torch.tensor([[1.0, 2.0, -1.0], [0.0, 0.0, 0.0], [3.0, -3.0, 0.5], [0.1, 0.2, 0.3]])
    whole = batch([1.0, 1.0, 1.0, 1.0])
    torch.testing.assert_close(cross_entropy(logits, whole, FACTS), functional.cross_entropy(logits, whole.y))


def test_cross_entropy_leaves_padding_out() -> None:
    logits = torch.tensor([[1.0, 2.0, -1.0], [0.0, 0.0, 0.0], [3.0, -3.0, 0.5], [0.1, 0.2, 0.3]])
    padded = batch([1.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(cross_entropy(logits, padded, FACTS), functional.cross_entropy(logits[:2], padded.y[:2]))


def test_a_batch_of_padding_costs_nothing() -> None:
    assert float(cross_entropy(torch.ones(4, 3), batch([0.0] * 4), FACTS)) == 0.0


def test_terms_add_to_the_criterion_and_leave_the_metric_alone() -> None:
    model = mlp((6,), 3, (2,))
    variables = model.init(0)
    moved = {name: leaf + 0.5 for name, leaf in variables.items()}
    whole = batch([1.0] * 4)
    plain = Objective(model)(moved, whole, {"model": variables}, {}, FACTS)
    held = Objective(model, terms=(proximity(2.0),))(moved, whole, {"model": variables}, {}, FACTS)
    count = sum(leaf.numel() for leaf in variables.values())
    assert float(held.value - plain.value) == pytest.approx(0.25 * count, rel=1e-5)
    assert float(held.metrics["loss"]) == float(plain.value)


@pytest.mark.parametrize("hands_on", [True, False])
def test_terms_add_to_a_loss_of_a_methods_own_and_see_the_model_in_training(
    hands_on: bool, louder: Callable[[Any], Any]
) -> None:
    model, whole = louder(mlp((6,), 3, (2,))), batch([1.0] * 4)
    variables = model.init(0)

    def loss(variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
        outputs, buffers = model.apply(variables, batch.x, True)
        value = 3 * cross_entropy(outputs.logits, batch, facts)
        return Loss(value, buffers, {"loss": value}, outputs if hands_on else ())

    plain = loss(variables, whole, {}, {}, FACTS)
    terms = (lambda model, at: at.outputs.logits.sum(), lambda model, at: at.variables["fc2.bias"].square().sum())
    found = loss_with_terms(model, loss, terms)(variables, whole, {}, {}, FACTS)
    added = model.apply(variables, whole.x, True)[0].logits.sum() + variables["fc2.bias"].square().sum()
    torch.testing.assert_close(found.value, plain.value + added)
    assert found.metrics == plain.metrics
    assert loss_with_terms(model, loss, ()) is loss


def test_a_loss_or_a_term_that_is_no_single_number_is_named() -> None:
    model = mlp((6,), 3, (2,))
    variables = model.init(0)

    def refused(**parts: Any) -> str:
        with pytest.raises(ConfigurationError) as caught:
            Objective(model, **parts)(variables, batch([1.0] * 4), {}, {}, FACTS)
        return str(caught.value).partition(";")[0]

    assert refused(criterion=lambda logits, batch, facts: None) == "the loss gave a NoneType"
    assert refused(criterion=lambda logits, batch, facts: logits[:, 0]) == "the loss gave a tensor of the shape [4]"
    assert (
        refused(terms=(lambda model, at: at.outputs.logits,)) == "a term of the loss gave a tensor of the shape [4, 3]"
    )
    assert refused(terms=(NamedTerm("mine:held", lambda model, at: None),)) == "the term 'mine:held' gave a NoneType"
    assert refused(terms=(lambda model, at: 1.0, lambda model, at: "1")) == "a term of the loss gave a str"


def test_a_term_beside_a_loss_of_a_methods_own_is_named_too() -> None:
    model = mlp((6,), 3, (2,))

    def own_loss(variables: Any, batch: Any, shared: Any, own: Any, facts: Any) -> Loss:
        return Loss(torch.zeros(()), {}, {})

    terms = (NamedTerm("mine:held", lambda model, at: None),)
    with pytest.raises(ConfigurationError, match="the term 'mine:held' gave a NoneType"):
        loss_with_terms(model, own_loss, terms)(model.init(0), batch([1.0] * 4), {}, {}, FACTS)
