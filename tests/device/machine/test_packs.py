"""In which processes devices wake: a scripted zygote forks them, and everything else is exact."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest

from fedemu.device.machine import processes
from fedemu.device.machine.forkers import ForkingProcess
from fedemu.device.machine.observer import MachineObserver
from fedemu.device.machine.packs import Packs
from fedemu.device.machine.processes import BIRTH_STRIDE, DeviceProcesses, start_zygote
from fedemu.device.machine.sleepers import Lives, Sleepers
from fedemu.device.pipe import TO_ZYGOTE, Ended, Fork, Forked, Setup, Unpacker, ZygoteReady, pack_message
from fedemu.device.process.process import RETIRED
from fedemu.protocol.errors import FedemuError, MalformedMessage
from fedemu.protocol.messages import Message

FIRST = 1 << 20
SETUP = Setup(
    coordinator="ipc:///nowhere",
    bus="ipc:///nowhere",
    token="token",
    lease="lease",
    heartbeat_seconds=1.0,
    patience=5,
    behaviours="nowhere:nothing",
    experiment="/nowhere",
    partition="/nowhere",
    devices="/nowhere",
    logs=None,
)


class Zygote:
    """The other end of a supervisor's pipe. It forks nothing, and says that it did."""

    pid = os.getpid()
    ready_at_once = True

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._socket.setblocking(False)
        self._unpacker = Unpacker(TO_ZYGOTE)
        self.heard: list[Message] = []
        self.ended = asyncio.Event()
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(ConnectionResetError):  # the other end is gone, and has not heard all
            while data := await loop.sock_recv(self._socket, 2**16):
                self.heard += self._unpacker.feed(data)
        self._socket.close()
        self.ended.set()

    def say(self, message: Message) -> None:
        self._socket.send(pack_message(message))

    def die(self) -> None:
        """Close the pipe, as the kernel does for a process that is killed."""
        self._socket.shutdown(socket.SHUT_RDWR)

    kill = die

    @property
    def forked(self) -> list[Fork]:
        return [message for message in self.heard if isinstance(message, Fork)]

    async def wait(self) -> int:
        await self.ended.wait()
        return 0


class Counting(MachineObserver):
    """An observer that knows how many devices there are of each kind."""

    def __init__(self) -> None:
        self.counts: Mapping[str, int] = {}

    def devices(self, counts: Mapping[str, int]) -> None:
        self.counts = counts


class Machine(Counting):
    """Packs with two devices in each, and what they do. ``deaf`` processes have not attached."""

    def __init__(self, zygote: ForkingProcess, failed: Callable[[FedemuError], object] = pytest.fail) -> None:
        super().__init__()
        self.roused: list[tuple[int, Lives]] = []
        self.died: list[tuple[int, int]] = []
        self.ended: list[int] = []
        self.sleepers = Sleepers([(0, 10)], FIRST)
        self.packs = Packs(
            zygote,
            SETUP,
            self.sleepers,
            2,
            FIRST,
            self,
            rouse=lambda number, lives: self.roused.append((number, [*lives])),
            died=lambda device, incarnation: self.died.append((device, incarnation)),
            process_ended=self.ended.append,
            failed=failed,
        )

    def news(self) -> list[tuple[int, Lives]]:
        """Who was roused since the last call."""
        news, self.roused[:] = [*self.roused], []
        return news

    def join(self, *devices: int) -> None:
        for device in devices:
            self.packs.joined(device, self.sleepers.incarnation(device))


@pytest.fixture
async def zygotes(monkeypatch: pytest.MonkeyPatch) -> list[Zygote]:
    """The zygotes that were started."""
    started: list[Zygote] = []

    async def start(*words: str, **more: Any) -> Zygote:
        started.append(Zygote(more["pass_fds"][0]))
        if Zygote.ready_at_once:
            started[-1].say(ZygoteReady())
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    return started


@pytest.fixture
async def machine(zygotes: list[Zygote]) -> AsyncIterator[Machine]:
    """A machine whose zygote is ready."""
    made = Machine(await start_zygote())
    await made.packs.prepare()
    yield made
    await made.packs.stop(None, 0.0)


def life(device: int, number: int = 1) -> tuple[int, int]:
    return device, FIRST + number * BIRTH_STRIDE


