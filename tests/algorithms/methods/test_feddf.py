"""FedDF: the ensemble's loss, the schedule of the learning rate, and the distilled average."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.interface import Context, DeviceReply, Labelled, PublicData, Reply, ServerJob, Tree
from fedemu.algorithms.methods.fedavg import fedavg
from fedemu.algorithms.methods.feddf import FedDF, agreement, cosine
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import SEEN, growing
from fedemu.algorithms.registry import build_algorithm
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.algorithms.training.server_training import predict
from fedemu.algorithms.trees import add, model_digest, unflatten, zeros_like
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import DeviceId

MODEL = mlp((1, 12, 12), 4, (8,))
ONE_CLASS_EACH = [np.arange(0, 80, 4), np.arange(1, 80, 4)]
SHORT = {"server_batches": 60, "evaluate_every": 20, "server_batch": 10}
ROWS = torch.arange(2)


def ingredients(public: bool = True) -> Ingredients:
    return Ingredients(MODEL, cross_entropy, 4, epochs=1, batch_size=5, lr=0.05, devices=2, public=public)


def test_the_loss_is_the_divergence_from_the_ensemble() -> None:
    # Each row: 0.75 ln(0.75 / 0.5) + 0.25 ln(0.25 / 0.5) against an even student, and 0 against itself.
    lessons = {"probabilities": torch.tensor([[0.75, 0.25], [0.5, 0.5]])}
    loss = agreement(2.0, torch.zeros(2, 2), torch.tensor([0, 1]), lessons, ROWS)
    assert float(loss) == pytest.approx((0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 2)


def test_labels_of_the_training_part_do_not_matter(little_fleet: Callable[..., Any], public: PublicData) -> None:
    def played(labels: torch.Tensor) -> Any:
        data = PublicData(Labelled(public.train.x, labels), public.validation)
        method = build_algorithm("feddf", SHORT, ingredients())
        fleet = little_fleet(method, MODEL.init(0), ONE_CLASS_EACH, public=data)
        fleet.play([0, 1])
        return fleet.model

    assert model_digest(played(public.train.y)) == model_digest(played(3 - public.train.y))


def test_the_rate_falls_to_zero_along_half_a_cosine() -> None:
    rate = partial(cosine, 0.5, 100)
    assert [rate(0), rate(50), rate(100)] == pytest.approx([0.5, 0.25, 0.0])


def test_the_target_is_the_softmax_of_the_mean_of_the_local_logits(
    little_fleet: Callable[..., Any], public: PublicData
) -> None:
    method = build_algorithm("feddf", {**SHORT, "temperature": 2.0}, ingredients())
    fleet = little_fleet(method, MODEL.init(0), ONE_CLASS_EACH, public=public)
    start = fleet.model
    fleet.play([0, 1])
    logits = [predict(MODEL, add(start, fleet.payloads[i]["delta"]), public.train.x) for i in (0, 1)]
    torch.testing.assert_close(
        fleet.carries[0]["lessons/probabilities"], (torch.stack(logits).mean(0) / 2.0).softmax(-1)
    )


def test_models_that_are_sure_of_different_classes_teach_no_class_that_has_not_come(public: PublicData) -> None:
    """Each gives those classes a logit of 100 - 50. The mean of both gives the two classes that have come 50, too."""
    model = growing(MODEL, ClassTasks.of(4, 2, [0, 1, 2, 3]), (1, 12, 12))
    context = Context(round=1, task=0, seed=1, classes=4, public=public)
    ingredients = Ingredients(model, cross_entropy, 4, epochs=1, batch_size=5, lr=0.05, devices=2, public=True)
    method = build_algorithm("feddf", SHORT, ingredients)
    variables = zeros_like(model.init(0)) | {SEEN: torch.tensor([1.0, 1.0, 0.0, 0.0])}
    script = method.round(method.init(variables, context), context)
    next(script)
    sure = [{**zeros_like(variables), "fc2.bias": 100 * torch.eye(4)[label]} for label in (0, 1)]
    told = [DeviceReply(DeviceId(i), examples=20, steps=4, metrics={}, label_counts=None) for i in (0, 1)]
    locals = [SimpleNamespace(device=DeviceId(i), load=lambda tree=tree: tree) for i, tree in enumerate(sure)]
    job = script.send(Reply({"delta": zeros_like(variables), "locals": locals}, tuple(told)))
    assert isinstance(job, ServerJob)
    seen = (public.train.y < 2).sum()
    torch.testing.assert_close(
        job.init()["lessons/probabilities"], torch.tensor([[0.5, 0.5, 0.0, 0.0]]).expand(seen, 4)
    )


@pytest.mark.parametrize("temperature", [0.5, 4.0])
def test_an_ensemble_of_one_device_has_nothing_to_teach_its_model_at_any_temperature(
    temperature: float, little_fleet: Callable[..., Any], public: PublicData
) -> None:
    """Both sides of the loss have the temperature, so the first gradients are 0, and Adam's means with them."""
    one_batch = {"server_batches": 1, "evaluate_every": 1, "server_batch": 10, "temperature": temperature}
    method = build_algorithm("feddf", one_batch, ingredients())
    fleet = little_fleet(method, MODEL.init(0), ONE_CLASS_EACH, public=public)
    fleet.play([0])
    means = [leaf for name, leaf in fleet.carries[0].items() if name.startswith("memory/mean/")]
    assert len(means) == 4
    assert all(float(leaf.abs().max()) < 1e-6 for leaf in means)


