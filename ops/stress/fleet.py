"""A real fleet under observation: starts coordinator and supervisors as processes, finds and ends what it started."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

POLL_SECONDS = 0.02


class FleetTimeout(Exception):
    """A condition did not come true in time; the text says which."""


class LiveFleet:
    """One run directory with a coordinator and one or more supervisors that belong to this object.

    Everything that it starts is ended by ``close``; ``leftovers`` then names what survived.
    """

    def __init__(
        self, directory: Path, *, address: str, overrides: Sequence[str] = (), experiment: str = "digits"
    ) -> None:
        self.run_directory = directory / "run"
        self.logs = directory / "terminal"
        self.logs.mkdir(parents=True, exist_ok=True)
        self._state = directory / "state"
        self.address = address
        self._experiment = experiment
        self._overrides = list(overrides)
        self._starts = 0
        self.coordinator: psutil.Popen | None = None
        self.supervisors: list[psutil.Popen] = []
        self._seen: dict[int, psutil.Process] = {}

    def start_coordinator(self, *options: str) -> psutil.Popen:
        """Start a coordinator, or resume it if the run directory exists already."""
        # Nobody reads a report of these runs, and drawing one takes two seconds.
        arguments = ["coordinator", "--bind", self.address, "--set", "runtime.report=false", *options]
        if (self.run_directory / "config.toml").exists():
            arguments += ["--resume", str(self.run_directory)]
        else:
            arguments += [self._experiment, "--out", str(self.run_directory)]
            for override in self._overrides:
                arguments += ["--set", override]
        self.coordinator = self._spawn("coordinator", arguments)
        return self.coordinator

    def start_devices(self, count: int, *options: str, state: str = "0") -> psutil.Popen:
        """Start a supervisor for ``count`` devices; the same ``state`` stands for the same machine come back."""
        supervisor = self._spawn(
            f"device-{state}",
            ["device", "--n", str(count), "--connect", self.address, "--state", str(self._state / state), *options],
        )
        self.supervisors.append(supervisor)
        return supervisor

    def _spawn(self, name: str, arguments: Sequence[str]) -> psutil.Popen:
        self._starts += 1
        with (self.logs / f"{self._starts:02d}-{name}.log").open("wb") as log:
            process = psutil.Popen(
                [sys.executable, "-m", "fedemu.ops.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._seen[process.pid] = process
        return process

    def rows(self) -> list[dict[str, Any]]:
        """The metrics rows written so far; a line that is being written is left out."""
        return self._lines("metrics.jsonl")

    def events(self) -> list[dict[str, Any]]:
        """The events told so far."""
        return self._lines("events.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.run_directory / name
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run_directory / "summary.json").read_text()))

    def setting(self, section: str, key: str) -> Any:
        """A setting of the run as its frozen configuration has it."""
        return tomllib.loads((self.run_directory / "config.toml").read_text())[section][key]

    def processes(self, kind: str) -> list[psutil.Process]:
        """Living processes of the supervisors of one kind: ``device``, ``trainer``, ``zygote``."""
        found = []
        for process in self._descendants():
            try:
                if process.name().startswith(f"fedemu-{kind}"):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def _descendants(self) -> Iterator[psutil.Process]:
        for parent in [*self.supervisors, *([self.coordinator] if self.coordinator else [])]:
            try:
                children = parent.children(recursive=True)
            except psutil.Error:
                continue
            for process in children:
                self._seen.setdefault(process.pid, process)
                yield process

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        """Poll a condition; raises FleetTimeout naming it, with the end of the terminal output."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise FleetTimeout(f"{what} did not happen within {seconds:.0f} s\n{self.tail()}")
            time.sleep(POLL_SECONDS)

    def wait_for_round(self, round: int, seconds: float = 120.0) -> None:
        self.wait_until(lambda: len(self.rows()) >= round, f"round {round}", seconds)

    def wait_for_end(self, seconds: float = 300.0) -> int:
        """The coordinator's exit code."""
        assert self.coordinator is not None, "start the coordinator first"
        try:
            return int(self.coordinator.wait(seconds))
        except psutil.TimeoutExpired as error:
            raise FleetTimeout(f"the coordinator did not end within {seconds:.0f} s\n{self.tail()}") from error

    def pause(self, seconds: float) -> None:
        """Let the fleet go on for a moment, so that what follows strikes at an arbitrary instant."""
        time.sleep(seconds)

    def signal(self, process: psutil.Process, number: int) -> None:
        """Signal a process of this fleet, if it still lives."""
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
        """End everything: first kindly, then for certain."""
        list(self._descendants())
        roots = [process for process in [self.coordinator, *self.supervisors] if process is not None]
        for sign in (signal.SIGTERM, signal.SIGKILL):
            alive = [process for process in roots if process.is_running()]
            for process in alive:
                process.send_signal(sign)
            psutil.wait_procs(alive, timeout=seconds)

    def leftovers(self, seconds: float = 5.0) -> list[str]:
        """Processes that this fleet had started and that still live after ``close``."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=seconds)
        described = []
        for process in alive:
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    described.append(f"{process.pid} {process.name()}")
            except psutil.Error:
                continue
        return described


@contextmanager
def live_fleet(
    directory: Path, *, address: str, overrides: Sequence[str] = (), experiment: str = "digits"
) -> Iterator[LiveFleet]:
    """A LiveFleet that is closed at the end, whatever happens."""
    fleet = LiveFleet(directory, address=address, overrides=overrides, experiment=experiment)
    try:
        yield fleet
    finally:
        fleet.close()
