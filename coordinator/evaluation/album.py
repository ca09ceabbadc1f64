"""Pictures of what a method generates, once a task. They are for people to look at, and change nothing in the run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.interface import Picturing
from fedemu.coordinator.evaluation.evaluate import evenly_spaced

MOST_SAMPLES: Final = 8
"""The number of generated images of each class, at most."""
MOST_BYTES: Final = 2**25
"""The size of a task's generated images at most. So 100 classes of 224 × 224 pixels get two images each."""
LOOKED_AT: Final = 1000
"""The number of training samples that are searched for the darkest and the brightest value."""

Pixels = NDArray[np.uint8]


class Album:
    """Makes pictures with 8 bits per channel. 0 and 255 are the extremes of the corpus's training samples."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        each = int(np.prod(corpus.input_shape)) * corpus.classes
        self.samples = max(1, min(MOST_SAMPLES, MOST_BYTES // each))

    def page(self, method: Picturing, state: Any, seed: int) -> Mapping[str, NDArray[Any]]:
        """The arrays of a file of ``generated/`` (see ``docs/run_directory.md``). Empty if nothing is generated."""
        pictures = method.pictures(state, self.samples, seed)
        if not pictures:
            return {}
        normalised = pictures["x"].numpy()
        y = pictures["y"].numpy()
        found, first = np.unique(self._corpus.test.y, return_index=True)
        shown = np.isin(found, y)
        return {
            "x": self._pixels(normalised * self._per_channel(self._corpus.std) + self._per_channel(self._corpus.mean)),
            "y": y,
            "real": self._pixels(self._corpus.test.x[first[shown]]),
            "real_y": found[shown],
            "names": np.array(self._corpus.class_names, dtype=np.str_),
        }

    def _pixels(self, x: NDArray[Any]) -> Pixels:
        """The 8-bit levels of images in the corpus's own units. A value that is not finite is black."""
        black, white = self._extremes
        levels = (x.astype(np.float32) - black) * (255 / (white - black))
        pixels: Pixels = np.nan_to_num(levels).clip(0, 255).round().astype(np.uint8)
        return pixels

    @cached_property
    def _extremes(self) -> tuple[float, float]:
        some = self._corpus.train.x[evenly_spaced(len(self._corpus.train), LOOKED_AT)]
        black, white = float(some.min()), float(some.max())
        return black, max(white, black + 1e-6)

    def _per_channel(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        return values[:, None, None].astype(np.float32)


def open_album(corpus: Corpus) -> Album | None:
    """The album of a corpus. None if its samples are not grey or colour images."""
    return Album(corpus) if len(corpus.input_shape) == 3 and corpus.input_shape[0] in (1, 3) else None
