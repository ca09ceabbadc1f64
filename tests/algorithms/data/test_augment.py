"""Random changes of images: crop, mirror and cut out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedemu.algorithms.data.augment import Augmentation, augmentation
from fedemu.protocol.errors import ConfigurationError

IMAGE = torch.arange(16.0).reshape(1, 1, 4, 4)


def augmented(crop: bool = False, flip: bool = False, cutout: bool = False) -> Augmentation:
    return Augmentation(crop, flip, cutout, fill=(-9.0,))


def test_a_mirrored_image_runs_backwards() -> None:
    x = IMAGE.expand(2, 1, 4, 4)
    changed = augmented(flip=True).apply(x, {"mirrored": torch.tensor([True, False])})
    assert torch.equal(changed[0], IMAGE[0].flip(-1))
    assert torch.equal(changed[1], IMAGE[0])


def test_a_crop_is_filled_with_black_beyond_the_image() -> None:
    changed = augmented(crop=True).apply(IMAGE, {"offset": torch.tensor([[1, -2]])})
    assert changed[0, 0].tolist() == [
        [-9.0, -9.0, 4.0, 5.0],
        [-9.0, -9.0, 8.0, 9.0],
        [-9.0, -9.0, 12.0, 13.0],
        [-9.0, -9.0, -9.0, -9.0],
    ]


def test_a_crop_is_taken_before_it_is_mirrored() -> None:
    draws = {"offset": torch.tensor([[0, 1]]), "mirrored": torch.tensor([True])}
    changed = augmented(crop=True, flip=True).apply(IMAGE, draws)
    assert changed[0, 0, 0].tolist() == [-9.0, 3.0, 2.0, 1.0]


def test_cutout_blanks_a_square_that_may_reach_over_the_border() -> None:
    x = torch.ones(1, 2, 32, 32)
    changed = augmented(cutout=True).apply(x, {"center": torch.tensor([[0, 16]])})
    assert changed.sum() == 2 * (32 * 32 - 8 * 16)
    assert torch.equal(changed[:, :, :8, 8:24], torch.zeros(1, 2, 8, 16))


def test_draws_depend_on_the_generator_alone_and_cover_their_ranges() -> None:
    every = augmented(crop=True, flip=True, cutout=True)
    first = every.draw(np.random.default_rng(1), 4000, (3, 32, 32))
    again = every.draw(np.random.default_rng(1), 4000, (3, 32, 32))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert (first["offset"].min(), first["offset"].max()) == (-4, 4)
    assert set(first["mirrored"].tolist()) == {True, False}
    assert (first["center"].min(), first["center"].max()) == (0, 31)
    for name, drawn in (("crop", "offset"), ("flip", "mirrored"), ("cutout", "center")):
        assert augmented(**{name: True}).draw(np.random.default_rng(1), 1, (3, 32, 32)).keys() == {drawn}


def test_layout_is_kept() -> None:
    x = torch.randn(3, 2, 8, 8)
    draws = {"mirrored": torch.tensor([True, False, True])}
    channels_last = augmented(flip=True).apply(x.contiguous(memory_format=torch.channels_last), draws)
    assert channels_last.is_contiguous(memory_format=torch.channels_last)
    assert augmented(flip=True).apply(x, draws).is_contiguous()
    assert torch.equal(channels_last, augmented(flip=True).apply(x, draws))


def test_black_is_normalised_as_pixels_are() -> None:
    built = augmentation(("crop", "flip"), (2, 8, 8), np.array([100.0, 50.0]), np.array([50.0, 100.0]))
    assert built == Augmentation(crop=True, flip=True, cutout=False, fill=(-2.0, -0.5))
    assert augmentation((), (2, 8, 8), np.zeros(2), np.ones(2)) is None


def test_only_images_can_be_augmented() -> None:
    with pytest.raises(ConfigurationError, match=r"needs images, but a sample has the shape \(64,\)"):
        augmentation(("flip",), (64,), np.zeros(1), np.ones(1))


def test_cutout_is_refused_where_it_would_leave_nothing_of_any_image() -> None:
    with pytest.raises(ConfigurationError, match="which is always all of an image of 7 x 8 pixels; leave it out"):
        augmentation(("flip", "cutout"), (1, 8, 7), np.zeros(1), np.ones(1))
    kept = augmentation(("cutout",), (1, 9, 4), np.zeros(1), np.ones(1))
    assert kept is not None
    changed = kept.apply(torch.ones(1, 1, 9, 4), {"center": torch.tensor([[0, 3]])})
    assert changed.flatten().tolist() == [0.0] * 32 + [1.0] * 4
