"""EWC and MAS: importances and their term, against formulas that are written down for a linear model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedemu.algorithms.terms.importance as importance_module
from fedemu.algorithms.interface import Batch, Facts, Model, Outputs, Tree
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.registry import build_algorithm
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.terms.consolidation import ewc, mas, weighted_distance
from fedemu.algorithms.terms.importance import AskImportance, summed
from fedemu.algorithms.terms.local_term import PREVIOUS, Importance, LocalTerm, importance_key, with_local_terms
from fedemu.algorithms.terms.remembering import with_terms
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import Pass, cross_entropy
from fedemu.algorithms.trees import SUM_UNIT, scale, squared_norm, without
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.ops.experiment.tables.run import Limits

SHAPE, CLASSES = (1, 12, 12), 4
LINEAR = mlp(SHAPE, CLASSES, ())
GROWING = growing(mlp(SHAPE, CLASSES, (5,)), ClassTasks.of(CLASSES, 2, [2, 0, 3, 1]), SHAPE)
STREAM = [[np.arange(task, 10, 2), np.arange(40 + task, 70, 2)] for task in (0, 1)]


def ingredients(model: Any = LINEAR, **fields: Any) -> Ingredients:
    return Ingredients(model, cross_entropy, CLASSES, 1, 5, 0.05, devices=2, input_shape=SHAPE, **fields)


def facts() -> Facts:
    zero = torch.tensor(0)
    return Facts(zero, zero, torch.tensor(0.1), zero, zero, torch.tensor(True), torch.ones(CLASSES))


def importance_of(term: LocalTerm) -> Importance:
    assert term.importance is not None
    return term.importance


def samples(corpus: Any, rows: Any) -> tuple[Tensor, Tensor]:
    x, y = corpus.batch(corpus.train, np.asarray(rows))
    return x, y


def fisher(variables: Tree, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The mean of the squared gradients of a linear model: the gradient by the logits is ``p - onehot``."""
    weight, bias = (next(leaf for leaf in variables.values() if leaf.dim() == dim).double() for dim in (2, 1))
    flat = x.flatten(1).double()
    errors = (flat @ weight.T + bias).softmax(-1) - torch.eye(CLASSES, dtype=torch.float64)[y]
    return {"weight": (errors**2).T @ flat**2 / len(y), "bias": (errors**2).mean(0)}


def synapses(variables: Tree, x: Tensor) -> dict[str, Tensor]:
    """The mean of the absolute gradients of the squared norm of a linear model's logits, which are ``2 z``."""
    weight, bias = (next(leaf for leaf in variables.values() if leaf.dim() == dim).double() for dim in (2, 1))
    flat = x.flatten(1).double()
    slopes = (2 * (flat @ weight.T + bias)).abs()
    return {"weight": slopes.T @ flat.abs() / len(x), "bias": slopes.mean(0)}


