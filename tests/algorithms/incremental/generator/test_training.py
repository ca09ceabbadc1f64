"""Training of a generator against a frozen model: what it learns, its losses, and resumed jobs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.incremental.generator.losses import image_prior_loss
from fedemu.algorithms.incremental.generator.training import (
    GeneratorSettings,
    GeneratorTraining,
    classes_seen,
    intended_classes,
)
from fedemu.algorithms.interface import Context, ServerJob, Tree
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import SEEN, Growing, growing
from fedemu.algorithms.models.image_generator import Generator
from fedemu.algorithms.models.layer_statistics import running_statistics, watched
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.trees import unflatten
from fedemu.ops.data import made

SHAPE = (1, 8, 8)
CONTEXT = Context(3, 1, 7, 10)
TASKS = ClassTasks.of(10, 5, [3, 8, 0, 1, 5, 9, 2, 4, 6, 7])
SMALL = Generator(8, 1, 16)


class Frozen(NamedTuple):
    """A perceptron that has learnt five of the ten digits, and the statistics of what it saw."""

    model: Growing
    variables: Tree


@pytest.fixture(scope="module")
def frozen() -> Frozen:
    torch.set_num_threads(1)
    x, y = map(torch.from_numpy, made.digits())
    x = (x.float() - x.float().mean()) / x.float().std()
    watching = watched(growing(mlp(SHAPE, 10, (32,)), TASKS, SHAPE), SHAPE)
    assert isinstance(watching.model, Growing)
    seen = torch.isin(torch.arange(10), torch.tensor([3, 8, 0, 1, 5])).float()
    known = seen[y] > 0
    x, y = x[known], y[known]
    variables = {**watching.init(0), SEEN: seen}
    order = torch.Generator().manual_seed(0)
    for _ in range(4):
        for rows in torch.randperm(len(x), generator=order).split(16):
            trained = {n: leaf.detach().requires_grad_() for n, leaf in variables.items() if n not in watching.buffers}
            outputs, buffers = watching.apply({**variables, **trained}, x[rows], True)
            slopes = torch.autograd.grad(functional.cross_entropy(outputs.logits, y[rows]), list(trained.values()))
            after = {n: (leaf - 0.1 * slope).detach() for (n, leaf), slope in zip(trained.items(), slopes, strict=True)}
            variables = {**variables, **buffers, **after}
    return Frozen(watching.model, variables)


def training(frozen: Frozen, **settings: Any) -> GeneratorTraining:
    defaults: dict[str, Any] = {"iterations": 200, "batch_size": 32, "batch_statistics": 10.0, "lr": 0.003}
    return GeneratorTraining(SMALL, frozen.model, GeneratorSettings(**{**defaults, **settings}))


def run(job: ServerJob, start: int = 0, carry: Tree | None = None) -> Tree:
    carry = job.init() if carry is None else carry
    for index in range(start, job.steps):
        carry, _ = job.step(carry, index)
    return carry


def noise(rows: int = 400) -> Tensor:
    return torch.randn(rows, SMALL.noise, generator=torch.Generator().manual_seed(1))


def answers(frozen: Frozen, carry: Tree) -> Tensor:
    images = SMALL.images(unflatten(carry)["generator"], noise())
    return frozen.model.apply(frozen.variables, images, False)[0].logits.argmax(1)


def test_a_trained_generator_makes_the_frozen_model_predict_the_intended_classes(frozen: Frozen) -> None:
    job = training(frozen, iterations=100).job(frozen.variables, {}, CONTEXT)
    assert (job.name, job.steps) == ("generator", 5)
    intended = intended_classes(frozen.model, frozen.variables[SEEN] > 0, noise())
    before = (answers(frozen, job.init()) == intended).float().mean()
    after = (answers(frozen, run(job)) == intended).float().mean()
    assert before < 0.35
    assert after > 0.7


def test_a_job_that_is_resumed_in_the_middle_ends_the_same(frozen: Frozen) -> None:
    job = training(frozen, iterations=50).job(frozen.variables, {}, CONTEXT)
    assert job.steps == 3
    carry, finished = job.step(job.init(), 0)
    assert not finished
    copied = {name: leaf.clone() for name, leaf in carry.items()}
    again = training(frozen, iterations=50).job(frozen.variables, {}, CONTEXT)
    one, other = run(job), run(again, 1, copied)
    assert one.keys() == other.keys()
    assert all(torch.equal(leaf, other[name]) for name, leaf in one.items())
    assert all(torch.equal(leaf, copied[name]) for name, leaf in carry.items())
    assert float(one["memory/steps"]) == 50


def test_every_round_has_noise_of_its_own(frozen: Frozen) -> None:
    one, other = (run(training(frozen, iterations=1).job(frozen.variables, {}, Context(r, 1, 7, 10))) for r in (3, 4))
    assert not torch.equal(one["generator/norm.running_mean"], other["generator/norm.running_mean"])


def test_training_begins_with_a_new_generator_or_with_the_last_one(frozen: Frozen) -> None:
    few = training(frozen, iterations=1)
    new = few.job(frozen.variables, {}, CONTEXT).init()
    last = unflatten(run(few.job(frozen.variables, {}, CONTEXT)))["generator"]
    warm = few.job(frozen.variables, last, CONTEXT).init()
    assert all(torch.equal(leaf, warm[f"generator/{name}"]) for name, leaf in last.items())
    assert not torch.equal(new["generator/project.weight"], warm["generator/project.weight"])
    assert all(not leaf.any() for name, leaf in warm.items() if name.startswith("memory/"))


def test_noise_stands_for_seen_classes_in_the_order_in_which_they_came() -> None:
    model = growing(mlp(SHAPE, 4, (4,)), ClassTasks.of(4, 2, [2, 0, 3, 1]), SHAPE)
    seen = torch.tensor([True, False, True, False])
    # The first value belongs to class 2, the second to class 0; the others have not come.
    z = torch.tensor([[2.0, 1.0, 9.0, 9.0], [0.5, 1.0, 9.0, 9.0], [-1.0, -2.0, 0.0, 0.0]])
    assert intended_classes(model, seen, z).tolist() == [2, 0, 2]


def test_the_loss_is_that_of_equation_5(frozen: Frozen, louder: Callable[[Any], Any]) -> None:
    z = noise(6)
    images = SMALL.images(SMALL.model.init(0), z)
    outputs, _ = frozen.model.apply(frozen.variables, images, False)
    # The frozen model is in evaluation mode, which a model tells that is louder in training.
    loud = training(Frozen(louder(frozen.model), {}), diversity=2.0, batch_statistics=3.0, image_prior=5.0)
    losses = loud.losses(images, z, frozen.variables, classes_seen(frozen.variables))
    seen = frozen.variables[SEEN] > 0
    known = outputs.logits[:, seen]
    place = torch.cumsum(seen, 0) - 1
    target = place[intended_classes(frozen.model, seen, z)]
    torch.testing.assert_close(losses["cross_entropy"], functional.cross_entropy(known, target))
    share = known.softmax(1).mean(0)
    torch.testing.assert_close(losses["diversity"], 2 * (share * share.log()).sum() / 5)
    running = running_statistics(frozen.variables)
    hidden = images.flatten(1) @ frozen.variables["fc1.weight"].t() + frozen.variables["fc1.bias"]
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(running["fc1.mean"], running["fc1.var"].sqrt()),
        torch.distributions.Normal(hidden.mean(0), hidden.std(0, correction=0)),
    )
    torch.testing.assert_close(losses["batch_statistics"], 3 * expected.mean(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(losses["image_prior"], 5 * image_prior_loss(images))
    assert losses.keys() == {"cross_entropy", "diversity", "batch_statistics", "image_prior"}


def test_a_loss_of_weight_0_is_left_out_and_needs_nothing(frozen: Frozen) -> None:
    losses = training(frozen, diversity=0.0, batch_statistics=0.0, image_prior=0.0).losses(
        torch.zeros(2, *SHAPE), noise(2), frozen.variables, classes_seen(frozen.variables)
    )
    assert losses.keys() == {"cross_entropy"}


def test_the_other_readings_are_those_of_the_authors_code(frozen: Frozen) -> None:
    z = noise(6)
    images = SMALL.images(SMALL.model.init(0), z)
    logits = frozen.model.apply(frozen.variables, images, False)[0].logits
    text = training(frozen).losses(images, z, frozen.variables, classes_seen(frozen.variables))
    code = training(frozen, targets="model", temperature=1000.0, entropy="logarithm").losses(
        images, z, frozen.variables, classes_seen(frozen.variables)
    )
    known = logits[:, frozen.variables[SEEN] > 0]
    torch.testing.assert_close(code["cross_entropy"], functional.cross_entropy(known / 1000, known.argmax(1)))
    torch.testing.assert_close(code["diversity"], text["diversity"] * 5 / math.log(5))


def test_only_seen_classes_count_in_cross_entropy_at_any_temperature() -> None:
    tasks = ClassTasks.of(100, 10, range(100))
    model = growing(mlp(SHAPE, 100, ()), tasks, SHAPE)
    # All logits of the ten classes seen are equal, so that the cross-entropy is the logarithm of 10.
    variables = {name: torch.zeros_like(leaf) for name, leaf in model.init(0).items()}
    variables[SEEN] = (torch.arange(100) < 10).float()
    z, images = torch.randn(5, 100, generator=torch.Generator().manual_seed(0)), torch.zeros(5, *SHAPE)
    for temperature in (1.0, 10.0, 1000.0):
        settings = GeneratorSettings(batch_statistics=0.0, temperature=temperature)
        losses = GeneratorTraining(Generator(8, 1, 100), model, settings).losses(
            images, z, variables, classes_seen(variables)
        )
        assert float(losses["cross_entropy"]) == pytest.approx(math.log(10), abs=1e-6)


def test_unseen_classes_pass_no_gradient_at_a_high_temperature(frozen: Frozen) -> None:
    z = noise(6)
    images = SMALL.images(SMALL.model.init(0), z).detach().requires_grad_()
    settings: dict[str, Any] = {"diversity": 0.0, "batch_statistics": 0.0, "image_prior": 0.0, "temperature": 1000.0}
    losses = training(frozen, **settings).losses(images, z, frozen.variables, classes_seen(frozen.variables))
    (found,) = torch.autograd.grad(losses["cross_entropy"], images)
    logits = frozen.model.apply(frozen.variables, images, False)[0].logits
    seen = frozen.variables[SEEN] > 0
    place = torch.cumsum(seen, 0) - 1
    intended = place[intended_classes(frozen.model, seen, z)]
    (expected,) = torch.autograd.grad(functional.cross_entropy(logits[:, seen] / 1000, intended), images)
    torch.testing.assert_close(found, expected)


def test_a_class_that_one_value_tells_is_learnt_in_fewer_iterations(frozen: Frozen) -> None:
    shares = []
    for signal in (0.0, 4.0):
        trained = training(frozen, iterations=40, class_signal=signal)
        generator = unflatten(run(trained.job(frozen.variables, {}, CONTEXT)))["generator"]
        with torch.no_grad():
            images = SMALL.images(generator, trained.given(frozen.variables, noise()))
            said = trained.judged(images, frozen.variables).logits.argmax(1)
        intended = intended_classes(frozen.model, frozen.variables[SEEN] > 0, noise())
        shares.append(float((said == intended).float().mean()))
    assert shares[1] > shares[0] + 0.1
