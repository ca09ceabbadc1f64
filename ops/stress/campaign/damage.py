"""Damage to the files of a run whose processes are dead: flipped bits, and files that are cut, emptied or gone.

None of it may change what the run ends with. ``docs/run_directory.md`` says what happens instead.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from fedemu.ops.stress.fleet import LiveFleet
from fedemu.protocol.host.paths import is_file

Target = Callable[[LiveFleet], list[Path]]


def flip(path: Path, chance: random.Random) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    _replace(path, bytes(content))


def cut(path: Path, chance: random.Random) -> None:
    """Cut a file somewhere."""
    content = path.read_bytes()
    _replace(path, content[: chance.randrange(max(1, len(content)))])


def empty(path: Path, chance: random.Random) -> None:
    """Leave nothing of a file but its name."""
    _replace(path, b"")


def remove(path: Path, chance: random.Random) -> None:
    """Remove a file."""
    path.unlink()


HARMS: dict[str, Callable[[Path, random.Random], None]] = {"flip": flip, "cut": cut, "empty": empty, "remove": remove}
"""What can happen to a file."""


def newest_checkpoint(fleet: LiveFleet) -> list[Path]:
    """The files of the newest checkpoint, if there is one before it to go back to."""
    records = sorted(
        (fleet.run_directory / "checkpoint").glob("record-*.json"), key=lambda path: int(path.stem.split("-")[1])
    )
    if len(records) < 2:
        return []
    round = records[-1].stem.split("-")[1]
    return [records[-1], *records[-1].parent.glob(f"state-{round}.*.safetensors")]


def events(fleet: LiveFleet) -> list[Path]:
    """The log of events, which no result depends on."""
    return [fleet.run_directory / "events.jsonl"]


def jobs(fleet: LiveFleet) -> list[Path]:
    """The carries of server jobs."""
    return sorted((fleet.run_directory / "checkpoint").glob("job-*.safetensors"))


def blobs(fleet: LiveFleet) -> list[Path]:
    """The blobs that machines have fetched."""
    return sorted(fleet.state.glob("*/*/*/blobs/*"))


TARGETS: dict[str, tuple[Target, tuple[str, ...]]] = {
    "newest checkpoint": (newest_checkpoint, ("flip", "cut", "empty")),
    "events": (events, ("flip",)),
    "jobs": (jobs, ("flip", "cut", "empty", "remove")),
    "blobs": (blobs, ("flip", "cut", "empty", "remove")),
}
"""What is damaged, and how. After each of these the run has to end as if nothing had happened."""


def damage(fleet: LiveFleet, target: str, harm: str, chance: random.Random) -> Path | None:
    """Damage one file of a kind, and say which. None if there is none. The processes that use it must be dead."""
    files = [path for path in TARGETS[target][0](fleet) if is_file(path)]
    if not files:
        return None
    path = chance.choice(files)
    HARMS[harm](path, chance)
    return path


def _replace(path: Path, content: bytes) -> None:
    path.chmod(0o644)  # blobs are read-only
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()
        os.fsync(file.fileno())
