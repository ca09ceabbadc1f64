"""Plays a case of a campaign: starts a run, strikes, starts again what has ended, and examines what came of it."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from pathlib import Path

import psutil

from fedemu.coordinator.record.run import read_summary
from fedemu.ops.running.codes import INTERRUPTED
from fedemu.ops.running.launch import free_address
from fedemu.ops.stress.campaign.accidents import ACCIDENTS, NETWORK, TO_EDGES, Deed, Scene
from fedemu.ops.stress.campaign.cases import COMMON, DEVICES, METHODS, Case, CaseResult
from fedemu.ops.stress.campaign.relay import Relay
from fedemu.ops.stress.fleet import FleetTimeout, LiveFleet
from fedemu.ops.stress.invariants import ended_as_undisturbed
from fedemu.ops.stress.leftovers import Descriptors, of_sessions, orphaned_memory, shared_memory
from fedemu.ops.stress.undisturbed import Undisturbed
from fedemu.ops.stress.warm import WarmStart

MOST_SECONDS = 240.0
STARTS = 12
"""How often a coordinator, an edge and a supervisor are started in one case before the case fails."""
LEFT_ALONE = (0, INTERRUPTED, -signal.SIGKILL, -signal.SIGTERM)
"""The exit codes of processes that an accident has ended. They are started again."""
FULL_DISK = 5
"""The exit code of a process whose disk is full."""


def play_case(case: Case, folder: Path, calm: Undisturbed, warm: WarmStart) -> CaseResult:
    """Play a case in ``folder``, and compare its end with that of the undisturbed run ``calm``.

    Every wait ends after ``MOST_SECONDS`` with a complaint.
    """
    began = time.monotonic()
    memory = shared_memory()
    # The paths of sockets are short. Processes that end late may remove files from this folder while it is removed.
    with tempfile.TemporaryDirectory(prefix="fs-", dir="/tmp", ignore_cleanup_errors=True) as sockets:
        played = _Played(case, folder, Path(sockets), warm)
        try:
            played.play()
            played.examine(calm)
        except (FleetTimeout, psutil.Error, OSError) as error:
            played.complain(f"{type(error).__name__}: {error}")
        finally:
            played.close()
        played.look_behind(memory)
    return CaseResult(case, time.monotonic() - began, tuple(played.done), tuple(played.complaints))


class _Played:
    """A case while it is played. It starts again what accidents end."""

    def __init__(self, case: Case, folder: Path, sockets: Path, warm: WarmStart) -> None:
        experiment, settings = METHODS[case.method]
        self.done: list[Deed] = []
        self.complaints: list[str] = []
        self._case = case
        self._folder = folder
        self._sockets = sockets
        self._address = free_address()
        needed = any(accident.name in NETWORK for accident in case.accidents)
        self._relay = Relay(free_address(), self._address) if needed else None
        self.fleet = LiveFleet(
            folder,
            address=self._address,
            overrides=(*COMMON, *settings, *case.fleet),
            experiment=experiment,
            start=warm.start,
            environment={"TMPDIR": str(sockets), "XDG_RUNTIME_DIR": str(sockets)},
        )
        self._started: dict[str, list[psutil.Process]] = {"coordinator": [], "edge": [], "machine": []}
        self._place = free_address() if case.edge else None
        """Where the edge listens."""
        self._descriptors = Descriptors(lambda: 0)
        self._rounds_before = 0
        self._scene = Scene(
            self.fleet,
            self._relay,
            random.Random(f"{case.seed}/{case.number}/strikes"),
            self._start_coordinator,
            self._start_devices,
            self._is_over,
            set(),
        )

    def play(self) -> None:
        """Play the run from its first start to its last exit code."""
        if self._place is not None:
            self._start_edge(self._place)
        self._start_devices()
        self._start_coordinator()
        for accident in self._case.accidents:
            if not self._reached(accident.after):
                break
            self.fleet.pause(accident.pause)
            if self.fleet.rounds() > self._rounds_before:
                self._descriptors.begin()
            self.done.append({**ACCIDENTS, **TO_EDGES}[accident.name](self._scene))
            self._descriptors.struck()
        self.fleet.wait_until(lambda: not self._tend(), "the end of the run", MOST_SECONDS)
        for edge in self.fleet.edges:
            self._farewell("edge", edge)
        for machine in self.fleet.supervisors:
            self._farewell("supervisor", machine)

    def complain(self, complaint: str) -> None:
        """The case has failed."""
        self.complaints.append(complaint)

    def close(self) -> None:
        """End everything."""
        self.fleet.close()
        if self._relay is not None:
            self._relay.close()

    def examine(self, calm: Undisturbed) -> None:
        """Compare the run's files and terminals with what they have to be."""
        if self.complaints:
            return
        self.complaints += ended_as_undisturbed(self.fleet.rows(), self.fleet.summary(), calm.digest, calm.rows)
        self.complaints += self._descriptors.grown()
        # A process that a full disk ends writes the traceback into its log, and one sentence to its terminal.
        paths = sorted(self.fleet.logs.iterdir()) if self._scene.full else self.fleet.outputs()
        for path in paths:
            if "Traceback (most recent call last)" in path.read_text(errors="replace"):
                self.complain(f"{path.relative_to(self._folder)} holds a traceback")

    def look_behind(self, memory: set[str]) -> None:
        """Count what is left when all processes have ended. ``memory`` was there before."""
        sessions = [process.pid for processes in self._started.values() for process in processes]
        self.complaints += [f"still running after the end: {process}" for process in of_sessions(sessions, 15.0)]
        self.complaints += [f"shared memory left behind: {name}" for name in orphaned_memory(memory)]
        # A machine or an edge that was killed leaves its folder to the next one.
        last = [*self._started["machine"][-1:], *self._started["edge"][-1:]]
        if all(process.returncode != -signal.SIGKILL for process in last):
            self.complaints += [f"left behind: {path.name}" for path in sorted(self._sockets.iterdir())]

    def _reached(self, round: int) -> bool:
        """Wait until a round is over. False if the run has ended before."""
        self.fleet.wait_until(lambda: not self._tend() or self.fleet.rounds() >= round, f"round {round}", MOST_SECONDS)
        return self._tend() and not self._is_over()

    def _tend(self) -> bool:
        """Start again what has ended. False if the run is over, or has failed."""
        if self.complaints:
            return False
        self._descriptors.sample()
        coordinator = self._scene.coordinator
        code = coordinator.poll()
        if code == 0:
            return False
        if code is not None:
            self._look_at_end("coordinator", coordinator)
            if not self.complaints:
                self._start_coordinator()
            return not self.complaints
        self._bury("edge", self.fleet.edges)
        self._bury("supervisor", self.fleet.supervisors)
        if self.complaints:
            return False
        if self._place is not None and not self.fleet.edges and not self._is_over():
            self._start_edge(self._place)
        if not self.fleet.supervisors and not self._is_over():
            self._start_devices()
        return True

    def _bury(self, kind: str, processes: list[psutil.Popen]) -> None:
        """Forget the processes that have ended."""
        for process in processes:
            if process.poll() is not None and not (process.poll() == 0 and self._is_over()):
                self._look_at_end(kind, process)
        processes[:] = [process for process in processes if process.poll() is None]

    def _look_at_end(self, kind: str, process: psutil.Process) -> None:
        """Complain if a process has ended for no reason that an accident gave."""
        if process.returncode in LEFT_ALONE and process.pid in self._scene.ended:
            return
        full = self._scene.full
        # What an error of the coordinator ends has the exit code of that error.
        if process.returncode == FULL_DISK and (process.pid in full or (kind != "coordinator" and full)):
            return
        self.complain(f"the {kind} ended with exit {process.returncode}: {self.fleet.tail(4)}")

    def _farewell(self, kind: str, machine: psutil.Process) -> None:
        """See that a machine or an edge leaves when the run is over. If it could not hear of the end, it is told."""

        def left() -> bool:
            if machine.poll() is None and self._is_deaf(machine):
                self._scene.send([machine], signal.SIGTERM)
            return machine.poll() is not None

        self.fleet.wait_until(left, f"the end of the {kind}", MOST_SECONDS)
        if machine.poll() != 0:
            self._look_at_end(kind, machine)

    def _is_deaf(self, machine: psutil.Process) -> bool:
        """Whether a machine has no connection, so that it looks for a coordinator that has ended."""
        log = self.fleet.log_of(machine).read_text(errors="replace")
        began = " connected" in log or "an edge of" in log
        return not began or log.rfind("coordinator is gone") > log.rfind("coordinator is back")

    def _is_over(self) -> bool:
        """Whether the run has completed all its rounds."""
        return read_summary(self.fleet.run_directory).get("outcome") == "completed"

    def _start_coordinator(self) -> None:
        self._require_start("coordinator")
        # A coordinator that has played no round yet has not opened all its descriptors.
        self._rounds_before = self.fleet.rounds()
        coordinator = self.fleet.start_coordinator()
        self._started["coordinator"].append(coordinator)
        self.complaints += self._descriptors.grown()
        self._descriptors = Descriptors(coordinator.num_fds)

    def _start_devices(self) -> None:
        self._require_start("machine")
        address = self._place or self._way_up
        self._started["machine"].append(self.fleet.start_devices(DEVICES, *self._case.machine, address=address))

    def _start_edge(self, place: str) -> None:
        self._require_start("edge")
        self._started["edge"].append(self.fleet.start_edge(place, connect=self._way_up))

    def _require_start(self, kind: str) -> None:
        """Raise FleetTimeout if processes of this kind were started so often that the case has failed."""
        if len(self._started[kind]) >= STARTS:
            raise FleetTimeout(f"the run did not end after {STARTS} starts of its {kind}\n{self.fleet.tail(4)}")

    @property
    def _way_up(self) -> str:
        """The address at which the coordinator is reached, through the relay if there is one."""
        return self._address if self._relay is None else self._relay.address
