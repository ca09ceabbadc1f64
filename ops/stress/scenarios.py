"""The scenarios: the settings of a fleet, what disturbs the fleet, and what the run must show at its end.

Planned failures (``faults``, ``availability``, ``profile``) are part of the experiment, and the outcomes show them.
Unplanned ones come from outside and must leave no trace. After both, the model and the rows have to be those of a run
in one process, which nothing disturbs.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import zmq

from fedemu.coordinator.record.row import Row
from fedemu.ops.stress.fleet import LiveFleet
from fedemu.ops.stress.garbage import broken_message
from fedemu.ops.stress.training import kill_job, wait_for_training

Disturb = Callable[[LiveFleet, random.Random], None]
"""Disturbs a fleet while its run goes on. The random source decides which processes are struck, and when."""


@dataclass(frozen=True)
class Scale:
    """The size of a scenario: its experiment, its number of devices, its rounds and its disturbances."""

    experiment: str
    devices: int
    overrides: tuple[str, ...]
    rounds: int
    disturbances: int
    """How often the fleet is disturbed."""

    @property
    def settings(self) -> tuple[str, ...]:
        """The overrides of this scale, as ``key=value``."""
        return (f"rounds={self.rounds}", *self.overrides)


SHORT = Scale(
    experiment="digits-small",
    devices=20,
    overrides=(
        "faults.crash_rate=0.08",
        "fleet.start_timeout=120.0",
        "fleet.give_up=90.0",
        "liveness.heartbeat_seconds=1.0",
    ),
    rounds=16,
    disturbances=2,
)
"""20 devices and 16 rounds. The tests play this scale."""
FULL = Scale(
    experiment="digits",
    devices=300,
    overrides=("fleet.start_timeout=120.0", "fleet.give_up=90.0", "liveness.heartbeat_seconds=1.0"),
    rounds=120,
    disturbances=5,
)
"""300 devices and 120 rounds: what ``fedemu stress`` plays."""


@dataclass(frozen=True)
class Scenario:
    """One scenario. ``what`` describes it in a few words.

    ``shows`` checks the rows for the outcomes that the failures must have caused. ``undone`` are overrides of the run
    in one process, with which the scenario is compared: they take back what may change neither the model nor a row.
    """

    name: str
    what: str
    overrides: tuple[str, ...] = ()
    disturb: Disturb | None = None
    shows: Callable[[Sequence[Row]], list[str]] | None = None
    undone: tuple[str, ...] = ()

    def settings(self, scale: Scale) -> tuple[str, ...]:
        """The overrides of ``scale``, followed by those of the scenario, which win."""
        return (*scale.settings, *self.overrides)

    def settings_alone(self, scale: Scale) -> tuple[str, ...]:
        """The overrides of the run in one process with which the scenario is compared."""
        return (*self.settings(scale), *self.undone, "runtime.report=false")


def _some_device_was(outcome: str) -> Callable[[Sequence[Row]], list[str]]:
    """A check that some device ended in this outcome."""

    def some(rows: Sequence[Row]) -> list[str]:
        if any(row.outcomes[outcome] for row in rows):
            return []
        return [f"no device was {outcome}, though the scenario is made for it"]

    return some


def _strikes(fleet: LiveFleet, chance: random.Random, strike: Disturb, *, scale: Scale) -> None:
    """Strike again and again, each time a little after one of some rounds spread over the run."""
    for number in range(scale.disturbances):
        fleet.wait_for_round(1 + (number + 1) * (scale.rounds - 4) // (scale.disturbances + 1))
        fleet.pause(chance.uniform(0.0, 0.05))
        strike(fleet, chance)


def _kill(fleet: LiveFleet, chance: random.Random, kind: str, share: float) -> None:
    """Kill a share of the processes of one kind, one at least. Raises FleetTimeout if there is none."""
    victims: list[psutil.Process] = []

    def found() -> bool:
        victims[:] = fleet.processes(kind)
        return bool(victims)

    fleet.wait_until(found, f"the arrival of a {kind} to kill", 30)
    for process in chance.sample(victims, max(1, round(share * len(victims)))):
        fleet.signal(process, signal.SIGKILL)


def _kill_coordinator(fleet: LiveFleet) -> None:
    """Kill the coordinator and resume its run."""
    assert fleet.coordinator is not None
    fleet.signal(fleet.coordinator, signal.SIGKILL)
    fleet.coordinator.wait(10)
    fleet.start_coordinator()


def _kill_supervisor(fleet: LiveFleet, devices: int) -> None:
    """Kill a supervisor and start the same machine again."""
    supervisor = fleet.supervisors.pop()
    fleet.signal(supervisor, signal.SIGKILL)
    supervisor.wait(10)
    fleet.start_devices(devices)


def _strike_trainings(fleet: LiveFleet, chance: random.Random, rounds_per_task: int, tasks: int) -> None:
    """At the beginning of each task but the first, kill the generator's training, some devices, and the coordinator."""
    for task in range(1, tasks):
        if process := wait_for_training(fleet, task * rounds_per_task + 1):
            kill_job(fleet, process)
        _kill(fleet, chance, "device", 0.34)
        _kill_coordinator(fleet)


