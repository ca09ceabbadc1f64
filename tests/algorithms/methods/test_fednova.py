"""FedNova: effective steps, normalised directions, and their averages."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

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
    weighted_mean,
)
from fedemu.algorithms.methods.fedavg import fedavg
from fedemu.algorithms.methods.fednova import FedNova, NormalisedSGD, effective_steps, fednova, minus_own
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import Training
from fedemu.algorithms.training.objective import Loss, cross_entropy
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.ids import DeviceId

SHAPE = (1, 12, 12)
MLP = mlp(SHAPE, 4, (8,))
GRADIENT = 3.0
UNEQUAL = [np.arange(0, 30), np.arange(40, 47), np.arange(0), np.arange(60, 90, 2)]


def ingredients(model: Model = MLP, **settings: Any) -> Ingredients:
    defaults: dict[str, Any] = {"classes": 4, "epochs": 2, "batch_size": 5, "lr": 0.02, "devices": 4}
    return Ingredients(model, cross_entropy, **{**defaults, **settings})


def facts(steps: int, lr: float = 0.5, first_visit: bool = True) -> Facts:
    zero = torch.tensor(0)
    taken = torch.tensor(steps)
    return Facts(
        zero, taken, torch.tensor(lr), zero, zero, torch.tensor(first_visit), torch.zeros(2, dtype=torch.int64)
    )


class Slope:
    """A model with one weight, whose loss is three times this weight, and a buffer that counts forward passes."""

    kind = "dense"
    buffers = frozenset({"seen"})

    def init(self, seed: int) -> Tree:
        return {"w": torch.tensor(1.0), "seen": torch.tensor(10.0)}


def slope_loss(variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
    value = GRADIENT * variables["w"]
    return Loss(value, {"seen": variables["seen"] + 1}, {"loss": value.detach()})


def slope(momentum: float = 0.0, **settings: Any) -> NormalisedSGD:
    model: Any = Slope()
    return NormalisedSGD(model, slope_loss, epochs=1, batch_size=1, lr=0.5, momentum=momentum, **settings)


def trained(program: NormalisedSGD, steps: int, own: Tree, lr: float = 0.5) -> Any:
    """The outcome of ``steps`` steps from the initial model."""
    batch = Batch(torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.ones(1))
    shared = {"model": program.model.init(0)}
    carry: Training = program.begin(shared, own, facts(steps, lr))
    for _ in range(steps):
        carry, _ = program.step(carry, batch, shared, own, facts(steps, lr), {})
    return program.finish(carry, shared, own, facts(steps, lr))


def test_without_momentum_every_step_counts_as_one() -> None:
    assert [effective_steps(steps, 0.0) for steps in (0, 1, 7)] == [0.0, 1.0, 7.0]


def test_momentum_makes_early_steps_count_for_more() -> None:
    # With momentum 0.5 the gradient of a step counts 1, 1.5 or 1.75 if 0, 1 or 2 more steps follow.
    assert [effective_steps(steps, 0.5) for steps in (0, 1, 2, 3)] == [0.0, 1.0, 2.5, 4.25]


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
def test_effective_steps_sum_the_weights_of_all_gradients(momentum: float) -> None:
    weights = [(1 - momentum ** (40 - k)) / (1 - momentum) for k in range(40)]
    assert effective_steps(40, momentum) == pytest.approx(sum(weights), rel=1e-12)


def test_effective_steps_of_a_tensor_keep_its_shape_and_floating_dtype() -> None:
    whole = torch.tensor([[0, 1], [2, 3]])
    expected = torch.tensor([[0.0, 1.0], [2.5, 4.25]])
    assert torch.equal(effective_steps(whole, 0.5), expected)
    assert torch.equal(effective_steps(whole.double(), 0.5), expected.double())
    assert torch.equal(torch.func.vmap(lambda steps: effective_steps(steps, 0.5))(whole), expected)
    assert effective_steps(torch.tensor(1), 0.999).item() == pytest.approx(1.0, abs=1e-7)


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_effective_steps_refuse_a_momentum_that_never_fades(momentum: float) -> None:
    with pytest.raises(ValueError, match=f"momentum = {momentum} has no number of effective steps"):
        effective_steps(3, momentum)


@pytest.mark.parametrize(("momentum", "effective"), [(0.0, 3.0), (0.5, 4.25)])
def test_a_device_sends_its_move_per_effective_step_and_buffers_as_they_are(momentum: float, effective: float) -> None:
    outcome = trained(slope(momentum), 3, {})
    assert outcome.payload["direction"] == {"w": torch.tensor(-0.5 * GRADIENT), "seen": torch.tensor(3.0)}
    assert outcome.payload["steps"] == {"effective": torch.tensor(effective)}
    assert outcome.own == {}


def test_the_payload_is_of_the_form_that_was_announced() -> None:
    program = slope(0.5)
    announced, sent = program.payload({"model": program.model.init(0)}), trained(program, 2, {}).payload
    assert {key: {name: leaf.dtype for name, leaf in tree.items()} for key, tree in announced.items()} == {
        key: {name: leaf.dtype for name, leaf in tree.items()} for key, tree in sent.items()
    }


def test_diagnosis_gets_the_local_model_back() -> None:
    program = slope(0.5)
    assert isinstance(program, Revealing)
    local = program.local_model({"model": program.model.init(0)}, trained(program, 3, {}).payload)
    assert local == {"w": torch.tensor(1.0 - 0.5 * GRADIENT * 4.25), "seen": torch.tensor(13.0)}


def test_the_global_model_goes_the_mean_number_of_steps_in_the_mean_direction() -> None:
    # Devices of 1 and 3 examples: a = 2 and 6, so 5 in the mean; d = 1 and -1, so -0.5.
    method = FedNova(slope())
    context = Context(1, 0, 1, 4)
    state = method.init({"w": torch.tensor(1.0), "seen": torch.tensor(10.0)}, context)
    script = method.round(state, context)
    ask: Any = next(script)
    assert ask.shared == {"model": state.variables}
    assert ask.reduce == {"direction": weighted_mean, "steps": weighted_mean}
    values = {
        "direction": {"w": torch.tensor(-0.5), "seen": torch.tensor(4.0)},
        "steps": {"effective": torch.tensor(5.0)},
    }
    with pytest.raises(StopIteration) as end:
        script.send(Reply(values, (DeviceReply(DeviceId(0), 4, 6, {}, None),)))
    assert end.value.value.variables == {"w": torch.tensor(1.0 - 2.5), "seen": torch.tensor(14.0)}


def test_devices_may_weigh_evenly() -> None:
    method = fednova(ingredients(), weights="even")
    context = Context(1, 0, 1, 4)
    ask: Any = next(method.round(method.init(MLP.init(0), context), context))
    assert ask.reduce == {"direction": mean, "steps": mean}


def largest_difference(one: Tree, other: Tree) -> float:
    return max(float((one[name] - leaf).abs().max()) for name, leaf in other.items())


def test_with_equal_steps_fednova_is_federated_averaging(little_fleet: Callable[..., Any]) -> None:
    equal = [np.arange(start, start + 18) for start in (0, 20, 40)]
    for momentum, tolerance in ((0.0, 0.0), (0.9, 1e-7)):  # Eight steps divide without rounding.
        settings = ingredients(momentum=momentum)
        nova, average = (little_fleet(build(settings), MLP.init(1), equal) for build in (fednova, fedavg))
        for cohort in ([0, 1, 2], [2, 0]):
            nova.play(cohort)
            average.play(cohort)
        assert largest_difference(nova.model, MLP.init(1)) > 1e-3
        assert largest_difference(nova.model, average.model) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_moves_of_many_steps_are_not_lost_in_half_precision(dtype: torch.dtype) -> None:
    model: Any = SimpleNamespace(buffers=frozenset())
    program = NormalisedSGD(
        model, slope_loss, epochs=1, batch_size=1, lr=0.5, momentum=0.9, direction=minus_own, subtract_previous=True
    )
    before, after = ({"w": torch.tensor(value, dtype=dtype)} for value in (0.0, 2.0**-13))
    shared = {"model": before}
    own = program.initial_own(shared)
    outcome = program.finish(Training(after, {}), shared, own, facts(500))
    assert program.local_model(shared, outcome.payload) == after
    assert {leaf.dtype for leaf in (*own.values(), *outcome.own.values())} == {torch.float32}
    assert [leaf.dtype for leaf in program.payload(shared)["direction"].values()] == [torch.float32]
    assert minus_own(after, shared, outcome.own, facts(1))["w"].dtype == dtype


def test_with_unequal_steps_fednova_is_not_federated_averaging(little_fleet: Callable[..., Any]) -> None:
    fleets = [little_fleet(build(ingredients()), MLP.init(1), UNEQUAL) for build in (fednova, fedavg)]
    for fleet in fleets:
        fleet.play([0, 1])
    assert largest_difference(fleets[0].model, fleets[1].model) > 1e-4


def test_a_device_without_samples_changes_nothing(little_fleet: Callable[..., Any]) -> None:
    fleets = [little_fleet(fednova(ingredients(momentum=0.9)), MLP.init(1), UNEQUAL) for _ in range(2)]
    for fleet, cohort in zip(fleets, ([0, 1, 2], [0, 1]), strict=True):
        fleet.play(cohort)
    assert largest_difference(fleets[0].model, fleets[1].model) == 0.0
    assert float(fleets[0].payloads[2]["steps"]["effective"]) == 0.0


def test_the_previous_direction_is_subtracted_from_the_second_visit_on() -> None:
    # The first visit follows 3; the second 3 - 3 = 0; the third 3 - 0 again.
    program = slope(0.5, direction=minus_own, subtract_previous=True)
    own = program.initial_own({"model": program.model.init(0)})
    assert own == {"w": torch.tensor(0.0)}
    followed = []
    for steps in (2, 1, 3):
        own = trained(program, steps, own).own
        followed.append(float(own["w"]))
    assert followed == [GRADIENT, 0.0, GRADIENT]
    assert trained(program, 0, own).own == own
    assert trained(program, 2, own, lr=0.0).own == own, "a learning rate that has decayed to 0 tells no gradient"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("subtract_previous", [False, True])
def test_stacked_and_serial_results_agree(
    momentum: float, subtract_previous: bool, little_fleet: Callable[..., Any]
) -> None:
    method = fednova(ingredients(momentum=momentum, weight_decay=1e-3), subtract_previous=subtract_previous)
    program: Any = method.programs["train"]
    assert program.direction is (minus_own if subtract_previous else None)
    assert bool(program.initial_own({"model": MLP.init(1)})) == subtract_previous
    fleet = little_fleet(method, MLP.init(1), UNEQUAL, executor=Checked(Serial(), Vmapped(3)))
    for _ in range(2):
        fleet.play([0, 1, 2, 3])


def test_running_statistics_are_averaged_plainly(little_fleet: Callable[..., Any]) -> None:
    model = from_module(
        lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(144), torch.nn.Linear(144, 4))
    )
    fleets = [little_fleet(build(ingredients(model)), model.init(1), UNEQUAL) for build in (fednova, fedavg)]
    for fleet in fleets:
        fleet.play([0, 1, 3])
    assert model.buffers
    for name in model.buffers:
        assert torch.equal(fleets[0].model[name], fleets[1].model[name])


def test_a_run_that_diverges_ends_in_values_that_are_not_finite(little_fleet: Callable[..., Any]) -> None:
    fleet = little_fleet(fednova(ingredients(lr=1e30, momentum=0.9)), MLP.init(1), UNEQUAL)
    for _ in range(2):
        fleet.play([0, 1, 3])
    assert not all(bool(leaf.isfinite().all()) for leaf in fleet.model.values())
