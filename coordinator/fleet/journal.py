"""The journal of leases: one line for each that is granted or released, or gets a key. So they outlive the coordinator.

A line is a JSON object, a space and the CRC-32 of the object's bytes. Earlier versions wrote no CRC. The first line may
stand for many changes: a file that has grown long is replaced by a single line.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fedemu.coordinator.fleet.changes import CHANGES
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import append_line, make_durable, named_failure, wait_for_disk, write_whole
from fedemu.protocol.host.paths import exists, is_file

LEASES: Final = "leases.jsonl"
"""The file of a checkpoint that is this journal. It is there before a round is played."""


class LeaseJournal:
    """A file that grows. A line that a kill cut off does not count, because no peer has been answered yet."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one change, in the form of JSON. Raises FedemuError if the disk does not take it, or only a part."""
        line = _line(entry)
        with named_failure(self._path):
            make_durable(self._path.parent)
            is_new = not exists(self._path)
            with self._path.open("ab", buffering=0) as file:
                append_line(file, line)
                os.fsync(file.fileno())
            if is_new:
                wait_for_disk(self._path.parent)

    def replace(self, entry: Mapping[str, Any]) -> None:
        """Let this entry stand for all that was written. After a kill the file is the former one or the new one."""
        write_whole(self._path, _line(entry), durable=True)

    def entries(self, least: int = 0) -> Iterator[dict[str, Any]]:
        """The changes that were written before. A last line that is not whole is removed from the file.

        Raises ConfigurationError if another line is damaged, or if the file is there and stands for fewer changes than
        ``least``, the number of changes of which a checkpoint knows.
        """
        if not is_file(self._path):
            return
        text = self._path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        lines = whole.splitlines()
        first = _entry(lines[0]) if lines else None
        at_first = first.get(CHANGES, 1) if first else 1
        if isinstance(at_first, int) and at_first + len(lines) - 1 < least:
            raise self.damaged(len(lines) + 1)
        if len(whole) < len(text):
            with self._path.open("r+b") as file:  # in place: a crash meanwhile must not take the lines that are whole
                file.truncate(len(whole))
                os.fsync(file.fileno())
        for number, line in enumerate(lines, 1):
            if (entry := _entry(line)) is None:
                raise self.damaged(number)
            yield entry

    def damaged(self, number: int) -> ConfigurationError:
        """The error for a line that cannot be used. Lines are counted from 1."""
        return ConfigurationError(
            f"Line {number} of {self._path} is damaged; put the file back, or remove it: then machines take "
            "devices anew, and devices begin with new own states."
        )


def _line(entry: Mapping[str, Any]) -> bytes:
    text = json.dumps(entry).encode()
    return b"%b %08x\n" % (text, zlib.crc32(text))


def _entry(line: bytes) -> dict[str, Any] | None:
    """The object of a line, None if the line is damaged."""
    before, has_checksum, checksum = line.rpartition(b"} ")
    written = before + b"}" if has_checksum else line
    try:
        entry = json.loads(written)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or (has_checksum and b"%08x" % zlib.crc32(written) != checksum):
        return None
    return entry
