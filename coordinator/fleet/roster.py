"""The members of the fleet: their sessions and incarnations, what they announced, and what is remembered of them.

This is a machine without I/O. ``now`` is a monotonic clock in real seconds. Peers are opaque names of connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedemu.coordinator.fleet.admission import Admission
from fedemu.coordinator.fleet.columns import Columns, Mask
from fedemu.coordinator.fleet.leases import Lease, Leases
from fedemu.coordinator.fleet.likeness import Likeness
from fedemu.coordinator.fleet.online_times import AnnouncedTimes
from fedemu.coordinator.fleet.planned_times import PlannedTimes
from fedemu.coordinator.settings import Settings
from fedemu.protocol.errors import RefusedError
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.liveness import Liveness
from fedemu.protocol.messages import Hello


class Seated(NamedTuple):
    """The result of a Hello. ``replaced`` is the peer whose session it ended. ``anew`` is False for a second copy."""

    device: DeviceId
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
        planned: PlannedTimes | None = None,
        renew: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """``journal`` and ``renew`` are those of Leases.

        ``resumed`` says that an earlier life of the coordinator knew this fleet.
        If the on-line times are ``planned``, devices need not announce them. Such devices sleep until they are asked.
        """
        self.admission = admission or Admission(settings.devices)
        self.columns = Columns(settings.devices)
        self.announced = AnnouncedTimes(settings.devices)
        self.planned = planned
        self.likeness = Likeness(settings.portable, settings.mixed_compute)
        self.connected: dict[DeviceId, bytes] = {}
        """The peers of the devices that have a session."""
        self._resumed = resumed
        self._virtual = settings.clock == "virtual"
        self.connection_of: Callable[[bytes], bytes] = lambda peer: peer
        """The connection of a peer. It is another name only if the connection is shared, and the peer is a channel."""
        self.resting: dict[bytes, DeviceId] = {}
        """The connections of devices that were told to sleep, and have not left yet."""
        self.departed: set[DeviceId] = set()
        """Under the wall clock the devices that said goodbye by their plan, and have not come back."""
        self.stations: dict[bytes, None] = {}
        """The connections of edges."""
        self.keepers: set[bytes] = set()
        """The connections of edges that keep results of the open ask."""
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
            renew,
            most_of_key=self.admission.most_devices,
        )

    def knows(self, peer: bytes) -> bool:
        """Whether the peer has a session."""
        return peer in self._liveness or peer in self._carriers

    def has_place(self, peer: bytes) -> bool:
        """Whether the peer has a session that the run gave it.

        An edge has one as long as somebody behind it has, or its sum is awaited of results from those that were there.
        """
        return self.knows(peer) and (peer not in self.stations or peer in self._carried or peer in self.keepers)

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
        known = self.leases.of_token(token)
        before = None if known is None else known.peer
        try:
            lease = self.leases.enroll(peer, count, token, host, now, key)
        except RefusedError:
            if not self.knows(peer):
                self.admission.unseat(peer)
            raise
        if before is not None and not self._has_role(before):  # its connection is gone, and it has come back
            self._forget(before)
        self._begin(peer, now)
        lease.through = self.connection_of(peer)
        self.admission.recognise(peer, lease.token, now)
        if self.planned is not None:
            for start, stop in lease.ranges:  # whoever can wake them is back
                self.columns.lost[start:stop] = False
        return lease

    def station(self, peer: bytes, now: float, key: str = "") -> bool:
        """Give an edge a session. Returns whether it had none. Raises RefusedError (quota)."""
        self.admission.seat(peer, key)
        self._begin(peer, now)
        anew = peer not in self.stations
        self.stations[peer] = None
        return anew

    def hello(self, peer: bytes, hello: Hello, now: float, key: str = "") -> Seated:
        """Give a device a session. Raises RefusedError: lease_unknown, superseded (by a newer incarnation), quota.

        ``key`` is that of the connection, empty without keys. It has to be that of the lease.
        """
        if not self.leases.holds(hello.lease, hello.device, key):
            raise RefusedError("lease_unknown", f"Device {hello.device} is not granted by this lease; enrol first.")
        if (connection := self.connection_of(peer)) != peer:
            granted = self.leases.of_token(hello.lease)
            if granted is None or granted.through != connection:
                raise RefusedError("lease_unknown", "A shared connection speaks only for devices of its own leases.")
        device = DeviceId(hello.device)
        replaced, incarnation = self.connected.get(device), int(self.columns.incarnation[device])
        if replaced is not None and hello.incarnation <= incarnation:
            if replaced == peer:
                return Seated(device, None, anew=False)
            raise RefusedError("superseded", f"Incarnation {incarnation} of device {device} is connected.")
        self.admission.seat(peer, key)
        if replaced is not None:
            self._unseat(replaced)
        if peer in self._by_peer:
            self._unseat(peer)
        self.admission.seat(peer, key)  # it may have been the one that was replaced
        self.columns.incarnation[device], self.columns.lost[device] = hello.incarnation, False
        self.connected[device] = peer
        self._by_peer[peer] = device
        self.resting.pop(peer, None)
        self.departed.discard(device)
        if (lease := self.leases.of_token(hello.lease)) is not None:
            lease.woken, lease.fresh = True, False
        self._begin(peer, now)
        self.admission.recognise(peer, device, now)
        return Seated(device, replaced, anew=True)

    def answers(self, device: DeviceId) -> None:
        """The device has answered something. If it had been given up, it may be asked again."""
        self.columns.lost[device] = False

    def device_of(self, peer: bytes) -> DeviceId | None:
        """The device that has its session on this connection, None if there is none."""
        return self._by_peer.get(peer)

    def died(self, device: int, incarnation: int, peer: bytes) -> DeviceId | None:
        """A supervisor saw the process of a device end. Returns the device if this ended its session, else None."""
        lease = self.leases.of_peer(peer)
        if lease is None or not self.leases.holds(lease.token, device):
            return None
        seat = self.connected.get(DeviceId(device))
        if seat is None or self.columns.incarnation[device] != incarnation:
            return None
        self._unseat(seat)
        return DeviceId(device)

    def rest(self, device: DeviceId) -> bytes:
        """The device is told to sleep, so nothing else is sent to it. Returns its connection, which may say Bye."""
        peer = self.connected.pop(device)
        del self._by_peer[peer]
        self.resting[peer] = device
        return peer

    def was_told_to_rest(self, peer: bytes) -> bool:
        """Whether a peer has a session, and is neither a device nor a supervisor nor an edge any more."""
        return self.knows(peer) and not self._has_role(peer)

    def leave(self, peer: bytes, now: float) -> DeviceId | None:
        """The session of one peer is over. Returns the device whose session this was, None if there is none."""
        device = self._by_peer.get(peer)
        if device is not None:
            self._unseat(peer)
        self.leases.leave(peer, now)
        self.stations.pop(peer, None)
        self.keepers.discard(peer)
        self._forget(peer)
        return device

    def leave_all(self, peer: bytes, now: float) -> list[tuple[bytes, DeviceId | None]]:
        """The peer is gone, and so are all channels of its connection. Returns them, each with its device or None."""
        return [(each, self.leave(each, now)) for each in (*self._carried.get(peer, ()), peer)]

    def quiet(self, now: float) -> list[bytes]:
        """The connections with a session from which nothing was heard for half the time after which it is over."""
        return self._liveness.quiet(now)

    def expire(self, now: float) -> list[tuple[bytes, DeviceId | None]]:
        """End the sessions of the peers that fell silent. Returns these peers, each with its device or None."""
        return [gone for peer in self._liveness.expired(now) for gone in self.leave_all(peer, now)]

    @property
    def peers(self) -> list[bytes]:
        """All peers with a session: devices, then the supervisors that are no devices, then edges."""
        return [*self._by_peer, *(peer for peer in self.leases.peers if peer not in self._by_peer), *self.stations]

    def _unseat(self, peer: bytes) -> None:
        device = self._by_peer.pop(peer)
        del self.connected[device]
        if not self._has_role(peer):
            self._forget(peer)

    def _has_role(self, peer: bytes) -> bool:
        """Whether a peer is a device, a supervisor or an edge, or has channels with a session. It may be several."""
        named = peer in self._by_peer or peer in self.stations or peer in self._carried
        return named or self.leases.of_peer(peer) is not None

    def _begin(self, peer: bytes, now: float) -> None:
        """The peer has a session from now on."""
        connection = self.connection_of(peer)
        if connection != peer:
            self._carriers[peer] = connection
            self._carried.setdefault(connection, {})[peer] = None
        self._liveness.heard(connection, now)

    def _forget(self, peer: bytes) -> None:
        self.resting.pop(peer, None)
        connection = self._carriers.pop(peer, None)
        if connection is None:
            self._liveness.forget(peer)
        else:
            del self._carried[connection][peer]
            if not self._carried[connection]:
                del self._carried[connection]
        self.admission.unseat(peer)

    @property
    def joined(self) -> int:
        """The number of devices that belong to the fleet. One that sleeps still does while its machine is away."""
        return len(self.columns) - len(self.missing()) if self.planned is None else self.leases.granted

    def missing(self) -> list[DeviceId]:
        """The devices that have to come before the run can go on.

        Under the virtual clock every device has to announce its on-line times. Where these are planned, it is enough
        that its supervisor is there, and has woken one of ``heralds`` before: a machine that starts may have data to
        decode before it can. Under the wall clock every device has to come once. After an absence of the
        coordinator, a device that is off-line by its plan need not know of the absence, so it is enough that its
        supervisor is back. ``Service.gather`` then waits a while for those that are ``absent``.
        """
        if self.planned is not None:
            return [DeviceId(device) for device in np.flatnonzero(~self.leases.held(woken=True)).tolist()]
        return [device for device in map(DeviceId, range(len(self.columns))) if self.is_missing(device)]

    def is_missing(self, device: DeviceId) -> bool:
        """Whether a device is among ``missing``."""
        if self.planned is not None:
            peer = self.leases.holder(device)
            lease = None if peer is None else self.leases.of_peer(peer)
            return lease is None or not lease.woken
        if self._virtual:
            return self.announced.of(device) is None
        return self.columns.incarnation[device] < 0 and not (self._resumed and self.leases.holder(device) is not None)

    def absent(self) -> list[DeviceId]:
        """The devices that have not come in this life of the coordinator."""
        return [DeviceId(device) for device in np.flatnonzero(self.columns.incarnation < 0).tolist()]

    def heralds(self) -> list[DeviceId]:
        """The first device of each lease whose supervisor is there and has not woken any device yet."""
        leases = [lease for peer in self.leases.peers if (lease := self.leases.of_peer(peer)) is not None]
        return [DeviceId(lease.ranges[0][0]) for lease in leases if not lease.woken]

    def here(self) -> Mask:
        """Whether each device has a connection. Where devices sleep, whether there is somebody who can wake it."""
        if self.planned is not None:
            return self.leases.held()
        here = np.zeros(len(self.columns), bool)
        here[list(self.connected)] = True
        return here

    def reachable(self) -> int:
        """The number of devices that can be asked now: the connected ones, or those that somebody can wake."""
        return len(self.connected) if self.planned is None else int(self.leases.held().sum())

    def away(self) -> int:
        """The number of devices that are off-line by their plan, and whose machine is there (wall clock)."""
        return int(self.leases.held()[list(self.departed)].sum()) if self.departed else 0

    def forget_states(self, lease: Lease) -> int:
        """The own states of a lease's devices are gone, so that they begin anew. Returns how many had one."""
        return sum(self.columns.forget_states(first, stop) for first, stop in lease.ranges)

    def lacking(self, until: float) -> list[DeviceId]:
        """The devices whose announced on-line times do not reach ``until``. Lost ones do not count."""
        if self.planned is not None:
            return []
        return [DeviceId(device) for device in self.announced.lacking(until) if not self.columns.lost[device]]

    def used_up(self, time: float) -> list[DeviceId]:
        """The devices whose announced on-line times are over by ``time``. Lost ones do not count."""
        if self.planned is not None:
            return []
        return [DeviceId(device) for device in self.announced.used_up(time) if not self.columns.lost[device]]

    def online(self, time: float) -> Mask:
        """Whether each device is on-line at ``time`` (virtual clock), or connected (wall clock)."""
        if self._virtual:
            return (self.planned or self.announced).online(time)
        return self.here()

    def eligible(self, time: float) -> Mask:
        """Whether each device is on-line and neither away after a dropout nor lost."""
        if not self._virtual:
            return self.online(time)
        return self.online(time) & (self.columns.away <= time) & ~self.columns.lost

    def next_arrival(self, time: float, among: Iterable[DeviceId] | None = None) -> float | None:
        """The first moment after which one of the devices is eligible, None if none is known (virtual clock)."""
        devices = np.arange(len(self.columns)) if among is None else np.array([*among], np.int64)
        devices = devices[~self.columns.lost[devices]]
        return (self.planned or self.announced).next_arrival(
            devices.tolist(), np.maximum(time, self.columns.away[devices]).tolist()
        )
