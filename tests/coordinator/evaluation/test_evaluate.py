"""The evaluation of a model: accuracy, loss, perplexity, and measures by class and by period."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.data.corpus import NO_TARGET, Corpus, Split
from fedemu.algorithms.interface import Outputs
from fedemu.algorithms.streams.period_tests import PeriodTests
from fedemu.coordinator.evaluation import evaluate
from fedemu.coordinator.evaluation.evaluate import Evaluator, read
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import digest_of


class Scaled:
    """A model whose logits are the sample times ``scale``, with one input per class."""

    kind = "dense"
    buffers: frozenset[str] = frozenset()

    def init(self, seed: int) -> Mapping[str, torch.Tensor]:
        return {"scale": torch.ones(())}

    def apply(self, variables, x, train):
        assert not train
        assert torch.is_inference_mode_enabled()
        return Outputs(x * variables["scale"], x, {}), variables


def corpus_of(x: list[list[float]], y: list[int]) -> Corpus:
    split = Split(np.array(x, dtype=np.float32), np.array(y, dtype=np.int64), {})
    classes = split.x.shape[1]
    return Corpus(
        name="tiny",
        train=split,
        test=split,
        class_names=tuple(map(str, range(classes))),
        input_shape=(classes,),
        mean=np.zeros(classes),
        std=np.ones(classes),
        digest=digest_of(b""),
    )


LOG3 = math.log(3.0)
CORPUS = corpus_of([[LOG3, 0, -99], [0, LOG3, -99], [LOG3, 0, -99], [0, LOG3, -99]], [0, 0, 0, 1])


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "the algorithm's state lacks the variable 'scale'"),
        ({"scale": torch.ones(7)}, "the algorithm's state has 'scale' as [7], where the model has []"),
    ],
)
def test_a_state_that_does_not_fit_the_model_is_named(variables: Mapping[str, torch.Tensor], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        Evaluator(Scaled(), CORPUS).evaluate(variables)


def test_a_state_of_another_type_than_the_model_is_named() -> None:
    class Multiplied(Scaled):
        def init(self, seed: int) -> Mapping[str, torch.Tensor]:
            return {"matrix": torch.eye(3)}

        def apply(self, variables, x, train):
            return Outputs(x @ variables["matrix"], x, {}), variables

    assert Evaluator(Multiplied(), CORPUS).evaluate({"matrix": torch.eye(3)}).accuracy == 0.75
    with pytest.raises(
        ConfigurationError, match=r"state has 'matrix' of torch\.float64, where the model has torch\.flo"
    ):
        Evaluator(Multiplied(), CORPUS).evaluate({"matrix": torch.eye(3, dtype=torch.float64)})


def test_accuracy_loss_and_class_accuracy_are_exact():
    result = Evaluator(Scaled(), CORPUS).evaluate({"scale": torch.ones(())})
    assert result.accuracy == 0.75
    assert result.loss == pytest.approx((3 * math.log(4 / 3) + math.log(4)) / 4, rel=1e-6)
    assert result.class_accuracy[:2] == (2 / 3, 1.0)


def test_chance_is_the_share_of_the_most_frequent_class():
    assert Evaluator(Scaled(), CORPUS).chance == 0.75


def test_held_back_samples_are_tested_too_but_not_between_full_evaluations():
    ones = {"scale": torch.ones(())}
    judge = Evaluator(Scaled(), CORPUS, part=2, validation=np.array([1, 3]))
    assert judge.evaluate(ones).validation_accuracy == 0.5
    assert judge.evaluate(ones).accuracy == 0.75
    assert judge.evaluate(ones, on_all=False).validation_accuracy is None
    assert Evaluator(Scaled(), CORPUS, validation=np.array([], np.int64)).evaluate(ones).validation_accuracy is None


def test_a_class_without_test_samples_has_no_accuracy():
    assert math.isnan(Evaluator(Scaled(), CORPUS).evaluate({"scale": torch.ones(())}).class_accuracy[2])


@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
@pytest.mark.parametrize("limit", [0, evaluate.CACHE_LIMIT])
def test_chunks_and_cache_do_not_change_the_result(monkeypatch, batch_size, limit):
    monkeypatch.setattr(evaluate, "CACHE_LIMIT", limit)
    generator = np.random.default_rng(0)
    corpus = corpus_of(generator.standard_normal((10, 4)).tolist(), [k % 4 for k in range(10)])
    variables = {"scale": torch.tensor(1.5)}
    whole = Evaluator(Scaled(), corpus, batch_size=10).evaluate(variables)
    evaluator = Evaluator(Scaled(), corpus, batch_size=batch_size)
    for _ in range(2):
        result = evaluator.evaluate(variables)
        assert (result.accuracy, result.class_accuracy) == (whole.accuracy, whole.class_accuracy)
        assert result.loss == pytest.approx(whole.loss, rel=1e-14)


@pytest.mark.parametrize(
    ("shape", "classes", "size"),
    [
        ((1, 8, 8), 10, 512),
        ((1, 28, 28), 10, 256),
        ((3, 32, 32), 10, 64),
        ((3, 64, 64), 10, 16),
        ((3, 224, 224), 10, 16),
        ((1, 8, 8), 2**17, 128),
    ],
)
def test_batches_are_smaller_where_samples_or_logits_are_large(shape, classes, size):
    split = Split(np.zeros((520, *shape), np.uint8), np.zeros(520, np.int64), {})
    names, channels = tuple(map(str, range(classes))), shape[0]
    corpus = Corpus("images", split, split, names, shape, np.zeros(channels), np.ones(channels), digest_of(b""))
    assert len(next(read(Scaled(), corpus, split, np.arange(520)))[1]) == size
    assert len(next(read(Scaled(), corpus, split, np.arange(520), 3))[1]) == 3


def test_a_model_that_diverged_has_a_loss_that_is_not_finite_and_no_right_answer():
    """Not even for the first class, which is the place of the first NaN."""
    variables = {"scale": torch.tensor(math.nan)}
    samples, talk = Evaluator(Scaled(), CORPUS).evaluate(variables), Evaluator(Certain(), TALK).evaluate(variables)
    assert math.isnan(samples.loss)
    assert math.isnan(talk.loss)
    assert samples.class_accuracy[:2] == talk.class_accuracy == (0.0, 0.0)


def test_a_convolutional_model_gets_channels_last_memory():
    seen = []

    class Convolution(Scaled):
        kind = "convolutional"

        def apply(self, variables, x, train):
            seen.extend([x, variables["w"]])
            return Outputs(x.flatten(1)[:, :2], x, {}), variables

    x = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4)
    split = Split(x, np.array([0, 1]), {})
    corpus = Corpus("images", split, split, ("a", "b"), (3, 4, 4), np.zeros(3), np.ones(3), digest_of(b""))
    Evaluator(Convolution(), corpus).evaluate({"w": torch.zeros(5, 3, 2, 2)})
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in seen)
    assert np.array_equal(seen[0].numpy(), x)


def test_a_data_set_without_test_samples_is_refused():
    empty = corpus_of([[0.0, 0.0]], [0])
    empty = Corpus(**{**vars(empty), "test": Split(np.zeros((0, 2), np.float32), np.zeros(0, np.int64), {})})
    with pytest.raises(ValueError, match="'tiny' has no test samples"):
        Evaluator(Scaled(), empty)


ONE = {"scale": torch.ones(())}


def divided(parts: list[list[int]], *, held_out: bool = False) -> PeriodTests:
    offsets = np.cumsum([0, *map(len, parts)])
    return PeriodTests(offsets, np.array([index for part in parts for index in part]), held_out)


def test_each_period_has_its_own_accuracy_and_loss_and_seen_periods_are_counted_together():
    # All samples but the second are recognised.
    tests = divided([[3], [1, 0], [2, 1]])
    right, wrong = math.log(4 / 3), math.log(4)
    found = Evaluator(Scaled(), CORPUS, tests).evaluate(ONE, 1)
    assert found.period_accuracy == (1.0, 0.5, 0.5)
    assert found.period_loss == pytest.approx([right, (right + wrong) / 2, (right + wrong) / 2], rel=1e-6)
    assert found.seen_accuracy == 2 / 3
    assert found.seen_loss == pytest.approx((2 * right + wrong) / 3, rel=1e-6)
    assert found.accuracy == 3 / 5
    assert found.loss == pytest.approx((3 * right + 2 * wrong) / 5, rel=1e-6)
    assert found.class_accuracy[:2] == (0.5, 1.0)
    assert found.perplexity is None


def test_where_devices_meet_tasks_in_orders_of_their_own_a_test_set_is_seen_from_when_the_first_meets_its_task():
    tests = replace(divided([[3], [1, 0], [2, 1]]), since=np.array([1, 0, 2]))
    evaluator = Evaluator(Scaled(), CORPUS, tests)
    found = [evaluator.evaluate(ONE, period) for period in range(3)]
    assert [each.seen_accuracy for each in found] == [1 / 2, 2 / 3, 3 / 5]
    assert found[0].period_since == (1, 0, 2)


def test_a_part_of_the_samples_gives_accuracy_and_loss_only():
    # Two evenly spaced ones of the five: the first and the third, of which the third is not recognised.
    evaluator = Evaluator(Scaled(), CORPUS, divided([[3], [0, 1], [2, 1]]), part=2)
    found = evaluator.evaluate(ONE, 1, on_all=False)
    assert (found.test_samples, found.accuracy) == (2, 0.5)
    assert found.loss == pytest.approx((math.log(4 / 3) + math.log(4)) / 2, rel=1e-6)
    assert (found.class_accuracy, found.class_loss, found.period_accuracy, found.seen_accuracy) == ((), (), None, None)
    assert evaluator.evaluate(ONE, 1).test_samples == 5
    assert Evaluator(Scaled(), CORPUS, part=4).evaluate(ONE, on_all=False).class_accuracy[:2] == (2 / 3, 1.0)


def test_in_the_last_period_everything_was_seen():
    evaluator = Evaluator(Scaled(), CORPUS, divided([[3], [1, 0], [2]]))
    found = evaluator.evaluate(ONE, 2)
    assert (found.seen_accuracy, found.seen_loss) == (found.accuracy, found.loss)
    assert evaluator.evaluate(ONE, 0).seen_accuracy == found.period_accuracy[0]


def test_without_a_period_nothing_counts_as_seen():
    found = Evaluator(Scaled(), CORPUS, divided([[3], [1]])).evaluate(ONE)
    assert (found.seen_accuracy, found.seen_loss) == (None, None)
    assert found.period_accuracy == (1.0, 0.0)


def test_every_sample_is_read_once_and_held_out_ones_are_of_the_training_split():
    asked = []

    class Counting(Scaled):
        def apply(self, variables, x, train):
            asked.extend(x[:, 0].tolist())
            return super().apply(variables, x, train)

    train = Split(np.array([[5, 0], [6, 0], [0, 7], [8, 0]], np.float32), np.array([0, 1, 1, 0]), {})
    corpus = replace(corpus_of([[0.0, 0.0]], [0]), train=train)
    found = Evaluator(Counting(), corpus, divided([[3, 1], [2]], held_out=True)).evaluate(ONE, 0)
    assert sorted(asked) == [0.0, 6.0, 8.0]
    assert found.period_accuracy == (0.5, 1.0)


def test_a_stream_of_one_period_gives_the_very_figures_of_the_test_split():
    generator = np.random.default_rng(0)
    corpus = corpus_of(generator.standard_normal((1111, 4)).tolist(), [k % 4 for k in range(1111)])
    model = {"scale": torch.tensor(1.5)}
    plain = Evaluator(Scaled(), corpus).evaluate(model)
    logits = torch.from_numpy(corpus.test.x).mul(1.5).double()
    losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(corpus.test.y), reduction="none")
    assert plain.loss == float(losses.numpy().mean())
    assert Evaluator(Scaled(), corpus, divided([list(range(1111))])).evaluate(model, 0) == plain
    assert (plain.period_accuracy, plain.seen_accuracy, plain.perplexity) == (None, None, None)


def test_a_period_of_which_no_sample_was_taken_is_not_known():
    evaluator = Evaluator(Scaled(), CORPUS, divided([[0, 1, 2], [3]]), samples=2)
    assert len(evaluator) == 2
    found = evaluator.evaluate(ONE, 1)
    assert found.period_accuracy[0] == 1.0
    assert math.isnan(found.period_accuracy[1])
    assert found.seen_accuracy == 1.0


def test_periods_without_any_test_sample_are_refused():
    with pytest.raises(ValueError, match="'tiny' has no test samples"):
        Evaluator(Scaled(), CORPUS, divided([[], []]))


class Certain:
    """A model that gives the token of row 0 ``exp(scale)`` times the weight of each other token."""

    kind = "dense"
    buffers: frozenset[str] = frozenset()

    def apply(self, variables: Any, x: torch.Tensor, train: bool) -> tuple[Outputs, Any]:
        assert x.dtype == torch.int64
        logits = torch.nn.functional.one_hot(x[:, 0], 4).float() * variables["scale"]
        return Outputs(logits, logits, {}), variables


def language_of(samples: list[tuple[list[int], list[int]]], y: list[int]) -> Corpus:
    """A corpus of these tokens and targets, with a vocabulary of 4."""
    split = Split(np.array(samples, dtype=np.int16), np.array(y), {})
    classes = tuple(map(str, range(max(y) + 1)))
    return Corpus(
        "talk", split, split, classes, split.x.shape[1:], np.zeros(2), np.ones(2), digest_of(b""), tuple("abcd")
    )


N = NO_TARGET
TALK = language_of(
    [([0, 1, 2], [0, N, N]), ([0, 1, 2], [N, N, N]), ([3, 3, 3], [3, 0, 1]), ([1, 1, 1], [1, 1, N])], [0, 0, 1, 1]
)
RIGHT, WRONG = math.log(math.e + 3) - 1, math.log(math.e + 3)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("limit", [0, evaluate.CACHE_LIMIT])
@pytest.mark.parametrize("block", [1, 8, evaluate.BLOCK_LOGITS])
def test_language_data_are_measured_by_predicted_tokens(monkeypatch, batch_size, limit, block):
    monkeypatch.setattr(evaluate, "CACHE_LIMIT", limit)
    monkeypatch.setattr(evaluate, "BLOCK_LOGITS", block)
    found = Evaluator(Certain(), TALK, batch_size=batch_size).evaluate(ONE)
    assert found.accuracy == 4 / 6
    assert found.loss == pytest.approx((4 * RIGHT + 2 * WRONG) / 6, rel=1e-7)
    assert found.class_accuracy == (1.0, 3 / 5)
    assert found.class_loss == pytest.approx([RIGHT, (3 * RIGHT + 2 * WRONG) / 5], rel=1e-7)
    assert found.perplexity == pytest.approx(math.exp(found.loss), rel=1e-14)


def test_periods_of_language_data_weigh_tokens_and_not_samples():
    found = Evaluator(Certain(), TALK, divided([[0, 1], [2], [3]])).evaluate(ONE, 1)
    assert found.period_accuracy == (1.0, 1 / 3, 1.0)
    assert found.seen_accuracy == 2 / 4
    assert found.seen_loss == pytest.approx((2 * RIGHT + 2 * WRONG) / 4, rel=1e-7)


def test_a_period_in_which_nothing_is_predicted_is_not_known():
    found = Evaluator(Certain(), TALK, divided([[1], [0]])).evaluate(ONE, 0)
    assert math.isnan(found.period_accuracy[0])
    assert math.isnan(found.seen_loss)
    assert found.accuracy == 1.0


def test_a_model_without_any_preference_has_the_perplexity_of_the_vocabulary():
    assert Evaluator(Certain(), TALK).evaluate({"scale": torch.zeros(())}).perplexity == pytest.approx(4.0)


def test_a_large_vocabulary_makes_batches_small(monkeypatch):
    monkeypatch.setattr(evaluate, "BATCH_LOGITS", 2 * 3 * 4)
    rows = []

    class Counting(Certain):
        def apply(self, variables, x, train):
            rows.append(len(x))
            return super().apply(variables, x, train)

    evaluator = Evaluator(Counting(), TALK)
    assert evaluator.evaluate(ONE).accuracy == 4 / 6
    assert rows == [2, 2]
