"""Convolutions on a processor as products of spectra, for large kernels.

torch's own convolutions on a processor multiply each pixel with each place of a kernel, about as fast as the processor
can. By the convolution theorem a convolution is also a product for each frequency, which takes a tenth of these
multiplications for a 5×5 kernel (Mathieu, Henaff and LeCun, "Fast training of convolutional networks through FFTs",
2014, section 2). Rounding errors are no larger.

The Fourier transforms are products with small matrices, along the height of an image and along its width. They keep all
samples and channels of a pixel together, and leave out what nobody needs. With ``torch.fft`` in their place the same
takes about twice as long, which is longer than torch's own convolution. All operations are ordinary ones of torch, so
gradients of any order, ``torch.func`` and recorded steps work as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

LEAST_SIDE: Final = 5
"""The side of the kernels from which on spectra are faster. With 3×3 they took 0.8 to 1.4 times as long."""
LEAST_CHANNELS: Final = 32
LEAST_BATCH: Final = 20
"""The input and output channels, and the samples, from which on the products are large enough."""
MOST_PIXELS: Final = 32
"""The side of an image up to which a product with a matrix is a fast transform."""
_ALIGNED: Final = 16
"""The float32 numbers in 64 bytes. Matrices that begin at a multiple of these have the same products everywhere."""

Matrices = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]


def suits(x: Tensor, weight: Tensor, stride: int | None) -> bool:
    """Whether a convolution of ``x`` with kernels ``weight`` is on a processor, in float32, and faster by spectra.

    The shapes decide, so that a run can be repeated. With 32 and 64 channels of 16×16 pixels and a 5×5 kernel, spectra
    took these parts of the time of torch's own convolution (oneDNN, channels-last memory, one thread of an AMD EPYC of
    family 25): 0.54 with both gradients and 0.76 without for 50 samples, 0.63 and 0.88 for 20, 0.81 and 1.06 for 8.
    """
    kind = x.device.type
    if kind != "cpu" or not x.dim() == weight.dim() == 4 or torch.is_autocast_enabled(kind):
        return False
    (batch, inputs, height, width), (outputs, expected, side, other) = x.shape, weight.shape
    return (
        stride == 1
        and inputs == expected
        and x.dtype == weight.dtype == torch.float32
        and LEAST_SIDE <= side == other <= min(height, width)
        and max(height, width) <= MOST_PIXELS
        and min(inputs, outputs) >= LEAST_CHANNELS
        and inputs % _ALIGNED == outputs % _ALIGNED == 0
        and batch >= LEAST_BATCH
    )


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """As ``torch.conv2d``, by spectra where they suit."""
    side = weight.shape[-1]
    named = {"valid": 0, "same": side // 2 if side % 2 else None}
    around = named.get(padding) if isinstance(padding, str) else _of_both(padding)
    if around is None or groups != 1 or _of_both(dilation) != 1 or not suits(input, weight, _of_both(stride)):
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    made = convolve(input, weight, around)
    return made if bias is None else made + bias[:, None, None]


def convolve(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    """The convolution of ``x [batch, inputs, height, width]`` with square kernels ``[outputs, inputs, side, side]``.

    Its stride is 1. The channels of the result come last in memory.
    """
    (batch, _, height, width), (outputs, _, side, _) = x.shape, weight.shape
    transforms = _transforms(height, width, side, padding)
    real, imaginary = _spectrum(x.permute(2, 3, 0, 1), transforms.of_samples)
    w_real, w_imaginary = _spectrum(weight.permute(2, 3, 1, 0), transforms.of_kernels)
    # The complex product of the first and the conjugate second spectrum, by three real products in place of four.
    both = torch.bmm(real + imaginary, w_real)
    products = both - torch.bmm(imaginary, w_real - w_imaginary), both - torch.bmm(real, w_real + w_imaginary)
    columns, *rows = (torch.tensor(matrix, dtype=x.dtype) for matrix in transforms.back)
    lines, frequencies = rows[0].shape[1], columns.shape[1]
    of_real, of_imaginary = (
        _times(along, _times(columns, part.view(-1, frequencies, batch * outputs)).view(1, lines, -1))
        for along, part in zip(rows, products, strict=True)
    )
    pixels = (of_real + of_imaginary).view(rows[0].shape[0], -1, batch, outputs)
    return pixels.permute(2, 0, 1, 3).contiguous().permute(0, 3, 1, 2)


class BySpectra(TorchFunctionMode):
    """A context in which ``torch.conv2d``, and so ``torch.nn.Conv2d``, computes by spectra where these are faster."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (conv2d if func is torch.conv2d else func)(*args, **(kwargs or {}))


