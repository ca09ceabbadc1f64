"""A log that grows while it is read: only what came since the last look is read again."""

from __future__ import annotations

from pathlib import Path

from fedemu.protocol.host.paths import is_file

_SEAM = 64
"""The number of last bytes by which a log is known again. A resumed run cuts lines off and writes others."""
_LONGEST = 2**25
"""Nothing is read of a line that is longer than this, and than the bytes that are wanted."""


class GrowingLog:
    """One log, which may not exist yet, and how far it was read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._seam = b""
        self.is_cut = False
        """Whether the last look has read as much as it was to read, so that there may be more."""

    def look(self, most: int = -1) -> tuple[bytes, bool]:
        """The whole lines behind those that were read, of ``most`` bytes at most, and whether the log began anew.

        If the first line is longer than that, it comes alone.
        A log that was cut, replaced or removed begins anew: then the lines are those from its beginning. What is no
        file counts as removed, such as a pipe, at which a reader would wait. Raises OSError for a file that cannot be
        read.
        """
        if not is_file(self._path):
            anew = self._offset > 0
            self._offset, self._seam = 0, b""
            return b"", anew
        with self._path.open("rb") as file:
            file.seek(self._offset - len(self._seam))
            anew = file.read(len(self._seam)) != self._seam
            if anew:
                self._offset, self._seam = 0, b""
                file.seek(0)
            text = file.read(most)
            self.is_cut = len(text) == most
            if self.is_cut and b"\n" not in text:
                text += file.readline(_LONGEST)
        return text[: text.rfind(b"\n") + 1], anew

    def read(self, lines: bytes) -> None:
        """Mark these lines, with which the last look began, as read. The next look begins behind them."""
        self._offset += len(lines)
        self._seam = (self._seam + lines)[-_SEAM:]
