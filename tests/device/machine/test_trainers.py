"""The trainers of a machine as their supervisor sees them, without processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from fedemu.device.machine.forkers import ended
from fedemu.device.machine.trainers import Trainers
from fedemu.device.pipe import Ended, Forked, NotForked, TrainerSetup
from fedemu.protocol.errors import FedemuError, MalformedMessage

SETUP = TrainerSetup(number=0, bus="bus", token="", trainer="", experiment="", device_type="cpu")


class Nursery:
    """A nursery that forks on paper, and lives until it is told how it ends. ``next_one`` is the one after it."""

    def __init__(self, next_one: Callable[[], Any]) -> None:
        self.forked: list[int] = []
        self.setups: list[TrainerSetup] = []
        self.heard: Callable[[object], None]
        self.end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.followed = self.stopped = False
        self._next = next_one

    async def follow(self, heard: Callable[[object], None], connected: Callable[[], None]) -> int:
        self.heard, self.followed = heard, True
        connected()
        return await self.end

    async def again(self) -> Any:
        found = self._next()
        return await found if isinstance(found, asyncio.Future) else found

    def tell(self, setup: TrainerSetup) -> None:
        self.forked.append(setup.number)
        self.setups.append(setup)
        self.heard(Forked(number=setup.number, pid=2**22 + len(self.forked)))

    async def stop(self) -> None:
        await asyncio.sleep(0)
        self.stopped = True


class Failing(Nursery):
    """A nursery that ends at once."""

    async def follow(self, heard: Callable[[object], None], connected: Callable[[], None]) -> int:
        self.end.set_result(-9)
        return await super().follow(heard, connected)


@asynccontextmanager
async def launched(
    nursery: Any,
    count: int,
    failed: Callable[[Any], None],
    ended: Callable[[int, str], None] = lambda *_: None,
    **more: Any,
) -> AsyncIterator[Trainers]:
    def ignore(*_: object) -> None: ...

    trainers = Trainers(nursery, SETUP, count, ended=ended, restarted=ignore, failed=failed, **more)
    trainers.launch()
    try:
        yield trainers
    finally:
        await trainers.stop()


async def test_a_nursery_that_cannot_be_started_again_ends_the_machine(until: Callable[..., Any]) -> None:
    told: list[FedemuError] = []

    def refuse() -> Any:
        raise FedemuError("no process can be started on this machine")

    async with launched(Failing(refuse), 1, told.append):
        await until(lambda: told, "the error")
    assert str(told[0]) == "no process can be started on this machine"


async def test_a_nursery_that_says_what_cannot_be_read_ends_the_machine(until: Callable[..., Any]) -> None:
    told: list[BaseException] = []
    nursery = Nursery(lambda: None)
    nursery.end.set_exception(MalformedMessage("encoding", "no map"))
    async with launched(nursery, 1, told.append):
        await until(lambda: told, "the error")
    assert [*map(str, told)] == ["no map"]


async def test_a_nursery_that_ends_again_and_again_before_a_trainer_is_ready_ends_the_machine(
    until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.device.machine.trainers.MOST_FAILURES", 2)
    told: list[FedemuError] = []
    ends: list[tuple[int, str]] = []
    last = Failing(lambda: pytest.fail("two have failed in a row"))
    good = Nursery(lambda: Failing(lambda: last))
    async with launched(Failing(lambda: good), 2, told.append, lambda *end: ends.append(end)) as trainers:
        await until(lambda: len(trainers.pids) == 2, "the second nursery has forked")
        assert told == []
        trainers.ready(1)
        good.end.set_result(1)  # it was of use, so the count begins anew
        await until(lambda: told, "the error")
    assert (last.forked, dict(trainers.pids)) == ([0, 1], {}), "the processes of a nursery have ended with it"
    assert [number for number, _ in ends] == [0, 1] * 4, "what they had to do is done by others"
    assert ends[2] == (0, "ended with its nursery, which ended with code 1")
    assert (
        str(told[0])
        == "No trainer can be started: the nursery was ended by SIGKILL (the kernel does so if memory runs out)."
    )


async def test_a_trainer_that_is_about_to_be_started_again_is_started_once_if_the_nursery_ends_meanwhile(
    until: Callable[..., Any],
) -> None:
    following = Nursery(lambda: None)
    nursery = Nursery(lambda: following)
    async with launched(nursery, 2, pytest.fail, gpus=["GPU-a", "GPU-b"], beside=2) as trainers:
        await until(lambda: len(trainers.pids) == 2, "the trainers were forked")
        nursery.heard(Ended(number=0, code=-9))
        nursery.end.set_result(-9)
        await until(lambda: following.forked, "the next nursery has forked")
        assert [(setup.number, setup.gpu, setup.gpu_share) for setup in following.setups] == [
            (0, "GPU-a", 0.5),
            (1, "GPU-b", 0.5),
        ]


@pytest.mark.parametrize("turns", range(3))
async def test_a_nursery_that_is_just_being_started_again_is_stopped_with_the_machine(
    turns: int, until: Callable[..., Any]
) -> None:
    loop = asyncio.get_running_loop()
    following, started, asked = Nursery(lambda: None), loop.create_future(), asyncio.Event()

    def begin() -> Any:
        asked.set()
        return started

    nursery = Nursery(begin)
    async with launched(nursery, 1, pytest.fail) as trainers:
        await until(lambda: trainers.pids, "the trainer was forked")
        nursery.end.set_result(-9)
        await asked.wait()
        started.set_result(following)
        for _ in range(turns):
            await asyncio.sleep(0)
    assert following.stopped or not following.followed, "its process would outlive the machine"


async def test_a_trainer_that_ends_again_and_again_before_it_is_ready_ends_the_machine(
    until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.device.machine.trainers.MOST_FAILURES", 2)
    told: list[FedemuError] = []
    nursery = Nursery(lambda: None)
    async with launched(nursery, 2, told.append) as trainers:
        for ready in (False, True, False):
            await until(lambda: 1 in trainers.pids, "trainer 1 was forked")
            if ready:
                trainers.ready(1)
            nursery.heard(Ended(number=1, code=3))
            assert told == []
        await until(lambda: 1 in trainers.pids, "trainer 1 was forked")
        nursery.heard(Ended(number=1, code=4))
        assert (nursery.forked, dict(trainers.pids)) == ([0, 1, 1, 1, 1], {0: 2**22 + 1})
    assert str(told[0]) == "Trainer 1 failed 2 times in a row; at last it ended with code 4."


async def test_a_trainer_that_tells_why_it_cannot_go_on_is_killed_and_quoted(
    until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.device.machine.trainers.MOST_FAILURES", 2)
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, sign: killed.append((pid, sign)))
    told: list[FedemuError] = []
    ended: list[tuple[int, str]] = []
    nursery = Nursery(lambda: None)
    async with launched(nursery, 1, told.append, lambda *end: ended.append(end)) as trainers:
        for fault in ("the GPU is hot.", "device 3: no memory, mine.py:10\n    mine.py:10 in forward: x = y"):
            await until(lambda: 0 in trainers.pids, "the trainer was forked")
            pid = trainers.pids[0]
            trainers.faulty(0, fault)
            assert killed.pop() == (pid, signal.SIGKILL)
            nursery.heard(Ended(number=0, code=-9))
    assert ended == [
        (0, "could not go on: the GPU is hot"),
        (0, "could not go on: device 3: no memory, mine.py:10"),
    ]
    assert (
        str(told[0])
        == "Trainer 0 failed 2 times in a row; at last it could not go on: device 3: no memory, mine.py:10."
    )


async def test_a_trainer_that_hangs_is_killed_and_what_it_lacked_is_told(
    until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, sign: killed.append((pid, sign)))
    ended: list[tuple[int, str]] = []
    nursery = Nursery(lambda: None)
    async with launched(nursery, 2, pytest.fail, lambda *end: ended.append(end)) as trainers:
        await until(lambda: len(trainers.pids) == 2, "the trainers were forked")
        trainers.ready(0)
        assert trainers.starting == [1]
        trainers.hung(1, "used no processor time for 60 s")
        assert killed == [(trainers.pids[1], signal.SIGKILL)]
        nursery.heard(Ended(number=1, code=-9))
        nursery.heard(Ended(number=0, code=-9))
        assert trainers.starting == []
        await until(lambda: sorted(trainers.starting) == [0, 1], "both were forked again")
        nursery.heard(Ended(number=1, code=-9))
    by_kernel = "was ended by SIGKILL (the kernel does so if memory runs out)"
    assert ended == [(1, "was killed because it used no processor time for 60 s"), (0, by_kernel), (1, by_kernel)]


async def test_a_trainer_that_the_system_does_not_let_start_is_tried_again_and_then_ends_the_machine(
    until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.device.machine.trainers.MOST_FAILURES", 2)
    told: list[FedemuError] = []
    nursery = Nursery(lambda: None)
    async with launched(nursery, 1, told.append) as trainers:
        await until(lambda: 0 in trainers.pids, "trainer 0 was forked")
        trainers.ready(0)
        nursery.heard(Ended(number=0, code=-9))
        await until(lambda: nursery.forked == [0, 0], "trainer 0 was forked again")
        nursery.heard(NotForked(number=0, detail="no room"))
        await until(lambda: nursery.forked == [0, 0, 0], "trainer 0 was forked once more")
        assert told == []
        nursery.heard(NotForked(number=0, detail="no room"))
    assert str(told[0]) == "Trainer 0 failed 2 times in a row; at last it could not be started: no room."


@pytest.mark.parametrize("turns", range(4))
async def test_a_wait_for_the_end_of_a_process_that_is_cancelled_ends_also_if_the_process_has_just_ended(
    turns: int,
) -> None:
    over = asyncio.Event()
    process: Any = SimpleNamespace(wait=over.wait)

    async def leave() -> None:
        await ended(process)
        await asyncio.get_running_loop().create_future()

    leaving = asyncio.create_task(leave())
    for _ in range(3):
        await asyncio.sleep(0)
    over.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    leaving.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert leaving.cancelled(), "the machine would not hear of its signal"
