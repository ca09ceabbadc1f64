"""A trainer's side of the bus: when it ends, and what it tells then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from fedemu.device.bus import TO_SUPERVISOR, Attach, Quit, Ready
from fedemu.device.compute import shell
from fedemu.device.pipe import TrainerSetup
from fedemu.protocol.codec import Envelope
from fedemu.protocol.transport.direct import DirectNetwork


class Bus:
    """A supervisor's side of the bus, with one trainer in the same process."""

    def __init__(self, folder: Path) -> None:
        self._network = DirectNetwork(asyncio.get_running_loop())
        self.heard: list[type] = []
        self._peer = b""
        address = f"ipc://{folder}/bus"
        self.router = self._network.bind(address, TO_SUPERVISOR, self._received, lambda peer, error: None)
        setup = TrainerSetup(
            number=0, bus=address, token="token", trainer="t", experiment="e", device_type="cpu", allow_code=None
        )
        self.task = asyncio.create_task(shell._serve(setup, lambda setup: MagicMock(capacity={}, default=1)))

    def _received(self, peer: bytes, envelope: Envelope) -> None:
        self._peer = peer
        self.heard.append(type(envelope.message))

    async def ready(self, until: Callable[..., Any]) -> None:
        await until(lambda: self.heard == [Attach, Ready], "the trainer")

    def quit(self) -> None:
        self.router.send(self._peer, Quit())

    def close(self) -> None:
        self._network.close()


async def test_a_trainer_whose_connection_broke_waits_for_its_own_end_before_it_tells_a_fault(
    tmp_path: Path, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slept: list[tuple[float, int]] = []
    waits = MagicMock(wraps=time, sleep=lambda seconds: slept.append((seconds, len(caplog.records))))
    monkeypatch.setattr(shell, "time", waits)
    bus = Bus(tmp_path)
    await bus.ready(until)
    bus.close()
    assert await asyncio.wait_for(bus.task, 30) == 1
    assert slept == [(shell.PARTING_SECONDS, 0)], "a trainer that is killed meanwhile has told nothing"
    assert [record.getMessage() for record in caplog.records] == [
        "the trainer ends: its connection to the supervisor broke"
    ]


async def test_a_trainer_that_was_told_to_quit_tells_nothing(
    tmp_path: Path, until: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    bus = Bus(tmp_path)
    await bus.ready(until)
    bus.quit()
    bus.close()
    assert await asyncio.wait_for(bus.task, 30) == 0
    assert caplog.records == []
