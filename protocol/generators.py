"""Random generators that belong to the whole process: those of Python's ``random`` and of ``numpy.random``.

Who seeds them for a while does so here, and so alone: in memory a model is evaluated while devices are trained.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np

_alone: AbstractContextManager[object]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which both draw by a seed below 2**64. At the end they are as they were before.

    Other threads that want to enter one wait meanwhile, so torch's generators may be seeded within it, too. A thread
    may enter another one while it is in one.
    """
    with _alone:
        before, legacy = random.getstate(), np.random.get_state()
        random.seed(seed)
        # Python takes the lower half first. In that order numpy, which has the same generator, would draw the same.
        np.random.seed([seed >> 32, seed % 2**32])
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(legacy)


def _begin() -> None:
    """A process that was forked is alone, whichever thread of its parent was in a context."""
    global _alone
    _alone = threading.RLock()


_begin()
os.register_at_fork(after_in_child=_begin)
