"""Flashback: knowledge, dynamic distillation on both sides, and its variants."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedemu.algorithms.interface import Batch, Facts, Labelled, Model, PublicData
from fedemu.algorithms.methods.fedavg import fedavg
from fedemu.algorithms.methods.fedntd import fedntd
from fedemu.algorithms.methods.flashback import accumulate_knowledge
from fedemu.algorithms.models.feed_forward import cnn, mlp
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.registry import build_algorithm
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.losses import dynamic_distillation, knowledge_weights
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.algorithms.training.server_training import predict
from fedemu.algorithms.trees import add, model_digest, scale, unflatten
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.errors import ConfigurationError

SHAPE = (1, 12, 12)
MODEL = mlp(SHAPE, 4, (8,))
SHARES = [np.arange(0, 80, 4), np.r_[1:81:4, 2:10:4], np.arange(200, 230), np.arange(3, 63, 4)]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"distil": "devices"},
    {"distil": "server"},
    {"local": "not_true"},
    {"knowledge": "probabilities"},
    {"knowledge": "probabilities", "distil": "devices"},
    {"knowledge": "probabilities", "distil": "server"},
]


def ingredients(model: Model = MODEL, **settings: Any) -> Ingredients:
    defaults: dict[str, Any] = {"epochs": 1, "batch_size": 5, "lr": 0.05, "devices": 4, "public": True}
    return Ingredients(model, **{"criterion": cross_entropy, "classes": 4, **defaults, **settings})


@pytest.fixture
def play(little_fleet: Callable[..., Any], public: PublicData) -> Callable[..., Any]:
    """Flashback with these options and two server epochs, ready for its first round."""

    def make(model: Model = MODEL, executor: Any = None, **options: Any) -> Any:
        method = build_algorithm("flashback", {"server_epochs": 2, "server_batch": 16, **options}, ingredients(model))
        more = {} if executor is None else {"executor": executor}
        return little_fleet(method, model.init(0), SHARES, public=public, **more)

    return make


def test_a_device_adds_a_part_of_its_label_counts() -> None:
    knowledge = accumulate_knowledge(
        torch.tensor([1.0, 0.0, 2.0]), torch.tensor([[4, 0, 8], [0, 2, 2]]), torch.tensor([1, 4]), gamma=0.25
    )
    assert knowledge.tolist() == [2.0, 0.5, 4.5]


@pytest.mark.parametrize(("gamma", "times"), [(0.1, 10), (0.025, 40), (0.3, 3), (1 / 49, 49), (0.7, 1), (1.0, 1)])
def test_a_device_adds_as_often_as_gamma_fits_into_one_and_no_more(gamma: float, times: int) -> None:
    knowledge = torch.zeros(2, dtype=torch.float64)
    for participation in range(1, times + 4):
        before = knowledge
        knowledge = accumulate_knowledge(knowledge, torch.tensor([[10.0, 20.0]]), torch.tensor([participation]), gamma)
        assert torch.equal(before, knowledge) == (participation > times)
    assert knowledge.tolist() == pytest.approx([10 * gamma * times, 20 * gamma * times], rel=1e-12)


def test_the_first_round_at_the_devices_is_federated_averaging(
    play: Callable[..., Any], little_fleet: Callable[..., Any]
) -> None:
    ours, theirs = play(), little_fleet(fedavg(ingredients()), MODEL.init(0), SHARES)
    ours.play([0, 1, 2])
    theirs.play([0, 1, 2])
    for device, payload in theirs.payloads.items():
        assert model_digest(ours.payloads[device]["delta"]) == model_digest(payload["delta"])


def facts(counts: list[int]) -> Facts:
    zero, labels = torch.tensor(0), torch.tensor(counts)
    return Facts(labels.sum(), zero, torch.tensor(0.1), zero, zero, torch.tensor(True), labels)


@pytest.mark.parametrize(
    ("knowledge", "student"), [("counts", [6.0, 2.0, 0.0, 0.0]), ("probabilities", [0.75, 0.25, 0.0, 0.0])]
)
def test_a_device_weighs_its_own_counts_against_those_of_the_global_model(
    knowledge: str, student: list[float], louder: Callable[[Any], Any]
) -> None:
    model = louder(MODEL)
    program: Any = build_algorithm("flashback", {"knowledge": knowledge}, ingredients(model)).programs["train"]
    torch.manual_seed(0)
    batch = Batch(torch.randn(3, *SHAPE), torch.tensor([0, 1, 0]), torch.tensor([1.0, 1.0, 0.0]))
    local, sent, known = MODEL.init(1), MODEL.init(2), torch.tensor([2.0, 0.0, 1.0, 0.0])
    loss = program.loss(local, batch, {"model": sent, "knowledge": {"counts": known}}, {}, facts([6, 2, 0, 0]))
    weights = knowledge_weights(torch.tensor(student), known[None])
    logits, teacher = (
        model.apply(variables, batch.x, train)[0].logits[:2] for variables, train in ((local, True), (sent, False))
    )
    expected = dynamic_distillation(logits, batch.y[:2], teacher[None], *weights, 3.0)
    torch.testing.assert_close(loss.value, expected)
    torch.testing.assert_close(loss.metrics["loss"], torch.nn.functional.cross_entropy(logits, batch.y[:2]))


def test_the_global_model_knows_what_accepted_devices_held(play: Callable[..., Any]) -> None:
    fleet = play(gamma=0.5)
    counts = torch.tensor([[20, 0, 0, 0], [0, 20, 2, 0], [8, 8, 7, 7], [0, 0, 0, 15]])
    fleet.play([0, 1, 2], lost=[1])
    assert fleet.state.participations.tolist() == [1, 0, 1, 0]
    assert fleet.state.knowledge.tolist() == (0.5 * (counts[0] + counts[2])).tolist()
    fleet.play([0, 1])
    fleet.play([0, 3])
    assert fleet.state.participations.tolist() == [3, 1, 1, 1]
    assert fleet.state.knowledge.tolist() == (counts[0] + 0.5 * counts[1:].sum(0)).tolist()


def test_on_a_stream_each_period_of_a_device_counts_once_and_earlier_knowledge_stays(
    little_fleet: Callable[..., Any],
) -> None:
    """With gamma 0.5 a device adds twice in a period. Device 0 has 20 samples of class 0, and then 10 of class 3."""
    method = build_algorithm("flashback", {"gamma": 0.5, "distil": "devices"}, ingredients())
    stream = [[SHARES[0], SHARES[1]], [np.arange(103, 143, 4), np.arange(0)]]
    fleet = little_fleet(method, MODEL.init(0), [], stream=stream, rounds_per_period=3)
    known, participations = [], []
    for cohort in ([0, 1], [0], [0], [0], [0, 1], [0]):
        fleet.play(cohort)
        known.append(fleet.state.knowledge.tolist())
        participations.append(fleet.state.participations[:2].tolist())
    first = [[10, 10, 1, 0], [20, 10, 1, 0], [20, 10, 1, 0]]
    assert known == [*first, [20, 10, 1, 5], [20, 10, 1, 10], [20, 10, 1, 10]]
    assert participations == [[1, 1], [2, 1], [3, 1], [1, 0], [2, 1], [3, 1]]


def test_the_server_is_taught_by_the_local_models_and_the_global_model_before(
    play: Callable[..., Any], public: PublicData
) -> None:
    fleet = play(gamma=0.5)
    fleet.play([0, 1])
    before, knowledge = fleet.model, fleet.state.knowledge
    fleet.play([1, 3])
    lessons = unflatten(fleet.carries[1])["lessons"]
    local = [add(before, fleet.payloads[device]["delta"]) for device in (1, 3)]
    assert torch.equal(
        lessons["logits"], torch.stack([predict(MODEL, model, public.train.x) for model in (*local, before)])
    )
    teachers = torch.stack([torch.tensor([0, 20, 2, 0]), torch.tensor([0, 0, 0, 15]), knowledge])
    student, shares = knowledge_weights(knowledge, teachers)
    assert torch.equal(lessons["student"], student)
    assert torch.equal(lessons["teachers"], shares)


def test_the_server_makes_the_average_better(play: Callable[..., Any], public: PublicData) -> None:
    ours, plain = play(server_epochs=20), play(distil="devices")

    def right(fleet: Any) -> int:
        fleet.play([0, 1, 3])
        return int((predict(MODEL, fleet.model, public.validation.x).argmax(-1) == public.validation.y).sum())

    assert right(ours) > right(plain)
    assert ours.jobs == ["distillation"]
    assert plain.jobs == []


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_variant_plays(play: Callable[..., Any], options: dict[str, Any]) -> None:
    fleet = play(**options)
    fleet.play([0, 1, 2])
    fleet.play([1, 3], lost=[1])
    told = [result.label_counts for result in fleet.results.values()]
    assert told == ([None] if options.get("knowledge") == "probabilities" else [(0, 0, 0, 15)])
    guided = options.get("distil") != "server" and "local" not in options
    assert [set(ask.shared) for ask in fleet.asks] == 2 * [{"model", "knowledge"} if guided else {"model"}]
    assert float(fleet.state.knowledge.sum()) > 0
    assert all(bool(leaf.isfinite().all()) for leaf in fleet.model.values())


def test_at_one_side_the_other_is_federated_averaging(
    play: Callable[..., Any], little_fleet: Callable[..., Any]
) -> None:
    served, plain = play(distil="server", server_epochs=0), little_fleet(fedavg(ingredients()), MODEL.init(0), SHARES)
    guided = play(distil="devices")
    for _ in range(2):
        for fleet in (served, plain, guided):
            fleet.play([0, 1, 2])
    assert model_digest(served.model) == model_digest(plain.model)
    assert model_digest(guided.model) != model_digest(plain.model)
    average = add(guided.asks[1].shared["model"], mean(guided))
    assert model_digest(guided.model) == model_digest(average)


def mean(fleet: Any) -> dict[str, Tensor]:
    """The weighted mean of the last deltas."""
    examples = {device: result.examples for device, result in fleet.results.items()}
    names = next(iter(fleet.payloads.values()))["delta"]
    return {
        name: (
            sum(examples[device] * payload["delta"][name].double() for device, payload in fleet.payloads.items())
            / sum(examples.values())
        ).float()
        for name in names
    }


def test_not_true_distillation_at_the_devices_is_fedntd(
    play: Callable[..., Any], little_fleet: Callable[..., Any]
) -> None:
    ours = play(local="not_true", beta=0.5, tau=2.0, server_epochs=0)
    theirs = little_fleet(fedntd(ingredients(), beta=0.5, tau=2.0), MODEL.init(0), SHARES)
    for _ in range(2):
        ours.play([0, 1])
        theirs.play([0, 1])
    assert model_digest(ours.model) == model_digest(theirs.model)


@pytest.mark.parametrize("distil", ["both", "devices"])
def test_knowledge_may_be_the_mean_probabilities_on_the_public_data(
    play: Callable[..., Any], public: PublicData, distil: str
) -> None:
    fleet = play(knowledge="probabilities", distil=distil, gamma=0.5, server_epochs=20)
    start, cohort = fleet.model, [0, 1, 3]
    fleet.play(cohort)
    local = [add(start, fleet.payloads[device]["delta"]) for device in cohort]
    estimates = [predict(MODEL, model, public.train.x).softmax(-1).mean(0) for model in local]
    torch.testing.assert_close(fleet.state.knowledge, 0.5 * sum(estimates))
    examples = [len(SHARES[device]) for device in cohort]
    parts = [scale(model, count / sum(examples)) for model, count in zip(local, examples, strict=True)]
    average = functools.reduce(add, parts)
    moved = max(float((leaf - average[name]).abs().max()) for name, leaf in fleet.model.items())
    assert (moved < 1e-6) == (distil == "devices"), "without distillation at the server the average stays as it is"


def test_a_device_without_samples_adds_no_knowledge_and_does_not_teach(
    little_fleet: Callable[..., Any], public: PublicData
) -> None:
    method = build_algorithm("flashback", {"knowledge": "probabilities", "server_epochs": 2}, ingredients())
    fleet = little_fleet(method, MODEL.init(0), [SHARES[0], np.arange(0)], public=public)
    start = fleet.model
    fleet.play([0, 1])
    local = add(start, fleet.payloads[0]["delta"])
    torch.testing.assert_close(fleet.state.knowledge, 0.025 * predict(MODEL, local, public.train.x).softmax(-1).mean(0))
    assert fleet.carries[0]["lessons/counts"][1].tolist() == [0.0] * 4
    assert fleet.carries[0]["lessons/teachers"][1].tolist() == [0.0] * 4


@pytest.mark.parametrize("knowledge", ["counts", "probabilities"])
def test_devices_with_a_cnn_agree_alone_and_in_company(play: Callable[..., Any], knowledge: str) -> None:
    fleet = play(cnn(SHAPE, 4), Checked(Serial(), Vmapped(3)), knowledge=knowledge, distil="devices")
    fleet.play([0, 1])
    fleet.play([1, 2, 3])


def test_flashback_is_refused_without_public_data_unless_nothing_reads_them() -> None:
    bare = ingredients(public=False)
    for options in ({}, {"distil": "server"}, {"distil": "devices", "knowledge": "probabilities"}):
        with pytest.raises(ConfigurationError, match="'flashback' needs public data"):
            build_algorithm("flashback", options, bare)
    build_algorithm("flashback", {"distil": "devices"}, bare)


def test_another_criterion_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="into which cross-entropy is built"):
        build_algorithm("flashback", {}, ingredients(criterion=lambda logits, batch, facts: logits.sum()))


@pytest.mark.parametrize(("distil", "names"), [("server", "distil = 'server'"), ("devices", "is FedNTD")])
def test_options_that_contradict_each_other_are_refused(distil: str, names: str) -> None:
    with pytest.raises(ConfigurationError, match=names):
        build_algorithm("flashback", {"distil": distil, "local": "not_true"}, ingredients())


@pytest.mark.parametrize("gamma", [0.0, 1.5])
def test_gamma_is_a_fraction(gamma: float) -> None:
    with pytest.raises(ConfigurationError, match=r"algorithm.options.gamma"):
        build_algorithm("flashback", {"gamma": gamma}, ingredients())


@pytest.mark.parametrize("knowledge", ["counts", "probabilities"])
def test_without_public_samples_of_the_classes_so_far_nothing_is_distilled(
    knowledge: str, little_fleet: Callable[..., Any], public: PublicData
) -> None:
    model = growing(MODEL, ClassTasks.of(4, 2, [2, 0, 3, 1]), SHAPE)
    # Labels go 0, 1, 2, 3, 0, ...: the first task brings the even ones.
    odd = PublicData(*(Labelled(part.x[1::2], part.y[1::2]) for part in (public.train, public.validation)))
    options = {"distil": "server", "knowledge": knowledge}
    stream = [[np.arange(0, 40, 2)]]
    taught, plain = (
        little_fleet(build_algorithm(name, chosen, ingredients(model)), model.init(0), [], stream=stream, public=odd)
        for name, chosen in (("flashback", options), ("fedavg", {}))
    )
    for fleet in (taught, plain):
        fleet.play([0])
    assert model_digest(taught.model) == model_digest(plain.model)
    known = taught.state.inner.knowledge
    assert known.tolist() == ([0.25, 0, 0.25, 0] if knowledge == "counts" else [0, 0, 0, 0])
