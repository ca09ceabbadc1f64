"""The processes that fork on command end when they are not wanted, whatever they are doing."""

from __future__ import annotations

import asyncio

import pytest

from fedemu.device.machine import forkers, processes, trainers


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zygotes and nurseries that import for ever, and a supervisor with all the time in the world."""
    for module in (processes, trainers):
        monkeypatch.setattr(module, "COMMAND", ("-c", "import signal; signal.pause()"))
    monkeypatch.setattr(forkers, "END_SECONDS", 3600.0)


@pytest.mark.usefixtures("importing")
async def test_a_zygote_that_still_imports_is_not_waited_for() -> None:
    zygote = await processes.Zygote.start()
    await asyncio.wait_for(zygote.stop(), 30)


@pytest.mark.usefixtures("importing")
async def test_a_nursery_that_still_imports_is_not_waited_for() -> None:
    nursery = await trainers.Nursery.start("")
    await asyncio.wait_for(nursery.stop(), 30)
