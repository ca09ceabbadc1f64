"""FedReg: made data, and steps that are corrected by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedemu.algorithms.interface import Ask, Batch, Context, Facts, Forest, Model, Outputs, Revealing, Tree, mean
from fedemu.algorithms.methods.fedavg import fedavg
from fedemu.algorithms.methods.fedreg import (
    RegularisedSGD,
    Rehearsal,
    between,
    fedreg,
    soft_cross_entropy,
    without_rise,
)
from fedemu.algorithms.models.feed_forward import cnn, mlp
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.registry import build_algorithm
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.errors import ConfigurationError

SHAPE = (1, 12, 12)
MLP = mlp(SHAPE, 4, (8,))
SHARES = [np.arange(0, 30), np.arange(40, 47), np.arange(0), np.arange(60, 90, 2)]


def ingredients(model: Model = MLP, **settings: Any) -> Ingredients:
    defaults: dict[str, Any] = {"epochs": 2, "batch_size": 5, "lr": 0.02, "input_shape": SHAPE, "classes": 4}
    return Ingredients(model, cross_entropy, **{**defaults, **settings})


class Sides:
    """A model of two classes. Its logits are ``a·x_0 + b·x_1`` and the negative of this."""

    kind = "dense"
    buffers: frozenset[str] = frozenset()

    def init(self, seed: int) -> Tree:
        return {"a": torch.tensor(0.5), "b": torch.tensor(0.0)}

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        side = variables["a"] * x[:, 0] + variables["b"] * x[:, 1]
        return Outputs(torch.stack([side, -side], 1), x, {}), {}


SHARED: Forest = {"model": {"a": torch.tensor(0.5), "b": torch.tensor(0.0)}}


def facts() -> Facts:
    zero = torch.tensor(0)
    return Facts(zero, zero, torch.tensor(0.5), zero, zero, torch.tensor(True), torch.zeros(2, dtype=torch.int64))


def sides(**options: Any) -> RegularisedSGD:
    model: Any = Sides()
    settings = ingredients(model, input_shape=(2,), classes=2, batch_size=3, lr=0.5)
    program: Any = fedreg(settings, **options).programs["train"]
    return program  # type: ignore[no-any-return]


def batch(x: list[list[float]], y: list[int]) -> Batch:
    return Batch(torch.tensor(x), torch.tensor(y), torch.ones(len(y)))


DATA = batch([[1.0, 0.5], [-1.0, 0.25], [0.5, -2.0]], [0, 1, 1])


def rehearsed(program: RegularisedSGD, *batches: Batch) -> Any:
    carry = program.begin(SHARED, {}, facts())
    for each in batches:
        carry, _ = program.rehearse(carry, each, SHARED, {}, facts(), {})
    return carry


def test_pseudo_data_climb_by_signs_and_stay_within_the_values_of_their_batch() -> None:
    # The weight of x_1 is 0 and so its gradient; x_0 leaves the true class: down for class 0, up for class 1.
    carry = rehearsed(sides(pseudo_step=0.5, perturbed_step=0.125, iterations=3), DATA)
    assert carry.pseudo.x[0].tolist() == [[-0.5, 0.5], [0.5, 0.25], [1.0, -2.0]]
    assert carry.perturbed.x[0].tolist() == [[0.625, 0.5], [-0.625, 0.25], [0.875, -2.0]]


def test_pseudo_targets_are_what_the_global_model_says_and_perturbed_ones_are_true() -> None:
    carry = rehearsed(sides(pseudo_step=0.5, iterations=3), DATA)
    side = 0.5 * carry.pseudo.x[0, :, 0]
    torch.testing.assert_close(carry.pseudo.targets[0], torch.stack([side, -side], 1).softmax(-1))
    assert carry.perturbed.targets[0].tolist() == [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]


def test_data_are_made_against_the_global_model_in_evaluation_mode() -> None:
    layers = nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)
    model, plain = (from_module(lambda kept=kept: nn.Sequential(*kept)) for kept in (layers, (*layers[:3], layers[4])))
    program, other = (fedreg(ingredients(each), rehearsals=1).programs["train"] for each in (model, plain))
    shared = {"model": model.init(0)}
    without_dropout = {"model": dict(zip(plain.init(0), shared["model"].values(), strict=True))}
    data = batch(np.random.default_rng(0).normal(size=(5, *SHAPE)).tolist(), [0, 1, 2, 3, 0])
    made, expected = (
        each.rehearse(each.begin(start, {}, facts()), data, start, {}, facts(), {})[0]  # type: ignore[union-attr]
        for each, start in ((program, shared), (other, without_dropout))
    )
    assert torch.equal(made.pseudo.x, expected.pseudo.x)
    assert torch.equal(made.pseudo.targets, expected.pseudo.targets)
    assert torch.equal(made.perturbed.x, expected.perturbed.x)


def test_made_data_go_into_one_slot_after_the_other() -> None:
    second = batch([[2.0, 1.0], [3.0, 1.0], [4.0, 1.0]], [1, 1, 0])
    carry = rehearsed(sides(rehearsals=3, pseudo_step=0.0, iterations=1), DATA, second)
    assert carry.pseudo.x.tolist() == [DATA.x.tolist(), second.x.tolist(), torch.zeros(3, 2).tolist()]
    assert carry.pseudo.weight.tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert int(carry.filled) == 2


def test_steps_take_the_filled_slots_in_turn() -> None:
    program = sides(rehearsals=3, iterations=1)
    second = batch([[2.0, 1.0], [3.0, 1.0], [4.0, 1.0]], [1, 1, 0])
    both = rehearsed(program, DATA, second)
    for used, only in ((0, DATA), (1, second), (2, DATA)):
        alone, _ = program.train(rehearsed(program, only), DATA, SHARED, {}, facts(), {})
        turn, _ = program.train(both._replace(used=torch.tensor(used)), DATA, SHARED, {}, facts(), {})
        assert turn.training.variables == alone.training.variables
        assert int(turn.used) == used + 1


def slope(program: RegularisedSGD, rehearsal: Rehearsal, at: Tree) -> Tree:
    def loss(variables: Tree) -> Tensor:
        outputs, _ = program.model.apply(variables, rehearsal.x[0], True)
        losses = soft_cross_entropy(outputs.logits, rehearsal.targets[0])
        return losses[rehearsal.weight[0] > 0].mean()

    gradient: Tree = torch.func.grad(loss)(dict(at))
    return gradient


def inner(left: Tree, right: Tree) -> float:
    return sum(float(leaf) * float(right[name]) for name, leaf in left.items())


def test_a_step_follows_the_gradient_half_way_back_and_takes_out_what_made_data_forbid() -> None:
    program = sides(rehearsals=1, iterations=2)
    # The last sample is padding, from which nothing follows.
    carry = rehearsed(program, DATA._replace(weight=torch.tensor([1.0, 1.0, 0.0])))
    start = SHARED["model"]
    # The second step: by then the model has left its start, where pseudo data have no gradient.
    carry, _ = program.train(carry, DATA, SHARED, {}, facts(), {})
    after, _ = program.train(carry, DATA, SHARED, {}, facts(), {})
    gradients, _ = program.gradients(between(start, carry.training.variables, 0.5), DATA, SHARED, {}, facts())
    free = {name: leaf - 0.5 * gradients[name] for name, leaf in carry.training.variables.items()}
    at = {name: 0.5 * leaf + 0.5 * start[name] for name, leaf in free.items()}
    way = {name: leaf - start[name] for name, leaf in free.items()}
    for rehearsal in (carry.pseudo, carry.perturbed):
        up = slope(program, rehearsal, at)
        share = max(0.0, inner(way, up) / inner(up, up))
        way = {name: leaf - share * up[name] for name, leaf in way.items()}
    for name, leaf in after.training.variables.items():
        torch.testing.assert_close(leaf, start[name] + way[name], rtol=1e-5, atol=1e-6)


def test_a_way_up_a_slope_becomes_level_and_a_way_down_stays() -> None:
    way: Tree = {"a": torch.tensor([2.0, 1.0]), "b": torch.tensor(-1.0)}
    up: Tree = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor(1.0)}
    level = without_rise(way, up)
    assert {name: leaf.tolist() for name, leaf in level.items()} == {"a": [1.5, 1.0], "b": -1.5}
    assert float((level["a"] * up["a"]).sum() + level["b"] * up["b"]) == 0.0
    down = {name: -leaf for name, leaf in up.items()}
    assert all(torch.equal(without_rise(way, down)[name], leaf) for name, leaf in way.items())
    flat = {name: torch.zeros_like(leaf) for name, leaf in up.items()}
    assert all(torch.equal(without_rise(way, flat)[name], leaf) for name, leaf in way.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_way_up_a_slope_of_small_gradients_becomes_level_in_half_precision(dtype: torch.dtype) -> None:
    slope = {"a": torch.full((4,), 2.0**-14, dtype=dtype)}
    level = without_rise({"a": torch.tensor([3.0, 1.0, -2.0, 2.0], dtype=dtype)}, slope)
    assert level["a"].dtype == dtype
    assert level["a"].tolist() == [2.0, 0.0, -3.0, 1.0]


@pytest.mark.parametrize("seed", range(3))
def test_after_a_step_the_last_constraint_holds_to_first_order(seed: int) -> None:
    program: Any = fedreg(ingredients(), rehearsals=1, iterations=2).programs["train"]
    random = np.random.default_rng(seed)
    data = batch(random.normal(size=(5, *SHAPE)).astype(np.float32).tolist(), random.integers(0, 4, 5).tolist())
    shared = {"model": MLP.init(seed)}
    carry = program.begin(shared, {}, facts())
    carry, _ = program.rehearse(carry, data, shared, {}, facts(), {})
    after, _ = program.train(carry, data, shared, {}, facts(), {})
    gradients, _ = program.gradients(shared["model"], data, shared, {}, facts())
    free = {name: leaf - 0.5 * gradients[name] for name, leaf in shared["model"].items()}
    up = slope(program, carry.perturbed, between(shared["model"], free, 0.5))
    way = {name: leaf - shared["model"][name] for name, leaf in after.training.variables.items()}
    rise, length = (sum(float((leaf * up[name]).sum()) for name, leaf in tree.items()) for tree in (way, up))
    assert rise <= 1e-5 * length


def test_without_constraints_fedreg_is_federated_averaging(little_fleet: Callable[..., Any]) -> None:
    settings = ingredients(momentum=0.9, weight_decay=1e-3)
    ours = little_fleet(fedreg(settings, gamma=1.0, rehearsals=0, weights="examples"), MLP.init(0), SHARES)
    theirs = little_fleet(fedavg(settings), MLP.init(0), SHARES)
    for _ in range(2):
        ours.play([0, 1, 2, 3])
        theirs.play([0, 1, 2, 3])
    assert all(torch.equal(ours.model[name], leaf) for name, leaf in theirs.model.items())


def test_devices_count_alike_unless_asked_otherwise(little_fleet: Callable[..., Any]) -> None:
    fleet = little_fleet(fedreg(ingredients(), rehearsals=1, iterations=1), MLP.init(0), SHARES)
    fleet.play([0, 1])
    assert [ask.reduce for ask in fleet.asks] == [{"delta": mean}]
    script = fedreg(ingredients()).round(fleet.state, Context(round=1, task=0, seed=1, classes=4))
    assert next(script) == Ask("train", {"model": fleet.model}, {"delta": mean})


def test_devices_with_a_cnn_agree_alone_and_in_company(little_fleet: Callable[..., Any]) -> None:
    model = cnn(SHAPE, 4)
    checked = Checked(Serial(), Vmapped(2))
    method = fedreg(ingredients(model, epochs=1, momentum=0.5), iterations=2, rehearsals=2)
    fleet = little_fleet(method, model.init(0), [share[:8] for share in SHARES], executor=checked)
    fleet.play([0, 1])
    before = fleet.model
    fleet.play([1, 2])
    assert any(not torch.equal(fleet.model[name], leaf) for name, leaf in before.items())


def test_made_data_come_from_no_more_batches_than_asked_for() -> None:
    program: Any = fedreg(ingredients(), rehearsals=4).programs["train"]
    making, training = program.stages
    assert making.plan(30, np.random.default_rng(0)).shape == (4, 5)
    assert making.plan(7, np.random.default_rng(0)).shape == (2, 5)
    assert training.plan(30, np.random.default_rng(0)).shape == (12, 5)
    assert making.rows_matter
    assert program.passes == 3 * 2 + 2 * 10
    plain: Any = fedreg(ingredients(), rehearsals=0).programs["train"]
    assert plain.passes == 2
    by_steps: list[Any] = [fedreg(ingredients(local_steps=4), rehearsals=some).programs["train"] for some in (0, 4)]
    assert [program.processed for program in by_steps] == [4 * 5, 3 * 4 * 5]


def test_the_trained_model_can_be_told_from_the_payload() -> None:
    program: Any = fedreg(ingredients()).programs["train"]
    assert isinstance(program, Revealing)
    assert program.payload({"model": MLP.init(0)}).keys() == {"delta"}


def test_batch_normalisation_is_refused() -> None:
    model = from_module(lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)))
    with pytest.raises(ConfigurationError, match="'fedreg' can't work with batch normalisation, because made data"):
        fedreg(ingredients(model))


class Half(nn.Module):
    """A module whose first layer gets bfloat16, whatever its own dtype is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(144, 6).to(torch.bfloat16), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x.flatten(1).to(torch.bfloat16)).float())
        return logits


