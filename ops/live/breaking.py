"""The buttons that break things: processes of this run and this user on this machine, and nothing else."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

from fedemu.ops.figures import counted
from fedemu.ops.live.machine import Crew
from fedemu.ops.live.run import LiveRun
from fedemu.ops.results.holder import UNNAMED
from fedemu.protocol.code.source import interpreter
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import is_folder

OUTPUT: Final = "resumed.out"
"""What a resumed run prints goes into this file of its logs."""
_MACHINE_OPTIONS: Final = frozenset(
    (
        "--bind",
        "--keys",
        "--metrics-port",
        "--metrics-address",
        "--trainers",
        "--per-process",
        "--device-type",
        "--log-level",
        "--transport",
        "--on",
        "--nodes",
    )
)
"""The options of a command that a resumed run needs again. The others are a part of the experiment."""
_MACHINE_SETTINGS: Final = ("runtime.", "track.")
"""How the settings begin that belong to a machine."""


class Breaking:
    """Performs what a button asks for, and says in a sentence what was done. Raises ConfigurationError if it can't."""

    def __init__(self) -> None:
        self._commands: dict[int, tuple[list[str], Path]] = {}
        self._noted: dict[int, int] = {}
        self._resumed: dict[int, subprocess.Popen[bytes]] = {}

    async def act(self, run: LiveRun, wanted: Mapping[str, Any]) -> str:
        """Do ``wanted["action"]``, for ``wanted["devices"]`` if it is about devices."""
        try:
            return await self._act(run, wanted)
        except psutil.Error as error:
            raise ConfigurationError(f"the process has ended by itself, or can't be reached ({error})") from error

    async def _act(self, run: LiveRun, wanted: Mapping[str, Any]) -> str:
        action = wanted.get("action")
        if action in ("kill", "freeze", "release"):
            return await asyncio.to_thread(self._devices, run, str(action), _indices(run, wanted.get("devices")))
        if action == "kill_trainer":
            return self._trainer(run, wanted.get("trainer"))
        if action == "kill_supervisor":
            return self._supervisor(run)
        if action == "kill_coordinator":
            return self._coordinator(run)
        if action == "resume":
            return self._resume(run)
        raise ConfigurationError(f"there is no action {str(action)[:40]!r}")

    def note(self, run: LiveRun) -> None:
        """Remember how the run was started, so that it can be resumed in the same way."""
        pid = run.coordinator
        if pid is not None and pid not in (UNNAMED, self._noted.get(run.number)):
            self._noted[run.number] = pid
            with suppress(psutil.Error, OSError):
                self._commands[run.number] = _command(psutil.Process(pid), run.directory)

    def command(self, run: LiveRun) -> str:
        """The command that resumes the run."""
        words, _ = self._commands.get(run.number, (["run", "--resume", str(run.directory)], Path.cwd()))
        return shlex.join(["fedemu", *words])

    def _devices(self, run: LiveRun, action: str, devices: Iterable[int]) -> str:
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

    def _trainer(self, run: LiveRun, number: Any) -> str:
        for crew in _crews(run):
            for trainer, pid in sorted(crew.trainers.items()):
                if number in (None, trainer) and (process := _member(pid, crew, "")) is not None:
                    process.send_signal(signal.SIGKILL)
                    return f"trainer {trainer + 1} killed (process {pid})"
        raise ConfigurationError("no trainer of this run is on this machine now")

    def _supervisor(self, run: LiveRun) -> str:
        crew = _crews(run)[0]
        pid = crew.supervisor.pid
        words = crew.supervisor.cmdline()
        crew.supervisor.send_signal(signal.SIGKILL)
        told = f"supervisor killed (process {pid}), and its {counted(len(crew.devices), 'device')} with it"
        if "device" not in words:  # that of fedemu run, which starts it again
            return told
        return f"{told}; start it again by {shlex.join(['fedemu', *words[words.index('device') :]])}"

    def _coordinator(self, run: LiveRun) -> str:
        pid = run.coordinator
        if pid is None:
            raise ConfigurationError("no coordinator is at work in this run directory")
        if pid == UNNAMED:
            raise ConfigurationError("the coordinator is in another container or on another machine; kill it there")
        process = psutil.Process(pid)
        if process.uids().real != os.getuid():
            raise ConfigurationError("the coordinator belongs to another user")
        self._commands[run.number] = _command(process, run.directory)
        if run.coordinator != pid:  # it ended meanwhile, and its number may belong to another process
            raise ConfigurationError("the coordinator has ended by itself")
        process.send_signal(signal.SIGKILL)
        return f"coordinator killed (process {pid}); {self.command(run)} goes on with the run"

    def _resume(self, run: LiveRun) -> str:
        if run.coordinator is not None or self.resuming(run):
            raise ConfigurationError("the run goes on already")
        words, place = self._commands.get(run.number, (["run", "--resume", str(run.directory)], Path.cwd()))
        logs = run.directory / "logs"
        logs.mkdir(exist_ok=True)
        with (logs / OUTPUT).open("ab") as output:
            process = subprocess.Popen(
                [*interpreter(), "-m", "fedemu.ops.cli", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=place if is_folder(place) else None,
                start_new_session=True,
            )
        self._resumed[run.number] = process
        return f"{self.command(run)} was started (process {process.pid})"

    def resuming(self, run: LiveRun) -> bool:
        """Whether a command that was started here is about to go on with the run."""
        started = self._resumed.get(run.number)
        return started is not None and started.poll() is None and run.coordinator is None


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


def _command(coordinator: psutil.Process, directory: Path) -> tuple[list[str], Path]:
    """The words of the command that resumes a run as this coordinator runs it, and the folder to start it in."""
    started = coordinator
    if coordinator.name().startswith("fedemu-coord"):
        started = coordinator.parent() or coordinator
    return resume_words(started.cmdline(), directory), Path(started.cwd())


def resume_words(words: Sequence[str], directory: Path) -> list[str]:
    """What follows ``fedemu`` to resume a run in ``directory`` that the command line ``words`` has started."""
    place = next((place for place, word in enumerate(words) if word in ("run", "coordinator")), None)
    if place is None:
        return ["run", "--resume", str(directory)]
    kept = [words[place], "--resume", str(directory)]
    rest = iter(words[place + 1 :])
    for word in rest:
        option, given, value = word.partition("=")
        if option in _MACHINE_OPTIONS:
            kept += [option, value if given else next(rest, "")]
        elif word == "--insecure":
            kept.append(word)
        elif option == "--set":
            setting = value if given else next(rest, "")
            if setting.startswith(_MACHINE_SETTINGS):
                kept += ["--set", setting]
    return kept
