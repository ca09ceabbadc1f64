"""Holds the folder of a sweep, so that no second sweep works there, and waits for runs that a killed one has left."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedemu.coordinator.record.holder import holder_of
from fedemu.ops.terminal import say
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import require_held, usable

LOCK = ".sweep.lock"
_LOCK_OF_RUN = ".lock"
_LONGEST_WAIT = 120.0
"""Seconds in which a run must have stopped whose sweep was killed. It stops by itself, with a checkpoint."""
_LOOK_EVERY = 0.2


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder in the block. Raises ConfigurationError if another sweep holds it, or it can't be written."""
    with usable(folder, "choose another folder with --out"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "ab")  # noqa: SIM115 - it is closed below
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            require_held(folder, error)
            raise ConfigurationError(
                f"another sweep is at work in {folder}; stop it, or choose another --out"
            ) from None
        yield


def await_left(directories: Sequence[Path]) -> None:
    """Wait until no process is at work in these run directories. A sweep that was killed leaves runs that stop soon."""
    deadline, said = time.monotonic() + _LONGEST_WAIT, False
    while any(holder_of(one / _LOCK_OF_RUN) is not None for one in directories) and time.monotonic() < deadline:
        if not said:
            say("waiting until the runs of the sweep that was killed have stopped")
            said = True
        time.sleep(_LOOK_EVERY)
