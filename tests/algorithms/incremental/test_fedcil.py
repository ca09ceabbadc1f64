"""FedCIL: the auxiliary-classifier GAN at the devices, and its consolidation at the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.incremental.fedcil import class_shares, fedcil
from fedemu.algorithms.incremental.fedcil_local import (
    FAKE,
    FAKE_CLASSES,
    GAN,
    GENERATOR,
    OLD,
    OLD_CLASSES,
    AdversarialSGD,
    drawn_classes,
    generator_of,
    without_gan,
)
from fedemu.algorithms.interface import (
    Batch,
    Context,
    DeviceReply,
    Facts,
    Picturing,
    Reply,
    Revealing,
    ServerJob,
    Tree,
)
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import SEEN, growing
from fedemu.algorithms.models.low_precision import Precision, precision_of, with_precision
from fedemu.algorithms.models.resnet import resnet18
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.algorithms.training.wsm import reweighted_softmax
from fedemu.algorithms.trees import model_digest, only
from fedemu.protocol import seeds
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import DeviceId

SHAPE = (1, 8, 8)
TASKS = ClassTasks.of(4, 2, [2, 0, 3, 1])
MODEL = growing(mlp(SHAPE, 4, (6,)), TASKS, SHAPE)
INGREDIENTS = Ingredients(MODEL, cross_entropy, 4, 1, 10, 0.05, 0.5, devices=3, input_shape=SHAPE)
SHORT: dict[str, Any] = {"noise": 5, "server_iterations": 30, "server_batch": 4, "server_samples": 6}


@pytest.fixture
def fleet(little_fleet: Callable[..., Any], digits: Corpus, stream: Any) -> Callable[..., Any]:
    def make(**fields: Any) -> Any:
        made = little_fleet(fedcil(INGREDIENTS, **SHORT), MODEL.init(0), [], stream=stream, **fields)
        made.corpus = digits
        return made

    return make


def test_devices_rehearse_from_the_second_task_on_with_the_generator_of_the_first(fleet: Callable[..., Any]) -> None:
    played = fleet(rounds_per_period=2)
    for cohort in ([0, 1], [1], [0, 2], [0, 1, 2]):
        played.play(cohort)
    assert [ask.program for ask in played.asks] == ["train", "train", "rehearse", "rehearse"]
    assert [list(ask.shared) for ask in played.asks] == 2 * [["model"]] + 2 * [["model", "generator"]]
    assert played.jobs == ["consolidation"] * 4
    third, fourth = (ask.shared["generator"] for ask in played.asks[2:])
    assert all(torch.equal(leaf, fourth[name]) for name, leaf in third.items())
    assert third[SEEN].tolist() == [1, 0, 1, 0]
    assert all(name.startswith(GENERATOR) for name in third.keys() - {SEEN})
    assert played.model.keys() == MODEL.init(0).keys()
    assert played.model[SEEN].tolist() == [1, 1, 1, 1]
    assert all(bool(torch.isfinite(leaf).all()) for leaf in played.state.variables.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_generator_has_the_precision_of_the_model_and_the_noise_of_its_architecture(precision: Precision) -> None:
    program: Any = fedcil(replace(INGREDIENTS, model=with_precision(MODEL, precision))).programs["train"]
    assert precision_of(program.gan.generator.model) == precision
    assert (program.gan.latent, program.gan.generator.noise) == (64, 64 + 4)


def test_without_iterations_the_average_is_left_as_it_is(little_fleet: Callable[..., Any], digits: Corpus) -> None:
    method = fedcil(INGREDIENTS, **{**SHORT, "server_iterations": 0})
    played = little_fleet(method, MODEL.init(0), [np.flatnonzero(digits.train.y % 2 == 0)[:20]])
    played.corpus = digits
    before = played.model
    played.play([0])
    assert played.jobs == []
    assert [*played.asks[0].reduce] == ["delta"], "local models are collected only for the consolidation"
    for name, leaf in played.model.items():
        torch.testing.assert_close(leaf, before[name] + played.payloads[0]["delta"][name])


def test_pictures_show_the_classes_that_devices_replay(fleet: Callable[..., Any]) -> None:
    played = fleet(rounds_per_period=2)
    assert isinstance(played.algorithm, Picturing)
    for cohort in ([0, 1], [1]):
        played.play(cohort)
        assert played.algorithm.pictures(played.state, 9, 1) == {}
    before = generator_of(played.state.variables)
    played.play([0, 2])
    pictures, again = (played.algorithm.pictures(played.state, 9, 1) for _ in range(2))
    assert pictures["y"].tolist() == [0, 2] * 9
    assert torch.equal(pictures["x"], again["x"])
    gan = played.algorithm.programs["train"].gan
    z = torch.from_numpy(seeds.generator(1, purpose="pictures").standard_normal((18, 5), "float32"))
    expected, _ = gan.images(before, z, pictures["y"], False)
    assert torch.allclose(pictures["x"], expected, atol=1e-5)


def test_a_reply_tells_the_whole_network_and_the_label_counts(fleet: Callable[..., Any]) -> None:
    played = fleet()
    played.play([1])
    program = played.algorithm.programs["train"]
    assert isinstance(program, Revealing)
    assert played.payloads[1]["delta"].keys() == played.state.variables.keys()
    assert program.local_model(played.asks[0].shared, played.payloads[1]).keys() == played.model.keys()
    assert played.results[1].label_counts is not None
    moved = played.payloads[1]["delta"]
    assert all(bool(moved[name].any()) for name in moved if name.endswith("weight"))


def facts() -> Facts:
    zero = torch.tensor(0)
    return Facts(torch.tensor(3), zero, torch.tensor(0.5), zero, zero, torch.tensor(True), torch.tensor([0] * 4))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("called", "seen", "held"), [("train", 3, 2), ("rehearse", 4, 1)])
def test_a_step_moves_the_discriminator_and_then_the_generator(called: str, seen: int, held: int) -> None:
    """The step of the discriminator is computed by hand from real, replayed and made samples, without the padding."""
    method = fedcil(replace(INGREDIENTS, momentum=0.0), **SHORT)
    program = method.programs[called]
    assert isinstance(program, AdversarialSGD)
    drawn = {FAKE: (10, 5), FAKE_CLASSES: (10, 4)}
    assert program.noise == drawn | ({OLD: (10, 5), OLD_CLASSES: (10, 4)} if called == "rehearse" else {})
    assert program.passes == seen
    assert replace(program, local_steps=2).processed == 2 * 10 * seen
    gan = program.gan
    old = {**gan.init(3), SEEN: torch.tensor([1.0, 0.0, 1.0, 0.0])}
    start = {**gan.init(4), SEEN: torch.ones(4)}
    shared = {"model": start, "generator": old}
    noise = {name: randn(*shape) for name, shape in {**drawn, OLD: (10, 5), OLD_CLASSES: (10, 4)}.items()}
    batch = Batch(randn(3, *SHAPE), torch.tensor([3, 1, 0]), (torch.arange(3) < held).float())

    classes = noise[FAKE_CLASSES].argmax(1)
    replayed = drawn_classes(old[SEEN], noise[OLD_CLASSES])
    assert set(replayed.tolist()) == {0, 2}
    made, _ = gan.images(generator_of(start), noise[FAKE], classes, True)
    again, _ = gan.images(generator_of(old), noise[OLD], replayed, False)

    def loss(trained: Tree) -> Tensor:
        def terms(x: Tensor, y: Tensor, real: float) -> Tensor:
            outputs, _ = gan.apply({**start, **trained}, x, True)
            sources = gan.sources({**start, **trained}, outputs.features)
            told = functional.binary_cross_entropy_with_logits(sources, torch.full_like(sources, real))
            return functional.cross_entropy(outputs.logits, y) + told

        real = terms(batch.x[:held], batch.y[:held], 1.0)
        if called == "rehearse":
            real = (real + terms(again, replayed, 1.0)) / 2
        return real + terms(made, classes, 0.0)

    judging = {n: leaf for n, leaf in start.items() if n not in gan.buffers and not n.startswith(GENERATOR)}
    slopes = torch.func.grad(loss)(judging)
    carry, metrics = program.step(program.begin(shared, {}, facts()), batch, shared, {}, facts(), noise)
    after = carry.training.variables
    assert after.keys() == start.keys()
    for name, leaf in judging.items():
        torch.testing.assert_close(after[name], leaf - 0.5 * slopes[name])
    known = functional.cross_entropy(gan.apply(start, batch.x[:held], True)[0].logits, batch.y[:held])
    torch.testing.assert_close(metrics["loss"], known)
    padding = batch._replace(weight=torch.zeros(3))
    idle, told = program.step(program.begin(shared, {}, facts()), padding, shared, {}, facts(), noise)
    assert told["loss"] == 0
    assert all(bool(leaf.isfinite().all()) for leaf in idle.training.variables.values())

    def fooled(making: Tree) -> Tensor:
        images, _ = gan.images({**generator_of(start), **making}, noise[FAKE], classes, True)
        outputs, _ = gan.apply({**start, **after}, images, True)
        sources = gan.sources(after, outputs.features)
        told = functional.binary_cross_entropy_with_logits(sources, torch.ones(10))
        return functional.cross_entropy(outputs.logits, classes) + told

    making = {n: leaf for n, leaf in generator_of(start).items() if GENERATOR + n not in gan.buffers}
    slopes = torch.func.grad(fooled)(making)
    for name, leaf in making.items():
        if name in gan.generator.idle:
            assert torch.equal(after[GENERATOR + name], leaf)
            continue
        # The first step of Adam does not depend on its decays.
        move = 0.001 * slopes[name] / (slopes[name].abs() + 1e-5)
        torch.testing.assert_close(after[GENERATOR + name], leaf - move, rtol=0, atol=1e-5)
        torch.testing.assert_close(carry.memory[f"mean/{GENERATOR}{name}"], 0.5 * slopes[name])
    assert int(after[f"{GENERATOR}norm.num_batches_tracked"]) == 1


def test_the_generator_is_told_the_class_and_a_linear_layer_of_the_features_tells_made_samples() -> None:
    program: Any = fedcil(INGREDIENTS, **SHORT).programs["train"]
    gan = program.gan
    variables, z, y = gan.init(3), randn(3, 5), torch.tensor([2, 0, 2])
    assert variables["gan.source.weight"].shape == (1, 6)
    assert not torch.equal(variables["gan.source.weight"], gan.init(4)["gan.source.weight"])
    told = torch.cat([z, functional.one_hot(y, 4)], 1)
    made = gan.generator.images(generator_of(variables), told)
    assert torch.equal(gan.images(generator_of(variables), z, y, False)[0], made)
    features = randn(3, 6)
    expected = functional.linear(features, variables["gan.source.weight"], variables["gan.source.bias"])[:, 0]
    torch.testing.assert_close(gan.sources(variables, features), expected)


def test_running_statistics_are_those_of_the_discriminators_pass_over_real_and_made_samples() -> None:
    model = growing(resnet18(SHAPE, 4, "batch", width=2), TASKS, SHAPE)
    program = fedcil(replace(INGREDIENTS, model=model), **SHORT).programs["train"]
    assert isinstance(program, AdversarialSGD)
    gan, start = program.gan, program.gan.init(4)
    batch = Batch(randn(10, *SHAPE), torch.arange(10) % 4, torch.ones(10))
    noise = {FAKE: randn(10, 5), FAKE_CLASSES: randn(10, 4)}
    carry, _ = program.step(program.begin({"model": start}, {}, facts()), batch, {}, {}, facts(), noise)
    classes = drawn_classes(start[SEEN], noise[FAKE_CLASSES])
    made, _ = gan.images(generator_of(start), noise[FAKE], classes, True)
    _, expected = model.apply(without_gan(start), torch.cat([batch.x, made]), True)
    for name, leaf in expected.items():
        torch.testing.assert_close(carry.training.variables[name], leaf)
    _, buffers = gan.apply(start, torch.cat([batch.x, made]), True)
    assert model_digest(buffers) == model_digest({**only(start, gan.buffers), **expected})


def test_a_generator_is_asked_for_what_it_was_trained_on() -> None:
    shares = class_shares((3, 0, 1, 0), None)
    assert shares is not None
    assert shares.tolist() == [0.75, 0, 0.25, 0]
    later = class_shares((0, 4, 0, 0), np.array([1.0, 0.0, 1.0, 0.0]))
    assert later is not None
    assert later.tolist() == [0.25, 0.5, 0.25, 0]
    assert class_shares((0, 0, 0, 0), None) is None


class _Local:
    def __init__(self, device: int, tree: Tree) -> None:
        self.device, self._tree = DeviceId(device), tree

    def load(self) -> Tree:
        return self._tree


def consolidation(counts: tuple[int, ...], **fields: Any) -> tuple[Any, Tree]:
    method = fedcil(INGREDIENTS, **SHORT)
    state = replace(method.init(MODEL.init(0), Context(0, 0, 3, 4)), **fields)
    delta = {
        name: torch.full_like(leaf, 0.01 if leaf.is_floating_point() else 0) for name, leaf in state.variables.items()
    }
    reply = DeviceReply(DeviceId(2), 5, 3, {}, counts)
    job = method.job(state, state.variables, [_Local(2, delta)], (reply,), Context(1, 0, 3, 4))
    return job, state.variables


def test_consolidation_trains_the_classifier_and_ends_the_same_if_it_is_resumed() -> None:
    job, average = consolidation((2, 0, 3, 0))
    assert (job.name, job.steps, job.checkpoint_every) == ("consolidation", 2, 1)
    begun = job.init()
    assert begun["data/x"].shape == (6, *SHAPE)
    # The samples are those of the device's generator in evaluation mode, by the shares of its classes.
    program: Any = fedcil(INGREDIENTS, **SHORT).programs["train"]
    draws = seeds.generator(3, round=1, device=DeviceId(2), purpose="consolidation")
    y = torch.from_numpy(draws.choice(4, 6, p=[0.4, 0.0, 0.6, 0.0]))
    z = torch.from_numpy(draws.standard_normal((6, program.gan.latent), "float32"))
    own = {name: leaf + 0.01 if leaf.is_floating_point() else leaf for name, leaf in average.items()}
    assert torch.equal(begun["data/y"], y)
    torch.testing.assert_close(begun["data/x"], program.gan.images(generator_of(own), z, y, False)[0])
    halfway, finished = job.step(begun, 0)
    assert not finished
    end, _ = job.step(halfway, 1)
    again, _ = consolidation((2, 0, 3, 0))[0].step({name: leaf.clone() for name, leaf in halfway.items()}, 1)
    assert all(torch.equal(leaf, again[name]) for name, leaf in end.items())
    model = {name.removeprefix("model/"): leaf for name, leaf in end.items() if name.startswith("model/")}
    assert model.keys() == without_gan(average).keys()
    assert not any(name.startswith(GAN) for name in model)

    # 30 steps of SGD by hand, each on 4 of the samples.
    trained = {n: leaf.clone().requires_grad_() for n, leaf in without_gan(average).items() if n not in MODEL.buffers}
    optimiser = torch.optim.SGD(trained.values(), lr=0.01)
    for iteration in range(30):
        rows = seeds.generator(3, round=1, purpose=f"consolidation/{iteration}").integers(0, 6, 4)
        outputs, _ = MODEL.apply({**without_gan(average), **trained}, begun["data/x"][rows], True)
        optimiser.zero_grad()
        functional.cross_entropy(outputs.logits, y[rows]).backward()
        optimiser.step()
    for name, leaf in trained.items():
        torch.testing.assert_close(model[name], leaf.detach())


def test_in_later_tasks_half_of_the_samples_to_consolidate_are_of_earlier_classes() -> None:
    job, _ = consolidation((0, 4, 0, 0), task=1, kept={"generator": {SEEN: torch.tensor([1.0, 0.0, 1.0, 0.0])}})
    draws = seeds.generator(3, round=1, device=DeviceId(2), purpose="consolidation")
    assert job.init()["data/y"].tolist() == draws.choice(4, 6, p=[0.25, 0.5, 0.25, 0.0]).tolist()


def test_devices_have_no_say_in_which_classes_are_consolidated() -> None:
    method, context = fedcil(INGREDIENTS, **SHORT), Context(1, 0, 3, 4)
    state = method.init(MODEL.init(0), context)
    lie = {name: torch.full_like(leaf, -2.0) for name, leaf in state.variables.items()}
    reply = Reply({"delta": lie, "locals": []}, ())
    job = next(method.merged(state, reply, context))
    assert isinstance(job, ServerJob)
    assert job.init()[f"model/{SEEN}"].tolist() == [1, 0, 1, 0]


def test_without_samples_there_is_nothing_to_consolidate() -> None:
    job, average = consolidation((0, 0, 0, 0))
    carry, finished = job.step(job.init(), 0)
    assert finished
    assert all(torch.equal(leaf, average[name.removeprefix("model/")]) for name, leaf in carry.items())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": mlp(SHAPE, 4)}, "set stream.kind = 'classes'"),
        ({"criterion": reweighted_softmax}, "has a loss of its own"),
        ({"model": growing(mlp((1, 9, 9), 4), TASKS, (1, 9, 9)), "input_shape": (1, 9, 9)}, "there is no generator"),
    ],
)
def test_unsuitable_settings_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        fedcil(replace(INGREDIENTS, **changes))


def test_a_consolidation_by_single_samples_is_refused_if_the_model_normalises_by_batches() -> None:
    given = replace(INGREDIENTS, model=growing(resnet18(SHAPE, 4, "batch", width=2), TASKS, SHAPE))
    with pytest.raises(ConfigurationError, match=r"can't work with algorithm\.options\.server_batch = 1, because"):
        fedcil(given, server_batch=1)
    assert {*fedcil(given, server_batch=2).programs} == {*fedcil(given, server_batch=1, server_iterations=0).programs}
    assert "train" in fedcil(INGREDIENTS, server_batch=1).programs