def test_a_model_that_is_bound_to_half_precision_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'fedreg' computes the model in float64 too, and this model can't"):
        fedreg(ingredients(from_module(Half)))
    fedreg(ingredients(from_module(Half)), rehearsals=0)


def test_fedreg_is_built_by_name() -> None:
    built = build_algorithm("fedreg", {"gamma": 0.4, "iterations": 2}, ingredients())
    assert isinstance(built.programs["train"], RegularisedSGD)
    with pytest.raises(ConfigurationError, match=r"algorithm\.options\.beta = 1\.5 does not fit 'fedreg'"):
        build_algorithm("fedreg", {"beta": 1.5}, ingredients())


class Centred(nn.Module):
    """A module with a buffer that no training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor(0.5))
        self.layer = nn.Linear(144, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x.flatten(1) - self.offset)
        return logits


def test_a_constant_buffer_of_the_model_is_accepted_and_stays(little_fleet: Callable[..., Any]) -> None:
    model = from_module(Centred)
    fleet = little_fleet(fedreg(ingredients(model), rehearsals=2, iterations=1), model.init(0), SHARES)
    fleet.play([0, 1])
    assert float(fleet.model["offset"]) == 0.5
    assert not torch.equal(fleet.model["layer.weight"], model.init(0)["layer.weight"])
