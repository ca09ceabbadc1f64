"""Random generators that belong to the whole process: those of Python's ``random``, of ``numpy.random`` and of torch.

Nothing here seeds them. Who seeds them for a while, and restores them at the end, does so alone.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

_alone: AbstractContextManager[object]


def alone_with_generators() -> AbstractContextManager[object]:
    """A context in which no other thread is in one: in memory a model is evaluated while devices are trained.

    A thread may enter it again while it is in it.
    """
    return _alone


def _begin() -> None:
    """A process that was forked is alone, whichever thread of its parent was in a context."""
    global _alone
    _alone = threading.RLock()


_begin()
os.register_at_fork(after_in_child=_begin)
