"""Writing a file so that whoever reads it sees all of it or nothing, whenever the writer is killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fedemu.protocol.errors import FedemuError


def replace(path: Path, data: bytes) -> None:
    """Write ``path`` anew by way of ``path.partial``. FedemuError says why if the disk does not take it."""
    partial = path.with_name(path.name + ".partial")
    with named_failure(path):
        partial.write_bytes(data)
        os.replace(partial, path)


@contextlib.contextmanager
def named_failure(path: Path) -> Iterator[None]:
    """An OSError in the block becomes one sentence about ``path``."""
    try:
        yield
    except OSError as error:
        raise FedemuError(f"Cannot write {path}: {error.strerror or error}.") from error