def _throw_garbage(fleet: LiveFleet, chance: random.Random) -> None:
    """Send a few hundred broken messages of many kinds to the coordinator's ROUTER."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 1000
        dealer.connect(fleet.address)
        for _ in range(300):
            dealer.send_multipart(broken_message(chance))


def scenarios(scale: Scale) -> dict[str, Scenario]:
    """All scenarios at one scale, by name."""

    def often(strike: Disturb) -> Disturb:
        return lambda fleet, chance: _strikes(fleet, chance, strike, scale=scale)

    tasks = 1 + scale.disturbances
    rounds_per_task = scale.rounds // tasks
    every = [
        Scenario(
            "mass-crash",
            "a third of the devices that are asked crash in every round (SIGKILL)",
            ("faults.crash_rate=0.33", "fleet.quorum=0.2", "fleet.attempts=10"),
            shows=_some_device_was("dropped"),
        ),
        Scenario(
            "flapping",
            "devices come and go by the minute",
            (
                "availability={kind='exponential', mean_online=60.0, mean_offline=30.0}",
                "fleet.quorum=0.2",
                "fleet.attempts=10",
                "fleet.deadline=30.0",
                "profile.seconds_per_sample=0.2",
            ),
            shows=_some_device_was("dropped"),
        ),
        Scenario(
            "slow-uploads",
            "many devices take longer to send than the deadline allows",
            (
                "profile.up_kbps={kind='lognormal', median=6.0, sigma=1.0}",
                "fleet.deadline=40.0",
                "fleet.quorum=0.1",
                "fleet.attempts=10",
            ),
            shows=_some_device_was("late"),
        ),
        Scenario(
            "half-open",
            "devices fall silent on open connections",
            ("faults.silence_rate=0.1", "liveness.heartbeat_seconds=0.5", "liveness.patience=3"),
            shows=_some_device_was("dropped"),
        ),
        Scenario(
            "corrupt-replies",
            "replies have NaN or a wrong shape, are cut off, or come twice",
            ("faults.corrupt_rate=0.15", "faults.duplicate_rate=0.15", "fleet.quorum=0.2"),
            shows=_some_device_was("rejected"),
            undone=("faults.duplicate_rate=0.0",),
        ),
        Scenario(
            name="coordinator-restarts",
            what="the coordinator is killed and resumed, again and again",
            disturb=often(lambda fleet, _: _kill_coordinator(fleet)),
        ),
        Scenario(
            name="trainer-kills",
            what="all trainers are killed in the middle of a round",
            disturb=often(lambda fleet, chance: _kill(fleet, chance, "trainer", 1.0)),
        ),
        Scenario(
            name="device-kills",
            what="a third of the device processes are killed from outside",
            disturb=often(lambda fleet, chance: _kill(fleet, chance, "device", 0.34)),
        ),
        Scenario(
            name="zygote-kills",
            what="the zygote is killed, and all device processes with it",
            disturb=often(lambda fleet, chance: _kill(fleet, chance, "zygote", 1.0)),
        ),
        Scenario(
            name="supervisor-restarts",
            what="the whole machine goes away and comes back",
            disturb=often(lambda fleet, _: _kill_supervisor(fleet, scale.devices)),
        ),
        Scenario(
            name="garbage",
            what="a stranger sends garbage to the coordinator",
            disturb=often(_throw_garbage),
        ),
        Scenario(
            name="training-kills",
            what="the training of a generator and the coordinator are killed as new classes come",
            overrides=(
                "algorithm.name='mfcl'",
                "algorithm.options={iterations=400, generator_batch=2, synthetic_batch=4}",
                f"stream={{kind='classes', tasks={tasks}, rounds_per_task={rounds_per_task}}}",
            ),
            disturb=lambda fleet, chance: _strike_trainings(fleet, chance, rounds_per_task, tasks),
        ),
    ]
    return {scenario.name: scenario for scenario in every}
