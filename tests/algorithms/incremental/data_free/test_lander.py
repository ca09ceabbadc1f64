"""LANDER: the losses at devices by hand, images from noisy anchors, and what devices get and send."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.incremental.data_free.anchors import Mapped, anchors_of
from fedemu.algorithms.incremental.data_free.lander import NoisyAnchorMaker, lander
from fedemu.algorithms.incremental.data_free.lander_local import AnchoredDistillingLoss, AnchoredLoss, balance
from fedemu.algorithms.incremental.data_free.maker import SynthesisSettings
from fedemu.algorithms.interface import Batch, Facts, Outputs, Revealing
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import SEEN, growing
from fedemu.algorithms.models.image_generator import Generator
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.algorithms.training.wsm import reweighted_softmax
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.errors import ConfigurationError

SHAPE = (1, 8, 8)
TASKS = ClassTasks.of(4, 2, [2, 0, 3, 1])
MODEL = growing(mlp(SHAPE, 4, (6,)), TASKS, SHAPE)
MAPPED = Mapped(MODEL, 6, 5)
ANCHORS = anchors_of("orthonormal", 4, 5, 0.45)
INGREDIENTS = Ingredients(MODEL, cross_entropy, 4, 2, 5, 0.05, devices=3, input_shape=SHAPE)
SHORT: dict[str, Any] = {
    "anchor_width": 5,
    "synthesis_rounds": 3,
    "warm_up": 1,
    "synthesis_steps": 2,
    "generator_batch": 4,
    "noise": 6,
    "synthetic_batch": 3,
    "student_steps": 2,
    "student_batch": 4,
}


def facts(task: int) -> Facts:
    zero = torch.tensor(0)
    return Facts(
        torch.tensor(4), zero, torch.tensor(0.5), zero, torch.tensor(task), torch.tensor(True), torch.tensor([0] * 4)
    )


def test_the_first_task_holds_features_near_anchors(louder: Callable[[Any], Any]) -> None:
    # The model learns in training mode, in which it is louder.
    loud = Mapped(louder(MODEL), 6, 5)
    variables = loud.init(0)
    x = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0))
    batch = Batch(x, torch.tensor([2, 0, 2]), torch.tensor([1.0, 1.0, 0.0]))
    outputs = loud.apply(variables, x[:2], True)[0]
    learning = functional.cross_entropy(outputs.logits, batch.y[:2])
    distance = functional.mse_loss(outputs.features, ANCHORS[[2, 0]])
    for radius in (0.1, 9.0):
        loss = AnchoredLoss(loud, ANCHORS, 5.0, radius)(variables, batch, {}, {}, facts(0))
        torch.testing.assert_close(loss.value, learning + 5 * max(0.0, float(distance) - radius))
        torch.testing.assert_close(loss.metrics["loss"], learning)


def test_devices_learn_later_tasks_by_the_weights_that_were_set(
    little_fleet: Callable[..., Any], digits: Corpus, stream: Any
) -> None:
    def learned(**options: Any) -> torch.Tensor:
        played = little_fleet(lander(INGREDIENTS, **SHORT, **options), MODEL.init(0), [], stream=stream)
        played.corpus = digits
        played.play([0, 1, 2])
        played.play([0, 1])
        return torch.cat([leaf.double().flatten() for leaf in played.model.values()])

    models = learned(), learned(current=0.0), learned(previous=0.0), learned(temperature=20.0)
    assert all(not torch.allclose(one, other) for one, other in combinations(models, 2))


def test_every_option_arrives_where_it_counts(making: tuple[dict[str, Any], SynthesisSettings]) -> None:
    options, settings = making
    method = lander(
        INGREDIENTS,
        anchor_width=5,
        anchor_scale=0.3,
        anchoring=1.5,
        radius=0.25,
        current=0.1,
        previous=0.7,
        temperature=4.0,
        synthetic_batch=6,
        noise=11,
        generator_lr=0.1,
        **options,
    )
    synthesis, maker = method._synthesis, method._synthesis.maker
    assert synthesis.settings == settings
    first, later = (method.programs[name].loss for name in ("train", "rehearse"))
    assert {(each.anchoring, each.radius) for each in (maker, first, later)} == {(1.5, 0.25)}
    assert all(torch.equal(each.anchors, anchors_of("orthonormal", 4, 5, 0.3)) for each in (maker, first, later))
    assert (maker.generator.noise, maker.lr) == (11, 0.1)
    assert (later.synthetic_batch, later.current, later.previous, later.temperature) == (6, 0.1, 0.7, 4.0)


def test_later_tasks_balance_new_classes_with_answers_and_features_of_earlier_ones(
    louder: Callable[[Any], Any],
) -> None:
    loud = Mapped(louder(MODEL), 6, 5)
    earlier = loud.init(0)
    variables = MODEL.entered({**earlier, "fc1.bias": earlier["fc1.bias"] + 0.1}, 1, 7)
    draws = torch.Generator().manual_seed(0)
    pool, real = torch.randn(6, *SHAPE, generator=draws), torch.randn(3, *SHAPE, generator=draws)
    taught = loud.apply(earlier, pool, False)[0]
    synthetic = {"x": pool, "logits": taught.logits, "features": taught.features}
    shared = {"synthetic": synthetic, "previous": {SEEN: earlier[SEEN]}}
    rows = torch.tensor([4, 1])
    # The last real row is padding.
    y, weight = torch.tensor([3, 1, 3]), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    batch = Batch(torch.cat([real, pool[rows]]), torch.cat([y, rows]), weight)
    loss = AnchoredDistillingLoss(loud, ANCHORS, 5.0, 0.01, MODEL, 2, 0.2, 0.4, 2.0)
    found = loss(variables, batch, shared, {}, facts(1))
    new, old = (loud.apply(variables, x, True)[0] for x in (real[:2], pool[rows]))
    learning = functional.cross_entropy(new.logits[:, [1, 3]], torch.tensor([1, 0]))
    bound = functional.mse_loss(new.features, ANCHORS[[3, 1]]) - 0.01
    answers, wanted = (logits[:, [0, 2]] / 2 for logits in (old.logits, taught.logits[rows]))
    kept = functional.kl_div(answers.log_softmax(1), wanted.softmax(1), reduction="batchmean")
    drift = functional.mse_loss(old.features, taught.features[rows])
    a, b = math.log2(3), math.sqrt(1 / 2)
    expected = 0.2 * (1 + 1 / a) / b * (learning + 5 * bound) + 0.4 * a * b * (kept + drift)
    torch.testing.assert_close(found.value, expected)
    torch.testing.assert_close(found.metrics["loss"], learning)


def test_with_own_orders_a_class_of_the_present_task_is_new_also_if_the_previous_model_has_seen_it() -> None:
    own = replace(MODEL, tasks=replace(TASKS, own=np.array([[1, 0], [0, 1]])))
    variables, draws = MODEL.entered(MAPPED.init(0), 1, 7), torch.Generator().manual_seed(0)
    pool = torch.randn(2, *SHAPE, generator=draws)
    batch = Batch(torch.cat([pool, pool]), torch.tensor([0, 2, 0, 1]), torch.ones(4))
    taught = MAPPED.apply(MAPPED.init(0), pool, False)[0]
    synthetic = {"x": pool, "logits": taught.logits, "features": taught.features}
    shared = {"synthetic": synthetic, "previous": {SEEN: torch.tensor([1.0, 0.0, 1.0, 1.0])}}
    # Only learning counts, so the value is its share times cross-entropy. The task of device 0 brings 2 classes of 3.
    loss = AnchoredDistillingLoss(MAPPED, ANCHORS, 0.0, 0.01, own, 2, 1.0, 0.0, 2.0)
    found = loss(variables, batch, shared, {}, facts(1)._replace(device=torch.tensor(0)))
    share, _ = balance(torch.tensor(1), torch.tensor(2))
    torch.testing.assert_close(found.value, share * found.metrics["loss"])


def test_the_balance_moves_from_new_classes_to_earlier_ones() -> None:
    current, previous = balance(torch.tensor([2.0, 8.0]), torch.tensor([2.0, 2.0]))
    a, b = np.log2([3, 6]), np.sqrt([0.5, 0.8])
    assert current.tolist() == pytest.approx((1 + 1 / a) / b)
    assert previous.tolist() == pytest.approx(a * b)


def test_images_come_from_standardised_anchors_by_a_noisy_layer_for_every_ten() -> None:
    maker = NoisyAnchorMaker(Generator(8, 1, 6), ANCHORS, 0.002, 5.0, 0.01)
    kept = maker.begin(0)
    opened = maker.opened(kept, 12, np.random.default_rng(0))
    assert {name: tuple(leaf.shape) for name, leaf in opened["weights"].items()} == {"noisy": (2, 6, 5), "bias": (2, 6)}
    y = torch.tensor([0, 2] * 6)
    chosen = ANCHORS[y]
    even, parts = functional.batch_norm(chosen, None, None, training=True), (slice(10), slice(10, 12))
    assert not opened["weights"]["bias"].any()
    bias = torch.tensor([[0.5], [-0.25]]).expand(2, 6)
    opened["weights"]["bias"] = bias
    z = torch.cat([even[rows] @ opened["weights"]["noisy"][i].t() + bias[i] for i, rows in enumerate(parts)])
    made = maker.generator.model.apply(kept["generator"], z, True)[0].logits
    torch.testing.assert_close(maker.images(kept, opened, y), made)
    opened = {**opened, "statistics": {"mean": torch.full((1, 1, 1, 1), 3.0), "deviation": torch.full((1, 1, 1, 1), 2)}}
    torch.testing.assert_close(maker.images(kept, opened, y), made * 2 + 3)
    after = maker.closed(kept, opened, {})
    assert after.keys() == kept.keys()
    assert float(after["statistics"]["mean"]) == 3


def test_the_generator_and_the_student_follow_the_features() -> None:
    maker = NoisyAnchorMaker(Generator(8, 1, 6), ANCHORS, 0.002, 5.0, 0.01)
    features, y = torch.ones(2, 5), torch.tensor([1, 3])
    outputs = Outputs(torch.zeros(2, 4), features, {})
    distance = float((1 - ANCHORS[y]).square().mean())
    assert float(maker.losses(outputs, y)["anchoring"]) == pytest.approx(5 * (distance - 0.01))
    lesson = maker.lesson(outputs, torch.full((2, 5), 3.0))
    assert lesson is not None
    assert float(lesson) == 5 * 4
    without = replace(maker, anchoring=0.0)
    assert without.losses(outputs, y) == {}
    assert without.lesson(outputs, features) is None


def test_devices_train_the_mapping_too_and_the_global_model_leaves_it_out(
    little_fleet: Callable[..., Any], digits: Corpus, stream: Any
) -> None:
    method = lander(INGREDIENTS, **SHORT)
    played = little_fleet(method, MODEL.init(0), [], stream=stream, executor=Checked(Serial(), Vmapped(2)))
    played.corpus = digits
    played.play([0, 1, 2])
    played.play([0, 2])
    assert played.jobs == ["synthesis"]
    first, second = played.asks
    assert list(first.shared) == ["model"]
    assert list(second.shared) == ["model", "previous", "synthetic"]
    assert {name: tuple(leaf.shape) for name, leaf in second.shared["synthetic"].items()} == {
        "x": (8, *SHAPE),
        "logits": (8, 4),
        "features": (8, 5),
    }
    before, after = (ask.shared["model"]["mapping.weight"] for ask in played.asks)
    assert not torch.equal(before, after)
    assert played.model.keys() == MODEL.init(0).keys()
    for name in ("train", "rehearse"):
        program = method.programs[name]
        assert isinstance(program, Revealing)
        assert program.local_model(second.shared, {"delta": second.shared["model"]}).keys() == played.model.keys()
    names = ["cross_entropy", "batch_statistics", "divergence", "anchoring", "recognised", "agreed"]
    assert sorted(method.remarks(played.state)["generator"]) == sorted(names)


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ({"model": mlp(SHAPE, 4)}, {}, "the stream brings none; set stream.kind = 'classes'"),
        ({"criterion": reweighted_softmax}, {}, "has a loss of its own"),
        ({}, {"synthesis_rounds": 3, "warm_up": 3}, "set it below algorithm.options.synthesis_rounds"),
        ({}, {"anchors": "words"}, "algorithm.options.anchors = 'words' is not 'orthonormal'"),
    ],
)
def test_unsuitable_settings_are_refused(changes: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        lander(replace(INGREDIENTS, **changes), **{**SHORT, **options})
