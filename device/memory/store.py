"""A device's own state on disk: one safetensors file per version, named by the ask that made it.

A version is written before its result is sent. It counts once the coordinator has accepted the result, so nothing is
committed twice. Trainers read and write the files by path. The device process only knows which versions there are, and
never loads a tensor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fedemu.protocol.blobs.tree_file import decode_tree, encode_tree
from fedemu.protocol.host.files import PARTIAL, named_failure, remove_abandoned, write_among_others
from fedemu.protocol.ids import AskId

PREFIX, SUFFIX = "own-", ".safetensors"


class OwnStore:
    """The versions of one device's own state in ``folder``. The folder need not exist before the first version."""

    def __init__(self, folder: Path) -> None:
        self._prefix = f"{folder}/{PREFIX}"
        self._versions: set[AskId] = set()
        self._counted: list[AskId] = []
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return
        if any(name.endswith(PARTIAL) for name in names):
            # A trainer may just be writing one for an earlier life of this device.
            remove_abandoned(folder)
        for name in names:
            if name.startswith(PREFIX) and name.endswith(SUFFIX):
                with suppress(ValueError):  # the file has such a name, but is no version
                    self._versions.add(AskId.parse(name[len(PREFIX) : -len(SUFFIX)]))

    @property
    def versions(self) -> Set[AskId]:
        """The versions on disk, each by the ask that made it."""
        return self._versions

    def path(self, version: str | AskId) -> str:
        """The path of a version, whether it exists or not. It is text, which is faster than ``Path`` for every job."""
        return f"{self._prefix}{version}{SUFFIX}"

    def written(self, version: AskId) -> None:
        """Take note of a version that a trainer has put in place."""
        self._versions.add(version)

    def supersede(self, current: AskId | None, durable_round: int) -> None:
        """Delete the versions that no checkpoint can name any more.

        ``current`` is the version that counts now. The coordinator never goes back to before ``durable_round``. Its
        checkpoint of that round names the last version up to that round that has counted; it is known from earlier
        calls, or because ``current`` is not of a later round. Without it nothing is deleted. A version of a later round
        may belong to work that is under way.
        """
        self._counted = [version for version in self._counted if current is not None and version < current]
        if current is not None:
            self._counted.append(current)
        named = [version for version in self._counted if version.round <= durable_round]
        if current is not None and not named:
            return
        self._counted = self._counted[max(0, len(named) - 1) :]
        for version in [v for v in self._versions if v.round <= durable_round and v not in (current, *named[-1:])]:
            self._versions.remove(version)
            with suppress(FileNotFoundError):
                os.unlink(self.path(version))


def write_own(path: Path, tree: Mapping[str, NDArray[Any]], dtypes: Mapping[str, str] | None = None) -> None:
    """Put a version in place in one step: a reader sees the old file, or none, or the whole new one.

    ``dtypes`` names the uint16 arrays that hold bfloat16, as everywhere on the wire. Raises FedemuError if the system
    refuses.
    """
    with named_failure(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    content = encode_tree(tree, dtypes, checksum=True)
    write_among_others(path, content)  # a job may be done again by another trainer


def read_own(path: Path) -> dict[str, NDArray[Any]]:
    """A version's tensors, mapped into memory.

    Raises BlobError if the version does not exist, cannot be read or is not what was written.
    """
    return decode_tree(path)
