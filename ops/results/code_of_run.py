"""The digests of a user's own code that a run directory keeps: those of now, and those of earlier rounds."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from fedemu.coordinator.record.json_lines import read_object
from fedemu.protocol.errors import ConfigurationError

CODE_FILE = "code.json"
"""The file of a run directory with the digest of each place. It is there only if the experiment names any code."""
EARLIER_FILE = "earlier_code.json"
"""The file with the digests that places had in earlier rounds. It is there only if one was changed since."""


def known_code(directory: Path) -> dict[str, str]:
    """The digests by module and file. Empty if there is no such file or it is damaged: no figure depends on it."""
    return {place: digest for place, digest in _table(directory / CODE_FILE).items() if isinstance(digest, str)}


def earlier_code(directory: Path) -> dict[str, list[str]]:
    """The digests that modules and files had in earlier rounds, in their order."""
    table = _table(directory / EARLIER_FILE)
    return {place: [*map(str, digests)] for place, digests in table.items() if isinstance(digests, list)}


def _table(path: Path) -> dict[str, Any]:
    with suppress(OSError, ConfigurationError):
        return read_object(path.read_bytes(), path)
    return {}
