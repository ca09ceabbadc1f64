"""Evaluation in several threads: the same bits as in one, in the same order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.data.corpus import NO_TARGET, Corpus, Split
from fedemu.algorithms.data.partition import Partition
from fedemu.algorithms.interface import Kind, Model, pure
from fedemu.algorithms.models.feed_forward import cnn
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.models.gru import gru
from fedemu.algorithms.models.layer_statistics import Watched, watched
from fedemu.algorithms.models.low_precision import LowPrecision
from fedemu.algorithms.models.resnet import resnet18
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.streams.period_tests import PeriodTests
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.coordinator.evaluation import threads
from fedemu.coordinator.evaluation.diagnosis import Diagnosis
from fedemu.coordinator.evaluation.evaluate import Evaluator
from fedemu.coordinator.evaluation.threads import in_order, most_threads, take_threads
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import DeviceId, digest_of

SHAPE = (1, 8, 8)
TASKS = ClassTasks.of(4, 2, [2, 0, 3, 1])
RANDOM = np.random.default_rng(0)
IMAGES = Split(RANDOM.integers(0, 256, (23, *SHAPE), np.uint8), RANDOM.integers(0, 4, 23), {})
PICTURES = Corpus("noise", IMAGES, IMAGES, tuple("abcd"), SHAPE, np.full(1, 127.5), np.full(1, 74.0), digest_of(b""))
TOKENS = RANDOM.integers(0, 5, (23, 2, 6), np.int64)
TOKENS[::2, 1, 3:] = NO_TARGET
TEXTS = Split(TOKENS.astype(np.int16), np.zeros(23, np.int64), {})
TALK = Corpus("talk", TEXTS, TEXTS, ("text",), (2, 6), np.zeros(2), np.ones(2), digest_of(b""), tuple("abcde"))
PERIODS = PeriodTests(np.array([0, 9, 23]), np.arange(23), held_out=False)

MODELS: dict[str, tuple[Model, Corpus]] = {
    "cnn": (cnn(SHAPE, 4), PICTURES),
    "resnet": (resnet18(SHAPE, 4, norm="batch", width=2), PICTURES),
    "growing": (growing(cnn(SHAPE, 4), TASKS, SHAPE), PICTURES),
    "watched": (watched(cnn(SHAPE, 4), SHAPE), PICTURES),
    "bfloat16": (LowPrecision(cnn(SHAPE, 4), torch.bfloat16), PICTURES),
    "gru": (gru((2, 6), 5), TALK),
}


class ThreeAtOnce:
    """A model whose batches wait for each other, three by three, unless they are to come one by one."""

    buffers: frozenset[str] = frozenset()

    def __init__(self, kind: Kind, pure: bool, together: bool) -> None:
        self.kind, self.pure = kind, pure
        self.model = cnn(SHAPE, 4)
        self.init = self.model.init
        self._together = together
        self._met = threading.Barrier(3)

    def apply(self, variables: Any, x: torch.Tensor, train: bool) -> Any:
        assert torch.is_inference_mode_enabled()
        assert torch.get_num_threads() == 2
        if self._together:
            self._met.wait(30)
        else:
            assert threading.current_thread() is threading.main_thread()
        return self.model.apply(variables, x, train)


def module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4))


def in_another_thread(function: Callable[..., object], *arguments: object) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function, *arguments).result()


@pytest.fixture(autouse=True)
def _threads_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    take_threads(2)
    in_another_thread(take_threads, 3)  # as a trainer in memory may
    yield
    take_threads(before)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tests", [None, PERIODS], ids=["whole", "by period"])
def test_threads_give_the_very_results_of_one(name: str, tests: PeriodTests | None) -> None:
    model, corpus = MODELS[name]
    one, several = (Evaluator(model, corpus, tests, batch_size=4, threads=threads) for threads in (1, 3))
    period = None if tests is None else 1
    assert several.evaluate(model.init(1), period) == one.evaluate(model.init(1), period)


@pytest.mark.parametrize(
    ("kind", "pure", "together"),
    [("convolutional", True, True), ("sequence", True, True), ("dense", True, False), ("convolutional", False, False)],
)
def test_batches_are_computed_at_the_same_time_if_the_model_bears_it(kind: Kind, pure: bool, together: bool) -> None:
    model, some = ThreeAtOnce(kind, pure, together), np.arange(12)
    alone = ThreeAtOnce(kind, pure=False, together=False)
    evaluator = Evaluator(model, PICTURES, batch_size=4, part=12, validation=some, threads=3)
    found = evaluator.evaluate(model.init(1))
    assert found == Evaluator(alone, PICTURES, batch_size=4, validation=some).evaluate(model.init(1))
    assert evaluator.evaluate(model.init(1), on_all=False).test_samples == 12


def test_the_validation_parts_of_devices_are_computed_at_the_same_time_too() -> None:
    model, none, parts = ThreeAtOnce("convolutional", True, together=True), np.zeros(0, np.int64), np.array([0, 5, 12])
    partition = Partition(np.zeros(3, np.int64), none, parts, np.arange(12))
    basis = Diagnosis(model, PICTURES, partition, Evaluator(model, PICTURES, batch_size=4, threads=3))
    variables = model.init(1)
    one = Evaluator(cnn(SHAPE, 4), PICTURES, batch_size=4).answers(variables, np.arange(12)).hits
    expected = [one[5:].mean(), one[:5].mean()]
    assert basis.validate(variables, [DeviceId(1), DeviceId(0)]).tolist() == expected


def test_a_thread_keeps_the_number_that_it_has_taken() -> None:
    def take() -> None:
        take_threads(2)
        in_another_thread(take_threads, 3)
        assert torch.get_num_threads() == 2

    in_another_thread(take)


def test_only_models_that_change_nothing_are_applied_in_threads() -> None:
    assert all(pure(model) for model, _ in MODELS.values())
    assert not pure(from_module(module))
    assert not pure(growing(from_module(module), TASKS, SHAPE))
    assert not pure(Watched(from_module(module), ()))
    assert not pure(LowPrecision(from_module(module), torch.bfloat16))


def test_a_watcher_sees_the_batches_in_order_in_the_thread_that_evaluates() -> None:
    model = cnn(SHAPE, 4)
    seen: list[int] = []

    def watch(outputs: Any, labels: torch.Tensor) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert torch.is_inference_mode_enabled()
        assert len(outputs.logits) == len(labels)
        seen.extend(labels.tolist())

    Evaluator(model, PICTURES, batch_size=2, threads=3).evaluate(model.init(1), watch=watch)
    assert seen == IMAGES.y.tolist()


def test_a_model_that_fails_in_a_thread_is_told_as_in_one() -> None:
    model = cnn(SHAPE, 4)
    lacking = {name: leaf for name, leaf in model.init(1).items() if name != "conv2.weight"}
    with pytest.raises(ConfigurationError, match=r"the algorithm's state lacks the variable .conv2\.weight."):
        Evaluator(model, PICTURES, batch_size=2, threads=3).evaluate(lacking)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order_and_few_items_are_taken_before_their_turn(threads: int) -> None:
    taken: list[int] = []

    def items() -> Any:
        for number in range(20):
            taken.append(number)
            yield number

    for place, result in enumerate(in_order(lambda number: number**2, items(), threads)):
        assert result == place**2
        assert len(taken) == min(20, place + 1 + (threads if threads > 1 else 0))
    assert threading.active_count() == 1 or not any(t.name.startswith("evaluation") for t in threading.enumerate())


def test_threads_are_as_many_as_cores_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, each, expected in ((1, 1, 1), (6, 1, 6), (6, 4, 1), (6, 2, 3), (2, 4, 1), (64, 1, 8)):
        monkeypatch.setattr(threads, "cores", lambda count=count: count)
        assert most_threads(each) == expected
