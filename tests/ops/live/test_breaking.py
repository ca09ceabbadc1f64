"""The buttons that break things reach no process that is not of the run, whatever its files tell."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any

import psutil
import pytest

from fedemu.ops.live.breaking import act
from fedemu.ops.live.machine import Crew
from fedemu.ops.live.run import LiveRun
from fedemu.ops.live.stream import Stream
from fedemu.protocol.errors import ConfigurationError


def test_only_descendants_of_the_supervisor_are_killed_and_as_devices_only_those_that_are_called_so(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LiveRun(0, made.directory, Stream())

    def kill(**wanted: object) -> str:
        return asyncio.run(act(run, wanted))

    with subprocess.Popen(["sleep", "600"]) as other, subprocess.Popen(["sleep", "600"]) as told:
        try:
            crew = Crew(psutil.Process(other.pid), trainers={0: told.pid}, devices={3: told.pid})
            monkeypatch.setattr("fedemu.ops.live.breaking._crews", lambda run: [crew])
            assert kill(action="kill", devices=[3]) == "0 device processes killed"
            with pytest.raises(ConfigurationError, match="no trainer of this run is on this machine now"):
                kill(action="kill_trainer")
            crew.supervisor = psutil.Process()
            assert kill(action="kill", devices=[3]) == "0 device processes killed"
            assert told.poll() is None
            assert kill(action="kill_trainer") == f"trainer 1 killed (process {told.pid})"
            assert told.wait(60) == -9
        finally:
            other.kill()
            told.kill()
