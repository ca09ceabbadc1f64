"""Kills the coordinator, the edge or the machine of a run at random moments, and measures when its rounds go on."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from fedemu.ops.running.launch import free_address
from fedemu.ops.stress.fleet import FleetTimeout, LiveFleet, send_home
from fedemu.ops.stress.invariants import ended_as_undisturbed
from fedemu.ops.stress.undisturbed import undisturbed
from fedemu.ops.stress.warm import WarmStart

EXPERIMENT: Final = "digits-small+fedntd+wsm"
DEVICES: Final = 12
SETTINGS: Final = (
    f"fleet.devices={DEVICES}",
    "fleet.per_round=5",
    "fleet.start_timeout=120.0",
    "fleet.give_up=90.0",
    "liveness.heartbeat_seconds=1.0",
    "evaluate.every=1",
    "runtime.report=false",
)
FLEETS: Final[Mapping[str, tuple[str, ...]]] = {
    "as by default": (),
    "shared connection": ("fleet.link='shared'",),
    "devices sleep": ("fleet.wake='on-demand'",),
    "both": ("fleet.link='shared'", "fleet.wake='on-demand'"),
}
"""How the fleets are connected, and whether their devices sleep. None of it changes the model."""
VICTIMS: Final = ("coordinator", "edge", "machine")
ROUNDS_AFTER: Final = 2
"""A run has gone on when so many rounds are over since. The first of them may have been nearly over before."""
MOST_SECONDS: Final = 60.0
"""A run that has not gone on after so long has failed."""
MOST_PAUSE: Final = 0.5
"""The longest time between the moment at which a run has gone on and the next kill."""


@dataclass(frozen=True)
class Kill:
    """One kill: what was killed, and the seconds until the run had gone on."""

    victim: str
    seconds: float


@dataclass(frozen=True)
class RecoveryResult:
    """The kills in the run of one fleet of ``FLEETS``. It passed if there are no complaints."""

    fleet: str
    rounds: int
    kills: tuple[Kill, ...]
    complaints: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether there are no complaints."""
        return not self.complaints

    def seconds_of(self, victim: str) -> list[float]:
        """The times of all kills of one kind, in seconds and ascending."""
        return sorted(kill.seconds for kill in self.kills if kill.victim == victim)


def recover(
    name: str,
    folder: Path,
    seconds: float,
    chance: random.Random,
    warm: WarmStart,
    *,
    victims: Sequence[str] = VICTIMS,
    options: Sequence[str] = (),
    most_seconds: float = MOST_SECONDS,
    told: Callable[[Kill], None] = lambda kill: None,
) -> RecoveryResult:
    """Play the run of the fleet ``name`` in ``folder``, and after its first round kill ``victims`` for some seconds.

    Nothing may be lost: at last the model and the rows are compared with those of a run of as many rounds that nothing
    disturbs. Every round is evaluated, as the last one of a run always is. ``options`` are those of the machine.
    """
    kills: list[Kill] = []
    settings = (*SETTINGS, *FLEETS[name])
    overrides = (*settings, "rounds=1000000")
    complaints: list[str] = []
    with LiveFleet(
        folder, address=free_address(), overrides=overrides, experiment=EXPERIMENT, start=warm.start
    ) as fleet:
        place = free_address()
        fleet.start_edge(place)
        fleet.start_devices(DEVICES, *options, address=place)
        fleet.start_coordinator()
        try:
            fleet.wait_for_round(1)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                fleet.pause(chance.uniform(0.0, MOST_PAUSE))
                kills.append(_kill(fleet, place, chance.choice(victims), options, most_seconds))
                told(kills[-1])
            complaints += send_home(fleet)
        except (FleetTimeout, psutil.TimeoutExpired) as error:
            complaints.append(str(error))
    complaints += fleet.leftovers()
    if not complaints:
        complaints += _examine(fleet, settings, folder / "undisturbed", warm)
    return RecoveryResult(name, fleet.rounds(), tuple(kills), tuple(complaints))


def _kill(fleet: LiveFleet, place: str, victim: str, options: Sequence[str], most_seconds: float) -> Kill:
    """Kill a process and start it again. Raises FleetTimeout if the run does not go on."""
    process = {"coordinator": fleet.coordinator, "edge": fleet.edges[-1], "machine": fleet.supervisors[-1]}[victim]
    assert process is not None
    rounds, began = fleet.rounds(), time.monotonic()
    fleet.signal(process, signal.SIGKILL)
    process.wait(10)
    match victim:
        case "coordinator":
            fleet.start_coordinator()
        case "edge":
            fleet.edges.remove(process)
            fleet.start_edge(place)
        case _:
            fleet.supervisors.remove(process)
            fleet.start_devices(DEVICES, *options, address=place)
    what = f"round {rounds + ROUNDS_AFTER}, after the {victim} was killed,"
    fleet.wait_until(lambda: fleet.rounds() >= rounds + ROUNDS_AFTER, what, most_seconds)
    return Kill(victim, time.monotonic() - began)


def _examine(fleet: LiveFleet, settings: Sequence[str], directory: Path, warm: WarmStart) -> list[str]:
    """What the files of the run show, compared with an undisturbed run of as many rounds."""
    rows = fleet.rows()
    calm = undisturbed(EXPERIMENT, (*settings, f"rounds={len(rows)}"), directory, warm.start)
    return ended_as_undisturbed(rows, fleet.summary(), calm.digest, calm.rows, outcome="interrupted")
