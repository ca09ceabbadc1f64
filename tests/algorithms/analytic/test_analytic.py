"""Nearest class mean and AFL: exact totals for any partition and order, and no sample counted twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.analytic.afl import afl
from fedemu.algorithms.analytic.classifiers import UNKNOWN, class_sums, nearest_means, products, ridge_regression
from fedemu.algorithms.analytic.ncm import ncm
from fedemu.algorithms.analytic.sums import BATCH
from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.incremental.task_by_task import with_tasks
from fedemu.algorithms.interface import Model, Outputs, Tree
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import SEEN, growing
from fedemu.algorithms.models.low_precision import Precision, with_precision
from fedemu.algorithms.models.random_features import random_features
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.algorithms.trees import SUM_UNIT, add, scale, squared_norm
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.ops.experiment.tables.run import Limits
from fedemu.protocol.errors import ConfigurationError

SHAPE, CLASSES = (1, 12, 12), 4
PLAIN = mlp(SHAPE, CLASSES, (6,))
MODEL = growing(PLAIN, ClassTasks.of(CLASSES, 2, [2, 0, 3, 1]), SHAPE)
EVERYTHING = np.arange(300)
# Labels go 0, 1, 2, 3, 0, ...: task 0 brings 2 and 0, task 1 brings 3 and 1.
PARTS = np.array_split(EVERYTHING, [20, 90, 100, 100, 240])
STREAM = [[part[part % 2 == task] for part in PARTS] for task in (0, 1)]
DEVICES = range(len(PARTS))
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")


def made(model: Model = MODEL, **over: Any) -> Ingredients:
    fields = {"epochs": 1, "batch_size": 8, "lr": 0.1, "input_shape": SHAPE, **over}
    return Ingredients(model, cross_entropy, CLASSES, **fields)


def features_of(corpus: Corpus, variables: Tree, model: Model = MODEL) -> tuple[Tensor, Tensor]:
    """Features in float64 and labels of all samples that the stream brings."""
    x, y = corpus.batch(corpus.train, EVERYTHING)
    return model.apply(variables, x, False)[0].features.double(), y


def regression(features: Tensor, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Ridge regression by least squares on stacked rows, weight and bias: a formula apart from the code's."""
    rows = torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], 1)
    stacked = torch.cat([rows, ridge**0.5 * torch.eye(rows.shape[1], dtype=torch.float64)])
    targets = torch.cat([functional.one_hot(y, CLASSES).double(), torch.zeros(rows.shape[1], CLASSES).double()])
    solution = torch.linalg.lstsq(stacked, targets, driver="gelsd").solution.t()
    return solution[:, :-1], solution[:, -1]


@pytest.fixture
def fleet(little_fleet: Callable[..., Any]) -> Callable[..., Any]:
    def make(method: Any, cohorts: Sequence[Sequence[int]], model: Model = MODEL, **fields: Any) -> Any:
        settings = {"stream": STREAM, "rounds_per_period": 3, **fields}
        played = little_fleet(with_tasks(method, model), model.init(0), PARTS, **settings)
        for cohort in cohorts:
            played.play(list(cohort))
        return played

    return make


ROUNDS_OF_A_TASK = [[0, 1, 2], [2, 4, 1, 0], [5, 3, 4, 0]]


@pytest.mark.parametrize("cohorts", [ROUNDS_OF_A_TASK * 2, [[5, 4, 3, 2, 1, 0], [0], [0]] * 2])
def test_afl_over_any_partition_and_order_equals_the_regression_on_all_samples(
    cohorts: list[list[int]], fleet: Callable[..., Any], corpus: Corpus, louder: Callable[[Any], Any]
) -> None:
    # Features are those of evaluation mode, which a model tells that is louder in training.
    played = fleet(afl(made(louder(MODEL)), ridge=0.7), cohorts, louder(MODEL))
    weight, bias = regression(*features_of(corpus, played.model), 0.7)
    torch.testing.assert_close(played.model["fc2.weight"], weight.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(played.model["fc2.bias"], bias.float(), rtol=1e-5, atol=1e-6)
    assert played.algorithm.remarks(played.state) == {"counted": 300}
    assert played.model[SEEN].tolist() == [1, 1, 1, 1]


def test_afl_equals_the_absolute_aggregation_of_the_devices_own_solutions(
    fleet: Callable[..., Any], corpus: Corpus
) -> None:
    """He et al.: ``W = (I - R1 C2 + R1 C2 (C1 + C2)^-1 C2) W1 + ...``, then their regularisation is taken away."""
    played = fleet(afl(made(), ridge=1e-6), ROUNDS_OF_A_TASK * 2)
    features, y = features_of(corpus, played.model)
    rows = torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], 1)
    eye, gamma = torch.eye(rows.shape[1], dtype=torch.float64), 1.0
    joint: tuple[Tensor, Tensor] | None = None
    owners = [part for part in PARTS if len(part)]
    for part in owners:
        x, targets = rows[part], functional.one_hot(y[part], CLASSES).double()
        gram = x.t() @ x + gamma * eye
        own = gram.inverse() @ x.t() @ targets, gram
        joint = own if joint is None else joined(joint, own)
    assert joint is not None
    solution, gram = joint
    left = gram - len(owners) * gamma * eye
    solution = solution + len(owners) * gamma * left.inverse() @ solution
    torch.testing.assert_close(played.model["fc2.weight"].double(), solution[:-1].t(), rtol=1e-4, atol=1e-5)


