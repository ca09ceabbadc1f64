"""The processes that fork on command end when they are not wanted, whatever they are doing."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from fedemu.device.machine import forkers, processes, trainers
from fedemu.device.machine.observer import MachineObserver
from fedemu.device.pipe import Setup, TrainerSetup
from fedemu.protocol.messages import Message

SETUP = Setup(
    coordinator="", bus="", token="", lease="", heartbeat_seconds=2.0, patience=5, behaviours="", experiment="",
    partition="", devices="", logs=None,
)  # fmt: skip


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zygotes and nurseries that import for ever, and a supervisor with all the time in the world."""
    for module in (processes, trainers):
        monkeypatch.setattr(module, "COMMAND", ("-c", "import signal; signal.pause()"))
    monkeypatch.setattr(forkers, "END_SECONDS", 3600.0)


@pytest.mark.usefixtures("importing")
async def test_a_zygote_that_still_imports_is_not_waited_for() -> None:
    zygote = await processes.start_zygote()
    await asyncio.wait_for(zygote.stop(), 30)


@pytest.mark.usefixtures("importing")
async def test_a_nursery_that_still_imports_is_not_waited_for() -> None:
    nursery = await trainers.start_nursery("")
    await asyncio.wait_for(nursery.stop(), 30)


@pytest.mark.usefixtures("importing")
async def test_a_zygote_that_was_told_what_it_is_for_while_it_imports_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ignore(*_: Any) -> None: ...

    zygote = await processes.start_zygote()
    devices = processes.DeviceProcesses(
        zygote, SETUP, [0], 1, 0, MachineObserver(), died=ignore, process_ended=ignore, failed=pytest.fail
    )
    told, tell = asyncio.Event(), zygote.tell

    def tell_and_note(message: Message) -> None:
        tell(message)
        told.set()

    monkeypatch.setattr(zygote, "tell", tell_and_note)
    preparing = asyncio.create_task(devices.prepare())
    await told.wait()
    await asyncio.wait_for(devices.stop(None, 0.0), 30)
    with pytest.raises(asyncio.CancelledError):
        await preparing


@pytest.mark.usefixtures("importing")
async def test_a_nursery_that_was_told_to_fork_while_it_imports_is_not_waited_for() -> None:
    nursery, told = await trainers.start_nursery(""), asyncio.Event()

    def tell() -> None:
        nursery.tell(TrainerSetup(number=0, bus="", token="", trainer="", experiment="", device_type="cpu"))
        told.set()

    following = asyncio.create_task(nursery.follow(lambda message: None, tell))
    await told.wait()
    await asyncio.wait_for(nursery.stop(), 30)
    assert await following == -signal.SIGKILL
