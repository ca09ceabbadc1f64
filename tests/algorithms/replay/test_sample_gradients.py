"""Gradients of single samples: products, sums and directions, against gradients that are computed one by one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedemu.algorithms.interface import Batch, Facts, Model, Tree
from fedemu.algorithms.models.feed_forward import cnn, mlp
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.replay.directions import Directions
from fedemu.algorithms.replay.linear_layers import LinearLayer
from fedemu.algorithms.replay.sample_gradients import SampleGradients
from fedemu.algorithms.training.objective import Criterion, cross_entropy
from fedemu.algorithms.training.wsm import reweighted_softmax
from fedemu.algorithms.trees import map_leaves, without

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")

CLASSES = 4
SHAPE = (1, 12, 12)
FACTS = Facts(*torch.zeros(6), label_counts=torch.tensor([5.0, 1.0, 2.0, 2.0]))
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


class Tokens(nn.Module):
    """Token ids ``[batch, 2]`` to the scores of five tokens at each place, by the embeddings' own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 10)
        self.hidden = nn.Linear(10, 40)
        self.back = nn.Linear(40, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.back(self.hidden(self.embedding(x)).tanh())
        return nn.functional.linear(hidden, self.embedding.weight)


class Twice(nn.Module):
    """A classifier that applies one linear layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(144, 20)
        self.shared = nn.Linear(20, 20)
        self.last = nn.Linear(20, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shared(self.shared(self.first(x.flatten(1))).tanh()).tanh())


def normalised(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(1, 6, 3), layer, nn.ReLU(), nn.AvgPool2d(5), nn.Flatten(), nn.Linear(24, CLASSES)
    )


MODELS: dict[str, Model] = {
    "mlp": mlp(SHAPE, CLASSES, (8,)),
    "cnn": cnn(SHAPE, CLASSES),
    "twice": from_module(Twice),
    "group norm": from_module(normalised(nn.GroupNorm(2, 6))),
    "batch norm": from_module(normalised(nn.BatchNorm2d(6))),
}


def double(leaf: Tensor) -> Tensor:
    return leaf.double() if leaf.is_floating_point() else leaf


def batch_of(samples: int) -> Batch:
    source = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, *SHAPE, generator=source, dtype=torch.float64)
    return Batch(x, torch.arange(samples) % CLASSES, torch.ones(samples))


def gradients_of(model: Model, batch: Batch, criterion: Criterion = cross_entropy, **settings: Any) -> SampleGradients:
    """A model in float64, so that blocks of other sizes round to the same side of every kink."""
    torch.set_num_threads(1)
    variables = map_leaves(double, model.init(3))
    for name in model.buffers:
        variables[name] = variables[name] + torch.ones_like(variables[name])
    return SampleGradients(model, criterion, variables, batch, FACTS, **settings)


def explicit(gradients: SampleGradients) -> Tensor:
    """``[d, n]``: the gradient of one sample after another, in the order of the trained leaves."""
    batch, model = gradients.batch, gradients.model
    columns = []
    for i in range(len(gradients)):
        trained = {
            name: leaf.clone().requires_grad_() for name, leaf in without(gradients.variables, model.buffers).items()
        }
        outputs, _ = model.apply({**gradients.variables, **trained}, batch.x[i : i + 1], False)
        alone = Batch(batch.x[i : i + 1], batch.y[i : i + 1], torch.ones(1))
        loss = gradients.criterion(outputs.logits, alone, FACTS)
        columns.append(flat(dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))))
    return torch.stack(columns, 1)


def flat(tree: Tree) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in tree.values()])


def unflat(vector: Tensor, like: Tree) -> dict[str, Tensor]:
    parts = vector.split([leaf.numel() for leaf in like.values()])
    return {name: part.view_as(leaf) for (name, leaf), part in zip(like.items(), parts, strict=True)}


@pytest.mark.parametrize("name", MODELS)
def test_products_and_sums_are_those_of_explicit_gradients(name: str) -> None:
    gradients = gradients_of(MODELS[name], batch_of(7))
    columns = explicit(gradients)
    weights = torch.linspace(-1, 2, 7, dtype=torch.float64)
    direction = torch.randn(len(columns), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    trained = without(gradients.variables, gradients.model.buffers)

    np.testing.assert_allclose(gradients.gram(), columns.t() @ columns, **TIGHT)
    total = gradients.weighted_sum(weights.numpy())
    assert list(total) == list(trained)
    np.testing.assert_allclose(flat(total), columns @ weights, **TIGHT)
    np.testing.assert_allclose(gradients.products(unflat(direction, trained)), columns.t() @ direction, **TIGHT)


@pytest.mark.parametrize("name", MODELS)
def test_directions_are_gradients_of_norm_one(name: str) -> None:
    directions = Directions.of(gradients_of(MODELS[name], batch_of(6)))
    x = np.linspace(0.0, 1.0, 6)
    total = directions.weighted_sum(x)
    np.testing.assert_allclose(np.diagonal(directions.gram), 1.0, rtol=1e-12)
    assert x @ directions.gram @ x == pytest.approx(float(flat(total).square().sum()), rel=1e-10)
    np.testing.assert_allclose(directions.products(total), directions.gram @ x, **TIGHT)


@pytest.mark.parametrize(("name", "memory"), [("mlp", 4_000), ("mlp", 13_000), ("group norm", 800)])
def test_little_memory_means_more_passes_and_the_same_gram_matrix(name: str, memory: int) -> None:
    batch = batch_of(5)
    whole, little = gradients_of(MODELS[name], batch), gradients_of(MODELS[name], batch, memory=memory)
    passes = list(little._passes())
    assert len(list(whole._passes())) == 1 < len(passes)
    assert all(sum(part.width for part in parts) * 5 * 8 <= memory / 2 for parts in passes)
    np.testing.assert_allclose(little.gram(), whole.gram(), **TIGHT)


def test_more_samples_than_a_block_come_out_as_they_do_alone() -> None:
    batch = batch_of(70)
    gram = gradients_of(MODELS["mlp"], batch).gram()
    some = [0, 31, 32, 69]
    few = gradients_of(MODELS["mlp"], Batch(*(part[some] for part in batch[:3])))
    np.testing.assert_allclose(gram[np.ix_(some, some)], few.gram(), **TIGHT)
    # So little memory holds the products of 29 samples at a time with all others.
    np.testing.assert_allclose(gradients_of(MODELS["mlp"], batch, memory=200_000).gram(), gram, **TIGHT)
    whole = gradients_of(MODELS["mlp"], batch)
    total = whole.weighted_sum(np.eye(70)[69])
    np.testing.assert_allclose(whole.products(total), gram[69], **TIGHT)


def test_a_gram_matrix_is_symmetric_and_the_same_to_the_bit_each_time() -> None:
    gradients = gradients_of(MODELS["cnn"], batch_of(4))
    gram = gradients.gram()
    assert (gram == gram.T).all()
    assert (gram == gradients.gram()).all()


def test_the_trainers_dtype_is_kept_and_gradients_may_be_off_around() -> None:
    model = MODELS["mlp"]
    batch = batch_of(5)
    gradients = SampleGradients(model, cross_entropy, model.init(3), batch._replace(x=batch.x.float()), FACTS)
    with torch.no_grad():
        directions = Directions.of(gradients)
        total = directions.weighted_sum(np.ones(5))
        products = directions.products(total)
    assert {leaf.dtype for leaf in total.values()} == {torch.float32}
    assert directions.gram.dtype == products.dtype == np.float64
    np.testing.assert_allclose(products, directions.gram.sum(1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(directions.gram, Directions.of(gradients_of(model, batch)).gram, atol=1e-5)


def test_the_criterion_is_the_one_that_was_given() -> None:
    gradients = gradients_of(MODELS["mlp"], batch_of(6), reweighted_softmax)
    columns = explicit(gradients)
    np.testing.assert_allclose(gradients.gram(), columns.t() @ columns, **TIGHT)
    assert not np.allclose(gradients.gram(), gradients_of(MODELS["mlp"], batch_of(6)).gram())


def test_weights_of_the_batch_do_not_count() -> None:
    batch = batch_of(3)
    weighted = gradients_of(MODELS["mlp"], batch._replace(weight=torch.tensor([0.0, 2.0, 1.0])))
    assert (weighted.gram() == gradients_of(MODELS["mlp"], batch).gram()).all()


def test_a_gradient_of_norm_zero_has_no_direction() -> None:
    model = from_module(lambda: nn.Linear(3, CLASSES, bias=False))
    x = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    directions = Directions.of(gradients_of(model, Batch(x, torch.tensor([0, 1, 2]), torch.ones(3))))
    assert np.diagonal(directions.gram) == pytest.approx([1.0, 0.0, 1.0])
    assert directions.scales[1] == 0.0
    total = directions.weighted_sum([1.0, 1.0, 0.0])
    assert float(flat(total).norm()) == pytest.approx(1.0)
    assert directions.products(total) == pytest.approx([1.0, 0.0, directions.gram[0, 2]])


@pytest.mark.parametrize("surety", [86.0, 95.0, 103.0, 120.0])
def test_a_model_that_is_sure_of_a_sample_gives_finite_directions(surety: float) -> None:
    """With 86 nats the gradient's norm is a normal float32, with 95 and 103 a smaller number, and with 120 it is 0."""
    model = mlp((2,), 3, ())
    variables = {"fc1.weight": torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]), "fc1.bias": torch.zeros(3)}
    x, y = torch.tensor([[surety, 0.0], [1.0, 2.0]]), torch.tensor([0, 1])
    directions = Directions.of(SampleGradients(model, cross_entropy, variables, Batch(x, y, torch.ones(2)), FACTS))
    assert directions.gram.diagonal().round(6).tolist() == [float(surety < 87), 1.0]
    total = directions.weighted_sum(np.ones(2))
    assert float(flat(total).square().sum()) == pytest.approx(directions.gram.sum(), rel=1e-4)
    assert np.isfinite(directions.products(total)).all()


