"""The samples that the trial applies a model to, because they hold a data set's smallest and largest values."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fedemu.algorithms.data import extremes as module
from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.data.extremes import extremes


def found(x: NDArray[np.generic]) -> list[int]:
    split = Split(x, np.zeros(len(x), np.int64), {})
    one = np.ones(1)
    return extremes(Corpus("x", split, split, ("a", "b"), x.shape[1:], one * 0, one, b""), split).tolist()


@pytest.mark.parametrize("kind", [np.int32, np.float32])
@pytest.mark.parametrize("block", [2**22, 30])
def test_each_place_of_a_sample_has_its_smallest_and_largest_value_among_them(
    block: int, kind: type[np.generic], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    x = np.tile(np.arange(40)[:, None] % 7, (1, 3)).astype(kind)
    x[31, 0], x[17, 2], x[5, 1] = 99, -3, 50
    samples = x[found(x)]
    assert (samples.min(axis=0) == x.min(axis=0)).all()
    assert (samples.max(axis=0) == x.max(axis=0)).all()
    assert len(samples) <= 6


def test_long_samples_of_tokens_have_one_table_and_pixels_none() -> None:
    x = np.zeros((50, 100), np.int32)
    x[20, 7], x[30, 8] = 5, -5
    assert found(x) == [20, 30]
    assert found(x.reshape(50, 10, 10)) == [20, 30], "of whatever shape they are"
    assert found(x[:, :3].astype(np.uint8)) == []
    assert found(x.astype(np.float32)) == []