def assert_same(found: Tree, expected: dict[str, Tensor]) -> None:
    by_form = {leaf.dim(): leaf for leaf in found.values()}
    torch.testing.assert_close(by_form[2].double(), expected["weight"], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(by_form[1].double(), expected["bias"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("block", [1, 2**26])
def test_importances_are_sums_over_samples_of_squared_or_absolute_gradients(
    block: int, corpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.algorithms.terms.importance.MOST_BYTES", block)
    variables, rows = LINEAR.init(0), torch.tensor([0, 2, 5])
    batch = Batch(*samples(corpus, range(7)), torch.ones(7))

    def mean(term: LocalTerm) -> Tree:
        total = summed(LINEAR, importance_of(term), variables, batch, rows, facts())
        return {name: leaf / 3 for name, leaf in total.items()}

    assert_same(mean(ewc(ingredients())), fisher(variables, batch.x[rows], batch.y[rows]))
    assert_same(mean(mas(ingredients())), synapses(variables, batch.x[rows]))


@pytest.mark.parametrize("decay", [1.0, 0.25])
def test_the_fleets_importance_is_the_mean_over_all_samples_of_the_task_and_adds_up_over_tasks(
    decay: float, corpus: Any, little_fleet: Callable[..., Any]
) -> None:
    stream = [*STREAM, [np.arange(100, 104)] * 2]
    terms = {"ewc": ewc(ingredients(), decay=decay), "mas": mas(ingredients(), decay=decay)}
    given = with_local_terms(ingredients(), terms)
    algorithm = with_terms(build_algorithm("fedavg", {}, given), terms, LINEAR, "fedavg")
    fleet = little_fleet(algorithm, LINEAR.init(0), [], stream=stream, rounds_per_period=2)
    expected: dict[str, Any] = {}
    for task in (0, 1):
        fleet.play([0, 1])
        assert not fleet.asks[-1].optional, "devices are asked only when a task ends"
        fleet.play([1])
        x, y = samples(corpus, np.concatenate(stream[task]))
        for name, new in (("ewc", fisher(fleet.model, x, y)), ("mas", synapses(fleet.model, x))):
            old = expected.get(name)
            expected[name] = {key: leaf + (decay * old[key] if old else 0) for key, leaf in new.items()}
            assert_same(fleet.state.kept[importance_key(name)], expected[name])
        assert fleet.state.kept[PREVIOUS] is fleet.model
        assert algorithm.remarks(fleet.state) == {"importance": {"period": task, "devices": 2}}  # type: ignore[attr-defined]


def test_on_a_cumulative_stream_each_sample_counts_once(corpus: Any, little_fleet: Callable[..., Any]) -> None:
    so_far = [STREAM[0], [np.concatenate(parts) for parts in zip(*STREAM, strict=True)]]
    terms = {name: make(ingredients(cumulative=True)) for name, make in (("ewc", ewc), ("mas", mas))}
    given = with_local_terms(ingredients(cumulative=True), terms)
    algorithm = with_terms(build_algorithm("fedavg", {}, given), terms, LINEAR, "fedavg")
    fleet = little_fleet(algorithm, LINEAR.init(0), [], stream=[*so_far, so_far[1]])
    for samples_of_devices in so_far:
        fleet.play([0, 1])
        x, y = samples(corpus, np.concatenate(samples_of_devices))
        assert_same(fleet.state.kept[importance_key("ewc")], fisher(fleet.model, x, y))
        assert_same(fleet.state.kept[importance_key("mas")], synapses(fleet.model, x))


def test_a_device_with_many_samples_takes_some_of_them_and_counts_for_all(
    corpus: Any, little_fleet: Callable[..., Any]
) -> None:
    terms = {"ewc": ewc(ingredients(), samples=14)}
    given = with_local_terms(ingredients(), terms)
    algorithm = with_terms(build_algorithm("fedavg", {}, given), terms, LINEAR, "fedavg")
    fleet = little_fleet(algorithm, LINEAR.init(0), [], stream=STREAM)
    fleet.play([0, 1])
    assert [float(fleet.payloads[device]["samples"]["ewc"]) for device in (0, 1)] == [5, 15]
    # 14 of the 15 samples count for all: one sample, and no sample twice, is left out.
    alone = torch.stack([fisher(fleet.model, *samples(corpus, [row]))["bias"] for row in STREAM[0][1]])
    others = (alone.sum(0) - alone) * 15 / 14 / SUM_UNIT
    bias = next(leaf for leaf in fleet.payloads[1]["ewc"].values() if leaf.dim() == 1)
    assert sum(torch.allclose(bias.double(), one, rtol=1e-4, atol=0) for one in others) == 1


def test_the_question_takes_a_pass_for_each_term() -> None:
    measures = {term.name: importance_of(term) for term in (ewc(ingredients()), mas(ingredients()))}
    assert AskImportance(LINEAR, {"mas": measures["mas"]}).passes == 1
    assert AskImportance(LINEAR, measures).passes == 2


def test_importances_are_those_of_trained_variables_in_evaluation_mode(corpus: Any) -> None:
    layers = nn.Flatten(), nn.BatchNorm1d(144, affine=False), nn.Dropout(0.5), nn.Linear(144, CLASSES)
    model = from_module(lambda: nn.Sequential(*layers))
    variables = {name: leaf + (0.5 if name in model.buffers else 0) for name, leaf in model.init(0).items()}
    trained = without(variables, model.buffers)
    batch, term = Batch(*samples(corpus, range(3)), torch.ones(3)), ewc(ingredients(model))
    total = summed(model, importance_of(term), variables, batch, torch.arange(3), facts())
    asked = AskImportance(model, {"ewc": importance_of(term)}).payload({"model": variables})["ewc"]
    assert total.keys() == asked.keys() == trained.keys()
    seen = (batch.x.flatten(1) - 0.5) / np.sqrt(1.5 + 1e-5)
    assert_same({name: leaf / 3 for name, leaf in total.items()}, fisher(trained, seen, batch.y))


def test_large_importances_are_within_the_largest_norm_of_a_reply(
    corpus: Any, little_fleet: Callable[..., Any]
) -> None:
    terms = {"mas": mas(ingredients())}
    algorithm = with_terms(build_algorithm("fedavg", {}, with_local_terms(ingredients(), terms)), terms, LINEAR, "")
    fleet = little_fleet(algorithm, scale(LINEAR.init(0), 1e4), [], stream=STREAM)
    fleet.play([0, 1])
    expected = synapses(fleet.model, samples(corpus, np.concatenate(STREAM[0]))[0])
    assert expected["weight"].norm() * 15 > Limits().max_norm
    assert squared_norm(fleet.payloads[1]["mas"]) < Limits().max_norm ** 2
    assert_same(fleet.state.kept[importance_key("mas")], expected)


def test_importances_stay_as_they_are_if_nobody_answers(little_fleet: Callable[..., Any]) -> None:
    terms = {"mas": mas(ingredients(), decay=0.5)}
    given = with_local_terms(ingredients(), terms)
    algorithm = with_terms(build_algorithm("fedavg", {}, given), terms, LINEAR, "fedavg")
    fleet = little_fleet(algorithm, LINEAR.init(0), [], stream=[*STREAM, STREAM[0]])
    fleet.play([0, 1])
    before = fleet.state.kept[importance_key("mas")]
    fleet.play([0, 1], online=[[]])
    assert all(torch.equal(leaf, before[name]) for name, leaf in fleet.state.kept[importance_key("mas")].items())
    assert fleet.state.kept[PREVIOUS] is fleet.model


def test_sums_over_many_samples_of_a_model_in_half_precision_are_no_smaller(
    corpus: Any, half_linear: Model, little_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importance_module, "MOST_BYTES", 1)
    model = half_linear
    terms = {"ewc": ewc(ingredients(model)), "mas": mas(ingredients(model))}
    given = with_local_terms(ingredients(model), terms)
    algorithm = with_terms(build_algorithm("fedavg", {}, given), terms, model, "fedavg")
    stream = [[np.arange(400), np.arange(5)], STREAM[1]]
    fleet = little_fleet(algorithm, model.init(0), [], stream=stream, executor=Vmapped(2))
    fleet.play([0, 1])
    x, y = samples(corpus, np.concatenate(stream[0]))
    for name, expected in (("ewc", fisher(fleet.model, x, y)), ("mas", synapses(fleet.model, x))):
        for leaf, exact in zip(fleet.state.kept[importance_key(name)].values(), expected.values(), strict=True):
            assert leaf.dtype == torch.float32
            torch.testing.assert_close(leaf.sum().double(), exact.sum(), rtol=0.01, atol=0)
    fleet.play([0, 1])
    assert {leaf.dtype for leaf in fleet.model.values()} == {torch.bfloat16}


def test_rows_of_classes_that_have_not_come_are_not_important(corpus: Any) -> None:
    variables = GROWING.init(0)
    batch = Batch(*samples(corpus, [0, 2, 4]), torch.ones(3))
    for term in (ewc(ingredients(GROWING)), mas(ingredients(GROWING))):
        total = summed(GROWING, importance_of(term), variables, batch, torch.arange(3), facts())
        rows = (total[GROWING.head.weight] > 0).any(1)
        assert rows.tolist() == [True, False, True, False]


def test_the_term_is_half_the_coefficient_times_the_weighted_squared_distance() -> None:
    here, there = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}, {"a": torch.zeros(2), "b": torch.ones(())}
    weights = {"a": torch.tensor([1.0, 0.5]), "b": torch.tensor(2.0)}
    assert float(weighted_distance(here, there, weights)) == 1 + 2 + 8
    nothing = Outputs(torch.zeros(1, 2), torch.zeros(1, 2), {})
    at = Pass(here, nothing, Batch(*torch.zeros(3, 1)), {}, {}, facts())
    term = ewc(ingredients(), coefficient=3.0).term
    assert float(term(LINEAR, at)) == 0
    remembered = at._replace(shared={PREVIOUS: there, importance_key("ewc"): weights})
    assert float(term(LINEAR, remembered)) == pytest.approx(1.5 * 11)
    assert float(replace(ewc(ingredients(), coefficient=0.0)).term(LINEAR, remembered)) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_important_variables_of_half_precision_are_pulled_like_those_of_float32(dtype: torch.dtype) -> None:
    weights = {"a": torch.tensor([3000.0, 3000.0, 0.5])}
    there = {"a": torch.tensor([1.0, 1.0, 1.0], dtype=dtype)}
    moved = there["a"] + torch.tensor([0.0, 2.0**-7, 2.0**-7], dtype=dtype)

    def pull(leaf: Tensor) -> Tensor:
        return 50 * weighted_distance({"a": leaf}, there, weights)

    found = torch.func.grad(pull)(moved)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), torch.tensor([0.0, 2343.75, 0.390625]), rtol=0.01, atol=0)
