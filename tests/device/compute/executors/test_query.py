"""Questions about a replay buffer at a trainer: which samples it trains on and keeps, also from periods it missed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.interface import Facts, Forest, Memory, Outcome, Tree
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.replay.buffer import Buffer
from fedemu.algorithms.terms.importance import AskImportance
from fedemu.algorithms.terms.local_term import Importance
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.objective import Objective
from fedemu.device.compute.executors.executor import Job, JobResult
from fedemu.device.compute.trainer import Trainer
from fedemu.protocol.errors import TrainingError
from fedemu.protocol.ids import Digest

MODEL = mlp((6,), 3, (4,))
LOCAL = LocalSGD(MODEL, Objective(MODEL), epochs=1, batch_size=4, lr=0.1)
SHARED = {"model": MODEL.init(0)}


@dataclass
class Select:
    """Keeps what it is told to, by default the last samples, and remembers what it was asked."""

    choose: Callable[[Memory], Any] = lambda memory: list(range(len(memory.indices)))[-memory.budget :]
    keeps: bool = True
    asked: list[tuple[Memory, dict[str, list[float]]]] = field(default_factory=list)
    passes: float = 1.0
    declares_label_counts: bool = False
    noted: int = 0

    def payload(self, shared: Forest) -> Forest:
        return {}

    def ask(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> tuple[Outcome, Tensor | None]:
        assert shared.keys() == {"model"}
        self.asked.append((memory, {name: leaf.tolist() for name, leaf in own.items()}))
        keep = torch.as_tensor(self.choose(memory)) if self.keeps else None
        rows = len(memory.indices) if keep is None else keep.numel()
        return Outcome({}, {"x": torch.full((self.noted or rows,), 0.5)}), keep


class Plain(Select):
    """Keeps the positions that it is given, in the form in which they are given."""

    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.keep = keep

    def ask(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> tuple[Outcome, Any]:
        return Outcome({}, {}), self.keep


@dataclass
class Writing(Select):
    """Writes to what it is given before it keeps the last samples."""

    write: Callable[[Forest, Tree], object] = lambda shared, own: None

    def ask(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> tuple[Outcome, Tensor | None]:
        self.write(shared, own)
        return super().ask(memory, shared, own, facts)


@pytest.fixture
def corpus() -> Corpus:
    draws = np.random.default_rng(0)
    split = Split(draws.standard_normal((50, 6)).astype(np.float32), draws.integers(0, 3, 50), {})
    return Corpus("noise", split, split, ("a", "b", "c"), (6,), np.zeros(6), np.ones(6), Digest("0" * 64))


def a_trainer(corpus: Corpus, select: Select, **programs: Any) -> Trainer:
    return Trainer(
        {"train": LOCAL, "select": select, **programs},
        corpus,
        seed=1,
        device_type="cpu",
        kind="dense",
        selection=select,
    )


def a_job(task: int, indices: list[int], **more: Any) -> Job:
    options = {"buffer": Buffer(), "budget": 3, **more}
    return Job(4, 10 * task + 1, task, np.array(indices, np.int64), **options)


def done(trainer: Trainer, program: str, job: Job) -> JobResult:
    (result,) = trainer.run(program, SHARED, [job])
    assert isinstance(result, JobResult), result
    return result


def held(result: JobResult) -> tuple[list[int], list[int], int, int]:
    buffer = result.buffer
    assert buffer is not None
    return buffer.indices.tolist(), buffer.periods.tolist(), buffer.period, buffer.seen


def test_a_selection_is_over_buffer_and_period_and_begins_the_next_one(corpus: Corpus) -> None:
    select = Select(lambda memory: [0, 3])
    buffer = Buffer(np.array([7, 9]), np.array([0, 1]), period=2, seen=11)
    result = done(a_trainer(corpus, select), "select", a_job(2, [20, 21, 22], buffer=buffer))
    assert held(result) == ([7, 21], [0, 2], 3, 14)
    ((memory, own),) = select.asked
    assert memory.indices.tolist() == [7, 9, 20, 21, 22]
    assert memory.fresh.tolist() == [False, False, True, True, True]
    assert memory.periods.tolist() == [0, 1, 2, 2, 2]
    assert (memory.period, memory.budget, memory.seen, own) == (2, 3, 14, {})
    assert memory.batch.y.tolist() == corpus.train.y[[7, 9, 20, 21, 22]].tolist()


def test_training_goes_over_the_buffer_and_the_period_alike(corpus: Corpus) -> None:
    buffer = Buffer(np.array([7, 9]), np.array([0, 0]), period=1, seen=5)
    trainer = a_trainer(corpus, Select())
    result = done(trainer, "train", a_job(1, [20, 21, 22], buffer=buffer))
    assert (result.examples, held(result)[0], result.metrics["replay_samples"]) == (5, [7, 9], 2.0)
    plain = done(trainer, "train", a_job(1, [7, 9, 20, 21, 22], buffer=None))
    for name, leaf in plain.payload["delta"].items():
        assert torch.equal(result.payload["delta"][name], leaf)
    assert "replay_samples" not in plain.metrics


def test_sealed_periods_are_selected_from_oldest_first_before_training(corpus: Corpus) -> None:
    select = Select()
    sealed = {0: np.array([1, 2]), 1: np.array([], np.int64), 2: np.array([5, 6])}
    result = done(a_trainer(corpus, select), "train", a_job(3, [30], sealed=sealed))
    assert [memory.indices.tolist() for memory, _ in select.asked] == [[1, 2], [1, 2], [1, 2, 5, 6]]
    assert [memory.period for memory, _ in select.asked] == [0, 1, 2]
    assert held(result) == ([2, 5, 6], [0, 2, 2], 3, 4)
    assert result.examples == 4


def by_its_memory(memory: Memory) -> list[int]:
    chosen: list[int] = memory.generator.permutation(len(memory.indices))[: memory.budget].tolist()
    return chosen


def by_the_process(memory: Memory) -> Tensor:
    order = torch.randperm(len(memory.indices)).roll(random.randrange(20))
    return order[np.random.permutation(len(order))][: memory.budget]


@pytest.mark.parametrize("choose", [by_its_memory, by_the_process])
def test_a_selection_draws_the_same_at_whatever_time_it_is_made(corpus: Corpus, choose: Any) -> None:
    trainer = a_trainer(corpus, Select(choose))
    at_once = done(trainer, "select", a_job(0, list(range(20))))
    before = random.getstate()
    later = done(trainer, "train", a_job(1, [30], sealed={0: np.arange(20)}))
    assert held(at_once)[:2] == held(later)[:2]
    assert random.getstate() == before


def test_an_answer_is_remembered_until_the_period_is_over(corpus: Corpus) -> None:
    question, select = Select(keeps=False), Select()
    trainer = a_trainer(corpus, select, question=question)
    first = done(trainer, "question", a_job(0, [1, 2]))
    assert first.buffer is not None
    assert (held(first), first.buffer.asked) == (([], [], 0, 0), 2)
    again = done(trainer, "question", a_job(0, [1, 2], buffer=first.buffer))
    assert question.asked[1][1] == {"x": [0.5, 0.5]}
    assert again.buffer is not None
    late = done(trainer, "train", a_job(1, [3], buffer=again.buffer, sealed={0: np.array([1, 2])}))
    assert select.asked[0][1] == {"x": [0.5, 0.5]}
    assert late.buffer is not None
    assert (held(late), late.buffer.asked, dict(late.buffer.answered)) == (([1, 2], [0, 0], 1, 2), -1, {})


class Again(nn.Module):
    """Two layers, of which the first may be computed again in the backward pass."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again, self.first, self.last = again, nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(self.first, x, use_reentrant=False) if self.again else self.first(x)
        logits: Tensor = self.last(inner.relu())
        return logits


