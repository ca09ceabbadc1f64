"""The trainers of a machine as their supervisor sees them, without processes."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fedemu.device.machine.trainers import Trainers
from fedemu.device.pipe import Ended, Forked, TrainerSetup
from fedemu.protocol.errors import FedemuError

SETUP = TrainerSetup(number=0, bus="bus", token="", trainer="", experiment="", device_type="cpu")


class Nursery:
    """A nursery that forks on paper, and lives until it is told how it ends. ``next_one`` is the one after it."""

    def __init__(self, next_one: Callable[[], Any]) -> None:
        self.forked: list[int] = []
        self.heard: Callable[[object], None]
        self.end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._next = next_one

    async def follow(self, heard: Callable[[object], None], connected: Callable[[], None]) -> int:
        self.heard = heard
        connected()
        return await self.end

    async def again(self) -> Any:
        return self._next()

    def fork(self, setup: TrainerSetup) -> None:
        self.forked.append(setup.number)
        self.heard(Forked(number=setup.number, pid=2**22 + len(self.forked)))

    async def stop(self) -> None: ...


class Failing(Nursery):
    """A nursery that ends at once."""

    async def follow(self, heard: Callable[[object], None], connected: Callable[[], None]) -> int:
        self.end.set_result(-9)
        return await super().follow(heard, connected)


@asynccontextmanager
async def launched(nursery: Any, count: int, failed: Callable[[FedemuError], None]) -> AsyncIterator[Trainers]:
    def ignore(*_: object) -> None: ...

    trainers = Trainers(nursery, SETUP, count, ended=ignore, restarted=ignore, failed=failed)
    trainers.launch()
    try:
        yield trainers
    finally:
        await trainers.stop()


async def test_a_nursery_that_cannot_be_started_again_ends_the_machine(until: Callable[..., Any]) -> None:
    told: list[FedemuError] = []

    def refuse() -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    async with launched(Failing(refuse), 1, told.append):
        await until(lambda: told, "the error")
    assert str(told[0]) == "No process can be started for the trainers: Cannot allocate memory."


async def test_a_nursery_that_ends_again_and_again_before_a_trainer_is_ready_ends_the_machine(
    until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.device.machine.trainers.MOST_FAILURES", 2)
    told: list[FedemuError] = []
    last = Failing(lambda: pytest.fail("two have failed in a row"))
    good = Nursery(lambda: Failing(lambda: last))
    async with launched(Failing(lambda: good), 2, told.append) as trainers:
        await until(lambda: len(trainers.pids) == 2, "the second nursery has forked")
        assert told == []
        trainers.ready(1)
        good.end.set_result(1)  # it was of use, so the count begins anew
        await until(lambda: told, "the error")
    assert last.forked == [0, 1]
    assert str(told[0]) == "No trainer can be started: the nursery ended with code -9."


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
            nursery.heard(Ended(number=1, pid=1, code=3))
            assert told == []
        await until(lambda: 1 in trainers.pids, "trainer 1 was forked")
        nursery.heard(Ended(number=1, pid=1, code=4))
        assert (nursery.forked, dict(trainers.pids)) == ([0, 1, 1, 1, 1], {0: 2**22 + 1})
    assert str(told[0]) == "Trainer 1 ended 2 times in a row, at last with code 4."
