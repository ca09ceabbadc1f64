"""TARGET: the loss at devices by hand, the common generator, and what the coordinator makes, sends and reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.incremental.data_free.maker import SynthesisSettings
from fedemu.algorithms.incremental.data_free.rehearsal import with_its_row
from fedemu.algorithms.incremental.data_free.target import DistillingLoss, LatentMaker, target
from fedemu.algorithms.incremental.mfcl_local import NOISE, RehearsingSGD
from fedemu.algorithms.interface import Batch, Facts, Picturing, Remarking
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import SEEN, growing
from fedemu.algorithms.models.image_generator import Generator
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.algorithms.training.wsm import reweighted_softmax
from fedemu.algorithms.trees import without
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.errors import ConfigurationError

SHAPE = (1, 8, 8)
TASKS = ClassTasks.of(4, 2, [2, 0, 3, 1])
MODEL = growing(mlp(SHAPE, 4, (6,)), TASKS, SHAPE)
INGREDIENTS = Ingredients(MODEL, cross_entropy, 4, 2, 5, 0.05, devices=3, input_shape=SHAPE)
SHORT: dict[str, Any] = {
    "synthesis_rounds": 3,
    "warm_up": 1,
    "synthesis_steps": 2,
    "generator_batch": 4,
    "noise": 6,
    "synthetic_batch": 3,
    "student_steps": 2,
    "student_batch": 4,
}


@pytest.fixture
def fleet(little_fleet: Callable[..., Any], digits: Corpus, stream: Any) -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        method = target(INGREDIENTS, **{**SHORT, **options})
        made = little_fleet(method, MODEL.init(0), [], stream=stream, executor=Checked(Serial(), Vmapped(2)))
        made.corpus = digits
        return made

    return make


def facts(task: int) -> Facts:
    zero = torch.tensor(0)
    return Facts(
        torch.tensor(4), zero, torch.tensor(0.5), zero, torch.tensor(task), torch.tensor(True), torch.tensor([0] * 4)
    )


def test_devices_learn_new_classes_from_labels_and_old_ones_from_the_answers_that_were_sent(
    louder: Callable[[Any], Any],
) -> None:
    # The model learns in training mode, in which it is louder.
    loud = louder(MODEL)
    previous = MODEL.init(0)
    variables = MODEL.entered({**previous, "fc1.bias": previous["fc1.bias"] + 0.1}, 1, 7)
    draws = torch.Generator().manual_seed(0)
    pool, real = torch.randn(6, *SHAPE, generator=draws), torch.randn(3, *SHAPE, generator=draws)
    taught = loud.apply(previous, pool, False)[0].logits
    shared = {"synthetic": {"x": pool, "logits": taught}, "previous": {SEEN: previous[SEEN]}}
    rows = torch.tensor([4, 1])
    # The last real row is padding.
    batch = Batch(
        torch.cat([real, pool[rows]]), torch.cat([torch.tensor([3, 1, 3]), rows]), torch.tensor([1.0, 1.0, 0, 1.0, 1.0])
    )
    loss = DistillingLoss(loud, MODEL, 2, 25.0, 2.0)(variables, batch, shared, {}, facts(1))
    new = loud.apply(variables, real[:2], True)[0].logits[:, [1, 3]]
    learning = functional.cross_entropy(new, torch.tensor([1, 0]))
    old = loud.apply(variables, pool[rows], True)[0].logits[:, [0, 2]] / 2
    kept = functional.kl_div(old.log_softmax(1), (taught[rows][:, [0, 2]] / 2).softmax(1), reduction="batchmean")
    torch.testing.assert_close(loss.value, learning + 25 * kept)
    torch.testing.assert_close(loss.metrics["loss"], learning)


def test_devices_distil_by_the_weight_and_the_temperature_that_were_set(fleet: Callable[..., Any]) -> None:
    def learned(**options: Any) -> torch.Tensor:
        played = fleet(**options)
        played.play([0, 1, 2])
        played.play([0, 1])
        return torch.cat([leaf.double().flatten() for leaf in played.model.values()])

    models = learned(), learned(distillation=0.0), learned(temperature=20.0)
    assert all(not torch.allclose(one, other) for one, other in combinations(models, 2))


def test_every_option_arrives_where_it_counts(making: tuple[dict[str, Any], SynthesisSettings]) -> None:
    options, settings = making
    method = target(
        INGREDIENTS,
        distillation=3.0,
        temperature=4.0,
        synthetic_batch=6,
        noise=11,
        generator_lr=0.1,
        latent_lr=0.3,
        **options,
    )
    synthesis, loss = method._synthesis, method.programs["rehearse"].loss
    assert synthesis.settings == replace(settings, keep_all=True)
    assert synthesis.maker.generator.noise == 11
    assert (synthesis.maker.rates, synthesis.maker.steps) == ({"generator": 0.1, "latents": 0.3}, 8)
    assert (loss.synthetic_batch, loss.distillation, loss.temperature) == (6, 3.0, 4.0)


def test_a_sample_comes_with_its_row() -> None:
    shared = {"synthetic": {"x": torch.arange(8.0)[:, None]}}
    x, rows = with_its_row(shared, torch.tensor([-9.0, 0.0, 9.0]))
    assert rows.tolist() == x[:, 0].tolist() == [0, 4, 7]


def test_a_round_trains_a_copy_and_the_common_generator_takes_a_step_of_adam_by_all_its_gradients() -> None:
    maker = LatentMaker(Generator(8, 1, 6), 0.002, 0.01, 10)
    kept = maker.begin(0)
    opened = maker.opened(kept, 3, np.random.default_rng(0))
    assert opened["latents"]["z"].shape == (3, 6)
    made = maker.generator.model.apply(kept["generator"], opened["latents"]["z"], True)[0].logits
    torch.testing.assert_close(maker.images(kept, opened, torch.zeros(3)), made)
    common = without(kept["generator"], maker.generator.model.buffers)
    assert all(torch.equal(leaf, common[name]) for name, leaf in opened["generator"].items())
    after, moved = kept, torch.zeros((), requires_grad=True)
    adam = torch.optim.Adam([moved], lr=0.02, betas=(0.5, 0.999))
    for slope in (-4.0, 1.0):
        moved.grad = torch.tensor(slope)
        adam.step()
        slopes = {name: torch.full_like(leaf, slope) for name, leaf in common.items()}
        after = maker.closed(after, opened, {"generator": slopes})
    assert after.keys() == kept.keys()
    for name, leaf in common.items():
        torch.testing.assert_close(after["generator"][name], leaf + moved.detach())
    assert float(after["memory"]["steps"]) == 2


def test_the_second_task_brings_samples_and_answers_but_neither_generator_nor_model(
    fleet: Callable[..., Any],
) -> None:
    played = fleet()
    played.play([0, 1, 2])
    assert played.jobs == []
    assert list(played.asks[0].shared) == ["model"]
    played.play([0, 2])
    assert played.jobs == ["synthesis"]
    ask = played.asks[1]
    assert ask.program == "rehearse"
    assert list(ask.shared) == ["model", "previous", "synthetic"]
    assert list(ask.shared["previous"]) == [SEEN]
    assert {name: tuple(leaf.shape) for name, leaf in ask.shared["synthetic"].items()} == {
        "x": (12, *SHAPE),
        "logits": (12, 4),
    }
    program = played.algorithm.programs["rehearse"]
    assert isinstance(program, RehearsingSGD)
    assert program.noise == {NOISE: (3,)}
    assert program.passes == 2 * (1 + 3 / 5)
    assert program.kind == "dense"
    assert all(bool(torch.isfinite(leaf).all()) for leaf in played.model.values())
    assert played.model.keys() == MODEL.init(0).keys()


def test_pictures_and_remarks_tell_of_the_samples(fleet: Callable[..., Any]) -> None:
    played = fleet()
    method = played.algorithm
    assert isinstance(method, Picturing)
    assert isinstance(method, Remarking)
    played.play([0])
    assert method.pictures(played.state, 3, 1) == {}
    assert method.remarks(played.state) == {}
    played.play([1])
    pictures = method.pictures(played.state, 5, 1)
    assert pictures["x"].shape == (10, *SHAPE)
    assert pictures["y"].tolist() == [0, 2] * 5
    assert torch.equal(pictures["x"], method.pictures(played.state, 5, 1)["x"])
    pool = played.state.kept["synthetic"]
    for label, counts in ((0, [5, 0, 0, 0]), (1, [])):
        lacking = {**played.state.kept, "synthetic": {**pool, "y": torch.full_like(pool["y"], label)}}
        shown = method.pictures(replace(played.state, kept=lacking), 5, 1)
        assert (shown["y"].bincount(minlength=4).tolist() if shown else []) == counts
    said = method.remarks(played.state)
    assert list(said) == ["generator"]
    names = ["cross_entropy", "batch_statistics", "divergence", "recognised", "agreed"]
    assert list(said["generator"]) == names


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ({"model": mlp(SHAPE, 4)}, {}, "the stream brings none; set stream.kind = 'classes'"),
        ({"criterion": reweighted_softmax}, {}, "has a loss of its own"),
        ({}, {"synthesis_rounds": 3, "warm_up": 3}, "set it below algorithm.options.synthesis_rounds"),
        (
            {},
            {"synthesis_rounds": 10**6, "generator_batch": 64},
            "64,000,000 synthetic samples come to 15.3 GiB, and more than 4 GiB are never made; set a lower",
        ),
        ({"model": growing(mlp((1, 12, 12), 4), TASKS, (1, 12, 12)), "input_shape": (1, 12, 12)}, {}, "no generator"),
        ({"model": growing(mlp(SHAPE, 4, ()), TASKS, SHAPE)}, {}, "no layers that report any"),
    ],
)
def test_unsuitable_settings_are_refused(changes: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        target(replace(INGREDIENTS, **changes), **{**SHORT, **options})
