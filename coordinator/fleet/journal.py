"""The leases granted and taken back, one line each, so that they outlive the coordinator from the first one on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class LeaseJournal:
    """A file that grows. A line that was cut off by a kill was never answered, so it does not count."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, entry: Mapping[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")

    def entries(self) -> Iterator[dict[str, Any]]:
        """What was written before; cuts off what was not written to its end."""
        if not self._path.is_file():
            return
        text = self._path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            self._path.write_bytes(whole)
        for line in whole.splitlines():
            yield json.loads(line)
