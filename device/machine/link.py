"""A machine's connection to the coordinator: it carries out the enrolment, fetches blobs, and reports deaths."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Never, TypeVar

from fedemu.device.machine.enrolment import EnrolAction, Enrolment
from fedemu.device.machine.observer import MachineObserver
from fedemu.device.runtime.actions import Connect
from fedemu.protocol.blobs.fetch import Fetches, Step
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.codec import DOWN, Envelope
from fedemu.protocol.errors import (
    BlobError,
    FedemuError,
    HandshakeFailed,
    Interrupted,
    ProtocolError,
    RefusedError,
    UnreachableError,
)
from fedemu.protocol.host.futures import done_before, fail
from fedemu.protocol.ids import Digest
from fedemu.protocol.messages import UNABLE, Blob, BlobRef, Bye, Died, Granted, Offer, Refused, Stop, Wake
from fedemu.protocol.transport.interface import Dealer, Dialer

T = TypeVar("T")

KEPT_ROUNDS = 2
"""Blobs that were offered this many rounds ago are removed, unless a job still needs them."""


class RunOver(Exception):
    """The coordinator has said Stop. The text is its reason."""


class CoordinatorLink:
    """The link of one machine. The future ``ended`` raises RunOver after the coordinator's Stop, or the error that
    makes it impossible to go on."""

    def __init__(self, network: Dialer, address: str, enrolment: Enrolment, observer: MachineObserver) -> None:
        self.arrived: Callable[[Digest], None] = lambda digest: None
        """Called with each blob that has arrived."""
        self.lost: Callable[[Digest, BlobError], None] = lambda digest, error: None
        """Called with each blob that was given up, and the reason."""
        self.needed: Callable[[], Iterable[Digest]] = tuple
        """Called to learn which blobs must stay for now, however old they are."""
        self.placed_again: Callable[[], None] = lambda: None
        """Called when the coordinator has given this machine its place again."""
        self._asked: list[int] = []
        """The devices that were asked before anybody could wake them."""
        self._wake: Callable[[Iterable[int]], None] = self._asked.extend
        self._network = network
        self._address = address
        self._enrolment = enrolment
        self._observer = observer
        self._sought = self._idle = False
        self._told: set[str] = set()
        self._dealer: Dealer | None = None
        self._fetches: Fetches | None = None
        self._waiting: dict[Digest, list[asyncio.Future[Path]]] = {}
        self._offered: dict[Digest, int] = {}
        self._pinned: set[Digest] = set()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._granted: asyncio.Future[Granted] = self._loop.create_future()
        self.ended: asyncio.Future[Never] = self._loop.create_future()

    async def enrol(self) -> Granted:
        """Wait for the coordinator's grant. Raises what ends the link, at the latest when the enrolment gives up."""
        self._perform(self._enrolment.start(self._loop.time()))
        return await self.unless_ended(self._granted)

    async def unless_ended(self, awaited: Awaitable[T]) -> T:
        """The result of ``awaited``. If the link ends first, this is cancelled and the link's error is raised."""
        task = asyncio.ensure_future(awaited)
        if await done_before(task, self.ended):
            return task.result()
        self.ended.result()
        raise AssertionError("the link ends with an exception")

    def keep_blobs(self, store: BlobStore) -> None:
        """Fetch blobs into ``store``. Before this call none can be fetched."""
        self._fetches = Fetches(store)

    async def fetch(self, ref: BlobRef) -> Path:
        """Wait for a blob and return its file, which is never removed. Raises BlobError, or what ends the link."""
        self._pinned.add(Digest(ref.digest))
        future: asyncio.Future[Path] = self._loop.create_future()
        self._waiting.setdefault(Digest(ref.digest), []).append(future)
        self.want(ref)
        return await self.unless_ended(future)

    def want(self, ref: BlobRef) -> None:
        """Begin to fetch a blob, unless it is here or under way."""
        if self._fetches is not None:
            self._step(self._fetches.want(ref, self._loop.time()))

    def wake_by(self, wake: Callable[[Iterable[int]], None]) -> None:
        """Call ``wake`` with the devices of this machine that are asked, and sleep. It hears of earlier ones now."""
        self._wake = wake
        if self._asked:
            wake(self._asked)

    def died(self, device: int, incarnation: int) -> None:
        """Tell the coordinator that a life of a device has ended."""
        if self._dealer is not None:
            self._dealer.send(Died(device=device, incarnation=incarnation))

    def close(self, error: BaseException | None = None) -> None:
        """Say goodbye, and give up all downloads. The coordinator is told of an ``error`` of this machine."""
        bye = Bye(reason="stopped")
        if isinstance(error, FedemuError) and not isinstance(error, Interrupted | RefusedError | UnreachableError):
            bye = Bye(reason=UNABLE, detail=str(error)[:2048])
        if self._dealer is not None:
            self._dealer.send(bye)
            self._dealer.close()
            self._dealer = None
        fail(self.ended, RunOver(bye.reason))
        if self._fetches is not None:
            self._fetches.store.close()

    def _received(self, envelope: Envelope) -> None:
        if self.ended.done():
            return
        now = self._loop.time()
        self._enrolment.heard(now)
        try:
            match envelope.message:
                case Granted() as granted:
                    if self._enrolment.accept(granted, now):
                        if not self._granted.done():  # nobody waits for it any more if this machine is being stopped
                            self._granted.set_result(granted)
                    else:
                        if self._fetches is not None:
                            self._step(self._fetches.restart(now))
                        self.placed_again()
                case Refused() as refused:
                    if self._fetches is not None and refused.reason == "unknown_blob":
                        self._fetches.refused()
                    self._perform(self._enrolment.refuse(refused, now))
                case Blob() as blob:
                    if self._fetches is not None:
                        self._step(self._fetches.receive(blob, envelope.frames[0], now))
                case Offer() as offer:
                    for ref in offer.blobs:
                        self._offered[Digest(ref.digest)] = offer.round
                        self.want(ref)
                    self._evict(offer.round)
                case Wake(devices=devices):
                    self._wake(devices)
                case Stop() as stop:
                    fail(self.ended, RunOver(stop.reason))
                case _:
                    pass  # a Beat, or a message that is meant for devices
        except Exception as error:  # whatever it is, nobody else would hear of it
            self._fail(error)
        self._tell(now)
        self._arm()

    def _rejected(self, error: ProtocolError) -> None:
        if isinstance(error, HandshakeFailed):
            self._enrolment.bar(str(error), error.final)
            if str(error) not in self._told:
                self._told.add(str(error))
                self._observer.barred(str(error))
            return
        try:
            self._enrolment.misread(error)
        except RefusedError as refused:
            self._fail(refused)

    def _tick(self) -> None:
        self._timer = None
        if self.ended.done():
            return
        now = self._loop.time()
        try:
            self._perform(self._enrolment.tick(now))
            if self._fetches is not None and now >= self._fetch_due:
                self._step(self._fetches.tick(now))
        except Exception as error:  # without this timer the coordinator would hear nothing more of this machine
            self._fail(error)
        self._tell(now)
        self._arm()

    def _tell(self, now: float) -> None:
        """Tell the observer if the coordinator is gone or back, or if all places of the run are taken."""
        if self._enrolment.idle and not self._idle:
            self._observer.placed(0)
        self._idle = self._enrolment.idle
        seeking = self._enrolment.seeking and not self.ended.done()
        if seeking and not self._sought:
            self._observer.lost(self._enrolment.seconds_left(now))
        elif self._sought and not self._enrolment.seeking:
            self._observer.found()
        self._sought = seeking

    def _perform(self, actions: Iterable[EnrolAction]) -> None:
        for action in actions:
            if isinstance(action, Connect):
                if self._dealer is not None:
                    self._dealer.close()
                self._dealer = self._network.connect(self._address, DOWN, self._received, self._rejected)
            elif self._dealer is not None:
                self._dealer.send(action)
        self._arm()

    def _step(self, step: Step) -> None:
        assert self._fetches is not None
        for need in step.needs:
            if self._dealer is not None:
                self._dealer.send(need)
        for digest in step.arrived:
            for future in self._waiting.pop(digest, ()):
                if not future.done():
                    future.set_result(self._fetches.store.path(digest))
            self.arrived(digest)
        for digest, error in step.lost:
            for future in self._waiting.pop(digest, ()):
                fail(future, error)
            self.lost(digest, error)
        self._arm()

    def _fail(self, error: Exception) -> None:
        fail(self.ended, error)

    @property
    def _fetch_due(self) -> float:
        """When chunks have to be asked for again. A coordinator that is sought is asked for all once it is back."""
        due = None if self._fetches is None or self._enrolment.seeking else self._fetches.due
        return math.inf if due is None else due

    def _arm(self) -> None:
        due = min(self._enrolment.due, self._fetch_due)
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._tick)

    def _evict(self, round: int) -> None:
        old = [digest for digest, offered in self._offered.items() if offered <= round - KEPT_ROUNDS]
        if not old or self._fetches is None:
            return
        keep = self._pinned.union(self.needed())
        for digest in old:
            if digest not in keep:
                del self._offered[digest]
        self._fetches.store.evict(keep.union(self._offered).__contains__)
