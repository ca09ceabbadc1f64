"""The sum that an edge sends: over the results that it keeps itself, and over those that edges behind it keep."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec.structs import replace

from fedemu.coordinator.edge.gathering import Gathering
from fedemu.coordinator.sums.partial import Arrays
from fedemu.protocol.codec import Buffer, Envelope
from fedemu.protocol.host.futures import listen
from fedemu.protocol.messages import Message, Result, TensorSpec
from fedemu.protocol.sharing import edge_messages as edge

log = logging.getLogger(__name__)


class Summing:
    """What is kept of one ask at a time. Large results are in ``folder``.

    ``say`` sends a message and its frames further up, ``send`` sends one to an edge below. ``is_sending`` says whether
    something long comes from one. Sums are computed in a thread, so the edge hears and beats meanwhile. ``fail`` gets
    the error of a sum that could not be computed.
    """

    def __init__(
        self,
        folder: Path,
        say: Callable[[Message, Sequence[Buffer]], None],
        send: Callable[[bytes, Message], None],
        fail: Callable[[BaseException], None],
        is_sending: Callable[[bytes], bool],
    ) -> None:
        self.stations: dict[bytes, None] = {}
        """The edges below."""
        self._folder = folder
        self._say = say
        self._send = send
        self._fail = fail
        self._is_sending = is_sending
        self._gathering: Gathering | None = None
        self._keepers: dict[int, bytes] = {}
        """The edges below that keep the results of devices."""
        self._twice: set[int] = set()
        """The devices whose results several of them keep."""
        self._sum: edge.Sum | None = None
        self._adding: asyncio.Task[None] | None = None
        self._awaited: dict[bytes, edge.Sum] = {}
        """The parts of the sum that edges below still have to send."""
        self._parts: asyncio.Queue[Envelope | None] = asyncio.Queue()
        """The parts that have come. None is of an edge that has none."""
        self._passing: tuple[tuple[TensorSpec, ...], int] | None = None
        """The tensors of an ask whose sum was too large, and the most bytes that it might have had.

        The results of later asks that have the same two are passed on.
        """
        self._thread = ThreadPoolExecutor(1, "sum")

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
        if station not in self.stations:
            return
        del self.stations[station]
        self._keepers = {device: keeper for device, keeper in self._keepers.items() if keeper != station}
        if station in self._awaited:
            del self._awaited[station]
            self._parts.put_nowait(None)

    def gather(self, gather: edge.Gather) -> None:
        """Keep results of this ask from now on, and of no other."""
        if self._gathering is not None and self._gathering.gather == gather:
            return
        self._forget()
        self._keepers.clear()
        self._twice.clear()
        if (gather.leaves, gather.most_bytes) == self._passing:
            return
        if gather.most_bytes:
            self._gathering = Gathering(gather, self._folder)
        self._send_below(gather)

    def keep(self, device: int, result: Result, frames: Sequence[memoryview]) -> edge.Held | None:
        """Keep the result of a device, and return what is said of it further up. None if the result has to pass."""
        if self._gathering is None or not self._gathering.covers(result.ask, result.epoch):
            return None
        return self._gathering.take(device, result, frames)

    def kept_by(self, station: bytes, device: int) -> None:
        """An edge below keeps the result of a device."""
        if self._keepers.setdefault(device, station) != station:
            self._twice.add(device)

    def begin(self, wanted: edge.Sum) -> None:
        """Add up what is kept here, and ask the edges below for their part."""
        gathering = self._gathering
        if gathering is None or not gathering.covers(wanted.ask, wanted.epoch):
            # This life has kept nothing of that ask.
            self._say(_nothing(wanted), ())
            return
        if wanted == self._sum and self._adding is not None and not self._adding.done():
            for station, part in self._awaited.items():  # the question or the answer may have been lost
                if not self._is_sending(station):
                    self._send(station, part)
            return
        self._stop()
        self._sum, self._parts = wanted, asyncio.Queue()
        elsewhere: dict[bytes, list[int]] = {}
        for device in wanted.devices:
            keeper = self._keepers.get(device)
            if keeper is None:
                continue
            if device in self._twice or gathering.has(device):
                # It has replied at several edges, and the coordinator may go by any reply. So it is asked once more.
                self._twice.discard(device)
                gathering.drop(device)
                del self._keepers[device]
            else:
                elsewhere.setdefault(keeper, []).append(device)
        self._awaited = {station: replace(wanted, devices=tuple(devices)) for station, devices in elsewhere.items()}
        for station, part in self._awaited.items():
            self._send(station, part)
        own = [device for device in wanted.devices if gathering.has(device)]
        self._adding = asyncio.ensure_future(self._add_up(gathering, own, gathering.kept(own)))
        listen(self._adding, self._fail)

    def merge(self, station: bytes, envelope: Envelope) -> None:
        """An edge below has sent its part of the sum."""
        message, part = envelope.message, self._awaited.get(station)
        if part is None or (message.ask, message.epoch) != (part.ask, part.epoch):
            return
        del self._awaited[station]
        fits = message.devices and {*part.devices}.issuperset(message.devices)
        self._parts.put_nowait(envelope if fits else None)

    def close(self) -> None:
        """Forget the results."""
        self._forget()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _add_up(self, gathering: Gathering, summed: list[int], kept: Sequence[tuple[Arrays, int]]) -> None:
        """Compute the sum, and send it when every edge below has sent its part or is gone."""
        compute = asyncio.get_running_loop().run_in_executor
        total = await compute(self._thread, gathering.sum, kept)
        while self._awaited or not self._parts.empty():
            part = await self._parts.get()
            if part is not None:
                try:
                    await compute(self._thread, gathering.merge, total, part)
                    summed += part.message.devices
                except ValueError as error:
                    log.warning("the sum of an edge below cannot be used: %s", error)
        message, frames = await compute(self._thread, gathering.told, total, summed)
        if (size := sum(map(len, frames))) <= gathering.gather.most_bytes:
            self._say(message, frames)
        else:
            self._let_pass(gathering, size)

    def _let_pass(self, gathering: Gathering, size: int) -> None:
        """The sum has too many bytes. Devices are asked again, and their results pass, as those of later asks do."""
        gather = gathering.gather
        log.warning("a sum has %d bytes, and %d are read; results like these pass from now on", size, gather.most_bytes)
        self._passing = gather.leaves, gather.most_bytes
        self._send_below(replace(gather, most_bytes=0))
        self._say(_nothing(gather), ())
        gathering.close()
        self._gathering = None

    def _send_below(self, gather: edge.Gather) -> None:
        for station in self.stations:
            self._send(station, gather)

    def _stop(self) -> None:
        """Give up the sum that is computed. The thread ends the part that it is at."""
        if self._adding is not None:
            self._adding.cancel()
        self._sum, self._adding = None, None
        self._awaited.clear()

    def _forget(self) -> None:
        """Forget what was kept of an ask."""
        self._stop()
        if self._gathering is not None:
            self._gathering.close()
        self._gathering = None


def _nothing(wanted: edge.Sum | edge.Gather) -> edge.Partial:
    """A sum of no results."""
    return edge.Partial(ask=wanted.ask, epoch=wanted.epoch, devices=(), examples=0, lowest=(), tensors=())
