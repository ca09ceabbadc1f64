"""The replay buffer as a part of a device's own state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedemu.algorithms.replay.buffer import Buffer
from fedemu.device.memory.replay_buffer import buffer_leaves, read_buffer, split_own
from fedemu.device.memory.store import write_own
from fedemu.protocol.errors import DataError

BUFFER = Buffer(np.array([3, 8]), np.array([0, 1]), period=2, seen=9)


def test_a_version_is_what_the_program_keeps_and_the_buffer() -> None:
    program, buffer = split_own({"control": np.ones(2), **buffer_leaves(BUFFER)})
    assert program.keys() == {"control"}
    assert (buffer.indices.tolist(), buffer.periods.tolist(), buffer.period, buffer.seen) == ([3, 8], [0, 1], 2, 9)


def test_a_version_without_a_buffer_has_an_empty_one() -> None:
    program, buffer = split_own({"control": np.ones(2)})
    assert program.keys() == {"control"}
    assert (len(buffer), buffer.period) == (0, 0)


def test_a_part_of_a_buffer_is_refused() -> None:
    with pytest.raises(DataError, match="the replay buffer lacks periods"):
        split_own({".replay.indices": np.array([1])})


def test_a_buffer_is_read_from_its_version(tmp_path: Path) -> None:
    write_own(tmp_path / "own", buffer_leaves(BUFFER))
    assert read_buffer(tmp_path / "own").indices.tolist() == [3, 8]


def test_no_version_and_one_that_cannot_be_read_have_an_empty_buffer(tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"no tensors")
    write_own(tmp_path / "partial", {".replay.indices": np.array([1])})
    for version in (None, tmp_path / "missing", tmp_path / "broken", tmp_path / "partial"):
        assert len(read_buffer(version)) == 0
