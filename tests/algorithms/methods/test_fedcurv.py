"""FedCurv: the Fisher diagonal, the penalty, and the sums at the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedemu.algorithms.interface import Batch, Facts, Forest, Model, Outputs, Revealing, Tree
from fedemu.algorithms.methods.fedavg import fedavg
from fedemu.algorithms.methods.fedcurv import CurvatureSGD, FedCurv, curvature, fedcurv
from fedemu.algorithms.models.feed_forward import cnn, mlp
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.registry import build_algorithm
from fedemu.algorithms.training.asymmetric import AsymmetricCrossEntropy
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import Objective, cross_entropy
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.errors import ConfigurationError

SHAPE = (1, 12, 12)
MLP = mlp(SHAPE, 4, (8,))
SHARES = [np.arange(0, 30), np.arange(40, 47), np.arange(0), np.arange(60, 90, 2)]


def ingredients(model: Model = MLP, **settings: Any) -> Ingredients:
    defaults: dict[str, Any] = {"classes": 4, "epochs": 2, "batch_size": 5, "lr": 0.02}
    return Ingredients(model, cross_entropy, **{**defaults, **settings})


class Line:
    """A model with the logit ``w·x + b``, for numbers."""

    kind = "dense"
    buffers: frozenset[str] = frozenset()

    def init(self, seed: int) -> Tree:
        return {"w": torch.tensor(1.0), "b": torch.tensor(0.5)}

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        return Outputs(variables["w"] * x + variables["b"], x, {}), {}


def squared_error(logits: Tensor, batch: Batch, facts: Facts) -> Tensor:
    return 0.5 * ((logits - batch.y).square() * batch.weight).sum() / batch.weight.sum()


def line(penalty: float = 1.0) -> CurvatureSGD:
    model: Any = Line()
    likelihood = Objective(model, squared_error)
    loss = Objective(model, squared_error, (curvature(penalty),))
    return CurvatureSGD(
        model, loss, epochs=1, batch_size=2, lr=0.5, likelihood=likelihood, fisher_batches=2, fisher_batch_size=1
    )


def facts() -> Facts:
    zero = torch.tensor(0)
    return Facts(zero, zero, torch.tensor(0.5), zero, zero, torch.tensor(True), torch.zeros(2, dtype=torch.int64))


def batch(x: Sequence[float], y: Sequence[int]) -> Batch:
    return Batch(torch.tensor(x), torch.tensor(y), torch.ones(len(x)))


def tree(w: float, b: float) -> Tree:
    return {"w": torch.tensor(w), "b": torch.tensor(b)}


def numbers(tree: Tree) -> dict[str, float]:
    return {name: float(leaf) for name, leaf in tree.items()}


SHARED: Forest = {"model": tree(1.0, 0.5), "fisher": tree(2.0, 1.0), "weighted": tree(1.0, 4.0)}
OWN: Tree = {
    "fisher/w": torch.tensor(0.5),
    "fisher/b": torch.tensor(1.0),
    "weighted/w": torch.tensor(0.25),
    "weighted/b": torch.tensor(1.0),
}


def squared(batches: Sequence[Batch]) -> tuple[Any, dict[str, dict[str, float]]]:
    """The outcome without training after these batches of the second stage, and its payload as numbers."""
    program = line()
    carry = program.begin(SHARED, OWN, facts())
    for each in batches:
        carry, _ = program.square(carry, each, SHARED, OWN, facts(), {})
    outcome = program.finish(carry, SHARED, OWN, facts())
    return outcome, {key: numbers(tree) for key, tree in outcome.payload.items()}


def test_the_diagonal_of_samples_is_the_mean_of_their_squared_gradients() -> None:
    # Errors 2 + 0.5 - 1 = 1.5 and -1 + 0.5 - 0 = -0.5: gradients (3, 1.5) and (0.5, -0.5) by (w, b).
    outcome, payload = squared([batch([2.0], [1]), batch([-1.0], [0])])
    fisher = {"w": (9 + 0.25) / 2, "b": (2.25 + 0.25) / 2}
    assert numbers(outcome.own) == {
        "fisher/w": fisher["w"],
        "fisher/b": fisher["b"],
        "weighted/w": fisher["w"] * 1.0,
        "weighted/b": fisher["b"] * 0.5,
    }
    assert payload["fisher"] == {"w": fisher["w"] - 0.5, "b": fisher["b"] - 1.0}
    assert payload["weighted"] == {"w": fisher["w"] - 0.25, "b": fisher["b"] * 0.5 - 1.0}


def test_the_diagonal_of_batches_squares_their_mean_gradients() -> None:
    outcome, _ = squared([batch([2.0, -1.0], [1, 0])])
    assert float(outcome.own["fisher/w"]) == 1.75**2
    assert float(outcome.own["fisher/b"]) == 0.5**2


def test_the_diagonal_of_er_ace_is_that_of_cross_entropy_as_a_single_sample_has_no_batch(
    little_fleet: Callable[..., Any],
) -> None:
    found = []
    for criterion in (AsymmetricCrossEntropy(None), cross_entropy):
        given = Ingredients(MLP, criterion, 4, epochs=0, batch_size=5, lr=0.02)
        fleet = little_fleet(fedcurv(given), MLP.init(0), SHARES, executor=Checked(Serial(), Vmapped(2)))
        fleet.play([0, 3])
        found.append(fleet.state.fisher)
    assert all(float(leaf.sum()) > 0 for leaf in found[0].values())
    for name, leaf in found[0].items():
        torch.testing.assert_close(leaf, found[1][name])


def test_a_visit_without_samples_changes_nothing() -> None:
    outcome, payload = squared([])
    assert numbers(outcome.own) == numbers(OWN)
    assert payload == {key: {"w": 0.0, "b": 0.0} for key in ("delta", "fisher", "weighted")}


def test_training_is_drawn_to_where_the_other_devices_are_certain() -> None:
    # P = (1.5, 0) and Q = (0.75, 3) without the device's own part; the gradient gains penalty · 2(P·θ - Q).
    carry, metrics = line(penalty=0.25).train(
        line().begin(SHARED, OWN, facts()), batch([2.0, -1.0], [1, 0]), SHARED, OWN, facts(), {}
    )
    assert float(carry.training.variables["w"]) == 1.0 - 0.5 * (1.75 + 0.25 * 2 * (1.5 * 1.0 - 0.75))
    assert float(carry.training.variables["b"]) == 0.5 - 0.5 * (0.5 + 0.25 * 2 * (0.0 * 0.5 - 3.0))
    assert float(metrics["loss"]) == 0.5 * (2.25 + 0.25) / 2


@pytest.mark.parametrize(("fisher", "steps", "size"), [("samples", 12, 1), ("batches", 3, 5)])
def test_the_second_stage_sees_no_more_samples_than_asked_for(fisher: Any, steps: int, size: int) -> None:
    method = fedcurv(ingredients(), samples=12, fisher=fisher)
    program: Any = method.programs["train"]
    plan = program.stages[1].plan
    assert plan(30, np.random.default_rng(0)).shape == (steps, size)
    assert sorted(plan(7, np.random.default_rng(0)).ravel().tolist())[-7:] == list(range(7))
    assert program.passes == 3.0


def test_without_penalty_fedcurv_is_federated_averaging(little_fleet: Callable[..., Any]) -> None:
    ours = little_fleet(fedcurv(ingredients(momentum=0.9), penalty=0.0), MLP.init(0), SHARES)
    theirs = little_fleet(fedavg(ingredients(momentum=0.9)), MLP.init(0), SHARES)
    for _ in range(2):
        ours.play([0, 1, 2, 3])
        theirs.play([0, 1, 2, 3])
    for name, leaf in theirs.model.items():
        assert torch.equal(ours.model[name], leaf)


def test_a_larger_penalty_draws_devices_more(little_fleet: Callable[..., Any]) -> None:
    def learned(method: Any) -> Tensor:
        fleet = little_fleet(method, MLP.init(0), SHARES)
        fleet.play([0, 1, 3])
        fleet.play([0, 1, 3])
        return torch.cat([leaf.flatten() for leaf in fleet.model.values()])

    plain = learned(fedavg(ingredients()))
    little, much = (float((learned(fedcurv(ingredients(), penalty=one)) - plain).norm()) for one in (0.01, 0.1))
    assert 0 < little < much


def test_a_device_is_not_drawn_to_itself(little_fleet: Callable[..., Any]) -> None:
    ours = little_fleet(fedcurv(ingredients(), penalty=10.0), MLP.init(0), SHARES)
    theirs = little_fleet(fedavg(ingredients()), MLP.init(0), SHARES)
    for _ in range(2):
        ours.play([0])
        theirs.play([0])
    for name, leaf in theirs.model.items():
        assert torch.equal(ours.model[name], leaf)


def test_the_sums_match_the_terms_that_devices_keep_whoever_takes_part_or_is_lost(
    little_fleet: Callable[..., Any],
) -> None:
    fleet = little_fleet(fedcurv(ingredients()), MLP.init(0), SHARES)
    for cohort, lost in (([0, 1], []), ([1, 2, 3], [1]), ([0, 3], [0]), ([0, 1, 3], [3])):
        fleet.play(cohort, lost)
        for key, total in (("fisher", fleet.state.fisher), ("weighted", fleet.state.weighted)):
            for name, leaf in total.items():
                kept = sum(own[f"{key}/{name}"] for own in fleet.own.values())
                torch.testing.assert_close(leaf, kept, rtol=1e-5, atol=1e-8)
    assert fleet.own.keys() == {0, 1, 2, 3}
    assert float(fleet.state.fisher["fc1.weight"].min()) >= -1e-8


def test_terms_of_a_model_in_half_precision_are_sums_in_single_precision(
    half_linear: Model, little_fleet: Callable[..., Any]
) -> None:
    model, exact = half_linear, mlp(SHAPE, 4, ())
    fleets = []
    for one in (model, exact):
        variables = one.init(0)
        if one is exact:
            variables = dict(zip(variables, map(Tensor.float, model.init(0).values()), strict=True))
        method = fedcurv(ingredients(one, epochs=0), penalty=0.1)
        fleet = little_fleet(method, variables, [np.arange(400), *SHARES], executor=Vmapped(2))
        fleet.play([0, 1])
        fleets.append(fleet)
    half, single = (fleet.state for fleet in fleets)
    assert {leaf.dtype for leaf in half.fisher.values()} == {torch.float32}
    for leaf, other in zip(half.fisher.values(), single.fisher.values(), strict=True):
        torch.testing.assert_close(leaf.sum(), other.sum(), rtol=0.01, atol=0)
    fleets[0].play([1, 2])
    assert {leaf.dtype for leaf in fleets[0].model.values()} == {torch.bfloat16}


@pytest.mark.parametrize("fisher", ["samples", "batches"])
def test_devices_with_a_cnn_agree_alone_and_in_company(little_fleet: Callable[..., Any], fisher: Any) -> None:
    model = cnn(SHAPE, 4)
    settings = ingredients(model, epochs=1, momentum=0.9)
    checked = Checked(Serial(), Vmapped(2))
    method = fedcurv(settings, penalty=0.1, samples=4, fisher=fisher)
    fleet = little_fleet(method, model.init(0), [share[:8] for share in SHARES], executor=checked)
    fleet.play([0, 1])
    before = fleet.model
    fleet.play([1, 2])
    assert any(not torch.equal(fleet.model[name], leaf) for name, leaf in before.items())


def test_the_trained_model_can_be_told_from_the_payload() -> None:
    program: Any = fedcurv(ingredients()).programs["train"]
    assert isinstance(program, Revealing)
    assert program.payload({key: MLP.init(0) for key in ("model", "fisher", "weighted")}).keys() == {
        "delta",
        "fisher",
        "weighted",
    }


def normalised() -> Model:
    return from_module(lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)))


def test_gradients_of_samples_refuse_batch_normalisation() -> None:
    with pytest.raises(ConfigurationError, match="'fedcurv' can't work with batch normalisation, because the gradient"):
        fedcurv(ingredients(normalised()))


def test_gradients_of_batches_leave_running_statistics_alone(little_fleet: Callable[..., Any]) -> None:
    model = normalised()
    settings = ingredients(model)
    ours = little_fleet(fedcurv(settings, penalty=0.0, fisher="batches"), model.init(0), SHARES)
    theirs = little_fleet(fedavg(settings), model.init(0), SHARES)
    ours.play([0, 3])
    theirs.play([0, 3])
    assert all(torch.equal(ours.model[name], leaf) for name, leaf in theirs.model.items())
    assert not model.buffers & ours.state.fisher.keys()


def test_fedcurv_is_built_by_name() -> None:
    assert isinstance(build_algorithm("fedcurv", {"penalty": 0.5, "fisher": "batches"}, ingredients()), FedCurv)
    with pytest.raises(ConfigurationError, match="'rows' does not fit 'fedcurv'"):
        build_algorithm("fedcurv", {"fisher": "rows"}, ingredients())