def test_importances_of_a_model_that_computes_activations_again_are_those_of_one_that_does_not(corpus: Corpus) -> None:
    found = []
    for again in (True, False):
        model = from_module(partial(Again, again))
        measures = {"mas": Importance(lambda logits, batch, facts: logits.square().sum(), Tensor.abs, 9, 1.0)}
        trainer = a_trainer(corpus, Select(), importance=AskImportance(model, measures))
        (result,) = trainer.run("importance", {"model": model.init(0)}, [a_job(0, [1, 2, 3])])
        assert isinstance(result, JobResult), result
        found.append(result.payload["mas"])
    # Another version of torch may compute a product with another kernel the second time, which differs in the last bit.
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)


def test_a_question_does_not_change_what_the_program_keeps(corpus: Corpus) -> None:
    own = {"control": torch.ones(2)}
    assert done(a_trainer(corpus, Select()), "select", a_job(0, [1], own=own)).own is own


@pytest.mark.parametrize(
    ("kept", "refusal"),
    [
        ([0, 0], "2 positions, 1 of them distinct, is refused; select each position once, and at most 3"),
        ([0, 1, 2, 3], "4 positions, 4 of them distinct, is refused; select each position once, and at most 3"),
        ([5], "the positions 5 to 5 is refused; they must be from 0 to 4"),
        ([-1], "the positions -1 to -1 is refused; they must be from 0 to 4"),
    ],
)
def test_an_impossible_selection_fails_its_device_alone(corpus: Corpus, kept: list[int], refusal: str) -> None:
    trainer = a_trainer(corpus, Select(lambda memory: kept if 1 in memory.indices else [0]))
    bad, good = trainer.run("select", SHARED, [a_job(0, [1, 2, 3, 4, 5]), a_job(0, [11, 12])])
    assert isinstance(bad, TrainingError)
    assert str(bad) == f"device 4: the question could not be answered: a selection of {refusal}"
    assert isinstance(good, JobResult)