def joined(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The absolute aggregation law for two solutions and their Gram matrices."""
    (w1, c1), (w2, c2) = one, two
    eye, both = torch.eye(len(c1), dtype=torch.float64), (c1 + c2).inverse()
    r1, r2 = c1.inverse(), c2.inverse()
    first = (eye - r1 @ c2 + r1 @ c2 @ both @ c2) @ w1
    return first + (eye - r2 @ c1 + r2 @ c1 @ both @ c1) @ w2, c1 + c2


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_nearest_means_over_any_partition_and_order_are_those_of_all_samples(
    distance: Any, fleet: Callable[..., Any], corpus: Corpus
) -> None:
    played = fleet(ncm(made(), distance), ROUNDS_OF_A_TASK * 2)
    features, y = features_of(corpus, played.model)
    rows = features if distance == "euclidean" else functional.normalize(features)
    means = torch.stack([rows[y == label].mean(0) for label in range(CLASSES)])
    means = means if distance == "euclidean" else functional.normalize(means)
    x, _ = corpus.batch(corpus.train, np.arange(300, 400))
    outputs, _ = MODEL.apply(played.model, x, False)
    queries = outputs.features.double() if distance == "euclidean" else functional.normalize(outputs.features.double())
    assert torch.equal(outputs.logits.argmax(1), torch.cdist(queries, means).argmin(1))


def test_no_sample_is_counted_twice_and_devices_without_news_send_zeros(fleet: Callable[..., Any]) -> None:
    played = fleet(ncm(made()), [[0, 1], [1, 0, 2]])
    assert played.payloads[1]["sums"]["counts"].sum() == 0
    assert played.payloads[2]["sums"]["counts"].sum() * SUM_UNIT == len(STREAM[0][2])
    assert played.algorithm.remarks(played.state) == {"counted": sum(len(STREAM[0][i]) for i in (0, 1, 2))}


def test_sums_over_large_features_are_within_the_largest_norm_of_a_reply(little_fleet: Callable[..., Any]) -> None:
    played = little_fleet(afl(made(PLAIN)), scale(PLAIN.init(0), 1000.0), PARTS)
    played.play([4])
    assert played.state.sums["gram"].norm() > Limits().max_norm
    assert squared_norm(played.payloads[4]["sums"]) < Limits().max_norm ** 2
    assert played.algorithm.remarks(played.state) == {"counted": len(PARTS[4])}


def test_samples_that_arrive_later_in_a_task_are_counted_when_they_are_there(fleet: Callable[..., Any]) -> None:
    played = fleet(ncm(made()), [])
    late = STREAM[0][4]
    for arrived in (late[:5], late[: BATCH + 3], late):
        played.stream = [[arrived if i == 4 else [] for i in DEVICES], STREAM[1]]
        played.play([4])
    counts = played.state.inner.sums["counts"]
    assert counts.tolist() == [sum(late % 4 == 0), 0, sum(late % 4 == 2), 0]


def test_a_device_that_was_lost_is_counted_when_it_comes_back(fleet: Callable[..., Any]) -> None:
    played = fleet(ncm(made()), [])
    played.play([0, 1], lost=[1])
    played.play([0, 1])
    assert played.algorithm.remarks(played.state) == {"counted": len(STREAM[0][0]) + len(STREAM[0][1])}


def test_with_cumulative_streams_samples_of_earlier_tasks_are_not_counted_again(fleet: Callable[..., Any]) -> None:
    both = [np.concatenate([STREAM[0][i], STREAM[1][i]]) for i in DEVICES]
    played = fleet(ncm(made(cumulative=True)), [[0, 1], [0], [1], [0, 2]], stream=[STREAM[0], both])
    expected = len(both[0]) + len(STREAM[0][1]) + len(both[2])
    assert played.algorithm.remarks(played.state) == {"counted": expected}


def test_all_devices_that_are_online_are_asked_if_the_option_says_so(fleet: Callable[..., Any]) -> None:
    played = fleet(afl(made(), devices="online"), [])
    played.play([0], online=[[1, 2]])
    played.play([0], online=[[]])
    assert played.algorithm.remarks(played.state) == {"counted": len(STREAM[0][1]) + len(STREAM[0][2])}


@pytest.mark.parametrize(("warm_up", "programs"), [(2, ["train", "train", "sums", "sums", "sums"]), (99, None)])
def test_features_are_trained_at_first_and_then_frozen(
    warm_up: int, programs: list[str] | None, fleet: Callable[..., Any]
) -> None:
    """A warm-up that is longer than the first task ends with it."""
    played = fleet(afl(made(), warm_up=warm_up), [[0, 1]] * 4, executor=Checked(Serial(), Vmapped(2)))
    expected = programs or ["train", "train", "train", "sums", "sums"]
    assert [ask.program for ask in played.asks] == expected
    before = played.model["fc1.weight"]
    assert not torch.equal(before, MODEL.init(0)["fc1.weight"])
    played.play([0, 1, 2])
    assert torch.equal(played.model["fc1.weight"], before)


def test_features_are_the_same_blob_for_a_whole_task(fleet: Callable[..., Any]) -> None:
    played = fleet(afl(made()), [[0], [1], [2]])
    first, *others = [ask.shared["model"] for ask in played.asks]
    assert all(torch.equal(leaf, other[name]) for other in others for name, leaf in first.items())


def test_a_static_stream_and_a_module_do_as_well(fleet: Callable[..., Any], corpus: Corpus) -> None:
    def build() -> torch.nn.Module:
        class Pixels(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.top = torch.nn.Linear(144, CLASSES, bias=False)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                return self.top(x.flatten(1)), x.flatten(1)

        return Pixels()

    model = from_module(build)
    played = fleet(afl(made(model), ridge=2.0), [DEVICES], model, stream=())
    features, y = features_of(corpus, played.model, model)
    targets = functional.one_hot(y, CLASSES).double()
    gram = features.t() @ features + 2 * torch.eye(144, dtype=torch.float64)
    expected = torch.linalg.solve(gram, features.t() @ targets).t()
    torch.testing.assert_close(played.model["top.weight"], expected.float(), rtol=1e-4, atol=1e-6)
    with pytest.raises(ConfigurationError, match=r"set algorithm\.options\.distance = 'cosine'"):
        ncm(made(model))
    played = fleet(ncm(made(model), "cosine"), [[0]], model)
    known = played.state.sums["counts"] > 0
    assert known.tolist() == [True, False, True, False]
    weight = played.model["top.weight"]
    torch.testing.assert_close(weight[~known], weight[known].mean(0).expand(2, -1))


def test_rounded_products_do_not_hide_the_classifier_of_a_model(fleet: Callable[..., Any]) -> None:
    exact, rounded = (
        fleet(ncm(made(with_precision(PLAIN, precision))), [DEVICES], PLAIN, stream=()).model
        for precision in PRECISIONS
    )
    assert exact["fc2.weight"].abs().max() > 0.1
    torch.testing.assert_close(rounded["fc2.weight"], exact["fc2.weight"], rtol=0.01, atol=0.01)


def test_formulas_on_numbers_worked_out_by_hand() -> None:
    features = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0], [9.0, 9.0]], dtype=torch.float64)
    labels, weight = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    outputs = Outputs(torch.zeros(4, 3), features, {})
    plain = class_sums(3, False)(outputs, labels, weight)
    assert plain["features"].tolist() == [[3, 6], [1, 0], [0, 0]]
    assert plain["counts"].tolist() == [2, 1, 0]
    means, bias = nearest_means(plain, False)
    assert means.tolist() == [[1.5, 3], [1, 0], [1.25, 1.5]]
    assert bias.tolist() == [-5.625, -0.5, -3.0625 + UNKNOWN]
    # A sample far from all means still belongs to the nearest one.
    for point in ([0.0, 0.0], [-100_000.0, 0.0], [0.0, -100_000.0], [-50_000.0, 70_000.0]):
        found = means @ torch.tensor(point, dtype=torch.float64) + bias
        assert int(found.argmax()) == int(torch.cdist(torch.tensor([point]).double(), means[:2]).argmin())
    scaled = class_sums(3, True)(outputs, labels, weight)
    torch.testing.assert_close(scaled["features"], torch.tensor([[0.6, 1.8], [1, 0], [0, 0]], dtype=torch.float64))
    cosines, bias = nearest_means(scaled, True)
    expected = torch.tensor([[0.1**0.5, 0.9**0.5], [1, 0]], dtype=torch.float64)
    torch.testing.assert_close(cosines, torch.cat([expected, expected.mean(0, keepdim=True)]))
    assert bias.tolist() == [0, 0, UNKNOWN]
    assert int((cosines @ torch.tensor([-1.0, -3.0], dtype=torch.float64)).argmax()) == 1, "no unknown class"
    sums = products(2, False)(outputs, labels, weight)
    assert sums["gram"].tolist() == [[10, 12], [12, 20]]
    assert sums["targets"].tolist() == [[3, 1], [6, 0]]
    # (gram + 2 I) = [[12, 12], [12, 22]], with the inverse [[22, -12], [-12, 12]] / 120.
    found, zero = ridge_regression(sums, 2.0, False)
    torch.testing.assert_close(found, torch.tensor([[-6 / 120, 36 / 120], [22 / 120, -12 / 120]], dtype=torch.float64))
    assert zero.tolist() == [0, 0]
    with_ones = products(2, True)(outputs, labels, weight)
    assert with_ones["gram"][2].tolist() == [4, 6, 3]
    halves = [
        products(2, True)(Outputs(features[rows], features[rows], {}), labels[rows], weight[rows])
        for rows in ([0, 3], [1, 2])
    ]
    torch.testing.assert_close(add(*halves), with_ones)


def test_a_ridge_that_rounding_takes_away_is_named() -> None:
    features = 100 * torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = products(2, False)(Outputs(features, features, {}), torch.tensor([0, 1, 1]), torch.ones(3).double())
    with pytest.raises(ConfigurationError, match=r"^algorithm\.options\.ridge = 1e-15 is so small .*; raise ridge, or"):
        ridge_regression(sums, 1e-15, False)
    with pytest.raises(ConfigurationError, match="or a device has sent what no features add up to; raise ridge, or go"):
        ridge_regression({**sums, "gram": -sums["gram"]}, 1.0, False)
    assert ridge_regression(sums, 1e-3, False)[0].isfinite().all()


def test_replay_is_refused_because_samples_would_be_counted_again() -> None:
    for builder in (ncm, afl):
        with pytest.raises(ConfigurationError, match=r"set replay\.strategy = 'none'"):
            builder(made(kept=3))


def test_random_features_are_drawn_once_and_approximate_their_kernel() -> None:
    x = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(1))
    model = random_features(SHAPE, CLASSES, 20_000, "fourier", scale=2.0)
    features = model.apply(model.init(0), x, False)[0].features
    distances = torch.cdist(x.flatten(1), x.flatten(1)).square()
    variables = {name: leaf.double() for name, leaf in model.init(0).items()}
    exact = model.apply(variables, x.double(), False)[0]
    assert exact.logits.dtype == torch.float64
    torch.testing.assert_close(exact.features.float(), features)
    made(model).require_float64("fedreg")
    torch.testing.assert_close(features @ features.t(), torch.exp(-4 * distances / (2 * 144)), rtol=0, atol=0.03)
    small, again, other = (random_features(SHAPE, CLASSES, 7, seed=seed) for seed in (0, 0, 1))
    assert sorted(small.init(3)) == ["head.bias", "head.weight"]
    assert sorted(small.frozen) == ["hidden.bias", "hidden.weight"]
    assert torch.equal(small.weight, again.weight)
    assert not torch.equal(small.weight, other.weight)
    assert torch.equal(
        small.apply(small.init(0), x, True)[0].features, (x.flatten(1) @ small.weight + small.bias).relu()
    )
