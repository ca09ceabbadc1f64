"""Who holds a lock, also where its process has no number: in another container, or on another machine."""

from __future__ import annotations

import fcntl
import struct
from pathlib import Path

import pytest

from fedemu.coordinator.record import holder
from fedemu.coordinator.record.holder import UNNAMED, holder_of


@pytest.mark.parametrize(
    ("kind", "pid", "found"),
    [
        (fcntl.F_WRLCK, 17, 17),
        (fcntl.F_WRLCK, 0, UNNAMED),
        (fcntl.F_WRLCK, -1, UNNAMED),
        (fcntl.F_UNLCK, 0, None),
    ],
)
def test_a_lock_of_a_process_without_a_number_is_held(
    kind: int, pid: int, found: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = struct.pack("@hhqqi4x", kind, 0, 0, 0, pid)
    monkeypatch.setattr(holder.fcntl, "fcntl", lambda *_: answer)
    (tmp_path / ".lock").touch()
    assert holder_of(tmp_path / ".lock") == found