async def test_devices_fill_packs_and_a_pack_is_started_when_the_others_are_full(
    machine: Machine, zygotes: list[Zygote], until: Callable[..., Any]
) -> None:
    machine.packs.launch()
    machine.packs.wake([4, 7, 9])
    assert machine.news() == [(0, [life(4), life(7)]), (1, [life(9)])]
    await until(lambda: len(zygotes[0].forked) == 2, "two packs")
    assert zygotes[0].forked == [Fork(number=0, lives=()), Fork(number=1, lives=())]
    machine.packs.wake([1])
    assert machine.news() == [(1, [life(1)])]
    assert len(machine.packs) == 2


async def test_a_pack_that_begins_to_hear_has_the_lives_begin_that_waited(machine: Machine) -> None:
    machine.packs.launch()
    machine.packs.wake([4, 7])
    machine.news()
    machine.packs.attached(0)
    assert machine.news() == [(0, [life(4), life(7)])]


async def test_whoever_is_asked_before_packs_may_be_started_has_one_when_they_are(
    zygotes: list[Zygote], until: Callable[..., Any]
) -> None:
    machine = Machine(await start_zygote())
    machine.packs.wake([4])
    await machine.packs.prepare()
    assert zygotes[0].forked == []
    machine.packs.wake([1, 2])
    machine.packs.launch()
    await until(lambda: len(zygotes[0].forked) >= 2, "two packs")
    assert zygotes[0].forked == [Fork(number=0, lives=()), Fork(number=1, lives=())]
    await machine.packs.stop(None, 0.0)


async def test_no_pack_is_started_while_the_machine_stops(
    machine: Machine, zygotes: list[Zygote], until: Callable[..., Any]
) -> None:
    machine.packs.launch()
    machine.packs.wake([4])
    zygotes[0].say(Forked(number=0, pid=7_777_777))
    await until(lambda: machine.packs._pids, "the pack")

    def farewell() -> None:
        machine.packs.wake([1, 2])
        zygotes[0].say(Ended(number=0, code=0))

    await machine.packs.stop(farewell, 60.0)
    assert zygotes[0].forked == [Fork(number=0, lives=())]


async def test_a_device_that_falls_asleep_leaves_its_place_to_another(machine: Machine) -> None:
    machine.packs.launch()
    machine.packs.wake([4, 7])
    machine.join(4, 7)
    assert machine.counts == {"connected": 10, "awake": 2, "starting": 0, "stopped": 0}
    machine.packs.asleep(4, FIRST + BIRTH_STRIDE)
    assert machine.counts["awake"] == 1
    machine.news()
    machine.packs.wake([5, 4])
    assert machine.news() == [(0, [life(5)]), (1, [life(4, 2)])]


async def test_a_device_that_is_asked_while_it_falls_asleep_begins_its_next_life_at_once(machine: Machine) -> None:
    machine.packs.launch()
    machine.packs.wake([4])
    machine.join(4)
    machine.packs.wake([4])
    machine.news()
    machine.packs.asleep(4, FIRST + BIRTH_STRIDE + 3)
    assert machine.news() == [(0, [(4, FIRST + 2 * BIRTH_STRIDE + 3)])]


