"""Compares the frozen experiment of a run directory with what the checkpoint keeps of it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from fedemu.coordinator.record.records import newest_record
from fedemu.coordinator.record.run_directory import CONFIG, TRACES, frozen_files
from fedemu.ops.experiment.mistakes import shown
from fedemu.ops.experiment.sources import differences
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import write_whole


def require_unchanged(directory: Path, say: Callable[[str], None]) -> bool:
    """Raise ConfigurationError if the files of the frozen experiment are not those with which the rounds were played.

    Only the number of rounds may differ. A ``config.toml`` that is gone is written back, which ``say`` tells. Nothing
    is checked before the first checkpoint, and for a run of an earlier version; the result is False then.
    """
    newest = newest_record(directory / "checkpoint")
    known: Mapping[str, str] | None = None if newest is None else newest["record"].get("frozen")
    if known is None:
        return False
    path, found = directory / CONFIG, frozen_files(directory)
    if CONFIG not in found:
        write_whole(path, known[CONFIG], durable=True)
        say(f"{path} was gone; it is written back from the checkpoint")
    elif found[CONFIG] != known[CONFIG]:
        _compare(path, known[CONFIG], found[CONFIG])
    if found.get(TRACES) != known.get(TRACES):
        raise ConfigurationError(
            f"{directory / TRACES} is gone or was changed since the run began; put it back, or start a new run"
        )
    return True


def _compare(path: Path, known: str, found: str) -> None:
    """Raise ConfigurationError unless both texts say the same, apart from the number of rounds."""
    advice = "put it back, or remove it and resume: then it is written back from the checkpoint"
    try:
        changes = differences(tomllib.loads(known), tomllib.loads(found))
    except tomllib.TOMLDecodeError:
        raise ConfigurationError(f"{path} is damaged: it is not valid TOML; {advice}") from None
    for key, old, new in changes:
        if key != "rounds":
            was, now = ("nothing" if value is None else shown(value) for value in (old, new))
            raise ConfigurationError(
                f"{path} was changed since the run began: {key} is {now}, and it was {was}; to run another experiment, "
                f"start a new run; to continue this one, {advice}"
            )
