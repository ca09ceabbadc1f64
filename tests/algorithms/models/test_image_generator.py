"""Generators of images: shapes, sizes and statistics."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import functional_call, vmap
from torch.nn import functional

from fedemu.algorithms.interface import Model
from fedemu.algorithms.models.image_generator import ARCHITECTURES, _Doubling, generator_for, samples_of_equal_memory
from fedemu.protocol.errors import ConfigurationError


def parameters(model: Model) -> int:
    return sum(leaf.numel() for name, leaf in model.init(0).items() if name not in model.buffers)


@pytest.mark.parametrize(("noise", "count"), [(0, 1_870_339), (200, 1_870_339), (1000, 8_423_939)])
def test_the_generator_for_cifar_has_the_published_number_of_parameters(noise: int, count: int) -> None:
    assert parameters(generator_for((3, 32, 32), noise).model) == count


def test_the_generators_for_larger_images_are_those_of_table_6() -> None:
    def convolution(inputs: int, outputs: int) -> int:
        return 9 * inputs * outputs + outputs

    small = 401 * 8192 + 2 * 128 + 2 * (convolution(128, 128) + 256) + convolution(128, 64) + 128 + convolution(64, 3)
    assert parameters(generator_for((3, 64, 64)).model) == small
    large = 201 * 3136 + 2 * 64 + 5 * (convolution(64, 64) + 128) + convolution(64, 3)
    assert parameters(generator_for((3, 224, 224)).model) == large


def test_a_generator_is_worth_as_many_samples_as_take_its_memory() -> None:
    # 3 of its 85,702 numbers count batches and take 8 bytes instead of 4. An image has 64 bytes, its label one.
    assert samples_of_equal_memory(generator_for((1, 8, 8))) == (4 * 85_702 + 3 * 4) // 65 == 5274
    assert samples_of_equal_memory(generator_for((1, 28, 28))) == 1734
    assert samples_of_equal_memory(generator_for((3, 32, 32))) == 2435


@pytest.mark.parametrize("size", ARCHITECTURES)
@pytest.mark.parametrize("channels", [1, 3])
def test_images_have_the_shape_of_the_data_and_are_normalised_by_the_batch_in_training(
    size: int, channels: int
) -> None:
    generator = generator_for((channels, size, size), 20)
    variables, z = generator.model.init(0), torch.randn(2, 20, generator=torch.Generator().manual_seed(0))
    images = generator.images(variables, z)
    assert images.shape == (2, channels, size, size)
    torch.testing.assert_close(generator.images(variables, z[:1]), images[:1])
    made = generator.model.apply(variables, z, True)[0].logits
    torch.testing.assert_close(made.mean((0, 2, 3)), torch.zeros(channels), atol=1e-4, rtol=0)
    torch.testing.assert_close(made.var((0, 2, 3), correction=0), torch.ones(channels), atol=1e-2, rtol=0)


def test_images_do_not_depend_on_what_the_batch_takes_away_in_training() -> None:
    generator, z = generator_for((1, 8, 8)), torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    variables = generator.model.init(0)
    assert generator.idle == {"blocks.0.0.bias"}
    moved = {**variables, "blocks.0.0.bias": variables["blocks.0.0.bias"] + 1}
    images, others = (generator.model.apply(each, z, True)[0].logits for each in (variables, moved))
    torch.testing.assert_close(images, others, rtol=1e-3, atol=1e-3)


def test_a_generator_may_be_used_for_many_devices_at_once_before_anything_else() -> None:
    variables = generator_for((1, 8, 8)).model.init(0)
    generator, z = generator_for((1, 8, 8)), torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(0))
    stacked = vmap(lambda one: generator.images(variables, one))(z)
    for images, one in zip(stacked, z, strict=True):
        torch.testing.assert_close(images, generator.images(variables, one))


@pytest.mark.parametrize("shape", [(1, 12, 12), (3, 32, 28), (64,)])
def test_other_sizes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="square images of 8, 28, 32, 64, 224 pixels"):
        generator_for(shape)


@pytest.mark.parametrize("stacked", [False, True])
def test_blocks_convolve_doubled_images(stacked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    block = generator_for((3, 32, 32)).model
    weight, bias = (block.init(0)[f"blocks.0.0.{name}"].double() for name in ("weight", "bias"))
    layer = _Doubling(128, 128, 3, padding=1).double()
    x = torch.randn(2, 3, 128, 4, 5, generator=generator, dtype=torch.float64)

    def made(x: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    found = vmap(made)(x) if stacked else torch.stack([made(part) for part in x])
    doubled = functional.interpolate(x.flatten(0, 1), scale_factor=2.0)
    expected = functional.conv2d(doubled, weight, bias, padding=1).unflatten(0, (2, 3))
    torch.testing.assert_close(found, expected)


def test_the_epsilon_is_that_of_batch_normalisation_in_the_blocks_alone() -> None:
    usual, other = generator_for((1, 8, 8)), generator_for((1, 8, 8), epsilon=0.8)
    variables, z = usual.model.init(0), torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(leaf, other.model.init(0)[name]) for name, leaf in variables.items())
    # A new generator in evaluation mode has means 0 and variances 1: each normalisation divides by √(1 + epsilon).
    projected = functional.linear(z, variables["project.weight"], variables["project.bias"]).view(3, 64, 4, 4)
    doubled = functional.interpolate(projected / math.sqrt(1 + 1e-5), scale_factor=2.0)
    block = functional.conv2d(doubled, variables["blocks.0.0.weight"], variables["blocks.0.0.bias"], padding=1)
    for generator, epsilon in ((usual, 1e-5), (other, 0.8)):
        wide = functional.leaky_relu(block / math.sqrt(1 + epsilon), 0.2)
        last = functional.conv2d(wide, variables["image.weight"], variables["image.bias"], padding=1)
        expected = last.tanh() / math.sqrt(1 + 1e-5)
        torch.testing.assert_close(generator.images(variables, z), expected)


def test_low_precision_rounds_the_products_and_gives_float32() -> None:
    exact, rounded = generator_for((1, 8, 8)), generator_for((1, 8, 8), precision="bfloat16")
    variables, z = exact.model.init(0), torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    images, others = exact.images(variables, z), rounded.images(variables, z)
    assert others.dtype == torch.float32
    assert 0 < float((images - others).abs().max()) < 0.02
