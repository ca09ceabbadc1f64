"""MFCL at the devices: the three losses by hand, and the batches to which synthetic samples are added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.incremental.generator.training import intended_classes
from fedemu.algorithms.incremental.mfcl import mfcl
from fedemu.algorithms.incremental.mfcl_local import NOISE, RehearsingSGD, StableLoss, generated, stored
from fedemu.algorithms.interface import Batch, Facts, Tree
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import SEEN, Growing, growing
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy

SHAPE = (1, 8, 8)
TASKS = ClassTasks.of(4, 2, [2, 0, 3, 1])
MODEL = growing(mlp(SHAPE, 4, (6,)), TASKS, SHAPE)
INGREDIENTS = Ingredients(MODEL, cross_entropy, 4, 2, 5, 0.05, devices=3, input_shape=SHAPE)
SHORT: dict[str, Any] = {"iterations": 20, "generator_batch": 8, "noise": 6, "synthetic_batch": 3}


def test_every_stored_sample_is_equally_likely() -> None:
    shared = {"synthetic": {"x": torch.arange(8.0)[:, None], "y": torch.arange(8)}}
    x, y = stored(shared, torch.randn(4000, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(x[:, 0].long(), y)
    assert y.bincount(minlength=8).min() > 430
    assert stored(shared, torch.tensor([-9.0, 0.0, 9.0]))[1].tolist() == [0, 4, 7]


def facts(task: int) -> Facts:
    zero = torch.tensor(0)
    return Facts(
        torch.tensor(4), zero, torch.tensor(0.5), zero, torch.tensor(task), torch.tensor(True), torch.tensor([0] * 4)
    )


class Case:
    """A model in its second task, and a batch of three real samples (the last is padding) and two synthetic ones."""

    def __init__(self, model: Growing = MODEL) -> None:
        self.model = model
        self.previous = MODEL.init(0)
        self.variables = MODEL.entered({**self.previous, "fc1.bias": self.previous["fc1.bias"] + 0.1}, 1, 7)
        x = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(0))
        weight = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
        self.batch = Batch(x, torch.tensor([3, 1, 3, 0, 2]), weight)
        self.counted = torch.tensor([0, 1, 3, 4])

    def value(self, **settings: Any) -> Tensor:
        defaults: dict[str, Any] = {
            "split": True,
            "fine_tuning": 0.0,
            "distillation": 0.0,
            "distillation_scale": "sum",
        }
        loss = StableLoss(self.model, self.model, 2, **{**defaults, **settings})
        return loss(self.variables, self.batch, {"previous": self.previous}, {}, facts(1)).value

    def outputs(self, variables: Tree, train: bool = True) -> Any:
        return self.model.apply(variables, self.batch.x, train)[0]


def test_the_loss_is_the_sum_of_equations_6_to_8(louder: Callable[[Any], Any]) -> None:
    case = Case()
    outputs = case.outputs(case.variables)
    new = functional.cross_entropy(outputs.logits[:2][:, [1, 3]], torch.tensor([1, 0]))
    torch.testing.assert_close(case.value(), new)
    everything = functional.cross_entropy(outputs.logits[:2], case.batch.y[:2])
    torch.testing.assert_close(case.value(split=False), everything)
    tuning = functional.cross_entropy(outputs.logits[case.counted], case.batch.y[case.counted])
    torch.testing.assert_close(case.value(fine_tuning=2.0) - new, 2 * tuning)
    # The previous model is in evaluation mode, which a model tells that is louder in training.
    case = Case(louder(MODEL))
    new, head = case.value(), case.previous["fc2.weight"][[0, 2]]
    features = case.outputs(case.variables).features - case.outputs(case.previous, train=False).features
    drift = (features[case.counted] @ head.t()).square().sum(1).mean()
    torch.testing.assert_close(case.value(distillation=3.0) - new, 3 * drift)
    torch.testing.assert_close(case.value(distillation=3.0, distillation_scale="mean") - new, 1.5 * drift)


def test_fine_tuning_moves_the_classifier_only_and_the_new_head_learns_by_real_samples_only() -> None:
    case = Case()

    def slopes(**settings: Any) -> Tree:
        trained = {name: leaf for name, leaf in case.variables.items() if name != SEEN}

        def value(trained: Tree) -> Tensor:
            case.variables = {**trained, SEEN: torch.ones(4)}
            return case.value(**settings)

        found: Tree = torch.func.grad(value)(trained)
        return found

    plain = slopes()
    assert plain["fc2.weight"][[0, 2]].abs().max() == 0
    tuned = slopes(fine_tuning=1.0)
    assert torch.equal(tuned["fc1.weight"], plain["fc1.weight"])
    assert tuned["fc2.weight"][[0, 2]].abs().sum(1).min() > 0


def test_a_step_adds_synthetic_samples_whose_weight_is_0_without_real_ones() -> None:
    seen: list[Batch] = []

    class Recorded(StableLoss):
        def __call__(self, variables: Tree, batch: Batch, *rest: Any) -> Any:
            seen.append(batch)
            return super().__call__(variables, batch, *rest)

    method = mfcl(INGREDIENTS, **SHORT)
    program = method.programs["rehearse"]
    assert isinstance(program, RehearsingSGD)
    assert program.noise == {NOISE: (3, 6)}
    assert program.passes == 2 * (1 + 3 / 5)
    assert replace(program, local_steps=4).processed == 4 * (5 + 3)
    generator = method._training.generator
    case, made = Case(), generator.model.init(0)
    program = replace(
        program, model=MODEL, loss=Recorded(MODEL, MODEL, 3, True, 1.0, 1.0, "sum"), synthetic=program.synthetic
    )
    shared = {"model": case.variables, "previous": case.previous, "generator": made}
    z = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    for weight in (torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0]), torch.zeros(3)):
        batch = Batch(case.batch.x[:3], case.batch.y[:3], weight)
        program.step(program.begin(shared, {}, facts(1)), batch, shared, {}, facts(1), {NOISE: z})
    images, classes = generated(generator, MODEL, "noise", 0.0)(shared, z)
    assert torch.equal(classes, intended_classes(MODEL, case.previous[SEEN] > 0, z))
    assert torch.equal(seen[0].x, torch.cat([case.batch.x[:3], images]))
    assert torch.equal(seen[0].y, torch.cat([case.batch.y[:3], classes]))
    assert [part.weight.tolist() for part in seen] == [[1, 1, 0, 1, 1, 1], [0, 1, 0, 1, 1, 1], [0] * 6]


def test_devices_tell_the_generator_the_class_as_the_coordinator_does() -> None:
    for targets, signal in (("noise", 3.0), ("noise", 0.0), ("model", 3.0)):
        method = mfcl(INGREDIENTS, **SHORT, targets=targets, class_signal=signal)
        program, training = method.programs["rehearse"], method._training
        assert isinstance(program, RehearsingSGD)
        previous, made = MODEL.init(0), training.generator.model.init(0)
        z = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
        images, classes = program.synthetic({"previous": previous, "generator": made}, z)
        told = torch.zeros(3, 6)
        told[:, 4:] = z[:, 4:]
        # The classes 2 and 0 have come, in this order.
        told[torch.arange(3), z[:, :2].argmax(1)] = 3.0
        given = told if (targets, signal) == ("noise", 3.0) else z
        assert torch.equal(training.given(previous, z), given)
        assert torch.equal(images, training.generator.images(made, given))
        said = MODEL.apply(previous, images, False)[0].logits.argmax(1)
        assert torch.equal(classes, z[:, :2].argmax(1) * -2 + 2 if targets == "noise" else said)
