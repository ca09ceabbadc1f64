"""MFCL and FedAvg + Gen: what the coordinator makes for each task, sends and reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.incremental.mfcl import MFCL, fedavg_gen, mfcl
from fedemu.algorithms.interface import OfItsOwnKind, Picturing, Remarking, Revealing, Tree
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import SEEN, growing
from fedemu.algorithms.models.image_generator import AT_ONCE, Generator, generator_for
from fedemu.algorithms.models.layer_statistics import unwatched
from fedemu.algorithms.models.low_precision import Precision, precision_of, with_precision
from fedemu.algorithms.models.resnet import resnet18
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.algorithms.training.wsm import reweighted_softmax
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol import seeds
from fedemu.protocol.errors import ConfigurationError

SHAPE = (1, 8, 8)
TASKS = ClassTasks.of(4, 2, [2, 0, 3, 1])
MODEL = growing(mlp(SHAPE, 4, (6,)), TASKS, SHAPE)
INGREDIENTS = Ingredients(MODEL, cross_entropy, 4, 2, 5, 0.05, devices=3, input_shape=SHAPE)
SHORT: dict[str, Any] = {"iterations": 6, "generator_batch": 8, "noise": 6, "synthetic_batch": 3}


@pytest.fixture
def fleet(little_fleet: Callable[..., Any], digits: Corpus, stream: Any) -> Callable[..., Any]:
    def make(method: MFCL, **fields: Any) -> Any:
        made = little_fleet(method, MODEL.init(0), [], stream=stream, **fields)
        made.corpus = digits
        return made

    return make


def test_the_first_task_is_federated_averaging_and_the_next_brings_generator_and_previous_model(
    fleet: Callable[..., Any],
) -> None:
    played = fleet(mfcl(INGREDIENTS, **SHORT), rounds_per_period=2)
    for _ in range(2):
        played.play([0, 1, 2])
    assert [ask.program for ask in played.asks] == ["train", "train"]
    assert [list(ask.shared) for ask in played.asks] == [["model"], ["model"]]
    assert played.jobs == []
    first = played.model
    played.play([0, 2])
    played.play([1])
    assert played.jobs == ["generator"]
    third, fourth = played.asks[2:]
    assert third.program == fourth.program == "rehearse"
    assert list(third.shared) == ["model", "previous", "generator"]
    assert third.shared["previous"].keys() == first.keys()
    assert all(torch.equal(leaf, first[name]) for name, leaf in third.shared["previous"].items())
    for key in ("previous", "generator"):
        assert all(torch.equal(leaf, fourth.shared[key][name]) for name, leaf in third.shared[key].items())
    assert third.shared["model"][SEEN].tolist() == [1, 1, 1, 1]
    assert torch.equal(third.shared["model"]["fc2.weight"], MODEL.entered(first, 1, 5)["fc2.weight"])
    assert played.model.keys() == first.keys()
    assert all(bool(torch.isfinite(leaf).all()) for leaf in played.model.values())


def test_devices_report_running_statistics_which_are_no_part_of_the_model(fleet: Callable[..., Any]) -> None:
    played = fleet(mfcl(INGREDIENTS, **SHORT))
    played.play([0])
    assert played.state.variables.keys() - played.model.keys() == {"watched.fc1.mean", "watched.fc1.var"}
    assert played.state.variables["watched.fc1.mean"].abs().min() > 0
    program = played.algorithm.programs["train"]
    assert isinstance(program, Revealing)
    assert program.local_model(played.asks[0].shared, played.payloads[0]).keys() == played.model.keys()
    without = fleet(mfcl(INGREDIENTS, **SHORT, batch_statistics=0.0))
    without.play([0])
    assert without.state.variables.keys() == without.model.keys()


def test_batch_normalisation_brings_statistics_of_its_own(
    little_fleet: Callable[..., Any], digits: Corpus, stream: Any
) -> None:
    model = growing(resnet18(SHAPE, 4, "batch", width=2), TASKS, SHAPE)
    method = mfcl(replace(INGREDIENTS, model=model, epochs=1, batch_size=10), **{**SHORT, "iterations": 2})
    played = little_fleet(method, model.init(0), [], stream=stream)
    played.corpus = digits
    played.play([0])
    played.play([1])
    assert played.state.variables.keys() == played.model.keys() == model.init(0).keys()
    assert played.jobs == ["generator"]
    assert all(bool(torch.isfinite(leaf).all()) for leaf in played.model.values())


class Forgetful(nn.Module):
    """Normalises by each batch, without running statistics, and refuses variables that it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(64, 6), nn.BatchNorm1d(6, track_running_stats=False)
        self.top = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.norm(self.body(x.flatten(1))).relu()
        return self.top(features), features


