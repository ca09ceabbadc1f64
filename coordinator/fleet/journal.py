"""The journal of leases: one line for each lease that is granted or released. So leases outlive the coordinator."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class LeaseJournal:
    """A file that grows. A line that a kill cut off does not count, because no peer has been answered yet."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one change, in the form of JSON."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")

    def entries(self) -> Iterator[dict[str, Any]]:
        """The changes that were written before. A last line that is not whole is removed from the file."""
        if not self._path.is_file():
            return
        text = self._path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            self._path.write_bytes(whole)
        for line in whole.splitlines():
            yield json.loads(line)
