"""Convolutions as products: the values and gradients of torch's own, in every way in which programs call them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.functional import conv2d

from fedemu.algorithms.models import spectral, unfolded
from fedemu.algorithms.models.layers import Convolution
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.models.unfolded import MOST_UNFOLDED, convolve, suits
from fedemu.device.compute.trainer import open_device

Convolving = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return open_device(request.param)


def by_stack(convolution: Convolving, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The gradients of stacked devices, each with its kernels and samples."""
    return vmap(grad(lambda w, x: convolution(x, w).square().sum(), argnums=(0, 1)))(weight, x)


def by_sample(convolution: Convolving, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (vmap(grad(lambda w, x: convolution(x[None], w).square().sum()), (None, 0))(weight[0], x[0]),)


def twice(convolution: Convolving, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    def size_of_gradient(x: Tensor) -> Tensor:
        return grad(lambda w: convolution(x, w).square().sum())(weight[0]).square().sum()

    return (grad(size_of_gradient)(x[0]),)


def by_autograd(convolution: Convolving, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    leaves = x[0].clone().requires_grad_(), weight[0].clone().requires_grad_()
    return torch.autograd.grad(convolution(*leaves).square().sum(), leaves)


@pytest.mark.parametrize("channels", ["few", "many"])
@pytest.mark.parametrize("way", [by_stack, by_sample, twice, by_autograd])
@pytest.mark.parametrize(
    ("pixels", "side", "stride", "padding"),
    [
        (8, 3, 1, 1),
        (8, 3, 2, 1),
        (9, 3, 2, 1),
        (7, 3, 1, 0),
        (6, 1, 1, 0),
        (8, 1, 2, 0),
        (10, 3, 3, 0),
        (5, 2, 1, 2),
        (4, 3, 1, 0),
        (8, 5, 1, 2),
    ],
)
def test_products_give_the_gradients_of_a_convolution(
    way: Callable[..., tuple[Tensor, ...]],
    pixels: int,
    side: int,
    stride: int,
    padding: int,
    channels: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unfolded, "LEAST_CHANNELS", {"few": 5, "many": 4}[channels])
    kinds = [partial(convolve, stride=stride, padding=padding)]
    if stride == 1 and device.type == "cpu":
        kinds.append(partial(spectral.convolve, padding=padding))
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 4, pixels, pixels, generator=random, dtype=torch.float64).to(device)
    weight = torch.randn(3, 5, 4, side, side, generator=random, dtype=torch.float64).to(device)

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return conv2d(x, weight, stride=stride, padding=padding)

    for products in kinds:
        torch.testing.assert_close(products(x[0], weight[0]), reference(x[0], weight[0]), rtol=1e-12, atol=1e-12)
        for found, expected in zip(way(products, x, weight), way(reference, x, weight), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("way", [by_stack, by_sample, twice, by_autograd])
@pytest.mark.parametrize("stride", [1, 2])
def test_products_under_autocast_give_the_gradients_of_a_convolution_under_autocast(
    way: Callable[..., tuple[Tensor, ...]], stride: int, device: torch.device
) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 4, 8, 8, generator=random).to(device)
    weight = torch.randn(3, 5, 4, 3, 3, generator=random).to(device)

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return conv2d(x, weight, stride=stride, padding=1)

    def products(x: Tensor, weight: Tensor) -> Tensor:
        return convolve(x, weight, stride, 1)

    def under_autocast(convolution: Convolving) -> Convolving:
        def convolving(x: Tensor, weight: Tensor) -> Tensor:
            # As a model of low precision does: the backward pass is outside of the context.
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
                made = convolution(x, weight)
            assert made.dtype == torch.bfloat16
            return made.float()

        return convolving

    found, expected = (way(under_autocast(convolution), x, weight) for convolution in (products, reference))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 2**-6 * other.norm()


@pytest.mark.parametrize(
    ("x", "kernels", "expected"),
    [
        # Many channels and a small kernel, however large the batch is.
        ((500, 64, 32, 32), (5, 64, 3, 3), True),
        ((500, 512, 32, 32), (5, 512, 1, 1), True),
        ((500, 63, 32, 32), (64, 63, 3, 3), False),
        ((500, 64, 32, 32), (5, 64, 4, 4), False),
        # 2^21 elements: 8 samples of 128 by 128 places, 4 channels and 2 by 2 pixels of the kernel.
        ((8, 4, 129, 129), (5, 4, 2, 2), True),
        ((9, 4, 129, 129), (5, 4, 2, 2), False),
    ],
)
def test_convolutions_of_many_channels_or_few_places_are_products_where_a_gpu_trains(
    x: tuple[int, ...], kernels: tuple[int, ...], expected: bool
) -> None:
    def answer(cuda: bool) -> bool:
        given: Any = SimpleNamespace(shape=x, is_cuda=cuda)
        return suits(given, torch.empty(kernels), 1, 0)

    assert answer(cuda=True) == expected
    assert not answer(cuda=False)
    with torch.no_grad():
        assert not answer(cuda=True)


def test_strides_and_padding_count_for_the_places_of_a_kernel() -> None:
    # (510 + 2 · 2 - 4) // 2 + 1 = 256 places in a row, for two samples of one channel and a kernel of 4 by 4.
    assert MOST_UNFOLDED == 2 * (256 * 256) * (4 * 4)
    given: Any = SimpleNamespace(shape=(2, 1, 510, 510), is_cuda=True)
    kernels = torch.empty(5, 1, 4, 4)
    assert suits(given, kernels, stride=2, padding=2)
    assert not suits(given, kernels, stride=2, padding=3)
    assert not suits(given, kernels, stride=1, padding=2)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_of_products_gives_what_it_gives_otherwise(
    bias: bool, low: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(0)
    layer = Convolution("c", inputs=16, outputs=5, kernel=3, padding=1, stride=2, bias=bias)
    variables = {name: torch.randn(leaf.shape, generator=random) for name, leaf in layer.init(random).items()}
    x = torch.randn(2, 16, 8, 8, generator=random)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        expected = layer(variables, x)
        monkeypatch.setattr(unfolded, "suits", lambda *_: True)
        made = layer(variables, x)
    assert made.dtype == (torch.bfloat16 if low else torch.float32)
    tolerance = 2**-5 if low else 1e-4
    torch.testing.assert_close(made, expected, rtol=tolerance, atol=tolerance)


SHAPES = ((20, 32, 14, 16), (64, 32, 5, 5))


def spectra_suit(
    x: tuple[int, ...] = SHAPES[0], kernels: tuple[int, ...] = SHAPES[1], stride: int = 1, **kind: Any
) -> bool:
    return spectral.suits(torch.empty(x, **kind), torch.empty(kernels, **kind), stride)


def test_large_kernels_with_many_channels_are_products_of_spectra_on_a_processor() -> None:
    assert spectra_suit()
    assert spectra_suit((20, 48, 32, 32), (32, 48, 7, 7))
    assert not spectra_suit((19, 32, 14, 16))
    assert not spectra_suit((20, 31, 14, 16), (64, 31, 5, 5))
    assert not spectra_suit((20, 40, 14, 16), (64, 40, 5, 5))
    assert not spectra_suit(kernels=(16, 32, 5, 5))
    assert not spectra_suit(kernels=(64, 32, 4, 4))
    assert not spectra_suit((20, 32, 14, 33))
    assert not spectra_suit((20, 32, 4, 16))
    assert not spectra_suit(stride=2)
    assert not spectra_suit(kernels=(64, 48, 5, 5))
    assert not spectra_suit(kernels=(64, 32, 5))
    assert not spectra_suit(dtype=torch.float64)
    assert not spectra_suit(device="meta")
    with torch.autocast("cpu", torch.bfloat16):
        assert not spectra_suit()


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_of_spectra_is_as_exact_as_one_of_sums(bias: bool) -> None:
    random = torch.Generator().manual_seed(0)
    layer = Convolution("c", inputs=32, outputs=64, kernel=5, padding=2, bias=bias)
    variables = {name: leaf.requires_grad_() for name, leaf in layer.init(random).items()}
    x = torch.randn(SHAPES[0], generator=random, requires_grad=True)
    assert spectral.suits(x, variables["c.weight"], 1)

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in (x, *variables.values())]
        made = layer(dict(zip(variables, leaves[1:], strict=True)), leaves[0])
        return [made, *torch.autograd.grad(made.square().sum(), leaves)]

    for found, exact in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        assert (found - exact).abs().max() < 1e-6 * exact.abs().max()


def test_images_from_spectra_have_their_channels_last_in_memory() -> None:
    made = spectral.convolve(torch.randn(SHAPES[0]), torch.randn(SHAPES[1]), 2)
    assert made.shape == (20, 64, 14, 16)
    assert made.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(
    ("settings", "by_spectra"),
    [
        ({"padding": 2}, True),
        ({"padding": (2, 2), "bias": False}, True),
        ({"padding": "same"}, True),
        ({"padding": "valid"}, True),
        ({"padding": 3, "padding_mode": "circular"}, True),
        ({"padding": (2, 1)}, False),
        ({"padding": "same", "kernel_size": 6}, False),
        ({"kernel_size": (5, 7)}, False),
        ({"stride": 2}, False),
        ({"stride": (1, 2)}, False),
        ({"dilation": 2}, False),
        ({"groups": 2}, False),
    ],
)
def test_layers_of_own_modules_are_computed_by_spectra_where_these_suit(
    settings: dict[str, Any], by_spectra: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(**{"in_channels": 32, "out_channels": 64, "kernel_size": 5, **settings})
    x = torch.randn(SHAPES[0])
    convolved: list[int] = []

    def counted(x: Tensor, weight: Tensor, padding: int) -> Tensor:
        convolved.append(padding)
        return convolve_by_spectra(x, weight, padding)

    convolve_by_spectra = spectral.convolve
    monkeypatch.setattr(spectral, "convolve", counted)
    made, alone = from_module(lambda: layer).apply(dict(layer.named_parameters()), x, True)[0].logits, layer(x)
    assert len(convolved) == by_spectra
    torch.testing.assert_close(made, alone, rtol=1e-4, atol=1e-5)
    single = from_module(lambda: layer).apply(dict(layer.named_parameters()), x[:1], True)[0].logits
    torch.testing.assert_close(single, alone[:1], rtol=1e-4, atol=1e-5)
