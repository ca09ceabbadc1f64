"""SCAFFOLD: both rules of the control variates, on steps that can be followed by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedemu.algorithms.interface import (
    Batch,
    Context,
    DeviceReply,
    Facts,
    Forest,
    Model,
    Reply,
    Revealing,
    Tree,
    mean,
    total,
    weighted_mean,
)
from fedemu.algorithms.methods.fedavg import fedavg
from fedemu.algorithms.methods.scaffold import ControlledSGD, Rule, Scaffold, controlled, scaffold
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.registry import build_algorithm
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import Training
from fedemu.algorithms.training.objective import Loss, cross_entropy
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import DeviceId

SHAPE = (1, 12, 12)
MLP = mlp(SHAPE, 4, (8,))
RULES: tuple[Rule, ...] = ("gradient", "weights")
SHARES = [np.arange(0, 30), np.arange(40, 47), np.arange(0), np.arange(60, 90, 2), np.arange(100, 109)]
SLOPE = 3.0
OWN: Tree = {"w": torch.tensor(1.0)}


def ingredients(model: Model = MLP, **settings: Any) -> Ingredients:
    defaults: dict[str, Any] = {"classes": 4, "epochs": 2, "batch_size": 5, "lr": 0.02, "devices": len(SHARES)}
    return Ingredients(model, cross_entropy, **{**defaults, **settings})


def facts(steps: int) -> Facts:
    zero = torch.tensor(0)
    return Facts(
        zero, torch.tensor(steps), torch.tensor(0.5), zero, zero, torch.tensor(False), torch.zeros(2, dtype=torch.int64)
    )


class Slope:
    """A model with one weight, 1.0 at first, whose gradient is always 3, and a buffer that counts forward passes."""

    kind = "dense"
    buffers = frozenset({"seen"})

    def init(self, seed: int) -> Tree:
        return {"w": torch.tensor(1.0), "seen": torch.tensor(10.0)}


def slope_loss(variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
    value = SLOPE * variables["w"]
    return Loss(value, {"seen": variables["seen"] + 1}, {"loss": value.detach()})


def slope(rule: Rule, momentum: float = 0.0) -> ControlledSGD:
    model: Any = Slope()
    direction = controlled if rule == "gradient" else None
    return ControlledSGD(
        model, slope_loss, epochs=1, batch_size=1, lr=0.5, momentum=momentum, direction=direction, rule=rule
    )


def trained(program: ControlledSGD, steps: int) -> tuple[Forest, Any]:
    """The shared trees, with c = 2, and the Outcome of ``steps`` steps of 0.5 at a device with c_i = 1."""
    batch = Batch(torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.ones(1))
    shared = {"model": program.model.init(0), "control": {"w": torch.tensor(2.0)}}
    carry: Training = program.begin(shared, OWN, facts(steps))
    for _ in range(steps):
        carry, _ = program.step(carry, batch, shared, OWN, facts(steps), {})
    return shared, program.finish(carry, shared, OWN, facts(steps))


def numbers(forest: Mapping[str, Tree]) -> dict[str, dict[str, float]]:
    return {key: {name: float(leaf) for name, leaf in tree.items()} for key, tree in forest.items()}


@pytest.mark.parametrize("rule", RULES)
def test_steps_follow_the_gradient_less_the_devices_part_plus_the_fleets(rule: Rule) -> None:
    # Each of two steps moves by -0.5·(3 - 1 + 2), so c_i+ = 1 - 2 + 4/(2·0.5) = 3: the gradient.
    _, outcome = trained(slope(rule), 2)
    assert numbers(outcome.payload) == {"delta": {"w": -4.0, "seen": 2.0}, "control": {"w": 2.0}}
    assert numbers({"own": outcome.own}) == {"own": {"w": 3.0}}


def test_with_momentum_the_corrected_gradient_goes_through_the_optimiser() -> None:
    # Moves -0.5·4 and -0.5·(4 + 0.5·4); two steps count 2.5, so c_i+ = 1 - 2 + 5/(2.5·0.5) = 3: the gradient.
    _, outcome = trained(slope("gradient", momentum=0.5), 2)
    assert numbers(outcome.payload) == {"delta": {"w": -5.0, "seen": 2.0}, "control": {"w": 2.0}}
    assert numbers({"own": outcome.own}) == {"own": {"w": 3.0}}


def test_with_momentum_the_other_rule_corrects_the_weights_past_it() -> None:
    # Moves -0.5·3 and -0.5·(3 + 0.5·3), and twice -0.5·(2 - 1); c_i+ = 1 - 2 + 4.75/(2·0.5), 1.25 times the gradient.
    _, outcome = trained(slope("weights", momentum=0.5), 2)
    assert numbers(outcome.payload) == {"delta": {"w": -4.75, "seen": 2.0}, "control": {"w": 2.75}}
    assert numbers({"own": outcome.own}) == {"own": {"w": 3.75}}


@pytest.mark.parametrize("rule", RULES)
def test_a_device_without_steps_keeps_its_control_variate(rule: Rule) -> None:
    _, outcome = trained(slope(rule, momentum=0.5), 0)
    assert numbers(outcome.payload) == {"delta": {"w": 0.0, "seen": 0.0}, "control": {"w": 0.0}}
    assert numbers({"own": outcome.own}) == {"own": {"w": 1.0}}


@pytest.mark.parametrize("rule", RULES)
def test_a_learning_rate_that_has_decayed_to_nothing_changes_nothing(
    rule: Rule, little_fleet: Callable[..., Any]
) -> None:
    """The second round's is 1e-50, which is 0 as a float32."""
    fleet = little_fleet(scaffold(ingredients(lr_decay=5e-49), rule), MLP.init(1), SHARES)
    fleet.play([0, 1])
    model, own = fleet.model, dict(fleet.own)
    fleet.play([0, 1])
    for name, leaf in model.items():
        assert torch.equal(fleet.model[name], leaf)
    for i in (0, 1):
        assert all(torch.equal(leaf, own[i][name]) for name, leaf in fleet.own[i].items())


