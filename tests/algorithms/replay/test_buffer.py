"""The samples that a device keeps, as arrays and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedemu.algorithms.replay.buffer import NEVER, Buffer
from fedemu.protocol.errors import DataError


def test_a_buffer_survives_storage_and_arrays_that_are_no_buffer_are_refused() -> None:
    buffer = Buffer(np.array([3, 8]), np.array([0, 1]), period=2, seen=9, asked=4, answered={"x": np.array([0.5])})
    again = Buffer.from_arrays(buffer.to_arrays())
    assert (again.indices.tolist(), again.periods.tolist(), again.period, again.seen, again.asked) == (
        [3, 8],
        [0, 1],
        2,
        9,
        4,
    )
    assert again.answered["x"].tolist() == [0.5]
    noted = replace(again, notes={"logits": np.array([[0.5, 1.0], [2.0, 3.0]])})
    assert Buffer.from_arrays(noted.to_arrays()).notes["logits"].tolist() == [[0.5, 1.0], [2.0, 3.0]]
    with pytest.raises(DataError, match="of 2 samples has notes of another number"):
        Buffer.from_arrays(replace(noted, notes={"logits": np.zeros((3, 2))}).to_arrays())
    with pytest.raises(DataError, match="the replay buffer lacks periods"):
        Buffer.from_arrays({"indices": np.array([1]), "state": np.array([0, 0, 0])})
    with pytest.raises(DataError, match=r"indices of the shape \[1\] and periods of the shape \[0\]; both must be"):
        Buffer.from_arrays({"indices": np.array([1]), "periods": np.array([], np.int64), "state": np.array([0, 0, 0])})


def test_an_empty_buffer_survives_storage() -> None:
    again = Buffer.from_arrays(Buffer().to_arrays())
    assert (len(again), again.period, again.seen, again.asked) == (0, 0, 0, NEVER)


@pytest.mark.parametrize(
    "wrong",
    [
        {"indices": np.array([3.0, 8.0])},
        {"indices": np.array([[3], [8]])},
        {"periods": np.array([0.0, 1.0])},
        {"periods": np.array([[0], [1]])},
        {"state": np.array([2, 9])},
    ],
)
def test_arrays_of_other_types_or_shapes_are_no_buffer(wrong: dict[str, np.ndarray]) -> None:
    arrays = Buffer(np.array([3, 8]), np.array([0, 1])).to_arrays()
    with pytest.raises(DataError, match="both must be int64 rows of the same length, with a state of 3 numbers"):
        Buffer.from_arrays(arrays | wrong)
