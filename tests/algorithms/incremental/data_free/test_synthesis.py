"""Samples that are made without data: rounds of synthesis, the student, and resumed jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.incremental.data_free.losses import agreement_divergence, statistics_distance
from fedemu.algorithms.incremental.data_free.maker import SynthesisSettings
from fedemu.algorithms.incremental.data_free.synthesis import Synthesis, even_classes
from fedemu.algorithms.interface import Context, Forest, Outputs, ServerJob, Tree
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import SEEN, growing
from fedemu.algorithms.models.layer_statistics import running_statistics, unwatched, watched
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.trees import unflatten, without
from fedemu.protocol import seeds
from fedemu.protocol.errors import FedemuError

SHAPE = (1, 2, 2)
MODEL = growing(mlp(SHAPE, 4, (6,)), ClassTasks.of(4, 2, [2, 0, 3, 1]), SHAPE)
CONTEXT = Context(3, 1, 7, 4)
SETTINGS = SynthesisSettings(
    rounds=4,
    warm_up=1,
    steps=3,
    batch_size=5,
    cross_entropy=0.5,
    batch_statistics=2.0,
    divergence=3.0,
    student_steps=4,
    student_batch=3,
    student_lr=0.1,
    student_decay=0.0,
    temperature=2.0,
    keep_all=True,
)


class Pixels:
    """Trains the pixels of the images themselves. What it keeps is the number of rounds."""

    rates: Mapping[str, float] = {"pixels": 0.1}

    def begin(self, seed: int) -> Forest:
        return {"count": {"rounds": torch.zeros(())}}

    def opened(self, kept: Forest, rows: int, draws: np.random.Generator) -> Forest:
        return {"pixels": {"x": torch.from_numpy(draws.standard_normal((rows, *SHAPE), "float32"))}}

    def images(self, kept: Forest, trained: Forest, y: Tensor) -> Tensor:
        return trained["pixels"]["x"]

    def losses(self, outputs: Outputs, y: Tensor) -> Mapping[str, Tensor]:
        return {}

    def lesson(self, student: Outputs, features: Tensor) -> Tensor | None:
        return None

    def closed(self, kept: Forest, trained: Forest, slopes: Forest) -> Forest:
        return {"count": {"rounds": kept["count"]["rounds"] + 1}}


@pytest.fixture
def teacher() -> Tree:
    """A new model that has seen two classes, with running statistics of its hidden layer."""
    torch.set_num_threads(1)
    watching = watched(MODEL, SHAPE)
    return {name: leaf * 3 if "weight" in name else leaf for name, leaf in watching.init(1).items()}


def job(teacher: Tree, model: Any = None, **settings: Any) -> ServerJob:
    synthesis = Synthesis(Pixels(), model or MODEL.observed(), replace(SETTINGS, **settings))
    return synthesis.job(teacher, SHAPE, CONTEXT)


def run(job: ServerJob, carry: Tree | None = None, start: int = 0) -> Tree:
    carry = job.init() if carry is None else carry
    for index in range(start, job.steps):
        carry, finished = job.step(carry, index)
        assert not finished
    return carry


def test_classes_to_show_are_those_seen_and_even() -> None:
    seen = torch.tensor([True, False, True, True])
    y = even_classes(seen, 11, np.random.default_rng(0))
    assert y[:9].tolist() == [0, 2, 3] * 3
    assert set(y[9:].tolist()) <= {0, 2, 3}
    assert len(y) == 11
    assert set(even_classes(seen, 2, np.random.default_rng(0)).tolist()) <= {0, 2, 3}


def test_all_samples_are_kept_or_those_after_the_warm_up_with_the_teachers_answers(
    teacher: Tree, louder: Callable[[Any], Any]
) -> None:
    # Teacher and student answer in evaluation mode, which a model tells that is louder in training.
    for keep_all, rounds in ((True, 4), (False, 3)):
        settings = replace(SETTINGS, keep_all=keep_all)
        carry = unflatten(run(job(teacher, louder(MODEL.observed()), keep_all=keep_all)))
        pool = carry["pool"]
        assert len(pool["y"]) == settings.samples == 5 * rounds
        outputs, _ = MODEL.apply(unwatched(teacher), pool["x"], False)
        torch.testing.assert_close(pool["logits"], outputs.logits)
        torch.testing.assert_close(pool["features"], outputs.features)
        assert set(pool["y"].tolist()) == {0, 2}
        assert float(carry["kept.count"]["rounds"]) == 4


def test_a_round_lowers_the_losses_that_it_is_judged_by(teacher: Tree) -> None:
    short, long = (unflatten(run(job(teacher, steps=steps, rounds=2)))["judged"] for steps in (1, 60))
    assert list(long) == ["cross_entropy", "batch_statistics", "recognised", "agreed"]
    assert long["cross_entropy"] + long["batch_statistics"] < short["cross_entropy"] + short["batch_statistics"]
    assert long["recognised"] == 1


def test_the_losses_are_weighted_and_the_statistics_remember_earlier_rounds(
    teacher: Tree, louder: Callable[[Any], Any]
) -> None:
    played = job(teacher, louder(MODEL.observed()), rounds=3, steps=1)
    carry, _ = played.step(played.init(), 0)
    second, _ = played.step(carry, 1)
    student = unflatten(second)["student"]
    third = unflatten(played.step(second, 2)[0])
    x, y = third["pool"]["x"][10:], third["pool"]["y"][10:]
    outputs, _ = MODEL.observed().apply(unwatched(teacher), x, False)
    past = unflatten(second)["statistics"]
    blended = {name: 0.9 * past[name] + 0.1 * leaf for name, leaf in outputs.statistics.items()}
    answers, _ = MODEL.apply(student, x, False)
    expected = {
        "cross_entropy": 0.5 * functional.cross_entropy(outputs.logits, y),
        "batch_statistics": 2 * statistics_distance(running_statistics(teacher), blended),
        "divergence": -3 * agreement_divergence(answers.logits, outputs.logits, teacher[SEEN] > 0),
        "recognised": (outputs.logits.argmax(1) == y).float().mean(),
        "agreed": (outputs.logits.argmax(1) == answers.logits.argmax(1)).float().mean(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(third["judged"][name], value)
    for name, leaf in blended.items():
        torch.testing.assert_close(third["statistics"][name], leaf)


def test_the_student_begins_after_the_warm_up_and_learns_the_teachers_answers(teacher: Tree) -> None:
    teacher[SEEN] = torch.tensor([1.0, 0.0, 1.0, 1.0])
    played = job(teacher, rounds=6, student_steps=60, student_batch=10)
    carry, _ = played.step(played.init(), 0)
    first = unflatten(carry)["student"]
    assert all(torch.equal(leaf, first[name]) for name, leaf in unflatten(played.init())["student"].items())
    last = unflatten(run(played, carry, 1))
    pool, seen = last["pool"], teacher[SEEN] > 0
    answers = [MODEL.apply(student, pool["x"], False)[0].logits[:, seen] for student in (first, last["student"])]
    taught = pool["logits"][:, seen]
    before, after = (functional.kl_div(a.log_softmax(1), taught.softmax(1), reduction="batchmean") for a in answers)
    assert after < before / 4
    assert torch.equal(last["student"][SEEN], teacher[SEEN])


def test_the_student_learns_answers_at_the_temperature_and_lessons_with_a_momentum_that_lasts_over_rounds(
    teacher: Tree, louder: Callable[[Any], Any]
) -> None:
    class Teaching(Pixels):
        """Has the student learn the teacher's features, too."""

        def lesson(self, student: Outputs, features: Tensor) -> Tensor | None:
            return 3 * (student.features - features).square().mean()

    settings = replace(SETTINGS, warm_up=0, rounds=2, student_steps=1, student_decay=0.01, temperature=20.0)
    played = Synthesis(Teaching(), louder(MODEL.observed()), settings).job(teacher, SHAPE, CONTEXT)
    start, end = unflatten(played.init())["student"], unflatten(run(played))
    pool, student = end["pool"], {name: leaf.requires_grad_() for name, leaf in without(start, MODEL.buffers).items()}
    optimiser = torch.optim.SGD(student.values(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for index in range(2):
        draws = seeds.generator(CONTEXT.seed, round=CONTEXT.round, purpose=f"student/{index}")
        rows = draws.integers(0, 5 * (index + 1), 3)
        outputs = MODEL.apply({**start, **student}, pool["x"][rows], True)[0]
        # The student learns in training mode, in which it is twice as loud.
        answers, taught = 2 * outputs.logits[:, [0, 2]] / 20, pool["logits"][rows][:, [0, 2]] / 20
        kept = functional.kl_div(answers.log_softmax(1), taught.softmax(1), reduction="batchmean")
        optimiser.zero_grad()
        (20**2 * kept + 3 * functional.mse_loss(2 * outputs.features, pool["features"][rows])).backward()
        optimiser.step()
    for name, leaf in student.items():
        torch.testing.assert_close(end["student"][name], leaf.detach())


def test_a_round_keeps_its_best_batch(teacher: Tree) -> None:
    class Hasty(Pixels):
        """Leaves a good batch behind by its large steps."""

        rates: Mapping[str, float] = {"pixels": 0.7}

    def lost(steps: int) -> float:
        settings = replace(SETTINGS, rounds=1, steps=steps)
        judged = unflatten(run(Synthesis(Hasty(), MODEL.observed(), settings).job(teacher, SHAPE, CONTEXT)))["judged"]
        return float(judged["cross_entropy"] + judged["batch_statistics"])

    values = [lost(steps) for steps in range(1, 7)]
    assert values == sorted(values, reverse=True)
    assert len({*values}) > 1


def test_every_task_has_draws_of_its_own(teacher: Tree) -> None:
    synthesis = Synthesis(Pixels(), MODEL.observed(), replace(SETTINGS, warm_up=0, rounds=1))
    jobs = [synthesis.job(teacher, SHAPE, replace(CONTEXT, round=number)) for number in (3, 4)]
    for carries, name in (([job.init() for job in jobs], "student/fc1.weight"), (list(map(run, jobs)), "pool/x")):
        assert not torch.equal(*(carry[name] for carry in carries))


def test_a_maker_gets_the_sum_of_the_gradients_of_a_round(teacher: Tree) -> None:
    class Still(Pixels):
        """Keeps its pixels, so that all gradients of a round are the same, and then their sum."""

        rates: Mapping[str, float] = {"pixels": 0.0}

        def closed(self, kept: Forest, trained: Forest, slopes: Forest) -> Forest:
            return slopes

    def slopes(steps: int) -> Tensor:
        settings = replace(SETTINGS, steps=steps, rounds=1)
        return run(Synthesis(Still(), MODEL.observed(), settings).job(teacher, SHAPE, CONTEXT))["kept.pixels/x"]

    assert slopes(1).any()
    torch.testing.assert_close(slopes(3), 3 * slopes(1))


def test_a_job_that_is_resumed_in_the_middle_ends_the_same(teacher: Tree) -> None:
    played = job(teacher)
    assert (played.name, played.steps) == ("synthesis", 4)
    half = played.init()
    for index in range(2):
        half, _ = played.step(half, index)
    copied = {name: leaf.clone() for name, leaf in half.items()}
    one, other = run(played), run(job(teacher), copied, 2)
    assert one.keys() == other.keys()
    assert all(torch.equal(leaf, other[name]) for name, leaf in one.items())


def test_a_weight_of_0_leaves_a_loss_out_and_needs_no_statistics(teacher: Tree) -> None:
    plain = unwatched(teacher)
    synthesis = Synthesis(Pixels(), MODEL, replace(SETTINGS, batch_statistics=0.0, divergence=0.0))
    carry = unflatten(run(synthesis.job(plain, SHAPE, CONTEXT)))
    assert list(carry["judged"]) == ["cross_entropy", "recognised", "agreed"]


def test_samples_and_students_that_are_not_finite_any_more_name_their_own_learning_rates(teacher: Tree) -> None:
    class Breaking(Pixels):
        """Makes a sample that is not finite in its third round."""

        def images(self, kept: Forest, trained: Forest, y: Tensor) -> Tensor:
            x = trained["pixels"]["x"]
            return torch.cat([x[:1] / (2 - kept["count"]["rounds"]), x[1:]])

    breaking = Synthesis(Breaking(), MODEL.observed(), SETTINGS).job(teacher, SHAPE, CONTEXT)
    with pytest.raises(FedemuError, match=r"samples of the synthesis .* in round 2 of it; .*options\.generator_lr$"):
        run(breaking)
    with pytest.raises(FedemuError, match=r"student of the synthesis .* round 1 of it; .*student_lr below 1e\+30$"):
        run(job(teacher, student_lr=1e30))
