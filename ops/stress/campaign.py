"""A campaign: random accidents at random moments of runs of random methods, each held against its undisturbed digest.

A case is a function of the campaign's seed and its own number, so that a failure can be played again by its number.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from fedemu.ops.running.launch import free_address
from fedemu.ops.stress.damage import TARGETS, damage
from fedemu.ops.stress.fleet import FleetTimeout, LiveFleet, live_fleet
from fedemu.ops.stress.invariants import clock_goes_forward, outcomes_add_up

DEVICES = 12
COMMON = (
    f"fleet.devices={DEVICES}",
    "fleet.per_round=4",
    "fleet.start_timeout=120.0",
    "fleet.give_up=90.0",
    "liveness.heartbeat_seconds=1.0",
    "faults.crash_rate=0.08",
    "model.hidden=[16]",
    "runtime.report=false",
)
"""The settings of all runs: a small fleet, some of whose devices crash by plan."""
TASKS = "stream={kind='classes', tasks=3, rounds_per_task=3}"
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fedavg": ("digits-small+fedavg", ("rounds=10",)),
    "scaffold": ("digits-small+scaffold", ("rounds=10",)),
    "flashback": ("digits-small+public+flashback", ("rounds=8",)),
    "fedntd+wsm": ("digits-small+fedntd+wsm", ("rounds=10",)),
    "mfcl": (
        "digits-tasks+mfcl",
        ("rounds=9", TASKS, "local.epochs=1", "algorithm.options={iterations=60, generator_batch=4}"),
    ),
    "replay": ("digits-tasks+uniform-replay", ("rounds=9", TASKS, "local.epochs=1", "replay.capacity=10")),
}
"""The runs: an experiment and its settings, by a short name."""
RESUMES = 8
"""How often a coordinator is started anew in one case before the case fails."""
FILE_BYTES = 2_000
"""The largest file that a coordinator may write on a disk that is full."""

Play = Callable[[LiveFleet, random.Random], str]
"""Makes an accident happen to a fleet, and says what it did."""


@dataclass(frozen=True)
class Accident:
    """The accident of this ``name`` in ``ACCIDENTS``. It happens ``pause`` seconds after the end of round ``after``."""

    name: str
    after: int
    pause: float


@dataclass(frozen=True)
class Case:
    """One case of a campaign: a method, and one to three accidents."""

    seed: int
    number: int
    method: str
    accidents: tuple[Accident, ...]

    @property
    def text(self) -> str:
        """The case in one line."""
        return f"{self.method}: " + ", then ".join(f"{each.name} after round {each.after}" for each in self.accidents)


@dataclass(frozen=True)
class CaseResult:
    """The result of a case. It passed if there are no complaints. ``done`` says what the accidents did."""

    case: Case
    seconds: float
    done: tuple[str, ...]
    complaints: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether there are no complaints."""
        return not self.complaints


def case(seed: int, number: int) -> Case:
    """The case with this number of the campaign with this seed."""
    chance = random.Random(f"{seed}/{number}")
    method = chance.choice(list(METHODS))
    rounds = int(METHODS[method][1][0].removeprefix("rounds="))
    moments = sorted(chance.randrange(1, rounds - 1) for _ in range(chance.choice((1, 1, 2, 3))))
    return Case(
        seed,
        number,
        method,
        tuple(Accident(chance.choice(list(ACCIDENTS)), after, chance.uniform(0.0, 0.1)) for after in moments),
    )


