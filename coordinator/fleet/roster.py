"""The members of the fleet: their sessions and incarnations, what they announced, and what is remembered of them.

This is a machine without I/O. ``now`` is a monotonic clock in real seconds. Peers are opaque names of connections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedemu.coordinator.fleet.admission import Admission
from fedemu.coordinator.fleet.leases import Lease, Leases
from fedemu.coordinator.fleet.online_times import OnlineTimes
from fedemu.coordinator.settings import Settings
from fedemu.protocol.errors import RefusedError
from fedemu.protocol.ids import AskId, DeviceId, Digest
from fedemu.protocol.liveness import Liveness
from fedemu.protocol.messages import BlobRef, Hello


@dataclass(slots=True)
class Member:
    """One device. ``incarnation`` is -1 before its first Hello; ``peer`` is None while it is not connected.

    ``state`` names the version of its own state that counts. ``charged`` is the blob that it downloaded last, by shared
    key. ``away`` is the time of the experiment until which it stays away after a dropout. ``lost`` means that it was
    given up: it is not asked again before its next Hello, so a machine that is gone for good delays one round, not all.
    """

    device: DeviceId
    incarnation: int = -1
    peer: bytes | None = None
    online_times: OnlineTimes | None = None
    away: float = 0.0
    lost: bool = False
    state: AskId | None = None
    charged: dict[str, Digest] = field(default_factory=dict)


class Seated(NamedTuple):
    """The result of a Hello. ``replaced`` is the peer whose session it ended. ``anew`` is False for a second copy."""

    member: Member
    replaced: bytes | None
    anew: bool


class Roster:
    """The members of one run, one for each of ``settings.devices`` indices."""

    def __init__(
        self,
        settings: Settings,
        journal: Callable[[Mapping[str, Any]], None] = lambda entry: None,
        resumed: bool = False,
        admission: Admission | None = None,
    ) -> None:
        """``journal`` is that of Leases. ``resumed`` says that an earlier life of the coordinator knew this fleet."""
        self.admission = admission or Admission(settings.devices)
        self.members = [Member(DeviceId(index)) for index in range(settings.devices)]
        self.connected: dict[DeviceId, bytes] = {}
        """The peers of the devices that have a session."""
        self._resumed = resumed
        self._virtual = settings.clock == "virtual"
        self.connection_of: Callable[[bytes], bytes] = lambda peer: peer
        """The connection of a peer. It is another name only if the connection is shared, and the peer is a channel."""
        self.stations: dict[bytes, str] = {}
        """The connections of edges, each with the name of its machine."""
        self._by_peer: dict[bytes, DeviceId] = {}
        self._carriers: dict[bytes, bytes] = {}
        """The connections of the channels that have a session. A channel lives as long as its connection."""
        self._carried: dict[bytes, dict[bytes, None]] = {}
        self._liveness: Liveness[bytes] = Liveness(settings.heartbeat_seconds, settings.patience)
        self.leases = Leases(
            settings.devices,
            settings.give_up,
            self.connected.__contains__,
            journal,
            places=self.admission.places,
        )

    def knows(self, peer: bytes) -> bool:
        """Whether the peer has a session."""
        return peer in self._liveness or peer in self._carriers

    def heard(self, peer: bytes, now: float) -> bool:
        """A message came from the peer. False if it has no session, so that it has to enrol or say Hello first."""
        connection = self._carriers.get(peer, peer)
        if connection not in self._liveness:
            return False
        self._liveness.heard(connection, now)
        return True

    def enroll(self, peer: bytes, count: int, token: str | None, host: str, now: float, key: str = "") -> Lease:
        """Give a supervisor a lease and a session. ``Leases.enroll`` explains arguments, result and errors."""
        self.admission.seat(peer, key)
        try:
            lease = self.leases.enroll(peer, count, token, host, now, key)
        except RefusedError:
            if not self.knows(peer):
                self.admission.unseat(peer)
            raise
        self._begin(peer, now)
        return lease

    def station(self, peer: bytes, host: str, now: float, key: str = "") -> bool:
        """Give an edge a session. Returns whether it had none. Raises RefusedError (quota)."""
        self.admission.seat(peer, key)
        self._begin(peer, now)
        anew = peer not in self.stations
        self.stations[peer] = host
        return anew

    def hello(self, peer: bytes, hello: Hello, now: float, key: str = "") -> Seated:
        """Give a device a session. Raises RefusedError: lease_unknown, superseded (by a newer incarnation), quota.

        ``key`` is that of the connection, empty without keys. It has to be that of the lease.
        """
        if not self.leases.holds(hello.lease, hello.device, key):
            raise RefusedError("lease_unknown", f"Device {hello.device} is not granted by this lease; enrol first.")
        if (connection := self.connection_of(peer)) != peer:
            holder = self.leases.holder(DeviceId(hello.device))
            if holder is None or self.connection_of(holder) != connection:
                raise RefusedError("lease_unknown", "A shared connection speaks only for devices of its own leases.")
        member = self.members[hello.device]
        if member.peer == peer and hello.incarnation <= member.incarnation:
            return Seated(member, None, anew=False)
        if member.peer is not None and hello.incarnation <= member.incarnation:
            raise RefusedError("superseded", f"Incarnation {member.incarnation} of device {hello.device} is connected.")
        self.admission.seat(peer, key)
        replaced = member.peer
        if replaced is not None:
            self._unseat(replaced)
        if peer in self._by_peer:
            self._unseat(peer)
        member.incarnation, member.peer, member.lost = hello.incarnation, peer, False
        self.connected[member.device] = peer
        self._by_peer[peer] = member.device
        self._begin(peer, now)
        return Seated(member, replaced, anew=True)

    def device_of(self, peer: bytes) -> DeviceId | None:
        """The device that has its session on this connection, None if there is none."""
        return self._by_peer.get(peer)

    def died(self, device: int, incarnation: int, peer: bytes) -> DeviceId | None:
        """A supervisor saw the process of a device end. Returns the device if this ended its session, else None."""
        lease = self.leases.of_peer(peer)
        if lease is None or not self.leases.holds(lease.token, device):
            return None
        member = self.members[device]
        if member.peer is None or member.incarnation != incarnation:
            return None
        self._unseat(member.peer)
        return member.device

    def leave(self, peer: bytes, now: float) -> DeviceId | None:
        """The session of one peer is over. Returns the device whose session this was, None if there is none."""
        device = self._by_peer.get(peer)
        if device is not None:
            self._unseat(peer)
        self.leases.leave(peer, now)
        self.stations.pop(peer, None)
        self._forget(peer)
        return device

    def leave_all(self, peer: bytes, now: float) -> list[tuple[bytes, DeviceId | None]]:
        """The peer is gone, and so are all channels of its connection. Returns them, each with its device or None."""
        return [(each, self.leave(each, now)) for each in (*self._carried.get(peer, ()), peer)]

    def expire(self, now: float) -> list[tuple[bytes, DeviceId | None]]:
        """End the sessions of the peers that fell silent. Returns these peers, each with its device or None."""
        return [gone for peer in self._liveness.expired(now) for gone in self.leave_all(peer, now)]

    @property
    def peers(self) -> list[bytes]:
        """All peers with a session: devices, then the supervisors that are no devices, then edges."""
        return [*self._by_peer, *(peer for peer in self.leases.peers if peer not in self._by_peer), *self.stations]

    def _unseat(self, peer: bytes) -> None:
        device = self._by_peer.pop(peer)
        self.members[device].peer = None
        del self.connected[device]
        if self.leases.of_peer(peer) is None:
            self._forget(peer)

    def _begin(self, peer: bytes, now: float) -> None:
        """The peer has a session from now on."""
        connection = self.connection_of(peer)
        if connection != peer:
            self._carriers[peer] = connection
            self._carried.setdefault(connection, {})[peer] = None
        self._liveness.heard(connection, now)

    def _forget(self, peer: bytes) -> None:
        connection = self._carriers.pop(peer, None)
        if connection is None:
            self._liveness.forget(peer)
        else:
            del self._carried[connection][peer]
            if not self._carried[connection]:
                del self._carried[connection]
        self.admission.unseat(peer)

    def missing(self) -> list[DeviceId]:
        """The devices that have to come before the run can go on.

        Under the virtual clock every device has to announce its on-line times. Under the wall clock every device has to
        come once. After an absence of the coordinator, a device that is off-line by its plan need not know of the
        absence, so it is enough that its supervisor is back.
        """
        return [member.device for member in self.members if self.is_missing(member.device)]

    def is_missing(self, device: DeviceId) -> bool:
        """Whether a device is among ``missing``."""
        member = self.members[device]
        if self._virtual:
            return member.online_times is None
        return member.incarnation < 0 and not (self._resumed and self.leases.holder_present(device))

    def lacking(self, until: float) -> list[Member]:
        """The members whose announced on-line times do not reach ``until``. Lost members do not count."""
        return [m for m in self.members if not m.lost and (m.online_times is None or m.online_times.until < until)]

    def online(self, time: float) -> list[DeviceId]:
        """The devices that are on-line at ``time`` (virtual clock), or connected (wall clock), in index order."""
        if self._virtual:
            return [m.device for m in self.members if m.online_times is not None and m.online_times.online(time)]
        return sorted(self.connected)

    def eligible(self, time: float) -> list[DeviceId]:
        """The on-line devices that are neither away after a dropout nor lost, in index order."""
        if not self._virtual:
            return self.online(time)
        members = self.members
        return [d for d in self.online(time) if members[d].away <= time and not members[d].lost]

    def next_arrival(self, time: float, among: Iterable[DeviceId] | None = None) -> float | None:
        """The first moment after which one of the devices is eligible, None if none is known (virtual clock)."""
        members = self.members if among is None else [self.members[device] for device in among]
        arrivals = (
            member.online_times.arrival(max(time, member.away))
            for member in members
            if member.online_times is not None and not member.lost
        )
        return min((arrival for arrival in arrivals if arrival is not None and arrival < math.inf), default=None)

    def download_bytes(self, device: DeviceId, shared: Sequence[BlobRef]) -> int:
        """The bytes of these blobs that the device has to download, because it did not download them before."""
        charged = self.members[device].charged
        return sum(blob.size for blob in shared if charged.get(blob.key) != blob.digest)

    def charge(self, device: DeviceId, shared: Iterable[BlobRef]) -> None:
        """Remember that the device has downloaded these blobs."""
        self.members[device].charged.update((blob.key, Digest(blob.digest)) for blob in shared)

    def forget_states(self, devices: Iterable[DeviceId]) -> int:
        """The own states of these devices are gone, so that they begin anew. Returns how many had one."""
        having = [member for member in map(self.members.__getitem__, devices) if member.state is not None]
        for member in having:
            member.state = None
        return len(having)

    def states(self) -> list[AskId | None]:
        """The versions of the devices' own states. ``restore_states`` puts them back."""
        return [member.state for member in self.members]

    def restore_states(self, states: Iterable[AskId | None]) -> None:
        """Put back what ``states`` gave."""
        for member, state in zip(self.members, states, strict=True):
            member.state = state

    def to_record(self) -> dict[str, Any]:
        """What a checkpoint keeps of the roster, in the form of JSON.

        Sessions and on-line times are not kept, because they come back with the devices. There are many digests, but
        few distinct ones, so each is listed once.
        """
        digests: dict[Digest, int] = {}
        charged = [
            {key: digests.setdefault(digest, len(digests)) for key, digest in member.charged.items()}
            for member in self.members
        ]
        return {
            "away": [member.away for member in self.members],
            "states": [None if member.state is None else str(member.state) for member in self.members],
            "charged": charged,
            "digests": list(digests),
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restore what ``to_record`` gave."""
        digests = record["digests"]
        rows: Iterator[tuple[Member, float, str | None, dict[str, int]]] = zip(
            self.members, record["away"], record["states"], record["charged"], strict=True
        )
        for member, away, state, charged in rows:
            member.away = away
            member.state = None if state is None else AskId.parse(state)
            member.charged = {key: digests[place] for key, place in charged.items()}
