"""The generator's losses against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.func import grad

from fedemu.algorithms.incremental.generator.losses import (
    batch_statistics_loss,
    image_prior_loss,
    information_entropy_loss,
)

LOG2 = math.log(2)


def doubles(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(value: Tensor, expected: object) -> None:
    torch.testing.assert_close(value, doubles(expected), rtol=1e-7, atol=1e-9)


def test_the_entropy_is_that_of_the_batch_and_not_of_its_samples() -> None:
    # The rows' softmax are (1/4, 3/4) and (3/4, 1/4). Their mean is even, and neither of them is.
    logits = doubles([[0.0, math.log(3)], [math.log(3), 0.0]])
    close(information_entropy_loss(logits), -LOG2 / 2)
    # The first row alone: (1/4 log 1/4 + 3/4 log 3/4) / 2.
    close(information_entropy_loss(logits[:1]), (0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / 2)


def test_the_entropy_is_divided_by_the_number_of_classes() -> None:
    close(information_entropy_loss(torch.zeros(3, 4, dtype=torch.float64)), -math.log(4) / 4)


def test_a_class_that_is_never_predicted_counts_for_nothing_and_keeps_its_gradient_finite() -> None:
    logits = torch.tensor([[0.0, -500.0]])
    close(information_entropy_loss(logits).double(), 0.0)
    assert bool(torch.isfinite(grad(information_entropy_loss)(logits)).all())


def test_the_statistics_are_compared_by_channels_then_by_layers() -> None:
    # Equal statistics: 0. N(0, 1) from N(3, 4): log 2 - (1 - (1 + 9)/4)/2 = log 2 + 3/4.
    one = (doubles([0.0, 3.0]), doubles([1.0, 2.0])), (doubles([3.0, 3.0]), doubles([4.0, 2.0]))
    # N(2, 4) from N(2, 1): -log 2 - (1 - 4)/2 = 3/2 - log 2.
    two = (doubles([2.0]), doubles([4.0])), (doubles([2.0]), doubles([1.0]))
    first, second = (LOG2 + 0.75) / 2, 1.5 - LOG2
    close(batch_statistics_loss([one[0]], [one[1]]), first)
    close(batch_statistics_loss([one[0], two[0]], [one[1], two[1]]), (first + second) / 2)


def test_trees_are_compared_by_the_names_of_their_layers() -> None:
    running = {"b.mean": doubles([0.0]), "b.var": doubles([1.0])}
    batch = {"a.mean": doubles([7.0]), "a.var": doubles([1.0]), "b.var": doubles([4.0]), "b.mean": doubles([1.0])}
    close(batch_statistics_loss(running, batch), LOG2 - 0.25)
    with pytest.raises(ValueError, match="no statistics of the layer 'a'"):
        batch_statistics_loss(batch, running)


def test_statistics_of_no_layers_or_of_different_layers_are_refused() -> None:
    layer = (doubles([0.0]), doubles([1.0]))
    with pytest.raises(ValueError, match="statistics of 0 layers"):
        batch_statistics_loss({}, {})
    with pytest.raises(ValueError, match="statistics of 1 layers cannot be compared with those of 2"):
        batch_statistics_loss([layer], [layer, layer])


def test_a_channel_that_never_varies_has_a_finite_divergence() -> None:
    still = {"a.mean": torch.zeros(1), "a.var": torch.zeros(1)}
    assert float(batch_statistics_loss(still, still)) == 0
    assert math.isfinite(float(batch_statistics_loss(still, {"a.mean": torch.zeros(1), "a.var": torch.ones(1)})))


def test_an_even_image_is_its_own_smoothed_version() -> None:
    close(image_prior_loss(torch.full((2, 3, 8, 8), 0.7, dtype=torch.float64)), 0.0)


def test_one_bright_pixel_by_hand() -> None:
    # Each of one axis' weights is exp(-d²/4) / s. What is left of the pixel is 1 - 1/s²; the others get k each.
    s = 1 + 2 * math.exp(-1 / 4) + 2 * math.exp(-1)
    squares = (1 + 2 * math.exp(-1 / 2) + 2 * math.exp(-2)) / s**2
    images = torch.zeros(1, 2, 9, 9, dtype=torch.float64)
    images[0, 0, 4, 4] = 1
    close(image_prior_loss(images), (1 - 2 / s**2 + squares**2) / (2 * 81))


def test_images_are_continued_by_reflection() -> None:
    # Vertical stripes ..., 1, 0, 1, 0: reflected, they go on as they are, so every pixel is smoothed alike.
    stripes = (torch.arange(8) % 2).double().expand(1, 1, 8, 8)
    s = 1 + 2 * math.exp(-1 / 4) + 2 * math.exp(-1)
    close(image_prior_loss(stripes), (2 * math.exp(-1 / 4) / s) ** 2)
