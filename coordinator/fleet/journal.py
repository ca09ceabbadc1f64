"""The journal of leases: one line for each that is granted or released, or gets a key. So they outlive the coordinator.

A line is a JSON object, a space and the CRC-32 of the object's bytes. Earlier versions wrote no CRC.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import append_line, make_durable, named_failure, wait_for_disk
from fedemu.protocol.host.paths import exists, is_file


class LeaseJournal:
    """A file that grows. A line that a kill cut off does not count, because no peer has been answered yet."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one change, in the form of JSON. Raises FedemuError if the disk does not take it, or only a part."""
        text = json.dumps(entry).encode()
        line = b"%b %08x\n" % (text, zlib.crc32(text))
        with named_failure(self._path):
            make_durable(self._path.parent)
            is_new = not exists(self._path)
            with self._path.open("ab", buffering=0) as file:
                append_line(file, line)
                os.fsync(file.fileno())
            if is_new:
                wait_for_disk(self._path.parent)

    def entries(self, least: int = 0) -> Iterator[dict[str, Any]]:
        """The changes that were written before. A last line that is not whole is removed from the file.

        Raises ConfigurationError if another line is damaged, or if the file is there and has fewer lines than
        ``least``, the number of changes of which a checkpoint knows.
        """
        if not is_file(self._path):
            return
        text = self._path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if (count := whole.count(b"\n")) < least:
            raise self._damaged(count + 1)
        if len(whole) < len(text):
            with self._path.open("r+b") as file:  # in place: a crash meanwhile must not take the lines that are whole
                file.truncate(len(whole))
                os.fsync(file.fileno())
        for number, line in enumerate(whole.splitlines(), 1):
            before, has_checksum, checksum = line.rpartition(b"} ")
            written = before + b"}" if has_checksum else line
            try:
                entry = json.loads(written)
            except (ValueError, RecursionError):
                entry = None
            if not isinstance(entry, dict) or (has_checksum and b"%08x" % zlib.crc32(written) != checksum):
                raise self._damaged(number)
            yield entry

    def _damaged(self, number: int) -> ConfigurationError:
        return ConfigurationError(
            f"Line {number} of {self._path} is damaged; put the file back, or remove it: then machines take "
            "devices anew, and devices begin with new own states."
        )