def test_a_device_without_samples_is_no_teacher(little_fleet: Callable[..., Any], public: PublicData) -> None:
    nothing = np.arange(0)
    method = build_algorithm("feddf", SHORT, ingredients())
    fleet = little_fleet(method, MODEL.init(0), [ONE_CLASS_EACH[0], nothing], public=public)
    start = fleet.model
    fleet.play([0, 1])
    alone = predict(MODEL, add(start, fleet.payloads[0]["delta"]), public.train.x)
    torch.testing.assert_close(fleet.carries[0]["lessons/probabilities"], alone.softmax(-1))
    before = fleet.model
    fleet.play([1])
    assert fleet.jobs == ["distillation"]  # there was nobody to learn from in the second round
    assert model_digest(fleet.model) == model_digest(before)


def test_the_average_learns_to_agree_with_the_ensemble(little_fleet: Callable[..., Any], public: PublicData) -> None:
    method = build_algorithm("feddf", SHORT, ingredients())
    fleet = little_fleet(method, MODEL.init(0), ONE_CLASS_EACH, public=public)
    plain = little_fleet(fedavg(ingredients()), MODEL.init(0), ONE_CLASS_EACH)
    fleet.play([0, 1])
    plain.play([0, 1])
    assert fleet.jobs == ["distillation"]
    carry = unflatten(fleet.carries[0])

    def divergence(model: Tree) -> float:
        logits = predict(MODEL, model, public.train.x)
        return float(agreement(1.0, logits, public.train.y, carry["lessons"], torch.arange(40)))

    assert divergence(carry["model"]) < 0.5 * divergence(plain.model)


def test_rounds_follow_each_other(little_fleet: Callable[..., Any], public: PublicData) -> None:
    method = build_algorithm("feddf", SHORT, ingredients())
    fleet = little_fleet(method, MODEL.init(0), ONE_CLASS_EACH, public=public)
    fleet.play([0, 1], lost=[0])
    fleet.play([1])
    assert fleet.jobs == ["distillation", "distillation"]


def test_batches_are_rounded_up_to_whole_evaluations(public: PublicData) -> None:
    context = Context(round=1, task=0, seed=1, classes=4, public=public)
    method = build_algorithm("feddf", {"server_batches": 250, "patience": 110}, ingredients())
    script = method.round(method.init(MODEL.init(0), context), context)
    next(script)
    told = DeviceReply(DeviceId(0), examples=20, steps=4, metrics={}, label_counts=None)
    job = script.send(Reply({"delta": MODEL.init(1), "locals": [None]}, (told,)))
    assert isinstance(job, ServerJob)
    assert job.steps == 3
    assert isinstance(method, FedDF)
    assert method._server.patience == 2
    rate = method._server.rate
    assert [rate(batch) for batch in (0, 100, 200, 300)] == pytest.approx([1e-3, 7.5e-4, 2.5e-4, 0.0])


def test_feddf_is_refused_without_public_data() -> None:
    with pytest.raises(ConfigurationError, match="'feddf' needs public data"):
        build_algorithm("feddf", {}, ingredients(public=False))
