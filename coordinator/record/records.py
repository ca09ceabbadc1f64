"""The records of checkpoints: JSON with its own checksum. No torch is imported here, because light processes read them.

``checkpoint.py`` says what belongs to a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedemu.protocol.errors import FedemuError
from fedemu.protocol.host.files import write_whole
from fedemu.protocol.host.paths import is_folder
from fedemu.protocol.ids import digest_of

_RECORD = re.compile(r"record-(\d+)\.json")
_SEAL = b"\nsha256 "
"""What stands between a record and its checksum."""


class DamagedError(FedemuError):
    """A file of a checkpoint is not what was written."""


def write_record(directory: Path, round: int, document: Mapping[str, Any]) -> None:
    """Put the record of a round in place, on the disk when this returns. Raises FedemuError if the disk refuses."""
    text = json.dumps(document).encode()
    write_whole(directory / record_name(round), text + _SEAL + digest_of(text).encode() + b"\n", durable=True)


def read_record(directory: Path, round: int) -> dict[str, Any]:
    """The record of a round. Raises DamagedError with one sentence if it is not what was written.

    A record of format 1 has no checksum, and only its syntax can be checked.
    """
    path = directory / record_name(round)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
    text, seal, digest = content.rpartition(_SEAL)
    try:
        document = json.loads(text if seal else content)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: it is no JSON any more") from error
    if not isinstance(document, dict):
        raise DamagedError(f"{path} is damaged: it holds no record")
    if seal and digest.strip().decode(errors="replace") != digest_of(text):
        raise DamagedError(f"{path} is damaged: its checksum is wrong")
    if not seal and document.get("format") != 1:
        raise DamagedError(f"{path} is damaged: its checksum is missing")
    return document


def newest_record(directory: Path) -> dict[str, Any] | None:
    """The record of the newest round that can be read; None if there is none."""
    for round in recorded_rounds(directory):
        try:
            return read_record(directory, round)
        except DamagedError:
            continue
    return None


def recorded_rounds(directory: Path) -> list[int]:
    """The rounds that have a record, readable or not, from the newest to the oldest."""
    if not is_folder(directory):
        return []
    found = [_RECORD.fullmatch(name) for name in os.listdir(directory)]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def record_name(round: int) -> str:
    """The name of the file of a round's record."""
    return f"record-{round}.json"
