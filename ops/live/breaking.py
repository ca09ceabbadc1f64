"""The buttons that break things: processes of this run and this user on this machine, and nothing else."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from fedemu.coordinator.record.holder import UNNAMED
from fedemu.ops.live.machine import Crew
from fedemu.ops.live.run import LiveRun
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.wording import counted


async def act(run: LiveRun, wanted: Mapping[str, Any]) -> str:
    """Do ``wanted["action"]``, for ``wanted["devices"]`` if it is about devices. Says in a sentence what was done.

    Raises FedemuError if it can't be done.
    """
    try:
        return await _act(run, wanted)
    except psutil.Error as error:
        raise ConfigurationError(f"the process has ended by itself, or can't be reached ({error})") from error


async def _act(run: LiveRun, wanted: Mapping[str, Any]) -> str:
    action = wanted.get("action")
    if action in ("kill", "freeze", "release"):
        return await asyncio.to_thread(_devices, run, str(action), _indices(run, wanted.get("devices")))
    if action == "kill_trainer":
        return _trainer(run, wanted.get("trainer"))
    if action == "kill_supervisor":
        return _supervisor(run)
    if action == "kill_coordinator":
        return _coordinator(run)
    if action == "resume":
        return run.resume()
    raise ConfigurationError(f"there is no action {str(action)[:40]!r}")


def _devices(run: LiveRun, action: str, devices: Iterable[int]) -> str:
    crews = _crews(run)
    process_of = {device: (pid, crew) for crew in crews for device, pid in crew.devices.items()}
    wanted = {process_of[device][0]: process_of[device][1] for device in devices if device in process_of}
    if not wanted:
        raise ConfigurationError("none of these devices has a process on this machine now")
    done = 0
    for pid, crew in wanted.items():
        process = _member(pid, crew, "fedemu-device")
        if process is None:
            continue
        with suppress(psutil.Error):
            if action == "kill":
                process.send_signal(signal.SIGKILL)
                run.machine.frozen.pop(pid, None)
            elif action == "freeze":
                process.send_signal(signal.SIGSTOP)
                run.machine.frozen[pid] = process, time.monotonic()
            else:
                process.send_signal(signal.SIGCONT)
                run.machine.frozen.pop(pid, None)
            done += 1
    verb = {"kill": "killed", "freeze": "frozen", "release": "let go on"}[action]
    word = "device process" if done == 1 else "device processes"
    return f"{done:,} {word} {verb}"


def _trainer(run: LiveRun, number: Any) -> str:
    for crew in _crews(run):
        for trainer, pid in sorted(crew.trainers.items()):
            if number in (None, trainer) and (process := _member(pid, crew, "")) is not None:
                process.send_signal(signal.SIGKILL)
                return f"trainer {trainer + 1} killed (process {pid})"
    raise ConfigurationError("no trainer of this run is on this machine now")


def _supervisor(run: LiveRun) -> str:
    crew = _crews(run)[0]
    pid = crew.supervisor.pid
    words = crew.supervisor.cmdline()
    crew.supervisor.send_signal(signal.SIGKILL)
    told = f"supervisor killed (process {pid}), and its {counted(len(crew.devices), 'device')} with it"
    if "device" not in words:  # that of fedemu run, which starts it again
        return told
    return f"{told}; start it again by {shlex.join(['fedemu', *words[words.index('device') :]])}"


def _coordinator(run: LiveRun) -> str:
    pid = run.coordinator
    if pid is None:
        raise ConfigurationError("no coordinator is at work in this run directory")
    if pid == UNNAMED:
        raise ConfigurationError("the coordinator is in another container or on another machine; kill it there")
    process = psutil.Process(pid)
    if process.uids().real != os.getuid():
        raise ConfigurationError("the coordinator belongs to another user")
    run.resuming.remember(process)
    if run.coordinator != pid:  # it ended meanwhile, and its number may belong to another process
        raise ConfigurationError("the coordinator has ended by itself")
    process.send_signal(signal.SIGKILL)
    return f"coordinator killed (process {pid}); {run.resuming.command} goes on with the run"


def _indices(run: LiveRun, given: Any) -> list[int]:
    count = run.experiment.fleet.devices
    if not isinstance(given, list) or not all(type(device) is int and 0 <= device < count for device in given):
        raise ConfigurationError(f"devices must be a list of numbers from 0 to {count - 1}")
    if not given:
        raise ConfigurationError("no device is selected")
    return given


def _crews(run: LiveRun) -> Sequence[Crew]:
    """The supervisors of the run on this machine, with what they told now."""
    run.machine.look(run.coordinator)
    if not run.machine.crews:
        raise ConfigurationError("no supervisor of this run is on this machine now")
    return run.machine.crews


def _member(pid: int, crew: Crew, name: str) -> psutil.Process | None:
    """A process that descends from the supervisor and has such a name. None if it has ended."""
    try:
        process = psutil.Process(pid)
        line = [parent.pid for parent in process.parents()]
        belongs = crew.supervisor.is_running() and crew.supervisor.pid in line and process.uids().real == os.getuid()
        return process if belongs and process.name().startswith(name) else None
    except psutil.Error:
        return None
