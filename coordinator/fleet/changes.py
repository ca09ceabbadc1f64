"""The forms of the changes of leases, as their journal has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

CHANGES: Final = "changes"
"""The key of the number of changes for which a line stands. A line without it stands for one."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Grant(msgspec.Struct):
    """The form of a lease that is granted, in the journal."""

    grant: str
    ranges: tuple[tuple[int, int], ...]
    host: str
    key: str = ""


class Release(msgspec.Struct):
    """The form of a lease that is over, in the journal."""

    release: str


class Owned(msgspec.Struct):
    """The form of a lease that gets a key, in the journal."""

    owned: str
    key: str


class Standing(msgspec.Struct):
    """The form of all leases, in the journal. It stands for so many ``changes``.

    ``granted`` has a triple for each range of devices that were ever granted: its bounds, and the number of the change
    that last granted them.
    """

    changes: _Count
    leases: tuple[Grant, ...]
    granted: tuple[tuple[_Count, _Count, _Count], ...]


FORMS: Final[Mapping[str, type[Grant | Release | Owned | Standing]]] = {
    "grant": Grant,
    "release": Release,
    "owned": Owned,
    CHANGES: Standing,
}
"""The forms of changes, each by a key that only it has."""
