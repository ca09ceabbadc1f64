"""Convolutions on a GPU as products of matrices, for training.

Stacked devices each have kernels of their own. cuDNN computes them as one convolution with a group for each device.
With many channels and few pixels, as in the last layers of a ResNet, this reaches a sixth of the speed of a large
product of matrices. As a product for each device, with one row for each place of the kernel, the same takes a third of
the time. Small convolutions take as long in both ways, once they are launched. But cuDNN launches some GPU kernels for
each group, which takes longer than they run, and its gradients for the weights are off by 1e-3 of their norm, for which
it transforms the samples (all measured on an H200). Other convolutions stay with cuDNN, which is faster there.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input

LEAST_CHANNELS: Final = 64
MOST_KERNEL: Final = 3
"""The input channels and the side of a kernel from which on, and up to which, products were faster on an H200."""
MOST_UNFOLDED: Final = 2**21
"""With other kernels they were as fast as long as the unfolded input of a batch had so many elements at most."""


def suits(x: Tensor, weight: Tensor, stride: int, padding: int) -> bool:
    """Whether a convolution of ``x`` with kernels ``weight`` is part of training on a GPU, and faster as a product."""
    if not (x.is_cuda and torch.is_grad_enabled()):
        return False
    batch, inputs, height, width = x.shape
    side = weight.shape[-1]
    places = ((height + 2 * padding - side) // stride + 1) * ((width + 2 * padding - side) // stride + 1)
    return _has_many_channels(weight) or batch * places * inputs * side**2 <= MOST_UNFOLDED


def _has_many_channels(weight: Tensor) -> bool:
    return weight.shape[1] >= LEAST_CHANNELS and weight.shape[-1] <= MOST_KERNEL


def convolve(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """The convolution of ``x [batch, inputs, height, width]`` with square kernels ``[outputs, inputs, side, side]``.

    The unfolded input, which is ``side²`` times as large as the input, is made once more for the gradient. A recorded
    step makes it once, and keeps it until then. Under autocast the result and the products of the gradient have its
    dtype, as those of torch's own convolution have.
    """
    x, weight = _cast(x), _cast(weight)
    outputs: Tensor = _Convolution.apply(x, weight, stride, padding)  # type: ignore[no-untyped-call]
    return outputs


def _cast(leaf: Tensor) -> Tensor:
    """The tensor in the dtype of autocast, which casts all but float64; without autocast the tensor itself.

    It is cast here because autocast ends with the forward pass, and the gradient needs both factors in one dtype.
    """
    kind = leaf.device.type
    if leaf.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return leaf
    return leaf.to(torch.get_autocast_dtype(kind))


class _Convolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        return _product(x, weight, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, int], output: Tensor) -> None:
        x, weight, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        rows, _ = _unfolded(x, weight.shape[-1], ctx.stride, ctx.padding)
        for_weight = _for_weight(rows, gradient).view(weight.shape)
        for_x = _for_input(x, weight, gradient, ctx.stride, ctx.padding) if ctx.needs_input_grad[0] else None
        return for_x, for_weight, None, None


def _product(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    rows, (batch, height, width) = _unfolded(x, weight.shape[-1], stride, padding)
    products = (rows @ weight.flatten(1).t()).view(batch, height, width, len(weight))
    # Batch normalisation on CUDA keeps the order in memory of what it is given, and vmap knows only the usual one.
    return products.permute(0, 3, 1, 2).contiguous()


def _unfolded(x: Tensor, side: int, stride: int, padding: int) -> tuple[Tensor, tuple[int, int, int]]:
    """What the kernels see, one row for each of their places: ``[batch · height · width, inputs · side · side]``.

    The second value is the batch, and the height and width of the output.
    """
    padded = functional.pad(x, (padding,) * 4) if padding else x
    windows = padded.unfold(2, side, stride).unfold(3, side, stride).permute(0, 2, 3, 1, 4, 5)
    batch, height, width = windows.shape[:3]
    return windows.reshape(batch * height * width, -1), (batch, height, width)


def _for_weight(rows: Tensor, gradient: Tensor) -> Tensor:
    """The gradient for the kernels, ``[outputs, inputs · side · side]``."""
    batch, outputs, height, width = gradient.shape
    # A product with few rows and columns and very long sums keeps few parts of a GPU busy. A product for each sample
    # keeps all busy, and is worth writing where it is smaller than what it sums. bfloat16 would round each of them.
    if outputs < height * width and rows.dtype != torch.bfloat16:
        return (gradient.flatten(2) @ rows.view(batch, height * width, -1)).sum(0)
    return gradient.permute(0, 2, 3, 1).flatten(0, 2).t() @ rows


def _for_input(x: Tensor, weight: Tensor, gradient: Tensor, stride: int, padding: int) -> Tensor:
    """The gradient for ``x``. Without a stride it is the convolution of ``gradient`` with the turned kernels."""
    if not _has_many_channels(weight):
        for_x: Tensor = conv2d_input(x.shape, weight, gradient, stride, padding)  # type: ignore[no-untyped-call]
        return for_x
    side = weight.shape[-1]
    if stride == 1 and padding < side:
        return _product(gradient, weight.flip((2, 3)).transpose(0, 1), 1, side - 1 - padding)
    for_rows = gradient.permute(0, 2, 3, 1).flatten(1, 2) @ weight.flatten(1)
    folded: Tensor = functional.fold(for_rows.transpose(1, 2), x.shape[2:], side, padding=padding, stride=stride)
    return folded
