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

from fedemu.coordinator.record.holder import UNNAMED
from fedemu.ops.terminal import COMPLAINT, complaint_in
from fedemu.protocol.code.source import interpreter
from fedemu.protocol.errors import ConfigurationError, Interrupted
from fedemu.protocol.host.files import GO_ON, usable
from fedemu.protocol.host.paths import is_folder
from fedemu.protocol.host.starting import starting

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
    """Knows how the run in ``directory`` was started, and goes on with it in the same way."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._command = Command(["run", "--resume", str(directory)], None, os.environ)
        self._noted: int | None = None
        self._resumed: Resumed | None = None
        self._is_awaited = False
        """Whether no coordinator has come since a command was started here."""

    def note(self, coordinator: int | None) -> None:
        """Remember how the run was started, if its coordinator is another process than at the last call."""
        self._is_awaited = self._is_awaited and coordinator is None
        if coordinator in (None, UNNAMED, self._noted):
            return
        self._noted = coordinator
        if not self.is_under_way:
            self._resumed = None  # somebody else goes on with the run
        with suppress(psutil.Error, OSError):
            self.remember(psutil.Process(coordinator))

    def remember(self, coordinator: psutil.Process) -> None:
        """Remember the command that resumes the run as this coordinator runs it. Raises psutil.Error."""
        self._command = _command(coordinator, self._directory)

    @property
    def command(self) -> str:
        """The command that resumes the run."""
        return shlex.join(["fedemu", *self._command.words])

    @property
    def is_under_way(self) -> bool:
        """Whether a command that was started here has not ended."""
        return self._resumed is not None and self._resumed.process.poll() is None

    @property
    def is_starting(self) -> bool:
        """Whether a command that was started here has not ended, and has brought no coordinator yet."""
        return self._is_awaited and self.is_under_way

    @property
    def failure(self) -> str:
        """Why the command that was started here last has failed. Empty if it has not, or if there is none."""
        return "" if self._resumed is None else self._resumed.failure()

    def start(self) -> str:
        """Start the command that resumes the run, and say so. Raises FedemuError if it can't be started."""
        if not is_folder(self._directory):
            raise ConfigurationError(f"the folder {self._directory} is gone")
        path = self._directory / "logs" / OUTPUT
        with usable(path, GO_ON):
            path.parent.mkdir(exist_ok=True)
            output = path.open("ab")
        folder = self._command.folder if self._command.folder and is_folder(self._command.folder) else None
        with output, starting():
            began = output.tell()
            process = subprocess.Popen(
                [*interpreter(), "-m", "fedemu.ops.cli", *self._command.words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=self._command.environment,
                start_new_session=True,
            )
        self._resumed, self._is_awaited = Resumed(process, path, began), True
        return f"{self.command} was started (process {process.pid})"


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