def undisturbed(method: str, folder: Path) -> str:
    """The model digest of a run that nothing disturbs, played in one process."""
    experiment, settings = METHODS[method]
    directory = folder / f"undisturbed-{method}"
    words = [word for setting in (*COMMON, *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "fedemu.ops.cli", "run", experiment, "--transport", "memory", *words]
    done = subprocess.run(
        [*command, "--out", str(directory)], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise FleetTimeout(f"the undisturbed run of {method} ended with exit {done.returncode}: {done.stderr[-500:]}")
    return str(json.loads((directory / "summary.json").read_text())["model_digest"])


def play_case(case: Case, folder: Path, digest: str, seconds: float = 180.0) -> CaseResult:
    """Play a case in ``folder``, and hold its end against the ``digest`` of the undisturbed run.

    Every wait ends after ``seconds`` with a complaint.
    """
    began = time.monotonic()
    chance = random.Random(f"{case.seed}/{case.number}/strikes")
    experiment, settings = METHODS[case.method]
    done: list[str] = []
    complaints: list[str] = []
    with live_fleet(folder, address=free_address(), overrides=(*COMMON, *settings), experiment=experiment) as fleet:
        try:
            fleet.start_devices(DEVICES)
            fleet.start_coordinator()
            for accident in case.accidents:
                if not _reached(fleet, accident.after, seconds):
                    break
                fleet.pause(accident.pause)
                done.append(ACCIDENTS[accident.name](fleet, chance))
            complaints += _end(fleet, seconds)
            complaints += _examine(fleet, digest)
        except (FleetTimeout, psutil.Error, OSError) as error:
            complaints.append(str(error))
    complaints += [f"still running after the end: {process}" for process in fleet.leftovers()]
    return CaseResult(case, time.monotonic() - began, tuple(done), tuple(complaints))


def _reached(fleet: LiveFleet, round: int, seconds: float) -> bool:
    """Wait until a round is over. False if the run has ended before."""
    coordinator = _coordinator(fleet)
    fleet.wait_until(lambda: fleet.rounds() >= round or coordinator.poll() is not None, f"round {round}", seconds)
    return coordinator.poll() is None and not _is_over(fleet)


def _end(fleet: LiveFleet, seconds: float) -> list[str]:
    """Wait for the end of the run. A coordinator or a machine that an accident ended is started again."""
    for _ in range(RESUMES):
        code = fleet.wait_for_end(seconds)
        if code == 0:
            break
        if code not in (4, -signal.SIGKILL):
            return [f"the coordinator ended with exit {code}: {fleet.tail(4)}"]
        _restart(fleet)
    else:
        return [f"the run did not end after {RESUMES} starts of its coordinator"]
    return [
        f"a supervisor ended with exit {code}: {fleet.tail(4)}"
        for code in map(_farewell, fleet.supervisors)
        if code not in (0, 3, 4)
    ]


def _farewell(supervisor: psutil.Popen) -> int:
    """The exit code of a supervisor when the run is over. One that came after the end still looks for a coordinator."""
    try:
        return int(supervisor.wait(10))
    except psutil.TimeoutExpired:
        supervisor.send_signal(signal.SIGTERM)
        return int(supervisor.wait(20))


def _is_over(fleet: LiveFleet) -> bool:
    """Whether the run has completed all its rounds."""
    file = fleet.run_directory / "summary.json"
    return file.is_file() and json.loads(file.read_text())["outcome"] == "completed"


def _examine(fleet: LiveFleet, digest: str) -> list[str]:
    rows, summary = fleet.rows(), fleet.summary()
    complaints = outcomes_add_up(rows) + clock_goes_forward(rows)
    if summary["perturbed"]:
        complaints.append("the run was perturbed")
    if summary["model_digest"] != digest:
        complaints.append(f"the model's digest is {summary['model_digest'][:16]}, undisturbed {digest[:16]}")
    return complaints


# The accidents.


def _coordinator(fleet: LiveFleet) -> psutil.Popen:
    assert fleet.coordinator is not None
    return fleet.coordinator


def _end_process(fleet: LiveFleet, process: psutil.Popen, number: int) -> None:
    fleet.signal(process, number)
    process.wait(30)


def _stop_everything(fleet: LiveFleet) -> None:
    ended = [_coordinator(fleet), *fleet.supervisors]
    fleet.supervisors.clear()
    for process in ended:
        fleet.signal(process, signal.SIGKILL)
    for process in ended:
        process.wait(30)


def _start_everything(fleet: LiveFleet) -> None:
    if not _is_over(fleet):
        fleet.start_devices(DEVICES)
    fleet.start_coordinator()


def _restart(fleet: LiveFleet) -> None:
    """Start all again after a coordinator that has told its machine that the run is over for now."""
    while fleet.supervisors:
        _farewell(fleet.supervisors.pop())
    _start_everything(fleet)


def _supervisor(fleet: LiveFleet) -> psutil.Popen:
    return fleet.supervisors[-1]


def _kill_coordinator(fleet: LiveFleet, chance: random.Random) -> str:
    _end_process(fleet, _coordinator(fleet), signal.SIGKILL)
    fleet.start_coordinator()
    return "coordinator killed"


def _interrupt_coordinator(fleet: LiveFleet, chance: random.Random) -> str:
    _end_process(fleet, _coordinator(fleet), signal.SIGTERM)
    _restart(fleet)
    return "coordinator interrupted by SIGTERM"


def _kill_supervisor(fleet: LiveFleet, chance: random.Random) -> str:
    _end_process(fleet, fleet.supervisors.pop(), chance.choice((signal.SIGKILL, signal.SIGTERM)))
    fleet.start_devices(DEVICES)
    return "supervisor ended"


def _kill_all(fleet: LiveFleet, chance: random.Random) -> str:
    _stop_everything(fleet)
    _start_everything(fleet)
    return "coordinator and machine killed"


def _fill_disk(fleet: LiveFleet, chance: random.Random) -> str:
    """Start the coordinator where no file may grow. It has to end with a sentence, and then to go on elsewhere."""
    _end_process(fleet, _coordinator(fleet), signal.SIGKILL)
    coordinator = fleet.start_coordinator()
    resource.prlimit(coordinator.pid, resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
    code = coordinator.wait(120)
    if code == 0:
        return "the run ended before the disk was full"
    _restart(fleet)
    return f"coordinator on a full disk ended with exit {code}"


def _signal_some(kind: str, number: int) -> Play:
    """An accident that sends a signal to some processes of a kind; those that it stops go on after a while."""

    def play(fleet: LiveFleet, chance: random.Random) -> str:
        victims = fleet.processes(kind)
        struck = chance.sample(victims, chance.randint(1, len(victims))) if victims else []
        for process in struck:
            fleet.signal(process, number)
        if number == signal.SIGSTOP:
            fleet.pause(chance.uniform(0.2, 4.0))
            for process in struck:
                fleet.signal(process, signal.SIGCONT)
        return f"{signal.Signals(number).name} to {len(struck)} of {len(victims)} processes: {kind}"

    return play


def _pause_one(of: Callable[[LiveFleet], psutil.Popen], name: str) -> Play:
    def play(fleet: LiveFleet, chance: random.Random) -> str:
        process, seconds = of(fleet), chance.uniform(0.2, 6.0)
        fleet.signal(process, signal.SIGSTOP)
        fleet.pause(seconds)
        fleet.signal(process, signal.SIGCONT)
        return f"{name} stood still for {seconds:.1f} s"

    return play


def _damage(target: str, harm: str) -> Play:
    def play(fleet: LiveFleet, chance: random.Random) -> str:
        _stop_everything(fleet)
        did = "the run was over" if _is_over(fleet) else damage(fleet, target, harm, chance)
        _start_everything(fleet)
        return f"all killed, then {did}"

    return play


def _accidents() -> Iterator[tuple[str, Play]]:
    yield "kill coordinator", _kill_coordinator
    yield "interrupt coordinator", _interrupt_coordinator
    yield "stop coordinator", _pause_one(_coordinator, "coordinator")
    yield "end supervisor", _kill_supervisor
    yield "stop supervisor", _pause_one(_supervisor, "supervisor")
    yield "kill everything", _kill_all
    yield "full disk", _fill_disk
    for kind in ("device", "trainer", "zygote"):
        yield f"kill {kind}", _signal_some(kind, signal.SIGKILL)
        yield f"stop {kind}", _signal_some(kind, signal.SIGSTOP)
    for target, (_, harms) in TARGETS.items():
        for harm in harms:
            yield f"{harm} {target}", _damage(target, harm)


ACCIDENTS: dict[str, Play] = dict(_accidents())
"""Everything that can happen in a case, by name."""
