"""The command that goes on with a run after its coordinator was killed: what it is, its start, and why it failed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from fedemu.ops.live.run import LiveRun
from fedemu.ops.results.holder import UNNAMED
from fedemu.ops.terminal import COMPLAINT, complaint_in
from fedemu.protocol.code.source import interpreter
from fedemu.protocol.errors import ConfigurationError, FedemuError, Interrupted
from fedemu.protocol.host.files import GO_ON, usable
from fedemu.protocol.host.paths import is_folder
from fedemu.protocol.wording import refusal

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
_MACHINE_SETTING: Final = re.compile(r"""\s*["']?(?:runtime|track)["']?\s*[.=]""")
"""How a setting begins that belongs to a machine: ``runtime.trainers=2``, or ``runtime={ trainers = 2 }``."""


@dataclass(frozen=True)
class Command:
    """The command that resumes a run: its words after ``fedemu``, and the folder and the variables to start it with.

    Without a folder it is started where the page was.
    """

    words: Sequence[str]
    folder: Path | None
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Resumed:
    """A command that goes on with a run. What it prints is in ``output`` from the byte ``began`` on."""

    process: subprocess.Popen[bytes]
    output: Path
    began: int

    def failure(self) -> str:
        """Why it has ended, if it has failed. Empty if not."""
        code = self.process.poll()
        if code in (None, 0, Interrupted.exit_code):
            return ""
        with suppress(OSError):
            lines = self.output.read_bytes()[self.began :].decode(errors="replace").splitlines()
            if said := complaint_in(lines).partition("\n")[0].removeprefix(COMPLAINT):
                return said
        return f"the command has ended with code {code}; see {self.output}"


class Resuming:
    """Knows how each run was started, and goes on with it in the same way."""

    def __init__(self) -> None:
        self._commands: dict[int, Command] = {}
        self._noted: dict[int, int] = {}
        self._resumed: dict[int, Resumed] = {}

    def note(self, run: LiveRun) -> None:
        """Remember how the run was started, so that it can be resumed in the same way."""
        pid = run.coordinator
        if pid is not None and pid not in (UNNAMED, self._noted.get(run.number)):
            self._noted[run.number] = pid
            if run.number in self._resumed and self._resumed[run.number].process.poll() is not None:
                del self._resumed[run.number]  # somebody else goes on with the run
            with suppress(psutil.Error, OSError):
                self.remember(run, psutil.Process(pid))

    def remember(self, run: LiveRun, coordinator: psutil.Process) -> None:
        """Remember the command that resumes the run as this coordinator runs it. Raises psutil.Error."""
        self._commands[run.number] = _command(coordinator, run.directory)

    def command(self, run: LiveRun) -> str:
        """The command that resumes the run."""
        return shlex.join(["fedemu", *self._command(run).words])

    def resume(self, run: LiveRun) -> str:
        """Start the command that resumes the run, and say so. Raises FedemuError if it can't be started."""
        if run.coordinator is not None or self.is_about_to_go_on(run):
            raise ConfigurationError("the run goes on already")
        command = self._command(run)
        if not is_folder(run.directory):
            raise ConfigurationError(f"the folder {run.directory} is gone")
        path = run.directory / "logs" / OUTPUT
        with usable(path, GO_ON):
            path.parent.mkdir(exist_ok=True)
            output = path.open("ab")
        with output:
            began = output.tell()
            try:
                process = subprocess.Popen(
                    [*interpreter(), "-m", "fedemu.ops.cli", *command.words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=command.folder if command.folder and is_folder(command.folder) else None,
                    env=command.environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise FedemuError(f"no process can be started on this machine: {refusal(error)}") from error
        self._resumed[run.number] = Resumed(process, path, began)
        return f"{self.command(run)} was started (process {process.pid})"

    def _command(self, run: LiveRun) -> Command:
        if run.number in self._commands:
            return self._commands[run.number]
        return Command(["run", "--resume", str(run.directory)], None, os.environ)

    def is_about_to_go_on(self, run: LiveRun) -> bool:
        """Whether a command that was started here is about to go on with the run."""
        started = self._resumed.get(run.number)
        return started is not None and started.process.poll() is None and run.coordinator is None

    def failure(self, run: LiveRun) -> str:
        """Why a command that was started here does not go on with the run. Empty if it does, or was not needed."""
        started = self._resumed.get(run.number)
        return "" if started is None or run.coordinator is not None else started.failure()


def _command(coordinator: psutil.Process, directory: Path) -> Command:
    """The command that resumes a run as this coordinator runs it. Raises psutil.Error."""
    started = coordinator
    if coordinator.name().startswith("fedemu-coord"):
        started = coordinator.parent() or coordinator
    return Command(resume_words(started.cmdline(), directory), Path(started.cwd()), started.environ())


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
            if _MACHINE_SETTING.match(setting):
                kept += ["--set", setting]
    return kept
