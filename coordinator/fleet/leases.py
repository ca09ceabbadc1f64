"""The leases: which supervisor holds which device indices, and the tokens that prove it."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedemu.coordinator.fleet.changes import CHANGES, FORMS, Grant, Owned, Release, Standing
from fedemu.protocol.errors import RefusedError
from fedemu.protocol.ids import DeviceId

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of indices, ascending."""
SPARE_LINES: Final = 1000
"""A journal that has so many lines more than twice the number of leases is replaced by a single line."""


class UnfitChangeError(ValueError):
    """A change that does not fit the changes before it. ``number`` is its place among them, counted from 1."""

    def __init__(self, number: int) -> None:
        super().__init__(f"change {number} does not fit those before it")
        self.number = number


@dataclass
class Lease:
    """The indices that one supervisor holds.

    ``peer`` is its connection, None while it is away. ``left`` is the real time in seconds since which it is away.
    ``key`` is the public key of its machine, empty without keys: no other machine can come back for the lease.
    ``hung_up`` says that the connection of ``peer`` is gone. ``through`` is the connection on which it was last
    granted, that of an edge if there are edges; None if that was in an earlier life of the coordinator. ``woken`` says
    that its machine has woken a device before, so that it can wake others. ``fresh`` says that it was granted in this
    life of the coordinator, and that none of its devices has come yet.
    """

    token: str
    ranges: Ranges
    host: str = ""
    peer: bytes | None = None
    left: float | None = None
    key: str = ""
    hung_up: bool = False
    through: bytes | None = None
    woken: bool = False
    fresh: bool = False

    def fits(self, key: str) -> bool:
        """Whether a machine with this key may use the lease. A lease that was granted without keys fits everybody."""
        return not self.key or not key or self.key == key

    def __len__(self) -> int:
        """The number of indices."""
        return sum(stop - start for start, stop in self.ranges)

    def __iter__(self) -> Iterator[DeviceId]:
        return (DeviceId(index) for start, stop in self.ranges for index in range(start, stop))


