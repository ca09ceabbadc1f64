"""Features and gradients of a device's samples: computed once per model, and the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.interface import Batch, Facts, Memory
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.replay.directions import Directions
from fedemu.algorithms.replay.lens import Lens
from fedemu.algorithms.replay.sample_gradients import SampleGradients
from fedemu.algorithms.training.objective import cross_entropy

MODEL = mlp((1, 12, 12), 4, (6,))
FACTS = Facts(*torch.zeros(6), label_counts=torch.ones(4))


@pytest.fixture
def memory(corpus: Corpus) -> Memory:
    indices = np.arange(40, 52)
    x, y = corpus.batch(corpus.train, indices)
    fresh, periods = np.ones(12, dtype=bool), np.zeros(12, dtype=np.int64)
    return Memory(Batch(x, y, torch.ones(12)), indices, fresh, periods, 0, 3, 12, np.random.default_rng(0))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of samples of each Gram matrix that is computed from now on."""
    found: list[int] = []
    gram = SampleGradients.gram

    def counting(gradients: SampleGradients) -> Any:
        found.append(len(gradients))
        return gram(gradients)

    monkeypatch.setattr(SampleGradients, "gram", counting)
    return found


def part(memory: Memory, size: int) -> Memory:
    """The memory with its first samples only."""
    batch = Batch(*(leaf[:size] for leaf in memory.batch[:3]))
    return replace(memory, batch=batch, indices=memory.indices[:size])


def test_the_same_samples_and_model_are_computed_once_and_give_the_same_bits(memory: Memory, computed: Any) -> None:
    lens, shared = Lens(MODEL, cross_entropy, 2**20), {"model": MODEL.init(0)}
    expected = Directions.of(SampleGradients(MODEL, cross_entropy, shared["model"], memory.batch, FACTS))
    again = FACTS._replace(first_visit=torch.ones(()))
    first, second = (lens.directions(memory, shared, facts) for facts in (FACTS, again))
    assert computed == [12, 12]
    for one in (first, second):
        assert np.array_equal(one.gram, expected.gram)
        assert np.array_equal(one.scales, expected.scales)
    assert torch.equal(first.weighted_sum(np.ones(12))["fc1.weight"], second.weighted_sum(np.ones(12))["fc1.weight"])


def test_other_samples_facts_and_models_are_computed_anew(memory: Memory, computed: Any) -> None:
    lens, first, second = Lens(MODEL, cross_entropy, 2**20), {"model": MODEL.init(0)}, {"model": MODEL.init(1)}
    lens.directions(memory, first, FACTS)
    lens.directions(part(memory, 5), first, FACTS)
    lens.directions(memory, first, FACTS._replace(label_counts=torch.zeros(4)))
    lens.directions(memory, second, FACTS)
    lens.directions(memory, first, FACTS)
    assert computed == [12, 5, 12, 12, 12]


def test_the_memory_for_gram_matrices_is_bounded(memory: Memory, computed: Any) -> None:
    """Gram matrices of 8 and 5 samples have 512 and 200 bytes."""
    lens, shared = Lens(MODEL, cross_entropy, 8 * 600), {"model": MODEL.init(0)}
    for size in (8, 5, 5, 8):
        lens.directions(part(memory, size), shared, FACTS)
    assert computed == [8, 5, 8]


def test_features_are_those_before_the_last_layer_in_evaluation_mode(
    memory: Memory, louder: Callable[[Any], Any]
) -> None:
    shared, lens = {"model": MODEL.init(0)}, Lens(louder(MODEL), cross_entropy, 1)
    expected = MODEL.apply(shared["model"], memory.batch.x, False)[0]
    np.testing.assert_allclose(lens.features(memory, shared), expected.features, rtol=1e-6)
    torch.testing.assert_close(lens.logits(memory, shared), expected.logits)
    # More samples than go through the model at once.
    x = torch.randn(600, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    many = replace(memory, batch=Batch(x, torch.zeros(600, dtype=torch.int64), torch.ones(600)))
    expected = MODEL.apply(shared["model"], x, False)[0]
    np.testing.assert_allclose(lens.features(many, shared), expected.features, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lens.logits(many, shared), expected.logits)
    assert len(Lens(MODEL, cross_entropy, 1).features(part(memory, 0), shared)) == 0


class Module(nn.Module):
    """Refuses variables that it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.top = nn.Linear(144, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x.flatten(1)).relu()
        return self.top(features), features


def test_other_variables_that_are_sent_with_the_model_are_not_used(memory: Memory, computed: Any) -> None:
    model = from_module(Module)
    lens, plain = Lens(model, cross_entropy, 2**20), {"model": model.init(0)}
    more = {"model": {**plain["model"], "watched.body.mean": torch.ones(6), "gan.batches": torch.tensor(3)}}
    np.testing.assert_array_equal(lens.features(memory, more), lens.features(memory, plain))
    first, second = (lens.directions(memory, more, FACTS) for _ in range(2))
    assert computed == [12]
    np.testing.assert_array_equal(first.gram, lens.directions(memory, plain, FACTS).gram)
    assert second.weighted_sum(np.ones(12)).keys() == plain["model"].keys()
