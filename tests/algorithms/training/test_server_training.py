"""Training on the public data: early stopping, the order of samples, and resumed jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from fedemu.algorithms.interface import Context, Labelled, Model, Outputs, PublicData, ServerJob, Tree
from fedemu.algorithms.methods.finetuning import labelled
from fedemu.algorithms.models.feed_forward import cnn
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.adam import Adam
from fedemu.algorithms.training.local_sgd import SGD
from fedemu.algorithms.training.server_training import ServerTraining, Trained, clipped, positions, predict
from fedemu.algorithms.trees import from_arrays, to_arrays
from fedemu.protocol.errors import ConfigurationError


class Clock:
    """A model whose parameter ``w`` grows by 1 per batch. It is right about ``right[w]`` validation samples."""

    kind: Literal["dense"] = "dense"
    buffers: frozenset[str] = frozenset()

    def __init__(self, right: Sequence[int], other: float = 1.0) -> None:
        self.right = right
        self.other = other

    def init(self, seed: int) -> Tree:
        return {"w": torch.tensor(0.0)}

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        if train:
            logits = variables["w"].expand(len(x), 2)
        else:
            answers = (x[:, 0] < self.right[round(float(variables["w"]))]).float()
            logits = torch.stack([self.other - answers, answers], 1)
        return Outputs(logits, logits, {}), {}


def forward(logits: Tensor, y: Tensor, lessons: Tree, rows: Tensor) -> Tensor:
    return -logits[:, 0].mean()


NUMBERS = torch.arange(10.0)[:, None]
CLOCK_DATA = PublicData(Labelled(NUMBERS[:4], torch.ones(4).long()), Labelled(NUMBERS, torch.ones(10).long()))


def run(job: ServerJob) -> tuple[Tree, int]:
    """The last carry, and the number of steps."""
    carry = job.init()
    for index in range(job.steps):
        carry, finished = job.step(carry, index)
        if finished:
            return carry, index + 1
    return carry, job.steps


def best_of(right: Sequence[int], patience: int = 2, steps: int = 6) -> tuple[float, int]:
    """The best parameter, which is its step, and the number of steps, for a model with these right answers."""
    model = Clock(right)
    training = ServerTraining.by_passes(model, forward, 1.0, 0.0, 4, steps, patience)
    job = training.job("clock", model.init(0), lambda public: {}, context(CLOCK_DATA))
    carry, taken = run(job)
    return float(carry["best/w"]), taken


def context(public: PublicData, round: int = 3) -> Context:
    return Context(round=round, task=0, seed=7, classes=4, public=public)


def norms() -> Model:
    return from_module(
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(200, 4)
        )
    )


def test_training_ends_after_patience_steps_without_more_right_answers() -> None:
    assert best_of([1, 5, 3, 4, 9, 9, 9]) == (1.0, 3)


def test_a_better_model_renews_the_patience() -> None:
    assert best_of([1, 5, 3, 6, 2, 6, 9]) == (3.0, 5)


def test_the_earliest_of_equally_good_models_counts() -> None:
    assert best_of([1, 5, 5, 5, 9, 9, 9]) == (1.0, 3)


def test_the_model_at_the_beginning_is_kept_if_no_later_one_is_better() -> None:
    assert best_of([5, 1, 5, 9, 9, 9, 9]) == (0.0, 2)


def test_training_ends_at_the_last_step_with_the_best_of_all() -> None:
    assert best_of([1, 2, 3, 4, 5, 6, 7]) == (6.0, 6)


def test_a_model_whose_logits_are_nan_has_no_right_answer() -> None:
    of_the_first_class = replace(CLOCK_DATA.validation, y=torch.zeros(10, dtype=torch.int64))
    training = ServerTraining.by_passes(Clock([10]), forward, 1.0, 0.0, 4, 6, 2)
    assert training._right({"w": torch.tensor(0.0)}, CLOCK_DATA.validation) == 10
    training = ServerTraining.by_passes(Clock([10], other=math.nan), forward, 1.0, 0.0, 4, 6, 2)
    assert training._right({"w": torch.tensor(0.0)}, of_the_first_class) == 0


def test_without_steps_the_lessons_are_still_prepared() -> None:
    model = Clock([1])
    training = ServerTraining.by_passes(model, forward, 1.0, 0.0, 4, 0, 2)
    script = training.train("clock", model.init(0), lambda train: {"sum": train.x.sum()}, context(CLOCK_DATA))
    job = next(script)
    assert isinstance(job, ServerJob)
    assert (job.name, job.checkpoint_every) == ("clock", 1)
    with pytest.raises(StopIteration) as end:
        script.send(run(job)[0])
    model_as_it_was = {"w": torch.tensor(0.0)}
    assert end.value.value == Trained(model_as_it_was, {"sum": torch.tensor(6.0)}, model_as_it_was)


def test_passes_go_over_all_samples_in_orders_of_their_own() -> None:
    where = context(CLOCK_DATA)
    batches = [rows.tolist() for rows in positions(5, 2, 0, 6, where)]
    assert [len(rows) for rows in batches] == [2, 2, 1, 2, 2, 1]
    assert sorted(chain(*batches[:3])) == sorted(chain(*batches[3:])) == [0, 1, 2, 3, 4]
    assert batches[:3] != batches[3:]


def test_the_order_of_samples_does_not_depend_on_where_one_begins() -> None:
    where = context(CLOCK_DATA)
    whole = [rows.tolist() for rows in positions(5, 2, 0, 9, where)]
    assert [rows.tolist() for rows in positions(5, 2, 4, 3, where)] == whole[4:7]
    assert [rows.tolist() for rows in positions(5, 2, 0, 9, context(CLOCK_DATA, round=4))] != whole


def test_a_last_batch_that_is_too_small_is_joined_to_the_batch_before() -> None:
    where = context(CLOCK_DATA)
    whole = [rows.tolist() for rows in positions(5, 2, 0, 6, where)]
    joined = [rows.tolist() for rows in positions(5, 2, 0, 4, where, fewest=2)]
    assert joined == [whole[0], whole[1] + whole[2], whole[3], whole[4] + whole[5]]
    assert [rows.tolist() for rows in positions(5, 2, 3, 1, where, fewest=2)] == joined[3:]
    assert [len(rows) for rows in positions(1, 2, 0, 2, where, fewest=2)] == [1, 1]
    for samples in (4, 6):
        pairs = [[rows.tolist() for rows in positions(samples, 2, 0, 6, where, fewest)] for fewest in (1, 2)]
        assert pairs[0] == pairs[1]


def flat_norms() -> Model:
    return from_module(
        lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(144), torch.nn.Linear(144, 4))
    )


@pytest.mark.parametrize(("samples", "batches"), [(17, 2), (18, 3), (1, 0), (2, 1)])
def test_with_batch_normalisation_no_batch_is_a_single_sample(samples: int, batches: int, public: PublicData) -> None:
    model = flat_norms()
    training = ServerTraining.by_passes(model, labelled, 0.05, 0.9, 8, 1, 5)
    part = Labelled(public.train.x[:samples], public.train.y[:samples])
    after, _ = run(training.job("tune", model.init(0), lambda train: {}, context(PublicData(part, public.validation))))
    assert int(after["model/1.num_batches_tracked"]) == batches
    assert all(leaf.isfinite().all() for name, leaf in after.items() if name.startswith("model/"))


def test_batches_of_a_single_sample_are_refused_with_batch_normalisation() -> None:
    with pytest.raises(ConfigurationError, match=r"can't work with algorithm\.options\.server_batch = 1, because"):
        ServerTraining.by_passes(flat_norms(), labelled, 0.05, 0.9, 1, 1, 5)
    ServerTraining.by_passes(flat_norms(), labelled, 0.05, 0.9, 1, 0, 5)
    ServerTraining.by_passes(cnn((1, 12, 12), 4), labelled, 0.05, 0.9, 1, 1, 5)


def test_the_rate_is_asked_by_batch_over_the_whole_job() -> None:
    asked: list[int] = []

    def rate(batch: int) -> float:
        asked.append(batch)
        return 1.0

    model = Clock(range(20))
    training = ServerTraining(model, forward, SGD(), rate, batch_size=4, steps=2, patience=1, batches=3)
    carry, _ = run(training.job("clock", model.init(0), lambda public: {}, context(CLOCK_DATA)))
    assert asked == [0, 1, 2, 3, 4, 5]
    assert float(carry["model/w"]) == 6.0


def test_long_gradients_are_shortened_and_short_ones_left() -> None:
    gradients = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    shortened = clipped(gradients, 1.0)
    assert [float(shortened[name]) for name in "ab"] == pytest.approx([0.6, 0.8], rel=1e-6)
    assert clipped(gradients, 6.0) == gradients
    assert clipped(gradients, float("inf")) is gradients


@pytest.mark.parametrize("optimiser", [SGD(), SGD(momentum=0.9), Adam()], ids=["sgd", "momentum", "adam"])
@pytest.mark.parametrize("build", [norms, lambda: cnn((1, 12, 12), 4)], ids=["norms", "cnn"])
def test_a_job_that_goes_on_from_its_carry_gives_the_same_bits(build: Any, optimiser: Any, public: PublicData) -> None:
    torch.set_num_threads(1)
    model = build()
    training = ServerTraining(model, labelled, optimiser, lambda batch: 0.05, batch_size=16, steps=3, patience=5)

    def job() -> ServerJob:
        return training.job("tune", model.init(0), lambda train: {"x": train.x[:2]}, context(public))

    expected, _ = run(job())
    first = job()
    carry, _ = first.step(first.init(), 0)
    for index in (1, 2):
        kept = {name: array.copy() for name, array in to_arrays(carry).items()}
        carry, _ = job().step(from_arrays(kept), index)
    assert carry.keys() == expected.keys()
    assert all(torch.equal(carry[name], leaf) for name, leaf in expected.items())


@pytest.mark.parametrize("empty", ["train", "validation"])
def test_a_part_without_samples_of_the_classes_seen_leaves_the_model_as_it_is(
    empty: str, public: PublicData, viewing: Model
) -> None:
    part: Labelled = getattr(public, empty)
    later = part.y >= 2
    split = replace(public, **{empty: Labelled(part.x[later], part.y[later])})
    model = growing(viewing, ClassTasks.of(4, 2, [0, 1, 2, 3]), (1, 12, 12))
    training = ServerTraining.by_passes(model, lambda z, y, lessons, rows: z.square().sum(), 0.1, 0.0, 16, 3, 2)
    variables = model.init(0)

    def prepare(data: Labelled) -> Tree:
        return {"logits": predict(model, variables, data.x)}

    carry, _ = run(training.job("some", variables, prepare, context(split)))
    assert carry["lessons/logits"].shape == (0 if empty == "train" else 20, 4)
    assert all(torch.equal(carry[f"best/{name}"], leaf) for name, leaf in variables.items())


def test_training_makes_a_model_better_on_the_validation_part(public: PublicData) -> None:
    torch.set_num_threads(1)
    model = cnn((1, 12, 12), 4)
    training = ServerTraining.by_passes(model, labelled, 0.05, 0.9, 16, 6, 6)
    job = training.job("tune", model.init(0), lambda train: {}, context(public))
    before = job.init()
    after, _ = run(job)
    best = {name.removeprefix("best/"): leaf for name, leaf in after.items() if name.startswith("best/")}
    answers = predict(model, best, public.validation.x).argmax(-1)
    assert int(after["stop/right"]) == int((answers == public.validation.y).sum()) > int(before["stop/right"])


def test_running_statistics_are_carried_and_not_trained(public: PublicData) -> None:
    model = norms()
    training = ServerTraining.by_passes(model, labelled, 0.05, 0.9, 20, 1, 5)
    after, _ = run(training.job("tune", model.init(0), lambda train: {}, context(public)))
    assert int(after["model/1.num_batches_tracked"]) == 2
    assert not any(name.startswith("memory/1.running") for name in after)
    assert after["model/1.running_mean"].abs().sum() > 0