def test_payload_and_own_state_have_the_form_that_was_announced() -> None:
    program = slope("gradient")
    shared, outcome = trained(program, 1)
    assert {key: set(tree) for key, tree in program.payload(shared).items()} == {
        key: set(tree) for key, tree in outcome.payload.items()
    }
    assert program.initial_own(shared) == {"w": torch.tensor(0.0)}
    assert isinstance(program, Revealing)
    assert numbers({"model": program.local_model(shared, outcome.payload)}) == {"model": {"w": -1.0, "seen": 11.0}}


def test_the_fleets_control_variate_moves_by_the_changes_over_all_devices() -> None:
    method = Scaffold(slope("gradient"), devices=10)
    context = Context(1, 0, 1, 4)
    state = method.init(Slope().init(0), context)
    assert state.control == {"w": torch.tensor(0.0)}
    script = method.round(state, context)
    ask: Any = next(script)
    assert ask.shared == {"model": state.variables, "control": state.control}
    assert ask.reduce == {"delta": weighted_mean, "control": total}
    values = {
        "delta": {"w": torch.tensor(-0.5), "seen": torch.tensor(2.0)},
        "control": {"w": torch.tensor(5.0)},
    }
    with pytest.raises(StopIteration) as end:
        script.send(Reply(values, (DeviceReply(DeviceId(3), 10, 5, {}, None),)))
    assert end.value.value.variables == {"w": torch.tensor(0.5), "seen": torch.tensor(12.0)}
    assert end.value.value.control == {"w": torch.tensor(0.5)}


def test_devices_may_weigh_evenly() -> None:
    method = scaffold(ingredients(), weights="even")
    context = Context(1, 0, 1, 4)
    ask: Any = next(method.round(method.init(MLP.init(0), context), context))
    assert ask.reduce == {"delta": mean, "control": total}


def largest_difference(one: Tree, other: Tree) -> float:
    return max(float((one[name] - leaf).abs().max()) for name, leaf in other.items())


def mean_control(fleet: Any) -> Tree:
    return {name: sum(own[name] for own in fleet.own.values()) / len(SHARES) for name in fleet.state.control}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_fleets_control_variate_stays_the_mean_of_the_devices(
    rule: Rule, momentum: float, little_fleet: Callable[..., Any]
) -> None:
    fleet = little_fleet(scaffold(ingredients(momentum=momentum), rule), MLP.init(1), SHARES)
    rounds: Sequence[tuple[list[int], list[int]]] = [
        ([0, 1, 3], []),
        ([1, 2, 4], [4]),
        ([0, 3, 4], [0]),
        ([0, 1, 2, 3, 4], [1, 3]),
    ]
    for cohort, lost in rounds:
        fleet.play(cohort, lost)
        magnitude = max(float(leaf.abs().max()) for leaf in fleet.state.control.values())
        assert magnitude > 1e-3
        assert largest_difference(fleet.state.control, mean_control(fleet)) < 1e-6 * magnitude


