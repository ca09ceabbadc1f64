"""Data for methods on streams of classes: the digits 0 to 3, in two tasks with the classes 2 and 0, then 3 and 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.ops.data import made
from fedemu.protocol.ids import Digest

SHAPE = (1, 8, 8)
TASKS = ((2, 0), (3, 1))


@pytest.fixture(scope="session")
def digits() -> Corpus:
    """The digits 0 to 3."""
    x, y = made.digits()
    split = Split(15 * x[y < 4], y[y < 4], {})
    return Corpus("digits", split, split, tuple("0123"), SHAPE, np.array([75.0]), np.array([90.0]), Digest("0" * 64))


@pytest.fixture
def stream(digits: Corpus) -> list[list[Any]]:
    """Both tasks, each over three devices with 20 samples."""
    per_task = [np.flatnonzero(np.isin(digits.train.y, classes)) for classes in TASKS]
    return [[task[20 * i : 20 * i + 20] for i in range(3)] for task in per_task]
