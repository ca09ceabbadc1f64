"""Random images for whole runs of the CNN: what ``data.dataset`` names, and the settings that train it by plain SGD."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

EACH: Final = 100
"""The number of images of a device: two full batches."""
IMAGES: Final = f"data.dataset={__name__}:images"
MANY_IMAGES: Final = f"data.dataset={__name__}:many_images"
PLAIN_SGD: Final = (
    "data.partition={kind='iid'}",
    "local.epochs=1",
    "local.momentum=0",
    "local.weight_decay=0",
    "local.lr_decay=1",
    "local.augment=[]",
)
"""Settings of the preset ``cifar10-cnn`` for one epoch of plain SGD."""


def images() -> dict[str, NDArray[Any]]:
    """``EACH`` images for each of 40 devices."""
    return _images(40 * EACH)


def many_images() -> dict[str, NDArray[Any]]:
    """50 images for each of 200 devices."""
    return _images(200 * 50)


def _images(samples: int) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(0)

    def drawn(count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        return random.integers(0, 256, (count, 3, 32, 32), np.uint8), random.integers(0, 10, count)

    (x, y), (test_x, test_y) = drawn(samples), drawn(EACH)
    return {"x": x, "y": y, "test_x": test_x, "test_y": test_y}
