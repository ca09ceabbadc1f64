import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from fedemu.algorithms.corpus import Corpus, Split
from fedemu.algorithms.interface import Outputs
from fedemu.coordinator import evaluate as module
from fedemu.coordinator.evaluate import Evaluator
from fedemu.protocol.ids import digest_of


class Scaled:
    """Logits are the sample times ``scale``; one input per class."""

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


def test_accuracy_loss_and_class_accuracy_are_exact():
    result = Evaluator(Scaled(), CORPUS).evaluate({"scale": torch.ones(())})
    assert result.accuracy == 0.75
    assert result.loss == pytest.approx((3 * math.log(4 / 3) + math.log(4)) / 4, rel=1e-6)
    assert result.class_accuracy[:2] == (2 / 3, 1.0)


def test_a_class_without_test_samples_has_no_accuracy():
    assert math.isnan(Evaluator(Scaled(), CORPUS).evaluate({"scale": torch.ones(())}).class_accuracy[2])


@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
@pytest.mark.parametrize("limit", [0, module.CACHE_LIMIT])
def test_chunks_and_cache_do_not_change_the_result(monkeypatch, batch_size, limit):
    monkeypatch.setattr(module, "CACHE_LIMIT", limit)
    generator = np.random.default_rng(0)
    corpus = corpus_of(generator.standard_normal((10, 4)).tolist(), [k % 4 for k in range(10)])
    variables = {"scale": torch.tensor(1.5)}
    whole = Evaluator(Scaled(), corpus, batch_size=10).evaluate(variables)
    evaluator = Evaluator(Scaled(), corpus, batch_size=batch_size)
    for _ in range(2):
        result = evaluator.evaluate(variables)
        assert (result.accuracy, result.class_accuracy) == (whole.accuracy, whole.class_accuracy)
        assert result.loss == pytest.approx(whole.loss, rel=1e-14)


def test_a_model_that_diverged_has_a_loss_that_is_not_finite():
    result = Evaluator(Scaled(), CORPUS).evaluate({"scale": torch.tensor(math.nan)})
    assert math.isnan(result.loss)
    assert 0.0 <= result.accuracy <= 1.0


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