def test_running_statistics_are_kept_for_a_module_that_keeps_none(
    little_fleet: Callable[..., Any], digits: Corpus, stream: Any
) -> None:
    model = growing(from_module(Forgetful), TASKS, SHAPE)
    method = mfcl(replace(INGREDIENTS, model=model), **{**SHORT, "iterations": 2})
    played = little_fleet(method, model.init(0), [], stream=stream)
    played.corpus = digits
    played.play([0, 1])
    assert played.state.variables.keys() - played.model.keys() == {"watched.norm.mean", "watched.norm.var"}
    played.play([1, 2])
    assert played.jobs == ["generator"]
    assert bool(torch.isfinite(played.state.variables["watched.norm.mean"]).all())


def test_a_generator_starts_from_the_one_before(
    little_fleet: Callable[..., Any], digits: Corpus, stream: list[list[Any]]
) -> None:
    model = growing(mlp(SHAPE, 4, (6,)), ClassTasks.of(4, 4, range(4)), SHAPE)
    method = mfcl(replace(INGREDIENTS, model=model), **SHORT)
    periods = [[np.flatnonzero(digits.train.y == task)[:20]] for task in range(4)]
    played = little_fleet(method, model.init(0), [], stream=periods)
    played.corpus = digits
    for _ in range(3):
        played.play([0])
    first, second = (ask.shared["generator"] for ask in played.asks[1:])
    assert int(first["norm.num_batches_tracked"]) == 6
    assert int(second["norm.num_batches_tracked"]) == 12


def test_stored_synthetic_samples_are_sent_in_place_of_the_generator(fleet: Callable[..., Any]) -> None:
    played = fleet(mfcl(INGREDIENTS, **SHORT, samples=5), executor=Checked(Serial(), Vmapped(2)))
    played.play([0, 1, 2])
    played.play([0, 1])
    shared = played.asks[1].shared
    assert list(shared) == ["model", "previous", "synthetic"]
    assert shared["synthetic"]["x"].shape == (10, *SHAPE)
    assert shared["synthetic"]["y"].bincount(minlength=4).tolist() == [5, 0, 5, 0]
    played.play([2])
    assert int(played.state.kept["generator"]["norm.num_batches_tracked"]) == 6


@pytest.mark.parametrize("targets", ["noise", "model"])
def test_stored_samples_are_made_a_few_at_once_whatever_their_number(
    fleet: Callable[..., Any], targets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Tensor] = []

    def images(generator: Generator, variables: Tree, z: Tensor) -> Tensor:
        made.append(z)
        return generator.model.apply(variables, z, False)[0].logits

    monkeypatch.setattr(Generator, "images", images)
    played = fleet(mfcl(INGREDIENTS, **SHORT, samples=20, targets=targets))
    played.play([0, 1])
    played.play([2])
    assert [*map(len, made)] == [8, AT_ONCE, AT_ONCE, 8]  # the judgement, and 20 of each of two classes
    assert len(played.asks[1].shared["synthetic"]["y"]) == 40
    drawn = seeds.generator(played.seed, round=2, purpose="synthetic").standard_normal((40, 6), "float32")
    # Values of a row may change places, so that it stands for its class.
    assert torch.equal(torch.cat(made[1:]).sort(1).values, torch.from_numpy(drawn).sort(1).values)


def test_as_many_samples_as_may_be_made_at_once_are_accepted() -> None:
    assert mfcl(INGREDIENTS, samples=2**22).programs.keys() == {"train", "rehearse"}


def test_making_samples_takes_convolutions_and_reading_them_does_not() -> None:
    for samples, kind in ((0, "convolutional"), (3, "dense")):
        programs = mfcl(INGREDIENTS, **SHORT, samples=samples).programs
        assert not isinstance(programs["train"], OfItsOwnKind)
        assert programs["rehearse"].kind == kind


