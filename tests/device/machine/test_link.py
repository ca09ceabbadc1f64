"""A machine's link by itself: what it sends and tells, with a coordinator of which only the messages are there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fedemu.device.machine.enrolment import Enrolment
from fedemu.device.machine.link import CoordinatorLink, RunOver
from fedemu.device.machine.observer import MachineObserver
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.codec import Envelope
from fedemu.protocol.errors import BlobError, ConfigurationError, HandshakeFailed, RefusedError, UnreachableError
from fedemu.protocol.ids import Digest, digest_of
from fedemu.protocol.messages import (
    UNABLE,
    Blob,
    BlobRef,
    Bye,
    Enroll,
    Granted,
    Message,
    Need,
    Offer,
    Refused,
    Stop,
    Wake,
)

WEIGHTS = b"weights"
REF = BlobRef(key="model", digest=digest_of(WEIGHTS), size=len(WEIGHTS))


class Connection:
    """A connection of the link. ``sent`` are the messages that have left on it."""

    def __init__(self, received: Callable[[Envelope], None], rejected: Callable[[Exception], None]) -> None:
        self._received = received
        self.rejected = rejected
        self.sent: list[Message] = []
        self.closed = False

    def send(self, message: Message) -> None:
        assert not self.closed
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True

    def say(self, message: Message, *frames: bytes) -> None:
        """The coordinator says something."""
        self._received(Envelope(message, tuple(map(memoryview, frames))))

    def heard_of(self, kind: type[Message]) -> list[Message]:
        """The messages of one type that have left."""
        return [message for message in self.sent if isinstance(message, kind)]


class Machine(MachineObserver):
    """A link with its connections, and what it tells. Its coordinator has granted a place."""

    def __init__(self, folder: Path, connect_seconds: float = 60.0) -> None:
        self.connections: list[Connection] = []
        self.told: list[str] = []
        enrolment = Enrolment("there", 3, "here", leases=(), connect_seconds=connect_seconds, lost_seconds=60.0)
        network: Any = self
        self.link = CoordinatorLink(network, "there", enrolment, self)
        self.store = BlobStore(folder)
        self.link.keep_blobs(self.store)

    def connect(self, address: str, decoder: object, received: Any, rejected: Any) -> Connection:
        self.connections.append(Connection(received, rejected))
        return self.connections[-1]

    @property
    def now(self) -> Connection:
        """The latest connection."""
        return self.connections[-1]

    async def granted(self, heartbeat_seconds: float = 60.0) -> None:
        enrolling = asyncio.create_task(self.link.enrol())
        await asyncio.sleep(0)
        self.grant(heartbeat_seconds)
        await enrolling

    def grant(self, heartbeat_seconds: float = 60.0) -> None:
        """The coordinator gives this machine its place, or gives it again."""
        self.now.say(
            Granted(
                lease="L",
                run="digits",
                ranges=((0, 3),),
                experiment=REF,
                partition=REF,
                data="b" * 64,
                heartbeat_seconds=heartbeat_seconds,
                patience=1,
            )
        )

    def placed(self, places: int) -> None:
        self.told.append(f"placed {places}")

    def barred(self, reason: str) -> None:
        self.told.append(reason)

    def lost(self, seconds: float) -> None:
        self.told.append("lost")

    def found(self) -> None:
        self.told.append("found")


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    made = Machine(tmp_path / "blobs")
    yield made
    made.link.close()


@pytest.mark.parametrize(
    ("error", "bye"),
    [
        (None, Bye(reason="stopped")),
        (OSError("broken"), Bye(reason="stopped")),
        (UnreachableError("gone"), Bye(reason="stopped")),
        (ConfigurationError(3000 * "x"), Bye(reason=UNABLE, detail=2048 * "x")),
    ],
)
async def test_a_machine_says_goodbye_and_why_if_the_reason_is_its_own(
    error: Exception | None, bye: Bye, machine: Machine
) -> None:
    await machine.granted()
    machine.link.close(error)
    assert machine.now.sent[-1] == bye
    assert machine.now.closed


async def test_a_machine_that_has_left_stays_away(machine: Machine, tmp_path: Path) -> None:
    await machine.granted(heartbeat_seconds=0.01)
    machine.link.want(large := BlobRef(key="model", digest=digest_of(bytes(20_000)), size=20_000))
    machine.now.say(Blob(digest=large.digest, offset=0, size=large.size), bytes(16_384))
    assert len([*(tmp_path / "blobs").iterdir()]) == 1
    waiting = asyncio.create_task(machine.link.unless_ended(asyncio.sleep(60)))
    await asyncio.sleep(0)
    machine.link.close()
    with pytest.raises(RunOver):
        await asyncio.wait_for(waiting, 5)
    await asyncio.sleep(0.05)
    assert len(machine.connections) == 1
    assert [*(tmp_path / "blobs").iterdir()] == []


async def test_nobody_is_woken_after_the_coordinators_stop(machine: Machine) -> None:
    woken: list[int] = []
    await machine.granted()
    machine.link.wake_by(woken.extend)
    machine.now.say(Wake(devices=(1,)))
    machine.now.say(Stop(reason="completed"))
    machine.now.say(Wake(devices=(2,)))
    assert woken == [1]


async def test_a_machine_whose_run_is_over_does_not_look_for_its_coordinator(machine: Machine) -> None:
    await machine.granted(heartbeat_seconds=0.01)
    machine.now.say(Stop(reason="completed"))
    await asyncio.sleep(0.05)
    assert (len(machine.connections), machine.told) == (1, [])
    assert [type(message) for message in machine.now.sent] == [Enroll]


async def test_what_bars_a_machine_is_told_once_and_in_the_end(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "blobs", connect_seconds=0.02)
    enrolling = asyncio.create_task(machine.link.enrol())
    await asyncio.sleep(0)
    for reason in ("not approved", "not approved", "another key"):
        machine.now.rejected(HandshakeFailed(reason))
    assert machine.told == ["not approved", "another key"]
    with pytest.raises(RefusedError, match=r"^No way in within 0\.02 s: another key\.$"):
        await asyncio.wait_for(enrolling, 5)
    machine.link.close()


async def test_a_machine_without_a_place_says_so_once(machine: Machine) -> None:
    enrolling = asyncio.create_task(machine.link.enrol())
    await asyncio.sleep(0)
    for _ in range(2):
        machine.now.say(Refused(reason="fleet_full", detail="All are taken."))
    assert machine.told == ["placed 0"]
    machine.grant()
    await enrolling


async def test_a_machine_whose_coordinator_is_silent_says_so_once_and_leaves_the_connections_that_were_in_vain(
    machine: Machine, until: Callable[..., Any]
) -> None:
    await machine.granted(heartbeat_seconds=0.01)
    await until(lambda: len(machine.connections) >= 4, "three new connections", 30.0)
    assert machine.told == ["lost"]
    assert [each.closed for each in machine.connections] == [True] * (len(machine.connections) - 1) + [False]
    machine.grant()
    assert machine.told == ["lost", "found"]


async def test_what_has_not_come_is_asked_for_at_once_when_the_coordinator_is_back(machine: Machine) -> None:
    await machine.granted()
    machine.link.want(REF)
    machine.now.say(Refused(reason="unknown_peer", detail="It has started again."))
    assert isinstance(machine.now.sent[-1], Enroll)
    machine.grant()
    asked = Need(digest=REF.digest, offset=0, length=len(WEIGHTS))
    assert machine.now.heard_of(Need) == [asked, asked]


async def test_what_does_not_come_is_asked_for_again_long_before_the_next_heartbeat(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, until: Callable[..., Any]
) -> None:
    monkeypatch.setattr("fedemu.protocol.blobs.fetch.PATIENCE", 0.02)
    monkeypatch.setattr("fedemu.device.machine.enrolment.AGAIN", 60.0)
    await machine.granted(heartbeat_seconds=60.0)
    machine.link.want(REF)
    await until(lambda: len(machine.now.heard_of(Need)) == 2, "the second request", 20.0)


async def test_a_blob_is_given_up_by_the_time_of_a_coordinator_that_is_there_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, until: Callable[..., Any]
) -> None:
    monkeypatch.setattr("fedemu.protocol.blobs.fetch.PATIENCE", 0.005)
    monkeypatch.setattr("fedemu.protocol.blobs.fetch.MOST_WAITS", 3)
    await machine.granted(heartbeat_seconds=0.01)
    machine.now.say(Refused(reason="unknown_peer", detail="It has started again."))
    fetching = asyncio.create_task(machine.link.fetch(REF))
    before = len(machine.connections)
    await until(lambda: len(machine.connections) >= before + 8, "many new connections", 30.0)
    assert not fetching.done()
    machine.grant(heartbeat_seconds=60.0)
    with pytest.raises(BlobError, match="does not send the blob"):
        await asyncio.wait_for(fetching, 5)


async def test_a_blob_that_comes_broken_again_and_again_is_an_error_for_all_who_wait(machine: Machine) -> None:
    lost: list[Digest] = []
    machine.link.lost = lambda digest, error: lost.append(digest)
    await machine.granted()
    fetching = asyncio.create_task(machine.link.fetch(REF))
    await asyncio.sleep(0)
    for _ in range(5):
        machine.now.say(Blob(digest=REF.digest, offset=0, size=REF.size), b"wrongly")
    with pytest.raises(BlobError):
        await asyncio.wait_for(fetching, 5)
    assert lost == [REF.digest]


async def test_a_blob_for_which_nobody_waits_any_more_may_come(machine: Machine) -> None:
    await machine.granted()
    fetching = asyncio.create_task(machine.link.fetch(REF))
    await asyncio.sleep(0)
    fetching.cancel()
    await asyncio.wait({fetching})
    machine.now.say(Blob(digest=REF.digest, offset=0, size=REF.size), WEIGHTS)
    assert machine.store.path(Digest(REF.digest)).read_bytes() == WEIGHTS
    assert not machine.link.ended.done()


async def test_blobs_of_earlier_rounds_stay_as_long_as_a_job_needs_them(machine: Machine) -> None:
    later = BlobRef(key="model", digest=digest_of(b"later"), size=5)
    first, second = Digest(REF.digest), Digest(later.digest)
    machine.link.needed = lambda: [first]
    await machine.granted()
    machine.now.say(Offer(blobs=(REF,), round=1))
    machine.now.say(Blob(digest=first, offset=0, size=REF.size), WEIGHTS)
    machine.now.say(Offer(blobs=(later,), round=3))
    machine.now.say(Blob(digest=second, offset=0, size=5), b"later")
    assert machine.store.has(first)
    machine.link.needed = list
    machine.now.say(Offer(blobs=(), round=4))
    assert (machine.store.has(first), machine.store.has(second)) == (False, True)