def _of_both(value: Any) -> int | None:
    """The number for height and width, if it is the same one."""
    if isinstance(value, int):
        return value
    return int(value[0]) if len(set(value)) == 1 else None


def _spectrum(t: Tensor, matrices: Matrices) -> tuple[Tensor, Tensor]:
    """The real and the imaginary parts ``[frequencies, m, n]`` of the spectra of ``t [height, width, m, n]``."""
    along, real, imaginary = (torch.tensor(matrix, dtype=t.dtype) for matrix in matrices)
    height, width, m, n = t.shape
    lines = _times(along, t.reshape(1, height, -1)).view(-1, 2 * width, m * n)
    return _times(real, lines).view(-1, m, n), _times(imaginary, lines).view(-1, m, n)


def _times(matrix: Tensor, t: Tensor) -> Tensor:
    """``matrix [i, j]`` times each of ``t [b, j, n]``: ``[b, i, n]``."""
    return torch.bmm(matrix.expand(len(t), *matrix.shape), t)


class _Transforms(NamedTuple):
    """Fourier transforms of images as matrices of real numbers, for pairs of real and imaginary parts.

    Numbers that are real have spectra of ``rows // 2 + 1`` lines of ``columns`` frequencies, as in ``numpy.fft.rfft``.
    """

    of_samples: Matrices
    """Along the height, ``[lines · 2, height]``; along the width to the real and to the imaginary parts, each
    ``[columns, 2 · width]``."""
    of_kernels: Matrices
    """The same for kernels, whose height and width is ``side``."""
    back: Matrices
    """Along the width, times the real and times the imaginary part of the matrix, ``[2 · width, columns]``; along the
    height from the real and from the imaginary parts of a spectrum, each ``[height, lines · 2]``."""


@cache
def _transforms(height: int, width: int, side: int, padding: int) -> _Transforms:
    # A spectrum belongs to an image that repeats itself. With so many empty rows and columns between two repetitions, a
    # kernel that begins or ends beyond the edge of an image sees nothing else.
    rows, columns = height + padding, width + padding
    lines = np.arange(rows // 2 + 1)

    def spectrum(height: int, width: int) -> Matrices:
        along = _waves(lines, np.arange(height), rows).conj()
        across = _waves(np.arange(columns), np.arange(width), columns).conj()
        return (
            np.stack([along.real, along.imag], 1).reshape(-1, height),
            np.hstack([across.real, -across.imag]),
            np.hstack([across.imag, across.real]),
        )

    # The first row and column of the result are those where a kernel begins ``padding`` before the image.
    across = _waves(np.arange(width + 2 * padding - side + 1) - padding, np.arange(columns), columns) / columns
    along = _waves(np.arange(height + 2 * padding - side + 1) - padding, lines, rows) / rows
    along *= np.where((lines == 0) | (2 * lines == rows), 1, 2)  # the others stand for their conjugates, too

    def real_part(along: NDArray[np.complex128]) -> NDArray[np.float64]:
        return np.stack([along.real, -along.imag], 2).reshape(len(along), -1)

    back = np.vstack([across.real, across.imag]), real_part(along), real_part(1j * along)
    return _Transforms(spectrum(height, width), spectrum(side, side), back)


def _waves(one: NDArray[np.int64], other: NDArray[np.int64], size: int) -> NDArray[np.complex128]:
    """``exp(2πi · one · other / size)`` for each of one and each of the other."""
    result: NDArray[np.complex128] = np.exp(2j * math.pi * (np.outer(one, other) % size) / size)
    return result