@pytest.mark.parametrize(
    ("method", "options", "whole"),
    [
        (mfcl, {}, True),
        (mfcl, {"distillation": 0.0}, False),
        (mfcl, {"distillation": 0.0, "targets": "model"}, True),
        (fedavg_gen, {}, False),
        (fedavg_gen, {"targets": "model"}, True),
        (fedavg_gen, {"targets": "model", "samples": 3}, False),
    ],
)
def test_the_previous_model_is_sent_if_a_loss_of_the_devices_needs_it(
    fleet: Callable[..., Any], method: Any, options: dict[str, Any], whole: bool
) -> None:
    played = fleet(method(INGREDIENTS, **SHORT, **options))
    played.play([0])
    before = played.model
    played.play([1])
    sent = played.asks[-1].shared["previous"]
    assert sent.keys() == (before.keys() if whole else {SEEN})
    assert all(torch.equal(leaf, before[name]) for name, leaf in sent.items())


def test_every_part_of_the_loss_changes_what_devices_learn(fleet: Callable[..., Any]) -> None:
    def learned(method: Any = mfcl, **options: Any) -> Tensor:
        played = fleet(method(INGREDIENTS, **SHORT | {"iterations": 2}, **options))
        played.play([0])
        played.play([0])
        return torch.cat([leaf.double().flatten() for leaf in played.model.values()])

    models = [
        learned(),
        learned(fedavg_gen),
        learned(split=False),
        learned(fine_tuning=0.0),
        learned(distillation=0.0),
        learned(distillation_scale="sum"),
    ]
    assert all(not torch.allclose(one, other) for one, other in combinations(models, 2))
    assert torch.equal(learned(distillation=0.0, distillation_scale="sum"), models[4])


def test_pictures_show_every_class_of_earlier_tasks(fleet: Callable[..., Any]) -> None:
    least = {"noise": INGREDIENTS.classes}
    played = fleet(mfcl(INGREDIENTS, **SHORT | least), rounds_per_period=2)
    assert isinstance(played.algorithm, Picturing)
    for cohort in ([0, 1, 2], [1]):
        played.play(cohort)
        assert played.algorithm.pictures(played.state, 3, 1) == {}
    played.play([0])
    pictures, again = (played.algorithm.pictures(played.state, 10, seed) for seed in (1, 1))
    assert pictures["x"].shape == (20, *SHAPE)
    assert pictures["y"].bincount(minlength=4).tolist() == [10, 0, 10, 0]
    assert torch.equal(pictures["x"], again["x"])
    assert not torch.equal(pictures["x"], played.algorithm.pictures(played.state, 10, 2)["x"])
    played.play([2])
    assert torch.equal(pictures["x"], played.algorithm.pictures(played.state, 10, 1)["x"])


def test_a_round_tells_how_good_the_generator_is_that_it_rehearsed_from(fleet: Callable[..., Any]) -> None:
    played = fleet(mfcl(INGREDIENTS, **{**SHORT, "generator_batch": 9}), rounds_per_period=2)
    assert isinstance(played.algorithm, Remarking)
    for cohort in ([0, 1, 2], [1]):
        played.play(cohort)
        assert played.algorithm.remarks(played.state) == {}
    before = played.state.variables
    played.play([0])
    said = played.algorithm.remarks(played.state)
    assert list(said) == ["generator"]
    names = ["cross_entropy", "diversity", "batch_statistics", "image_prior", "recognised"]
    assert list(said["generator"]) == names
    played.play([2])
    assert played.algorithm.remarks(played.state) == said

    generator, draws = played.state.kept["generator"], seeds.generator(5, round=3, purpose="generator/judged")
    z = torch.from_numpy(draws.standard_normal((9, 6), "float32"))
    made = generator_for(SHAPE, 6).images(generator, z)
    logits = MODEL.apply(unwatched(before), made, False)[0].logits
    intended = z[:, :2].argmax(1) * -2 + 2  # the classes 2 and 0, in the order in which they came
    assert said["generator"]["recognised"] == (logits.argmax(1) == intended).float().mean()
    assert said["generator"]["cross_entropy"] == pytest.approx(float(functional.cross_entropy(logits, intended)))


def test_no_class_is_recognised_if_the_noise_tells_none(fleet: Callable[..., Any]) -> None:
    played = fleet(mfcl(INGREDIENTS, **SHORT, targets="model", image_prior=0.0))
    played.play([0, 1])
    played.play([1, 2])
    said = played.algorithm.remarks(played.state)["generator"]
    assert list(said) == ["cross_entropy", "diversity", "batch_statistics"]
    pictures = played.algorithm.pictures(played.state, 10, 1)
    logits = MODEL.apply(played.state.kept["previous"], pictures["x"], False)[0].logits
    assert torch.equal(pictures["y"], logits.argmax(1))