def test_duplicate_samples_have_one_direction() -> None:
    batch = batch_of(2)
    twice = Batch(batch.x[[0, 1, 0]], batch.y[[0, 1, 0]], torch.ones(3))
    gram = Directions.of(gradients_of(MODELS["cnn"], twice)).gram
    assert gram[0, 2] == pytest.approx(1.0)
    assert gram[0, 1] == pytest.approx(gram[2, 1])


def test_nothing_imports_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    monkeypatch.delitem(vars(torch), "_dynamo", raising=False)
    directions = Directions.of(gradients_of(MODELS["cnn"], batch_of(2)))
    directions.products(directions.weighted_sum([1.0, 1.0]))
    with pytest.raises(ImportError):
        torch.func.grad(torch.sum)(torch.zeros(2))


def test_one_sample_and_no_sample_have_products_and_sums() -> None:
    one = Directions.of(gradients_of(MODELS["mlp"], batch_of(1)))
    assert one.gram == pytest.approx(np.ones((1, 1)))
    assert float(flat(one.weighted_sum([2.0])).norm()) == pytest.approx(2.0)
    none = Directions.of(gradients_of(MODELS["mlp"], batch_of(0)))
    total = none.weighted_sum([])
    assert none.gram.shape == (0, 0)
    assert float(flat(total).norm()) == 0.0
    assert none.products(total).shape == (0,)