async def test_the_death_of_a_pack_is_told_for_each_device_in_it_and_another_takes_its_place(
    machine: Machine, zygotes: list[Zygote], until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MOST_FAILURES", 2)
    machine.packs.launch()
    machine.packs.wake([4, 7, 9])
    machine.join(4, 7, 9)
    zygotes[0].say(Forked(number=0, pid=7_777_777))
    zygotes[0].say(Ended(number=0, code=-9))
    await until(lambda: machine.ended == [0], "the end of a pack")
    assert (machine.died, dict(machine.packs._pids)) == ([life(4), life(7)], {})
    assert machine.counts["awake"] == 1
    machine.packs.asleep(4, FIRST + BIRTH_STRIDE)  # the word of it comes after its end
    await until(lambda: len(zygotes[0].forked) == 3, "another pack")
    assert zygotes[0].forked[-1] == Fork(number=0, lives=())
    machine.news()
    machine.packs.wake([7])
    assert machine.news() == [(0, [life(7, 2)])], "it is asked still, so the coordinator wakes it again"
    for packs in (4, 5):
        machine.packs.wake([7])
        machine.join(7)  # the pack was of use, so its failures are counted anew
        zygotes[0].say(Ended(number=0, code=1))
        await until(lambda: len(zygotes[0].forked) == packs, "another pack")  # noqa: B023


async def test_packs_of_a_zygote_that_died_are_forked_by_the_next_one(
    machine: Machine, zygotes: list[Zygote], until: Callable[..., Any]
) -> None:
    machine.packs.launch()
    machine.packs.wake([4])
    machine.join(4)
    zygotes[0].say(Forked(number=0, pid=7_777_777))
    await until(lambda: machine.packs._pids == {0: 7_777_777}, "the pack")
    zygotes[0].die()
    await until(lambda: len(zygotes) == 2 and zygotes[1].forked, "the packs of the next zygote")
    assert zygotes[1].forked == [Fork(number=0, lives=())]
    assert machine.died == [life(4)]
    machine.packs.wake([1, 2, 3])
    await until(lambda: len(zygotes[1].forked) == 2, "one more pack")
    assert zygotes[1].forked[1] == Fork(number=1, lives=())


@pytest.mark.parametrize("ready", [True, False])
async def test_packs_are_forked_once_if_the_zygote_dies_before_they_are_launched(
    machine: Machine,
    zygotes: list[Zygote],
    until: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    ready: bool,
) -> None:
    monkeypatch.setattr(Zygote, "ready_at_once", False)
    machine.packs.wake([4])
    zygotes[0].die()
    await until(lambda: len(zygotes) == 2, "the next zygote")
    if ready:
        zygotes[1].say(ZygoteReady())
        await until(lambda: machine.packs._born is not None, "the next zygote can fork")
    machine.packs.launch()
    if not ready:
        zygotes[1].say(ZygoteReady())
    machine.packs.wake([1, 2, 3])
    await until(lambda: len(zygotes[1].forked) >= 2, "two packs")
    assert [fork.number for fork in zygotes[1].forked] == [0, 1]


async def test_a_pack_for_whoever_is_asked_before_the_next_zygote_is_ready_is_forked_once(
    machine: Machine, zygotes: list[Zygote], until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.packs.launch()
    machine.packs.wake([4])
    machine.join(4)
    monkeypatch.setattr(Zygote, "ready_at_once", False)
    zygotes[0].die()
    await until(lambda: len(zygotes) == 2, "the next zygote")
    machine.packs.wake([1, 2, 3])
    zygotes[1].say(ZygoteReady())
    await until(lambda: len(zygotes[1].forked) >= 2, "the packs of the next zygote")
    assert [fork.number for fork in zygotes[1].forked] == [0, 1]


async def test_a_zygote_that_dies_again_and_again_is_given_up(
    zygotes: list[Zygote], until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MOST_FAILURES", 3)
    failures: list[FedemuError] = []
    machine = Machine(await start_zygote(), failures.append)
    await machine.packs.prepare()
    machine.packs.launch()
    machine.packs.wake([4])
    for number in range(5):
        pid = 7_777_777 + number
        await until(lambda: len(zygotes) > number and zygotes[number].forked, "the next zygote")  # noqa: B023
        assert failures == []
        zygotes[number].say(Forked(number=0, pid=pid))
        await until(lambda: machine.packs._pids == {0: pid}, "the pack")  # noqa: B023
        if number == 1:
            machine.packs.wake([4])
            machine.join(4)  # this one was of use, so the count begins anew
        zygotes[number].die()
    await until(lambda: failures, "the end of the machine")
    told = "The zygote, which forks the device processes, failed 3 times in a row; at last it ended with code 0."
    assert str(failures[0]) == told
    await machine.packs.stop(None, 0.0)


@pytest.mark.parametrize("turns", range(3))
async def test_a_zygote_that_is_just_being_started_again_does_not_outlive_its_machine(
    turns: int, zygotes: list[Zygote], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(await start_zygote())
    await machine.packs.prepare()
    begun, go_on, start = asyncio.Event(), asyncio.Event(), asyncio.create_subprocess_exec

    async def slow(*words: str, **more: Any) -> Any:
        begun.set()
        await go_on.wait()
        return await start(*words, **more)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    zygotes[0].die()
    await begun.wait()
    go_on.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    await machine.packs.stop(None, 0.0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert all(zygote.ended.is_set() for zygote in zygotes)


@pytest.mark.parametrize("ready", [True, False])
async def test_a_zygote_that_says_what_cannot_be_read_ends_the_machine(
    zygotes: list[Zygote], until: Callable[..., Any], ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ready:
        monkeypatch.setattr(Zygote, "say", lambda self, message: self._socket.send(b"\0\0\0\1?"))
    failures: list[BaseException] = []
    machine = Machine(await start_zygote(), failures.append)
    preparing = asyncio.create_task(machine.packs.prepare())
    if ready:
        await preparing
        zygotes[0]._socket.send(b"\0\0\0\1?")
        await until(lambda: failures, "the end of the machine")
        error: BaseException | None = failures[0]
    else:
        await asyncio.wait({preparing}, timeout=60)
        error = preparing.exception()
    assert isinstance(error, MalformedMessage), "otherwise nobody would hear of the deaths of devices any more"
    await machine.packs.stop(None, 0.0)


async def test_devices_that_have_retired_live_again_when_their_machine_gets_its_place_back(
    zygotes: list[Zygote], until: Callable[..., Any]
) -> None:
    """Also those of a process in which others have not retired. A process begins no life of a device that lives."""

    def ignore(*_: int) -> None: ...

    roused: list[tuple[int, Lives]] = []
    died: list[tuple[int, int]] = []
    seen = Counting()
    here = DeviceProcesses(
        await start_zygote(),
        SETUP,
        [4, 5, 6],
        2,
        FIRST,
        seen,
        died=lambda *end: died.append(end),
        process_ended=ignore,
        failed=pytest.fail,
    )
    await here.prepare()
    here.launch()
    assert seen.counts == {"connected": 0, "starting": 3, "stopped": 0}
    await until(lambda: len(zygotes[0].forked) == 2, "two processes")
    for number in range(2):
        zygotes[0].say(Forked(number=number, pid=7_777_777))
    for device in (4, 5):
        here.joined(*life(device))
    zygotes[0].say(Ended(number=1, code=RETIRED))
    await until(lambda: len(here._pids) == 1, "the end of one of them")
    assert seen.counts == {"connected": 2, "starting": 0, "stopped": 1}
    here.wanted_again(lambda number, lives: roused.append((number, [*lives])))
    assert seen.counts == {"connected": 2, "starting": 1, "stopped": 0}
    await until(lambda: len(zygotes[0].forked) == 3, "its next life")
    assert zygotes[0].forked[2] == Fork(number=1, lives=(life(6, 2),))
    [(number, lives)] = roused
    assert (number, [device for device, _ in lives]) == (0, [4, 5])
    assert all(life(4, 1)[1] < incarnation < life(4, 2)[1] for _, incarnation in lives)
    here.joined(*lives[0])  # device 4 had retired; 5 lives on
    zygotes[0].say(Ended(number=0, code=-9))
    await until(lambda: len(zygotes[0].forked) == 4, "the next life of the other process")
    assert seen.counts == {"connected": 0, "starting": 3, "stopped": 0}
    assert died == [lives[0], life(5)], "the coordinator is told of lives that it knows"
    assert zygotes[0].forked[3].lives == ((4, lives[0][1] + BIRTH_STRIDE), life(5, 2))
    await here.stop(None, 0.0)


async def test_a_process_is_given_up_that_ends_again_and_again_without_joining_and_planned_ends_do_not_count(
    zygotes: list[Zygote], until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MOST_FAILURES", 2)
    failures: list[FedemuError] = []

    def ignore(*_: int) -> None: ...

    alone = DeviceProcesses(
        await start_zygote(),
        SETUP,
        [4],
        1,
        FIRST,
        MachineObserver(),
        died=ignore,
        process_ended=ignore,
        failed=failures.append,
    )
    await alone.prepare()
    alone.launch()
    ends = [(False, 1), (True, -9), (False, 1), (True, 1), (False, 5)]
    for number, (joins, code) in enumerate(ends, 1):
        await until(lambda: len(zygotes[0].forked) == number, "the next life")  # noqa: B023
        assert failures == []
        if joins:
            alone.joined(4, FIRST + number * BIRTH_STRIDE)
        zygotes[0].say(Ended(number=0, code=code))
    await until(lambda: failures, "the end of the machine")
    assert str(failures[0]) == (
        "Device process 0 failed 2 times in a row; at last it ended with code 5; see the output above."
    )
    assert [fork.lives for fork in zygotes[0].forked] == [(life(4, number),) for number in range(1, 6)]
    await alone.stop(None, 0.0)