def test_the_other_targets_are_the_classes_that_the_previous_model_predicts(fleet: Callable[..., Any]) -> None:
    for samples in (0, 5):
        played = fleet(mfcl(INGREDIENTS, **SHORT, targets="model", samples=samples))
        played.play([0, 1])
        played.play([1, 2])
        assert set(played.state.kept["previous"][SEEN].nonzero()[:, 0].tolist()) == {0, 2}
    said = MODEL.apply(played.asks[1].shared["previous"], played.asks[1].shared["synthetic"]["x"], False)[0].logits
    assert torch.equal(said.argmax(1), played.asks[1].shared["synthetic"]["y"])


@pytest.mark.parametrize("samples", [0, 3])
def test_noise_that_tells_no_class_may_have_fewer_values_than_there_are_classes(
    samples: int, fleet: Callable[..., Any]
) -> None:
    played = fleet(mfcl(INGREDIENTS, **{**SHORT, "noise": 3}, targets="model", samples=samples))
    for cohort in ([0, 1, 2], [0, 2]):
        played.play(cohort)
    assert len(played.algorithm.pictures(played.state, 5, 1)["x"]) == 10
    assert played.model[SEEN].tolist() == [1, 1, 1, 1]


def test_fedavg_gen_is_federated_averaging_with_generated_samples(
    fleet: Callable[..., Any],
) -> None:
    played = fleet(fedavg_gen(INGREDIENTS, **SHORT))
    played.play([0, 1, 2])
    played.play([0, 2])
    assert list(played.asks[1].shared) == ["model", "previous", "generator"]
    first, rehearse = (played.algorithm.programs[name] for name in ("train", "rehearse"))
    assert type(first.loss) is type(rehearse.loss)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_generator_has_the_precision_of_the_model(fleet: Callable[..., Any], precision: Precision) -> None:
    method = mfcl(replace(INGREDIENTS, model=with_precision(MODEL, precision)), **SHORT)
    assert precision_of(method._training.generator.model) == precision
    played = fleet(method)
    for cohort in ([0, 1, 2], [0, 1]):
        played.play(cohort)
    leaves = [*played.model.values(), *played.state.kept["generator"].values()]
    assert {leaf.dtype for leaf in leaves} == {torch.float32, torch.int64}


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ({"model": mlp(SHAPE, 4)}, {}, "the stream brings none; set stream.kind = 'classes'"),
        ({"criterion": reweighted_softmax}, {}, "has a loss of its own"),
        (
            {},
            {"noise": 4, "class_signal": 5.0},
            "class_signal = 5 leaves nothing of 4 values of noise beside 4 classes",
        ),
        (
            {},
            {"samples": 2**22 + 1},
            "= 4194305 of each class come to 4.0 GiB, and more than 4 GiB are never made at once",
        ),
        ({}, {"noise": 3}, "stand for the 4 classes, but there are 3; set algorithm.options.noise = 4 or more"),
        ({"model": growing(mlp((1, 12, 12), 4), TASKS, (1, 12, 12)), "input_shape": (1, 12, 12)}, {}, "no generator"),
        ({"model": growing(mlp(SHAPE, 4, ()), TASKS, SHAPE)}, {}, "no layers that report any"),
    ],
)
def test_unsuitable_settings_are_refused(changes: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        mfcl(replace(INGREDIENTS, **changes), **options)


@pytest.mark.parametrize("method", [mfcl, fedavg_gen])
def test_options_of_the_generator_reach_its_training(method: Callable[..., MFCL]) -> None:
    losses: dict[str, Any] = {"diversity": 2.0, "batch_statistics": 3.0, "image_prior": 0.5, "entropy": "logarithm"}
    steps: dict[str, Any] = {"iterations": 4, "targets": "noise", "class_signal": 6.0, "temperature": 7.0}
    built: Any = method(
        INGREDIENTS, **losses, **steps, noise=9, generator_batch=5, generator_lr=0.25, synthetic_batch=3
    )
    training = built._training
    assert vars(training.settings) == {**losses, **steps, "batch_size": 5, "lr": 0.25}
    assert training.generator.noise == 9
    assert built.programs["rehearse"].synthetic_batch == 3