@pytest.mark.parametrize("rule", RULES)
def test_a_first_round_is_federated_averaging_to_the_bit(rule: Rule, little_fleet: Callable[..., Any]) -> None:
    settings = ingredients(momentum=0.9, weight_decay=1e-3)
    corrected = little_fleet(scaffold(settings, rule), MLP.init(1), SHARES)
    average = little_fleet(fedavg(settings), MLP.init(1), SHARES)
    for fleet in (corrected, average):
        fleet.play([0, 1, 2, 3])
    assert largest_difference(corrected.model, MLP.init(1)) > 1e-3
    assert all(torch.equal(corrected.model[name], leaf) for name, leaf in average.model.items())


@pytest.mark.parametrize(("momentum", "same"), [(0.0, True), (0.9, False)])
def test_without_momentum_the_rules_are_the_same(momentum: float, same: bool, little_fleet: Callable[..., Any]) -> None:
    settings = ingredients(momentum=momentum, weight_decay=1e-3)
    one, other = (little_fleet(scaffold(settings, rule), MLP.init(1), SHARES) for rule in RULES)
    for cohort in ([0, 1, 3], [1, 3, 4], [0, 3, 4]):
        one.play(cohort)
        other.play(cohort)
    assert (largest_difference(one.model, other.model) < 1e-6) == same
    assert (largest_difference(one.state.control, other.state.control) < 1e-5) == same


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_stacked_and_serial_results_agree(rule: Rule, momentum: float, little_fleet: Callable[..., Any]) -> None:
    method = scaffold(ingredients(momentum=momentum, weight_decay=1e-3), rule)
    fleet = little_fleet(method, MLP.init(1), SHARES, executor=Checked(Serial(), Vmapped(3)))
    for cohort in ([0, 1, 2, 3], [0, 2, 3, 4]):
        fleet.play(cohort)


@pytest.mark.parametrize("rule", RULES)
def test_control_variates_of_a_model_in_half_precision_are_in_single_precision_and_keep_their_mean(
    rule: Rule, half_linear: Model, little_fleet: Callable[..., Any]
) -> None:
    model = half_linear
    fleet = little_fleet(scaffold(ingredients(model), rule), model.init(1), SHARES, executor=Vmapped(3))
    for _ in range(10):
        fleet.play([0, 1, 2, 3])
        fleet.play([1, 3, 4])
    assert {leaf.dtype for leaf in fleet.model.values()} == {torch.bfloat16}
    assert {leaf.dtype for own in fleet.own.values() for leaf in own.values()} == {torch.float32}
    assert not torch.equal(fleet.model["layer.weight"], model.init(1)["layer.weight"])
    assert largest_difference(fleet.state.control, mean_control(fleet)) < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_running_statistics_have_no_control_variates(rule: Rule, little_fleet: Callable[..., Any]) -> None:
    model = from_module(lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(144), nn.Linear(144, 4)))
    fleet = little_fleet(scaffold(ingredients(model), rule), model.init(1), SHARES)
    for _ in range(2):
        fleet.play([0, 1, 3])
    assert fleet.state.control.keys() == model.init(1).keys() - model.buffers
    assert all(not torch.equal(fleet.model[name], leaf) for name, leaf in model.init(1).items())


def test_a_single_sample_under_batch_normalisation_is_no_disagreement(little_fleet: Callable[..., Any]) -> None:
    model = from_module(lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    method = scaffold(ingredients(model, epochs=1, lr=0.05))
    fleet = little_fleet(method, model.init(1), [share[:1] for share in SHARES], executor=Checked(Serial(), Vmapped(3)))
    for _ in range(3):
        fleet.play([0, 1, 3])


@pytest.mark.parametrize("rule", RULES)
def test_a_run_that_diverges_ends_in_values_that_are_not_finite(rule: Rule, little_fleet: Callable[..., Any]) -> None:
    fleet = little_fleet(scaffold(ingredients(lr=1e30, momentum=0.9), rule), MLP.init(1), SHARES)
    for _ in range(2):
        fleet.play([0, 1, 3])
    assert not all(bool(leaf.isfinite().all()) for leaf in fleet.model.values())


def test_a_fleet_of_unknown_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="ingredients say devices = 0; give them the number of devices"):
        scaffold(ingredients(devices=0))


def test_the_rules_have_names() -> None:
    with pytest.raises(ConfigurationError, match=r"algorithm.options.rule = 'both' does not fit 'scaffold'"):
        build_algorithm("scaffold", {"rule": "both"}, ingredients())
