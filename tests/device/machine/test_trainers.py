"""The trainers of a machine as their supervisor sees them, without processes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from fedemu.device.machine.trainers import Trainers
from fedemu.device.pipe import TrainerSetup
from fedemu.protocol.errors import FedemuError

SETUP = TrainerSetup(number=0, bus="bus", token="", trainer="", experiment="", device_type="cpu")


class Killed:
    """A nursery that somebody kills, and that cannot be started again."""

    async def follow(self, heard: Callable[[object], None], connected: Callable[[], None]) -> int:
        connected()
        return -9

    async def again(self) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def fork(self, setup: TrainerSetup) -> None: ...

    async def stop(self) -> None: ...


async def test_a_nursery_that_cannot_be_started_again_ends_the_machine(until: Callable[..., Any]) -> None:
    told: list[FedemuError] = []
    nursery: Any = Killed()
    trainers = Trainers(nursery, SETUP, 1, ended=lambda number: None, restarted=lambda: None, failed=told.append)
    trainers.launch()
    await until(lambda: told, "the error")
    assert str(told[0]) == "No process can be started for the trainers: Cannot allocate memory."
    await trainers.stop()
