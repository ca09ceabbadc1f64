"""Who is approved at this moment, while a coordinator runs."""

from __future__ import annotations

import logging
import os
import time
from typing import Final

from fedemu.ops.keys.store import KeyFolder, is_passing

logger = logging.getLogger(__name__)

AGAIN_SECONDS: Final = 1.0
"""The longest time after which a change of the approved keys counts."""


class Approval:
    """Whether a public key is approved: the files are read again when they change.

    If a look fails for a reason that passes, such as no free descriptor, what was known before counts meanwhile. If the
    folder cannot be read for another reason, nobody is approved.
    """

    def __init__(self, folder: KeyFolder, own: str) -> None:
        self._folder = folder
        self._own = own
        self._keys: frozenset[str] = frozenset()
        self._edges: frozenset[str] = frozenset()
        self._seen: object = None
        self._looked = -AGAIN_SECONDS
        self._hindered = False

    def __call__(self, key: str) -> bool:
        self._look()
        return key in self._keys or key == self._own

    def of_edge(self, key: str) -> bool:
        """Whether a public key is approved for an edge. One on the same machine needs no approval."""
        self._look()
        return key in self._edges or key == self._own

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._looked + AGAIN_SECONDS:
            return
        self._looked = now
        try:
            self._read()
        except OSError as error:
            if not self._hindered:
                text = "can't look at %s now (%s); what it approved before counts until this is over"
                logger.warning(text, self._folder.approved_folder, error.strerror)
            self._hindered = True
        else:
            self._hindered = False

    def _read(self) -> None:
        """Read the files again if they have changed. Raises OSError for what passes."""
        seen = self._signature()
        if seen != self._seen:
            approved = self._folder.approved()
            edges = frozenset(approved[name] for name in self._folder.edges() if name in approved)
            self._keys, self._edges, self._seen = frozenset(approved.values()), edges, seen

    def _signature(self) -> object:
        """What changes when the files change. Raises OSError for what passes."""
        try:
            with os.scandir(self._folder.approved_folder) as entries:
                stats = [(entry.name, _stat(entry)) for entry in entries]
        except FileNotFoundError:
            return ()
        except OSError as error:
            if is_passing(error):
                raise
            logger.warning("can't read %s (%s); no machine is approved", self._folder.approved_folder, error.strerror)
            return None
        return sorted(stats)


def _stat(entry: os.DirEntry[str]) -> tuple[int, ...]:
    """What changes when the file behind an entry changes. Empty if it is gone, or a link to nothing.

    Raises OSError for what passes.
    """
    try:
        found = entry.stat()
    except OSError as error:
        if is_passing(error):
            raise
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
