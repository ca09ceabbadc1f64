"""The sum that an edge sends: over the results that it keeps itself, and over those that edges behind it keep."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from fedemu.coordinator.edge.gathering import Gathering
from fedemu.coordinator.sums.partial import Partial
from fedemu.protocol.codec import Buffer, Envelope
from fedemu.protocol.messages import Message, Result
from fedemu.protocol.sharing import edge_messages as edge

log = logging.getLogger(__name__)


class Summing:
    """What is kept of one ask at a time. Large results are in ``folder``.

    ``say`` sends a message and its frames further up, ``send`` sends one to an edge below.
    """

    def __init__(
        self,
        folder: Path,
        say: Callable[[Message, Sequence[Buffer]], None],
        send: Callable[[bytes, Message], None],
    ) -> None:
        self.stations: dict[bytes, None] = {}
        """The edges below."""
        self._folder = folder
        self._say = say
        self._send = send
        self._gathering: Gathering | None = None
        self._keepers: dict[int, bytes] = {}
        """The edges below that keep the results of devices."""
        self._awaited: dict[bytes, None] = {}
        self._sum: edge.Sum | None = None
        self._total: Partial | None = None
        self._summed: list[int] = []

    @property
    def gathers(self) -> bool:
        """Whether results of an ask are to be kept."""
        return self._gathering is not None

    def join(self, station: bytes) -> None:
        """An edge below has taken its place."""
        self.stations[station] = None
        if self._gathering is not None:
            self._send(station, self._gathering.gather)

    def leave(self, station: bytes) -> None:
        """A peer is gone, which may have been an edge."""
        self.stations.pop(station, None)
        if station in self._awaited:
            del self._awaited[station]
            self._finish()

    def gather(self, gather: edge.Gather) -> None:
        """Keep results of this ask from now on, and of no other."""
        if self._gathering is not None:
            if self._gathering.gather == gather:
                return
            self._gathering.close()
        self._gathering = Gathering(gather, self._folder)
        self._keepers.clear()
        self._sum, self._total, self._summed = None, None, []
        self._awaited.clear()
        for station in self.stations:
            self._send(station, gather)

    def keep(self, device: int, result: Result, frames: Sequence[memoryview]) -> edge.Held | None:
        """Keep the result of a device, and return what is said of it further up. None if the result has to pass."""
        if self._gathering is None or not self._gathering.covers(result.ask, result.epoch):
            return None
        return self._gathering.take(device, result, frames)

    def kept_by(self, station: bytes, device: int) -> None:
        """An edge below keeps the result of a device."""
        self._keepers[device] = station

    def begin(self, wanted: edge.Sum) -> None:
        """Add up what is kept here, and ask the edges below for their part."""
        gathering = self._gathering
        if gathering is None or not gathering.covers(wanted.ask, wanted.epoch):
            # This life has kept nothing of that ask.
            nothing = edge.Partial(ask=wanted.ask, epoch=wanted.epoch, devices=(), examples=0, lowest=(), tensors=())
            self._say(nothing, ())
            return
        if wanted == self._sum and self._awaited:
            for station in self._awaited:  # the question or the answer may have been lost
                self._send(station, self._part_of(wanted, station))
            return
        self._sum = wanted
        self._total, self._summed = gathering.sum(wanted.devices)
        elsewhere = {self._keepers[d] for d in wanted.devices if not gathering.has(d) and d in self._keepers}
        self._awaited = dict.fromkeys(station for station in self.stations if station in elsewhere)
        for station in self._awaited:
            self._send(station, self._part_of(wanted, station))
        self._finish()

    def merge(self, station: bytes, envelope: Envelope) -> None:
        """An edge below has sent its part of the sum."""
        message, gathering, total, wanted = envelope.message, self._gathering, self._total, self._sum
        if station not in self._awaited or gathering is None or total is None or wanted is None:
            return
        if (message.ask, message.epoch) != (wanted.ask, wanted.epoch):
            return
        del self._awaited[station]
        if message.devices and {*message.devices} <= {*self._part_of(wanted, station).devices}:
            try:
                total.merge(gathering.heard(message, envelope.frames))
                self._summed += message.devices
            except ValueError as error:
                log.warning("the sum of an edge below cannot be used: %s", error)
        self._finish()

    def close(self) -> None:
        """Forget the results."""
        if self._gathering is not None:
            self._gathering.close()

    def _part_of(self, wanted: edge.Sum, station: bytes) -> edge.Sum:
        devices = tuple(device for device in wanted.devices if self._keepers.get(device) == station)
        return replace(wanted, devices=devices)

    def _finish(self) -> None:
        if self._sum is None or self._total is None or self._gathering is None or self._awaited:
            return
        message, frames = self._gathering.told(self._total, self._summed)
        self._say(message, frames)
