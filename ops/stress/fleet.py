"""A real fleet under observation: it starts a coordinator and supervisors as processes, finds them and ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

from fedemu.coordinator.record.json_lines import read_lines
from fedemu.coordinator.record.row import Row, read_rows
from fedemu.coordinator.record.run import read_summary
from fedemu.ops.running.codes import INTERRUPTED
from fedemu.ops.stress.leftovers import living, of_sessions
from fedemu.protocol.code.source import interpreter
from fedemu.protocol.errors import FedemuError
from fedemu.protocol.host.paths import exists

POLL_SECONDS = 0.02
LEFT_SECONDS = 5.0


Start = Callable[[Sequence[str], Path, Mapping[str, str]], psutil.Popen]
"""Starts ``fedemu`` with some words and an environment, in a session of its own. Its output goes to a file."""


class FleetTimeout(FedemuError):
    """A condition did not become true in time. The text says which condition."""


class LiveFleet:
    """One run directory with a coordinator, supervisors and perhaps edges that belong to this object.

    ``close`` ends everything that it started, and so does the end of a ``with`` block. ``leftovers`` then complains
    of the processes that still live.
    """

    def __init__(
        self,
        directory: Path,
        *,
        address: str,
        overrides: Sequence[str] = (),
        experiment: str = "digits",
        start: Start | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``environment`` are variables that its processes get beside those of this one."""
        self.run_directory = directory / "run"
        self.logs = directory / "terminal"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.state = directory / "state"
        """The folder of the machines' state."""
        self.address = address
        self._experiment = experiment
        self._overrides = list(overrides)
        self._start = start_interpreter if start is None else start
        self._environment = {**os.environ, **(environment or {})}
        self._starts = 0
        self.coordinator: psutil.Popen | None = None
        self.supervisors: list[psutil.Popen] = []
        self.edges: list[psutil.Popen] = []
        self._log_of: dict[int, Path] = {}
        """The terminal of each process that was started, by its id, which is also that of its session."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def start_coordinator(self, *options: str, environment: Mapping[str, str] | None = None) -> psutil.Popen:
        """Start a coordinator, or resume it if the run directory exists already.

        It gets the variables of ``environment`` beside those of the fleet.
        """
        # Nobody reads the reports of these runs, and drawing one takes two seconds.
        arguments = ["coordinator", "--bind", self.address, "--set", "runtime.report=false", *options]
        if exists(self.run_directory / "config.toml"):
            arguments += ["--resume", str(self.run_directory)]
        else:
            settings = [f"--set={override}" for override in self._overrides]
            arguments += [self._experiment, "--out", str(self.run_directory), *settings]
        self.coordinator = self._spawn("coordinator", arguments, environment)
        return self.coordinator

    def start_devices(
        self,
        count: int,
        *options: str,
        state: str = "0",
        address: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> psutil.Popen:
        """Start a supervisor for ``count`` devices, which looks for the coordinator at ``address`` if that is given.

        A second supervisor with the same ``state`` is the same machine, started again. It gets the variables of
        ``environment`` beside those of the fleet.
        """
        to, where = address or self.address, str(self.state / state)
        words = ["device", "--n", str(count), "--connect", to, "--state", where, *options]
        supervisor = self._spawn(f"device-{state}", words, environment)
        self.supervisors.append(supervisor)
        return supervisor

    def start_edge(self, bind: str, *options: str, connect: str | None = None) -> psutil.Popen:
        """Start an edge that listens at ``bind``, and looks for the coordinator, or an edge at ``connect``."""
        edge = self._spawn("edge", ["edge", "--bind", bind, "--connect", connect or self.address, *options])
        self.edges.append(edge)
        return edge

    def _spawn(self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> psutil.Popen:
        self._starts += 1
        log = self.logs / f"{self._starts:02d}-{name}.log"
        process = self._start(arguments, log, {**self._environment, **(environment or {})})
        self._log_of[process.pid] = log
        return process

    def log_of(self, process: psutil.Process) -> Path:
        """The terminal of a coordinator or supervisor."""
        return self._log_of[process.pid]

    def outputs(self) -> list[Path]:
        """All that its processes have written for people: the terminals, and the logs of the run and of the devices."""
        folders = (self.logs, self.run_directory / "logs", self.state)
        return sorted(path for folder in folders for suffix in ("log", "out") for path in folder.rglob(f"*.{suffix}"))

    def rounds(self) -> int:
        """How many rounds are over."""
        return finished_rounds(self.run_directory)

    def rows(self) -> tuple[Row, ...]:
        """The rows of the rounds that are over."""
        return read_rows(self.run_directory)

    def events(self) -> list[dict[str, Any]]:
        """The events that the coordinator has written so far."""
        return read_lines(self.run_directory / "events.jsonl")

    def summary(self) -> dict[str, Any]:
        """The summary of the run, which has to be over."""
        return read_summary(self.run_directory)

    def setting(self, section: str, key: str) -> Any:
        """A setting from the frozen configuration of the run."""
        return tomllib.loads((self.run_directory / "config.toml").read_text())[section][key]

    def processes(self, kind: str) -> list[psutil.Process]:
        """The living processes of one kind: ``device``, ``trainer``, ``zygote`` or ``nursery``."""
        found = []
        for process in self.all_processes():
            with suppress(psutil.Error):
                if process.name().startswith(f"fedemu-{kind}"):
                    found.append(process)
        return found

    def all_processes(self) -> list[psutil.Process]:
        """All living processes: those that this object has started, and whatever these have started in turn.

        A process whose parent has ended is among them, and no process that has begun a session of its own.
        """
        return list(living(self._log_of))

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait until ``condition`` is true.

        Raises FleetTimeout after ``seconds``, with ``what`` as its name and the end of the terminal output.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise FleetTimeout(f"{what} did not happen within {seconds:.0f} s\n{self.tail()}")
            time.sleep(POLL_SECONDS)

    def wait_for_round(self, round: int, seconds: float = 120.0) -> None:
        """Wait until a round is over. Raises FleetTimeout after ``seconds``."""
        self.wait_until(lambda: self.rounds() >= round, f"round {round}", seconds)

    def wait_for_end(self, seconds: float = 300.0) -> int:
        """Wait until the coordinator ends, and return its exit code. Raises FleetTimeout after ``seconds``."""
        assert self.coordinator is not None, "start the coordinator first"
        try:
            return int(self.coordinator.wait(seconds))
        except psutil.TimeoutExpired as error:
            raise FleetTimeout(f"the coordinator did not end within {seconds:.0f} s\n{self.tail()}") from error

    def pause(self, seconds: float) -> None:
        """Let the fleet go on for some seconds, so that the next disturbance comes at an arbitrary instant."""
        time.sleep(seconds)

    def signal(self, process: psutil.Process, number: int) -> None:
        """Send a signal to a process of this fleet, if it still lives."""
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)

    def tail(self, lines: int = 12) -> str:
        """The end of every terminal log."""
        parts = []
        for path in sorted(self.logs.iterdir()):
            text = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {path.name}", *text]))
        return "\n".join(parts)

    def close(self, seconds: float = 15.0) -> None:
        """End all processes: first by SIGTERM, then by SIGKILL. Each of the two gets ``seconds``."""
        roots = [process for process in [self.coordinator, *self.edges, *self.supervisors] if process is not None]
        for sign in (signal.SIGTERM, signal.SIGKILL):
            alive = [process for process in roots if process.is_running()]
            for process in alive:
                self.signal(process, sign)
            psutil.wait_procs(alive, timeout=seconds)

    def leftovers(self) -> list[str]:
        """A complaint for each process of this fleet that still lives ``LEFT_SECONDS`` after ``close``."""
        return [f"still running after the end: {process}" for process in of_sessions(self._log_of, LEFT_SECONDS)]


def lives(process: psutil.Process) -> bool:
    """Whether a process is there. One that has ended and that its parent has not asked about is not."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def start_interpreter(
    words: Sequence[str], log: Path, environment: Mapping[str, str], before: Sequence[str] = ()
) -> psutil.Popen:
    """A ``Start`` with an interpreter of its own, as a shell does it. The words ``before`` stand before its command.

    The process ends with this one. So ``before`` has to become the command, and not to start it as a child.
    """
    with log.open("wb") as file:
        return psutil.Popen(
            [*before, *interpreter(), "-m", "fedemu.ops.stress.bound", str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )


def finished_rounds(run_directory: Path) -> int:
    """How many rounds of a run are over. This is cheap enough to be asked again and again."""
    path = run_directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if exists(path) else 0


def send_home(fleet: LiveFleet) -> list[str]:
    """Interrupt the run, which has to stop with a checkpoint and to send its edges and machines home.

    Returns what went wrong, in sentences.
    """
    assert fleet.coordinator is not None
    fleet.signal(fleet.coordinator, signal.SIGTERM)
    try:
        code = fleet.wait_for_end(60.0)
    except FleetTimeout as error:
        return [str(error)]
    complaints = [] if code == INTERRUPTED else [f"the coordinator ended with exit {code}: {fleet.tail(4)}"]
    for kind, processes in (("a supervisor", fleet.supervisors), ("an edge", fleet.edges)):
        for process in processes:
            try:
                left = process.wait(30)
            except psutil.TimeoutExpired:
                complaints.append(f"{kind} did not leave within 30 s after the run: {fleet.tail(4)}")
            else:
                if left != INTERRUPTED:
                    complaints.append(f"{kind} ended with exit {left}: {fleet.tail(4)}")
    return complaints