@dataclass
class Leases:
    """Leases the indices below ``devices`` to supervisors.

    If too few indices are free, leases end whose supervisors have been away for longer than ``hold`` real seconds, if
    none of their devices is connected. If a key would have more than ``most_of_key`` indices, such leases of this key
    end. A fresh lease ends there as soon as its supervisor is away, or the supervisor's connection is gone: the
    supervisor may have died before it had kept the lease, and it has no states to keep. If the supervisor of a fresh
    lease says goodbye, the lease ends in any case.

    ``present`` says whether a device is connected. Every change goes to ``journal``, in the form of JSON, before its
    holder hears of it. When the journal has grown long, ``renew`` gets one entry that stands for all of them.
    ``replay`` reads the journal back.
    """

    devices: int
    hold: float
    present: Callable[[DeviceId], bool] = lambda device: False
    journal: Callable[[Mapping[str, Any]], None] = lambda entry: None
    renew: Callable[[Mapping[str, Any]], None] | None = None
    new_token: Callable[[], str] = lambda: secrets.token_hex(16)
    most_of_key: int = 2**31
    """The most indices that are leased to one key. Machines without keys have no such limit."""
    changes: int = 0
    """The number of changes since the run began, all of which the journal knows."""
    _lines: int = 0
    """The number of entries of the journal."""
    _by_token: dict[str, Lease] = field(default_factory=dict)
    _by_peer: dict[bytes, Lease] = field(default_factory=dict)
    _held: Counter[str] = field(default_factory=Counter)
    """The number of indices that are leased to each key."""
    _numbered: list[Lease | None] = field(default_factory=list)
    _unused: list[int] = field(default_factory=list)
    """The numbers of leases that are gone, for others."""
    _holder: NDArray[np.int32] = field(init=False)
    """The number of the lease that has each device, -1 without one."""
    _granted_by: NDArray[np.int64] = field(init=False)
    """The number of the change that last granted each device, counted from 0. -1 if none did."""

    def __post_init__(self) -> None:
        self._holder = np.full(self.devices, -1, np.int32)
        self._granted_by = np.full(self.devices, -1, np.int64)

    def enroll(self, peer: bytes, count: int, token: str | None, host: str, now: float, key: str = "") -> Lease:
        """The lease with this ``token``, or a new one with the ``count`` lowest free indices, or fewer if they run out.

        A second request on the same connection gives the same lease. Raises RefusedError: lease_unknown (also if the
        lease belongs to another key), lease_taken, quota, fleet_full. With fleet_full the supervisor may ask again
        later: others may lose theirs, also others of its own key that has as many as it may have.
        """
        held = self._by_peer.get(peer)
        if token is not None and (held is None or held.token != token):
            lease = self._by_token.get(token)
            if lease is None:
                raise RefusedError("lease_unknown", "This lease does not belong to this run; enrol without one.")
            if not lease.fits(key):
                raise RefusedError("lease_unknown", "This lease belongs to another machine's key; enrol without one.")
            if lease.peer is not None and not lease.hung_up:
                place = f" on {lease.host}" if lease.host else ""
                raise RefusedError("lease_taken", f"The lease is held by a live supervisor{place}.")
            if key and not lease.key:
                self._give(lease, key)
                self._note({"owned": token, "key": key})
            self._seat(lease, peer, now)
            return lease
        if held is not None:
            return held
        if key and self.held_by(key) + count > self.most_of_key:
            self._reclaim(now, key)
            count = min(count, self._free_for(key, now))
        wait = self._reclaim(now) if count > self.devices - self.granted else None
        if wait is not None and count > self.devices - self.granted:
            raise RefusedError(
                "fleet_full",
                f"Too few of the {self.devices} devices of this run are free, but machines that are away lose theirs "
                f"within {max(1, math.ceil(wait))} s.",
            )
        if self.granted == self.devices:
            raise RefusedError("fleet_full", f"All {self.devices} devices of this run are taken; yours stay idle.")
        lease = Lease(self.new_token(), compress(np.flatnonzero(self._holder < 0)[:count]), host, key=key, fresh=True)
        self._grant(lease)
        self._seat(lease, peer, now)
        self._note(_entry_of(lease))
        return lease

    def hung_up(self, peer: bytes) -> None:
        """The connection of a peer is gone. If it is a supervisor, it can come back for its lease at once."""
        if (lease := self._by_peer.get(peer)) is not None:
            lease.hung_up = True

    def holds(self, token: str, device: int, key: str = "") -> bool:
        """Whether the lease with this token contains the device, and a machine with this key may use it."""
        lease = self._lease_of(device)
        return lease is not None and lease.token == token and lease.fits(key)

    def held_by(self, key: str) -> int:
        """The number of indices that are leased to this key."""
        return self._held[key]

    def holder(self, device: DeviceId) -> bytes | None:
        """The connected supervisor of this device, None if there is none."""
        lease = self._lease_of(device)
        return None if lease is None else lease.peer

    def of_token(self, token: str | None) -> Lease | None:
        """The lease with this token, None if there is none."""
        return None if token is None else self._by_token.get(token)

    def of_peer(self, peer: bytes) -> Lease | None:
        """The lease of a connected supervisor, None for any other peer."""
        return self._by_peer.get(peer)

    def peers_of(self, devices: Iterable[DeviceId]) -> dict[bytes, None]:
        """The connected supervisors of these devices, each once."""
        return {peer: None for device in devices if (peer := self.holder(device)) is not None}

    def held(self, woken: bool = False) -> NDArray[np.bool_]:
        """Whether the supervisor of each device is connected, and if ``woken``, whether it has woken one before."""
        here = [lease is not None and lease.peer is not None and (lease.woken or not woken) for lease in self._numbered]
        return np.array([*here, False])[self._holder]

    def leave(self, peer: bytes, now: float) -> None:
        """The supervisor is gone. Its lease waits for it."""
        lease = self._by_peer.pop(peer, None)
        if lease is not None:
            lease.peer, lease.left = None, now

    def renounce(self, peer: bytes) -> None:
        """The supervisor says goodbye. If none of its devices has come, its indices are free for others at once."""
        lease = self._by_peer.get(peer)
        if lease is not None and lease.fresh:
            del self._by_peer[peer]
            self._forget(lease)

    @property
    def peers(self) -> list[bytes]:
        """The connected supervisors."""
        return list(self._by_peer)

    def hosts_of(self, devices: Iterable[DeviceId]) -> tuple[str, ...]:
        """The names of the machines that hold these devices, connected or not."""
        return tuple(sorted({lease.host for lease in map(self._lease_of, devices) if lease is not None and lease.host}))

    @property
    def away(self) -> tuple[str, ...]:
        """The names of the machines whose supervisors are not connected."""
        return tuple(sorted({lease.host for lease in self._by_token.values() if lease.peer is None and lease.host}))

    @property
    def granted(self) -> int:
        """The number of indices that are leased."""
        return self._held.total()

    def granted_since(self, changes: int) -> Ranges:
        """The devices that were granted when the journal knew of so many changes already."""
        return compress(np.flatnonzero(self._granted_by >= changes))

    def replay(self, entries: Iterable[Mapping[str, Any]], left: float) -> None:
        """Restore the leases of an earlier life of the coordinator. Their holders are away since ``left``.

        Raises UnfitChangeError.
        """
        for number, entry in enumerate(entries, 1):
            form = next((form for key, form in FORMS.items() if key in entry), None)
            try:
                if form is None or not self._restore(msgspec.convert(entry, form), left):
                    raise UnfitChangeError(number)
            except msgspec.ValidationError as error:
                raise UnfitChangeError(number) from error
            self._lines += 1

    def go_on_from(self, changes: int) -> None:
        """Count further changes from this number, if the journal knows fewer, because it was removed or cut.

        Otherwise the changes from now on could come to a number that is known already, and look like those before.
        """
        if self.changes < changes:
            self.changes = changes
            if self.renew is not None:
                self.renew(self._standing())
                self._lines = 1

    def _restore(self, change: Grant | Release | Owned | Standing, left: float) -> bool:
        """Take one change of the journal. Returns whether it fits those before it."""
        match change:
            case Standing():
                if self._lines or not all(self._restore(grant, left) for grant in change.leases):
                    return False
                self.changes = change.changes
                for start, stop, number in change.granted:
                    self._granted_by[start:stop] = number
                return True
            case Grant(token, ranges, host, key):
                if token in self._by_token or not self._are_free(ranges):
                    return False
                self._grant(Lease(token, ranges, host, left=left, key=key))
            case Release(token) | Owned(token):
                if (lease := self._by_token.get(token)) is None:
                    return False
                if isinstance(change, Owned):
                    self._give(lease, change.key)
                else:
                    self._drop(lease)
        self.changes += 1
        return True

    def _are_free(self, ranges: Ranges) -> bool:
        """Whether these are ranges of a lease that can be granted."""
        end = 0
        for start, stop in ranges:
            if not end <= start < stop <= self.devices or (self._holder[start:stop] >= 0).any():
                return False
            end = stop
        return bool(ranges)

    def _lease_of(self, device: int) -> Lease | None:
        number = int(self._holder[device]) if 0 <= device < self.devices else -1
        return None if number < 0 else self._numbered[number]

    def _grant(self, lease: Lease) -> None:
        self._by_token[lease.token] = lease
        self._count(lease.key, len(lease))
        if not self._unused:
            self._unused.append(len(self._numbered))
            self._numbered.append(None)
        number = self._unused.pop()
        self._numbered[number] = lease
        for start, stop in lease.ranges:
            self._holder[start:stop] = number
            self._granted_by[start:stop] = self.changes

    def _give(self, lease: Lease, key: str) -> None:
        """A lease that was granted without keys belongs to this key from now on."""
        self._count(lease.key, -len(lease))
        self._count(key, len(lease))
        lease.key = key

    def _count(self, key: str, devices: int) -> None:
        """So many more devices are leased to this key, or fewer."""
        self._held[key] += devices
        if not self._held[key]:
            del self._held[key]

    def _seat(self, lease: Lease, peer: bytes, now: float) -> None:
        self.leave(peer, now)
        if lease.peer is not None:
            self.leave(lease.peer, now)
        lease.peer, lease.left, lease.hung_up = peer, None, False
        self._by_peer[peer] = lease

    def _reclaim(self, now: float, key: str | None = None) -> float | None:
        """Free the abandoned leases, or only those of this ``key``.

        The result is the seconds after which all other holders that are away lose theirs; None if there are none.
        """
        waiting = None
        for lease in list(self._by_token.values()):
            if lease.fresh and lease.hung_up and lease.peer is not None:
                self.leave(lease.peer, now)
            if lease.left is None or key not in (None, lease.key) or any(map(self.present, lease)):
                continue
            if lease.fresh or now - lease.left > self.hold:
                self._forget(lease)
            else:
                waiting = max(waiting or 0.0, lease.left + self.hold - now)
        return waiting

    def _free_for(self, key: str, now: float) -> int:
        """How many more indices this key may have. RefusedError if none: fleet_full if some get free, or else quota."""
        held = self.held_by(key)
        if held < self.most_of_key:
            return self.most_of_key - held
        if (wait := self._wait_for_own(now, key)) is not None:
            raise RefusedError(
                "fleet_full",
                f"This machine's key holds {held} devices, and may not have more, but some of them are away, and lose "
                f"their places within {max(1, math.ceil(wait))} s.",
            )
        raise RefusedError(
            "quota",
            f"This machine's key holds {held} devices, and may not have more; start fewer, or raise "
            "runtime.devices_per_key at the coordinator.",
        )

    def _wait_for_own(self, now: float, key: str) -> float | None:
        """The seconds after which the first lease of this key goes to others. None if nobody of this key is away.

        A supervisor whose connection is gone is away, also before it has been silent for long enough.
        """
        waits = []
        for lease in self._by_token.values():
            if lease.key == key and (lease.left is not None or lease.hung_up):
                waits.append(self.hold - (0.0 if lease.left is None else now - lease.left))
        return min((wait for wait in waits if wait >= 0.0), default=None)

    def _forget(self, lease: Lease) -> None:
        self._drop(lease)
        self._note({"release": lease.token})

    def _note(self, change: Mapping[str, Any]) -> None:
        """A change was made, which the journal and ``changes`` do not know yet."""
        self.journal(change)
        self.changes += 1
        self._lines += 1
        if self.renew is not None and self._lines > SPARE_LINES + 2 * len(self._by_token):
            self.renew(self._standing())
            self._lines = 1

    def _standing(self) -> dict[str, Any]:
        """The one entry that stands for all changes."""
        leases = [_entry_of(lease) for lease in self._by_token.values()]
        ends = np.flatnonzero(np.diff(self._granted_by)) + 1
        spans = zip([0, *ends.tolist()], [*ends.tolist(), self.devices], strict=True)
        granted = [(start, stop, int(self._granted_by[start])) for start, stop in spans if self._granted_by[start] >= 0]
        return {CHANGES: self.changes, "leases": leases, "granted": granted}

    def _drop(self, lease: Lease) -> None:
        del self._by_token[lease.token]
        self._count(lease.key, -len(lease))
        number = int(self._holder[lease.ranges[0][0]])
        self._numbered[number] = None
        self._unused.append(number)
        for start, stop in lease.ranges:
            self._holder[start:stop] = -1


def compress(indices: NDArray[np.integer[Any]]) -> Ranges:
    """Ascending indices as half-open ranges. For example, [0, 1, 2, 5] becomes ((0, 3), (5, 6))."""
    runs = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs if len(run))


def _entry_of(lease: Lease) -> dict[str, Any]:
    """A lease that is granted, in the form of JSON."""
    entry = {"grant": lease.token, "ranges": lease.ranges, "host": lease.host}
    return {**entry, "key": lease.key} if lease.key else entry