def test_linear_layers_are_kept_by_their_inputs_and_output_gradients() -> None:
    (parts,) = gradients_of(MODELS["cnn"], batch_of(2))._passes()
    assert [part for part in parts if isinstance(part, LinearLayer)] == [
        LinearLayer("fc1.weight", 1, 576, (1, 512)),
        LinearLayer("fc2.weight", 1, 512, (1, CLASSES)),
    ]
    assert sum(part.width for part in parts) < 60_000


def sequence_loss(logits: Tensor, batch: Batch, facts: Facts) -> Tensor:
    """The cross-entropy of the next token, with the sample's own first token at its end."""
    target = torch.arange(5) == batch.x.roll(-1, 1)[..., None]
    return -(logits.log_softmax(-1) * target).sum((1, 2)).mean()


def test_a_layer_may_see_a_sample_at_several_places_and_a_leaf_may_be_used_twice() -> None:
    model = from_module(Tokens)
    x = torch.randint(0, 5, (6, 2), generator=torch.Generator().manual_seed(1))
    gradients = gradients_of(model, Batch(x, x[:, 0], torch.ones(6)), sequence_loss)
    (parts,) = gradients._passes()
    assert {part.name: part.width for part in parts if isinstance(part, LinearLayer)} == {
        "hidden.weight": 100,
        "back.weight": 100,
    }
    columns = explicit(gradients)
    np.testing.assert_allclose(gradients.gram(), columns.t() @ columns, **TIGHT)
