"""The replay buffer on disk: it is a part of each version of a device's own state, beside what the program keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedemu.algorithms.replay.buffer import Buffer
from fedemu.device.memory.store import read_own
from fedemu.protocol.errors import BlobError, DataError

PREFIX = ".replay."
"""The beginning of the names of the buffer's tensors in a version of the own state."""


def split_own(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], Buffer]:
    """The two parts of a version's tensors: what the program keeps, and the replay buffer.

    The buffer is empty if the version holds none. Raises DataError if the buffer's tensors make no buffer.
    """
    program = {name: leaf for name, leaf in arrays.items() if not name.startswith(PREFIX)}
    buffer = {name.removeprefix(PREFIX): leaf for name, leaf in arrays.items() if name.startswith(PREFIX)}
    return program, Buffer.from_arrays(buffer) if buffer else Buffer()


def buffer_leaves(buffer: Buffer) -> dict[str, Any]:
    """The buffer's tensors, by the names that they have in a version of the own state."""
    return {PREFIX + name: leaf for name, leaf in buffer.to_arrays().items()}


def read_buffer(version: Path | None) -> Buffer:
    """The replay buffer in a version of the own state; an empty one if there is no version, or none that can be read.

    A version that cannot be read makes the job fail later, with an error that says so.
    """
    if version is None:
        return Buffer()
    try:
        return split_own(read_own(version))[1]
    except (BlobError, DataError):
        return Buffer()