@pytest.mark.parametrize(
    ("select", "refusal"),
    [
        (Select(lambda memory: torch.tensor([False, True])), "to keep as torch.bool; they must be whole numbers"),
        (Select(lambda memory: [0.5, 1.5]), "to keep as torch.float32; they must be whole numbers"),
        (Select(lambda memory: [[0, 1, 2, 3]]), "a selection of 4 positions, 4 of them distinct, is refused"),
        (
            Select(lambda memory: [1], noted=2),
            "the note 'x' of 2 rows is refused; it must have one for each of the positions",
        ),
    ],
    ids=["mask", "fractions", "table", "notes of all"],
)
def test_an_answer_that_names_no_samples_is_refused_in_a_sentence(corpus: Corpus, select: Select, refusal: str) -> None:
    (result,) = a_trainer(corpus, select).run("select", SHARED, [a_job(0, list(range(4 if "4" in refusal else 2)))])
    assert isinstance(result, TrainingError)
    assert refusal in str(result)


@pytest.mark.parametrize(
    ("write", "place"),
    [
        (lambda shared, own: shared["model"]["fc1.bias"][1:].add_(1), "shared['model']['fc1.bias']"),
        (lambda shared, own: own["x"].zero_(), "own['x']"),
    ],
)
def test_a_question_that_writes_to_what_others_read_is_refused(corpus: Corpus, write: Any, place: str) -> None:
    shared = {"model": MODEL.init(0)}
    job = a_job(0, [1, 2, 3], buffer=Buffer(answered={"x": torch.ones(3)}))
    (result,) = a_trainer(corpus, Writing(write=write)).run("select", shared, [job])
    assert isinstance(result, TrainingError)
    assert f"answered: ask writes to {place}, which other devices and questions read, too; let it make" in str(result)
    assert isinstance(a_trainer(corpus, Writing()).run("select", SHARED, [job])[0], JobResult)


@pytest.mark.parametrize("form", [np.array, list, torch.tensor])
def test_positions_may_be_an_array_or_a_list(corpus: Corpus, form: Any) -> None:
    assert held(done(a_trainer(corpus, Plain(form([2, 0]))), "select", a_job(0, [5, 6, 7])))[0] == [5, 7]


def test_a_buffer_that_is_ahead_of_the_work_is_refused(corpus: Corpus) -> None:
    (result,) = a_trainer(corpus, Select()).run("train", SHARED, [a_job(1, [1], buffer=Buffer(period=2))])
    assert str(result) == "device 4: its replay buffer is of period 2, later than the work's 1"


def test_sealed_samples_beyond_the_data_are_refused(corpus: Corpus) -> None:
    (result,) = a_trainer(corpus, Select()).run("train", SHARED, [a_job(1, [1], sealed={0: np.array([50])})])
    assert str(result) == "device 4: its sample indices reach beyond the 50 training samples"


def test_a_selection_that_keeps_everything_for_now_of_a_period_that_is_over_is_told_what_to_return(
    corpus: Corpus,
) -> None:
    (result,) = a_trainer(corpus, Select(keeps=False)).run("select", SHARED, [a_job(1, [20], sealed={0: np.arange(2)})])
    assert isinstance(result, TrainingError)
    assert str(result) == (
        "device 4: it could not select from sealed samples: ask of the method's selection returned None for the "
        "positions of the samples to keep, but period 0 is over; let it return them, and an empty tensor for none"
    )
