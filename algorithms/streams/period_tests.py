"""What the model is tested on in each period of a stream, as flat arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.data.flat import Indices, offsets_of
from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.protocol.errors import ConfigurationError


@dataclass(frozen=True)
class PeriodTests:
    """The test samples of period ``t`` are ``indices[offsets[t]:offsets[t + 1]]``. Periods count from 0.

    ``offsets [periods + 1]``. With ``held_out`` the indices point into ``Corpus.train``, to samples that never arrive
    at a device. Without it they point into ``Corpus.test``. ``since [periods]`` is the period from which on a test set
    counts as seen; None if that is its own number. It differs where devices meet tasks in orders of their own.
    """

    offsets: Indices
    indices: Indices
    held_out: bool
    since: Indices | None = None

    def __len__(self) -> int:
        """The number of periods."""
        return len(self.offsets) - 1

    def split(self, corpus: Corpus) -> Split:
        """The part of the corpus that the indices point into."""
        return corpus.train if self.held_out else corpus.test

    @classmethod
    def of(cls, period: Indices, indices: Indices, *, period_count: int, held_out: bool) -> PeriodTests:
        """The test plan of samples in any order. The order within a period is kept.

        ``period [samples]`` is the period of each sample, ``indices [samples]`` are the samples.
        """
        return cls(offsets_of(period, period_count), indices[np.argsort(period, kind="stable")], held_out)


def checked(arrivals: Arrivals, tests: PeriodTests) -> tuple[Arrivals, PeriodTests]:
    """Both arguments, unchanged.

    Raises ConfigurationError if there is a period in which no device has a sample to train on, or one without a test
    sample.
    """
    for missing, purpose in (
        (arrivals.counts().sum(axis=0) == 0, "train on at any device"),
        (np.diff(tests.offsets) == 0, "test on"),
    ):
        if np.any(missing):
            raise ConfigurationError(
                f"period {np.argmax(missing) + 1} of {len(missing)} has no sample to {purpose}; "
                "ask for fewer periods, or use more data"
            )
    return arrivals, tests
