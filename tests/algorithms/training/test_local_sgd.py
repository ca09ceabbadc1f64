"""Local training on ``loss = 0.5·(w·x + b - y)²``, whose steps can be followed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedemu.algorithms.interface import Batch, Facts, Forest, Model, Outputs, Plan, Tree
from fedemu.algorithms.training.local_sgd import (
    SGD,
    LocalSGD,
    Training,
    first_batches,
    shuffled_epochs,
    shuffled_steps,
)
from fedemu.algorithms.training.objective import Loss


class Line:
    """A model with the logit ``w·x + b``. If asked to, it counts forward passes in a buffer."""

    kind = "dense"

    def __init__(self, buffers: Sequence[str] = ()) -> None:
        self.buffers = frozenset(buffers)

    def init(self, seed: int) -> Tree:
        return {"w": torch.tensor(1.0), "b": torch.tensor(0.5), **{name: torch.tensor(0.0) for name in self.buffers}}

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        logits = variables["w"] * x + variables["b"]
        return Outputs(logits, x, {}), {name: variables[name] + 1 for name in self.buffers}


def squared_error(model: Any) -> Any:
    def loss(variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
        outputs, buffers = model.apply(variables, batch.x, True)
        error = outputs.logits - batch.y
        value = 0.5 * (error.square() * batch.weight).sum() / batch.weight.sum()
        return Loss(value, buffers, {"loss": value.detach()})

    return loss


def facts(lr: float) -> Facts:
    zero = torch.tensor(0)
    return Facts(zero, zero, torch.tensor(lr), zero, zero, torch.tensor(True), torch.zeros(2, dtype=torch.int64))


def local(model: Any, **settings: Any) -> LocalSGD:
    return LocalSGD(model, squared_error(model), epochs=1, batch_size=2, lr=0.5, **settings)


def batch(x: Sequence[float], y: Sequence[int], weight: Sequence[float]) -> Batch:
    return Batch(torch.tensor(x), torch.tensor(y), torch.tensor(weight))


def train(program: LocalSGD, batches: Sequence[Batch], lr: float) -> tuple[Training, list[float]]:
    shared = {"model": program.model.init(0)}
    carry = program.begin(shared, {}, facts(lr))
    losses = []
    for each in batches:
        carry, metrics = program.step(carry, each, shared, {}, facts(lr), {})
        losses.append(float(metrics["loss"]))
    return carry, losses


def test_one_step_follows_the_gradient_of_the_mean() -> None:
    # Errors: 1·2 + 0.5 - 1 = 1.5 and 1·(-1) + 0.5 - 0 = -0.5; d/dw = (1.5·2 + 0.5·1)/2, d/db = (1.5 - 0.5)/2.
    carry, losses = train(local(Line()), [batch([2.0, -1.0], [1, 0], [1.0, 1.0])], lr=0.5)
    assert losses == [0.5 * (2.25 + 0.25) / 2]
    assert float(carry.variables["w"]) == 1.0 - 0.5 * 1.75
    assert float(carry.variables["b"]) == 0.5 - 0.5 * 0.5


def test_padding_of_weight_zero_counts_for_nothing() -> None:
    carry, losses = train(local(Line()), [batch([2.0, 1000.0], [1, 7], [1.0, 0.0])], lr=0.5)
    assert losses == [0.5 * 2.25]
    assert float(carry.variables["w"]) == 1.0 - 0.5 * 3.0
    assert float(carry.variables["b"]) == 0.5 - 0.5 * 1.5


def test_momentum_and_weight_decay_act_as_in_torch() -> None:
    # Step 1: g = (3, 1.5) + 0.25·(1, 0.5) = (3.25, 1.625) = m; w = 1 - 0.25·3.25, b = 0.5 - 0.25·1.625.
    # Step 2, same sample: error = 2w + b - 1 = -0.53125; g = (-1.0625, -0.53125) + 0.25·(w, b); m = 0.5·m + g.
    program = local(Line(), momentum=0.5, weight_decay=0.25)
    same = batch([2.0, 0.0], [1, 0], [1.0, 0.0])
    carry, _ = train(program, [same, same], lr=0.25)
    w, b = 1 - 0.25 * 3.25, 0.5 - 0.25 * 1.625
    moved_w, moved_b = 0.5 * 3.25 - 1.0625 + 0.25 * w, 0.5 * 1.625 - 0.53125 + 0.25 * b
    assert float(carry.momentum["w"]) == moved_w
    assert float(carry.variables["w"]) == w - 0.25 * moved_w
    assert float(carry.variables["b"]) == b - 0.25 * moved_b


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 1e-2)])
def test_ten_steps_agree_with_the_optimiser_of_torch(momentum: float, weight_decay: float) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(5), torch.randn(10, 5)
    parameter = torch.nn.Parameter(start.clone())
    reference = torch.optim.SGD([parameter], lr=0.1, momentum=momentum, weight_decay=weight_decay)
    optimiser = SGD(momentum, weight_decay)
    trained: Tree = {"w": start}
    state = optimiser.begin(trained)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        reference.step()
        trained, state = optimiser.step(trained, {"w": gradient}, state, torch.tensor(0.1))
    torch.testing.assert_close(trained["w"], parameter.detach())


def test_without_momentum_there_is_no_momentum_in_the_carry() -> None:
    carry, _ = train(local(Line()), [], lr=0.5)
    assert carry.momentum == {}


def test_the_payload_is_local_minus_global_with_buffers() -> None:
    program = local(Line(buffers=["seen"]))
    shared = {"model": program.model.init(0)}
    carry, _ = train(program, [batch([2.0, 2.0], [1, 1], [1.0, 1.0])] * 3, lr=0.0)
    outcome = program.finish(carry, shared, {}, facts(0.0))
    assert {name: float(leaf) for name, leaf in outcome.payload["delta"].items()} == {"w": 0.0, "b": 0.0, "seen": 3.0}
    assert program.payload(shared)["delta"].keys() == outcome.payload["delta"].keys()
    assert program.local_model(shared, outcome.payload) == carry.variables


def test_buffers_have_neither_gradient_nor_momentum() -> None:
    carry, _ = train(local(Line(buffers=["seen"]), momentum=0.5), [], lr=0.5)
    assert carry.momentum.keys() == {"w", "b"}


def test_a_direction_replaces_the_gradients_by_what_it_makes_of_what_the_device_knows() -> None:
    def corrected(gradients: Tree, shared: Forest, own: Tree, facts: Facts) -> Tree:
        return {name: leaf - shared["control"][name] + facts.lr * own[name] for name, leaf in gradients.items()}

    program = local(Line(), direction=corrected)
    own = {"w": torch.tensor(8.0), "b": torch.tensor(2.0)}
    shared = {"model": program.model.init(0), "control": {"w": torch.tensor(1.0), "b": torch.tensor(0.5)}}
    begun = program.begin(shared, own, facts(0.25))
    carry, _ = program.step(begun, batch([2.0, 2.0], [1, 1], [1.0, 1.0]), shared, own, facts(0.25), {})
    assert float(carry.variables["w"]) == 1.0 - 0.25 * (3.0 - 1.0 + 0.25 * 8.0)
    assert float(carry.variables["b"]) == 0.5 - 0.25 * (1.5 - 0.5 + 0.25 * 2.0)


def test_the_learning_rate_decays_after_each_round() -> None:
    program = local(Line(), lr_decay=0.5)
    assert [program.learning_rate(round, 0) for round in (1, 2, 3)] == [0.5, 0.25, 0.125]
    assert program.learning_rate(3, 1) == 0.125
    assert local(Line()).learning_rate(3, 0) == 0.5


def test_the_learning_rate_may_begin_anew_with_each_task() -> None:
    program = local(Line(), lr_decay=0.5, rounds_per_task=2)
    assert [program.learning_rate(r, (r - 1) // 2) for r in (1, 2, 3, 4, 5)] == [0.5, 0.25, 0.5, 0.25, 0.5]
    # If there are more rounds than all tasks have, the last task goes on.
    assert program.learning_rate(7, 2) == 0.125


@pytest.mark.parametrize("examples", [5, 8, 10])
def test_each_epoch_is_an_order_of_its_own_and_its_last_batch_is_padded(examples: int) -> None:
    plan = shuffled_epochs(epochs=3, batch_size=4)(examples, np.random.default_rng(0))
    orders = np.random.default_rng(0).permuted(np.tile(np.arange(examples), (3, 1)), axis=1)
    padded = [[*order, *[-1] * (-examples % 4)] for order in orders.tolist()]
    assert plan.tolist() == np.reshape(padded, (-1, 4)).tolist()
    assert len({*map(tuple, padded)}) == 3


def test_steps_are_the_first_batches_of_as_many_epochs_as_are_needed() -> None:
    def plan(made: Plan, examples: int) -> list[list[int]]:
        return made(examples, np.random.default_rng(0)).tolist()

    whole = plan(shuffled_epochs(epochs=3, batch_size=4), 10)
    assert plan(shuffled_steps(9, 4), 10) == whole
    assert plan(shuffled_steps(7, 4), 10) == whole[:7]
    assert plan(shuffled_steps(2, 4), 10) == whole[:2]
    assert plan(shuffled_steps(5, 4), 3) == [[0, 1, 2, -1]] * 5
    assert plan(shuffled_steps(5, 4), 0) == []
    # The first batches are those of one epoch at most.
    assert plan(first_batches(2, 4), 10) == whole[:2]
    assert plan(first_batches(9, 4), 10) == whole[:3]


def test_local_steps_take_the_place_of_epochs() -> None:
    counting = LocalSGD(Line(), None, epochs=7, batch_size=4, lr=0.1, local_steps=6)  # type: ignore[arg-type]
    assert (counting.passes, counting.processed) == (0.0, 24.0)
    assert len(counting.stages[0].plan(100, np.random.default_rng(0))) == 6
    epochs = LocalSGD(Line(), None, epochs=7, batch_size=4, lr=0.1)  # type: ignore[arg-type]
    assert (epochs.passes, epochs.processed) == (7.0, 0.0)


def test_samples_that_fit_one_batch_keep_their_order() -> None:
    positions = shuffled_epochs(epochs=2, batch_size=4)(3, np.random.default_rng(0))
    assert positions.tolist() == [[0, 1, 2, -1]] * 2


def test_no_samples_make_no_steps() -> None:
    assert shuffled_epochs(epochs=2, batch_size=4)(0, np.random.default_rng(0)).shape == (0, 4)


def test_a_model_with_buffers_needs_its_padding() -> None:
    plain: Model = Line()
    assert not local(plain).stages[0].rows_matter
    assert local(Line(buffers=["seen"])).stages[0].rows_matter


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_stacked_steps_keep_the_dtype_of_each_leaf_and_its_bits(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    leaf, slope = (torch.randn(3, 5, generator=random).to(dtype) for _ in range(2))
    rates = torch.tensor([0.1, 0.2, 0.3])
    optimiser = SGD(momentum=0.9, weight_decay=0.01)

    def moved(leaf: Tensor, slope: Tensor, lr: Tensor) -> Tensor:
        return optimiser.step({"w": leaf}, {"w": slope}, {"w": slope}, lr)[0]["w"]

    stacked = torch.func.vmap(moved)(leaf, slope, rates)
    assert stacked.dtype == dtype
    assert torch.equal(stacked, torch.stack([moved(*each) for each in zip(leaf, slope, rates, strict=True)]))
