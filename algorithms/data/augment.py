"""Random changes of training samples. They are drawn in numpy per device, and applied outside the training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.data.masking import Masking
from fedemu.algorithms.interface import Augment
from fedemu.protocol.errors import ConfigurationError

CROP_PADDING = 4
"""The pixels that are added on each side before a crop of the original size is taken."""
CUTOUT_SIDE = 16
"""The side of the square in pixels. The square may reach over the border."""


@dataclass(frozen=True)
class Augmentation:
    """Crops, mirrors and cuts out a square, in this order, as far as asked for, independently for each row of a batch.

    ``fill`` is the value of a black pixel per channel, after normalisation; a crop shows it beyond the image. A cut-out
    square becomes 0, the mean of all pixels.
    """

    crop: bool
    flip: bool
    cutout: bool
    fill: tuple[float, ...]

    def draw(
        self, generator: np.random.Generator, rows: int, sample_shape: Sequence[int]
    ) -> Mapping[str, NDArray[Any]]:
        """Random choices for ``rows`` samples. Each leaf is ``[rows, ...]``."""
        draws: dict[str, NDArray[Any]] = {}
        if self.crop:
            draws["offset"] = generator.integers(-CROP_PADDING, CROP_PADDING + 1, (rows, 2))
        if self.flip:
            draws["mirrored"] = generator.integers(0, 2, rows).astype(bool)
        if self.cutout:
            draws["center"] = generator.integers(0, sample_shape[-2:], (rows, 2))
        return draws

    def apply(self, x: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """A new tensor with the changed images of ``x [rows, channels, height, width]``, which is normalised."""
        rows, _, height, width = x.shape
        vertical = torch.arange(height, device=x.device).expand(rows, height)
        horizontal = torch.arange(width, device=x.device).expand(rows, width)
        if "mirrored" in draws:
            horizontal = torch.where(draws["mirrored"][:, None], width - 1 - horizontal, horizontal)
        source_rows, source_columns = vertical, horizontal
        if "offset" in draws:
            source_rows = source_rows + draws["offset"][:, :1]
            source_columns = source_columns + draws["offset"][:, 1:]
        sample = torch.arange(rows, device=x.device)[:, None, None]
        picked = x.permute(0, 2, 3, 1)[
            sample, source_rows.clamp(0, height - 1)[:, :, None], source_columns.clamp(0, width - 1)[:, None, :]
        ]
        if "offset" in draws:
            inside = _within(source_rows, height)[:, :, None] & _within(source_columns, width)[:, None, :]
            fill = torch.tensor(self.fill, dtype=x.dtype, device=x.device)
            picked = torch.where(inside[..., None], picked, fill)
        if "center" in draws:
            top_left = draws["center"] - CUTOUT_SIDE // 2
            hole_rows = _within(vertical - top_left[:, :1], CUTOUT_SIDE)
            columns = torch.arange(width, device=x.device).expand(rows, width)
            hole_columns = _within(columns - top_left[:, 1:], CUTOUT_SIDE)
            picked = picked.masked_fill((hole_rows[:, :, None] & hole_columns[:, None, :])[..., None], 0.0)
        changed = picked.permute(0, 3, 1, 2)
        return changed.contiguous() if x.is_contiguous() else changed


def augmentation(
    names: Sequence[str],
    input_shape: tuple[int, ...],
    mean: NDArray[np.float64],
    std: NDArray[np.float64],
    masked: int = 0,
) -> Augment | None:
    """The augmentation of these names: ``crop``, ``flip`` and ``cutout``, or ``mask``. None if there are no names.

    ``masked`` is the size of the vocabulary for masked language modelling, and 0 for other data. Raises
    ConfigurationError if a name is unknown, or does not fit the samples.
    """
    if not names:
        return None
    if set(names) == {"mask"} and masked:
        return Masking(masked)
    if "mask" in names:
        raise ConfigurationError(
            f"local.augment = {list(names)}: mask goes with masked language modelling only, and with no other change; "
            "leave it out, or set data.text.kind = 'masked'"
        )
    if len(input_shape) != 3:
        raise ConfigurationError(
            f"local.augment = {list(names)} needs images, but a sample has the shape {input_shape}; set it to []"
        )
    unknown = sorted(set(names) - {"crop", "flip", "cutout"})
    if unknown:
        raise ConfigurationError(f"local.augment knows crop, flip, cutout and mask, not {unknown[0]!r}")
    if "cutout" in names and max(input_shape[1:]) <= CUTOUT_SIDE // 2:
        height, width = input_shape[1:]
        raise ConfigurationError(
            f"local.augment = {list(names)}: cutout makes a square of {CUTOUT_SIDE} pixels 0, which is always all of "
            f"an image of {width} x {height} pixels; leave it out"
        )
    fill = tuple(float(value) for value in -mean / std)
    return Augmentation("crop" in names, "flip" in names, "cutout" in names, fill)


def _within(positions: Tensor, size: int) -> Tensor:
    return (positions >= 0) & (positions < size)
