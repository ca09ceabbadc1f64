"""A supervisor's lease on disk. The supervisor's next life finds its devices and their own states there again.

``state/RUN/LEASE/`` holds ``lease.json``, the blobs and a folder per device. It is locked while its supervisor lives,
so that two supervisors with one state folder never take the same devices.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedemu.device.memory.store import PREFIX, SUFFIX
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.files import is_of_disk, make_durable, refusal_of, require_held, write_whole
from fedemu.protocol.messages import Granted

KEPT = 8
"""The number of leases that are kept in a state folder. The folders of older leases are removed."""
LIFE_BITS = 20
"""The lowest bits of an incarnation count a device's lives. The bits above, up to 31, count its supervisor's lives."""


@dataclass(frozen=True)
class LeaseRecord:
    """The content of ``lease.json``. ``life`` counts the supervisors that have held the lease."""

    lease: str
    run: str
    count: int
    life: int


class LeaseFolder:
    """The folder of a lease, locked until ``close``."""

    def __init__(self, folder: Path, record: LeaseRecord, lock: int) -> None:
        self.folder = folder
        self.record = record
        self._lock = lock

    @property
    def first_incarnation(self) -> int:
        """The first incarnation of this life, above all that devices of earlier supervisors have used."""
        return self.record.life << LIFE_BITS

    @property
    def devices(self) -> Path:
        """The folder of the devices' own folders."""
        return self.folder / "devices"

    @property
    def blobs(self) -> Path:
        """The folder of the blobs that this machine has fetched."""
        return self.folder / "blobs"

    def begin(self) -> None:
        """Begin another life with this lease. Raises ConfigurationError if there were too many."""
        life = self.record.life + 1
        if life >= 2 ** (31 - LIFE_BITS):
            raise ConfigurationError(
                f"The lease in {self.folder} was taken up {life} times, which is too often; remove the folder."
            )
        self.record = replace(self.record, life=life)
        write_whole(self.folder / "lease.json", json.dumps(asdict(self.record), indent=1), durable=True)

    def close(self) -> None:
        """Unlock the folder. A second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class LeaseSearch:
    """The leases of ``count`` devices in a state folder that no living supervisor holds, newest first.

    Only the current one is locked. So supervisors that start at the same time each try another one.
    """

    def __init__(self, state: Path, count: int) -> None:
        self._state = state
        self._count = count
        self._left = deque(sorted(state.glob("*/*/lease.json"), key=_age))
        self._current: LeaseFolder | None = None

    def __iter__(self) -> Iterator[str]:
        """The leases' tokens. Each is locked when it is asked for, and unlocked when the next one is.

        Whoever iterates again finds those that another supervisor held before, and holds no more.
        """
        for _ in range(len(self._left)):
            self.close()
            path = self._left.popleft()
            lock = _lock(path.parent)
            if lock is None:
                self._left.append(path)
                continue
            record = _read(path)
            if record is None or record.count != self._count:
                os.close(lock)
                continue
            self._current = LeaseFolder(path.parent, record, lock)
            yield record.lease
        self.close()

    def claim(self, granted: Granted) -> LeaseFolder:
        """Begin another life with the granted lease, in its old folder or a new one. The search is over.

        Old leases are removed only for a new one. A run that goes on may have many in this state folder, as behind
        edges, and their supervisors come one after another. Raises ConfigurationError if the folder cannot be used.
        """
        own, self._current = self._current, None
        if own is not None and own.record.lease == granted.lease:
            own.begin()
            return own
        if own is not None:
            own.close()
        own = create_lease(self._state, granted, self._count)
        own.begin()
        prune(self._state)
        return own

    def close(self) -> None:
        """Unlock the current lease, unless it was claimed. A second call does nothing."""
        if self._current is not None:
            self._current.close()
            self._current = None


def create_lease(state: Path, granted: Granted, count: int) -> LeaseFolder:
    """The folder of a new lease, locked. Raises ConfigurationError if it cannot be made."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", granted.run)[:64].strip(".") or "run"
    folder = state / name / hashlib.sha256(granted.lease.encode()).hexdigest()[:16]
    try:
        make_durable(folder)
    except OSError as error:
        kind = FedemuError if is_of_disk(error) else ConfigurationError
        raise kind(f"The state folder {state} cannot be used ({refusal_of(error)}); choose another one.") from error
    lock = _lock(folder)
    if lock is None:
        raise ConfigurationError(f"Another supervisor works in {folder}; stop it, or choose another state folder.")
    return LeaseFolder(folder, _read(folder / "lease.json") or LeaseRecord(granted.lease, granted.run, count, 0), lock)


def sizes_with_own_states(state: Path) -> set[int]:
    """The numbers of devices of those leases in a state folder whose devices have kept own states."""
    kept = (path for path in state.glob("*/*/lease.json") if any(path.parent.glob(f"devices/*/{PREFIX}*{SUFFIX}")))
    return {record.count for path in kept if (record := _read(path)) is not None}


def prune(state: Path) -> None:
    """Remove the folders of all leases but the newest ones, unless a supervisor holds them."""
    for path in sorted(state.glob("*/*/lease.json"), key=_age)[KEPT:]:
        lock = _lock(path.parent)
        if lock is not None:
            shutil.rmtree(path.parent, ignore_errors=True)
            os.close(lock)
            with suppress(OSError):
                path.parent.parent.rmdir()


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock of the folder; None if another process has it, or there is no folder.

    Raises ConfigurationError if the file system has no locks.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        require_held(folder, error)
        return None
    return descriptor


def _read(path: Path) -> LeaseRecord | None:
    """The record in a ``lease.json``; None if there is no such file, or it holds no record."""
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        return LeaseRecord(str(fields["lease"]), str(fields["run"]), int(fields["count"]), int(fields["life"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _age(path: Path) -> float:
    """A key that sorts files from the newest to the oldest."""
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0
