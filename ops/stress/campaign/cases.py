"""The cases of a campaign: random accidents at random moments of runs of random methods.

A case is a function of the campaign's seed and its own number, so that a failure can be played again by its number.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from fedemu.ops.stress.campaign.accidents import ACCIDENTS, TO_EDGES, TO_JOBS, Deed

DEVICES = 9
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
TASKS = "stream={kind='classes', tasks=3, rounds_per_task=4}"
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fedavg": ("digits-small+fedavg", ("rounds=16",)),
    "scaffold": ("digits-small+scaffold", ("rounds=16",)),
    "flashback": ("digits-small+public+flashback", ("rounds=12",)),
    "fedntd+wsm": ("digits-small+fedntd+wsm", ("rounds=16",)),
    "mfcl": (
        "digits-tasks+mfcl",
        ("rounds=12", TASKS, "local.epochs=1", "algorithm.options={iterations=60, generator_batch=4}"),
    ),
    "replay": ("digits-tasks+uniform-replay", ("rounds=12", TASKS, "local.epochs=1", "replay.capacity=10")),
}
"""The runs: an experiment and its settings, by a short name."""
WITH_JOBS = frozenset({"flashback", "mfcl"})
"""The methods that have server jobs."""
EDGES = 0.25
"""The share of the cases whose machine is behind an edge, to which something happens, too."""


FLEETS: tuple[tuple[str, ...], ...] = (
    *3 * ((),),
    ("fleet.link='shared'",),
    ("fleet.wake='on-demand'",),
    ("fleet.link='shared'", "fleet.wake='on-demand'"),
)
"""How the fleet of a case is connected, and whether its devices sleep. Half of the cases have the defaults."""
MACHINES: tuple[tuple[str, ...], ...] = (
    *2 * (("--trainers", "2"),),
    ("--trainers", "1", "--per-process", "2"),
    ("--trainers", "3", "--per-process", "4"),
)
"""The options of the machine of a case. Half of the cases have a process for each device."""


@dataclass(frozen=True)
class Accident:
    """The accident of this ``name`` in ``ACCIDENTS`` or ``TO_EDGES``.

    It happens ``pause`` seconds after the end of round ``after``.
    """

    name: str
    after: int
    pause: float


@dataclass(frozen=True)
class Case:
    """One case of a campaign: a method, one to three accidents, and one more if there is an ``edge``.

    ``fleet`` are settings of the fleet, and ``machine`` options of its machine, that change no result.
    """

    seed: int
    number: int
    method: str
    accidents: tuple[Accident, ...]
    edge: bool = False
    fleet: tuple[str, ...] = ()
    machine: tuple[str, ...] = MACHINES[0]

    @property
    def text(self) -> str:
        """The case in one line."""
        fleet = "".join(f" ({setting})" for setting in self.fleet)
        machine = "" if self.machine == MACHINES[0] else f" ({' '.join(self.machine)})"
        through = " through an edge" if self.edge else ""
        happened = ", then ".join(f"{each.name} after round {each.after}" for each in self.accidents)
        return f"{self.method}{fleet}{machine}{through}: {happened}"


@dataclass(frozen=True)
class CaseResult:
    """The result of a case. It passed if there are no complaints. ``done`` has what each accident did, in order."""

    case: Case
    seconds: float
    done: tuple[Deed, ...]
    complaints: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether there are no complaints."""
        return not self.complaints

    @property
    def happened(self) -> frozenset[str]:
        """The names of the accidents that struck something. A run may end before the last one."""
        happened = zip(self.case.accidents, self.done, strict=False)
        return frozenset(accident.name for accident, deed in happened if deed.struck)


def case(seed: int, number: int) -> Case:
    """The case with this number of the campaign with this seed."""
    chance = random.Random(f"{seed}/{number}")
    method = chance.choice(list(METHODS))
    rounds = int(METHODS[method][1][0].removeprefix("rounds="))
    moments = sorted(chance.randrange(1, rounds - 1) for _ in range(chance.choice((1, 1, 2, 3))))
    accidents = [Accident(chance.choice(list(ACCIDENTS)), after, chance.uniform(0.0, 0.1)) for after in moments]
    if method not in WITH_JOBS:
        # With draws of their own, accidents in place of those to server jobs leave all others as they are drawn.
        others, instead = [name for name in ACCIDENTS if name not in TO_JOBS], random.Random(f"{seed}/{number}/instead")
        accidents = [replace(each, name=instead.choice(others)) if each.name in TO_JOBS else each for each in accidents]
    # With draws of their own, edges leave the other cases of a seed as they were without them.
    apart = random.Random(f"{seed}/{number}/edge")
    if edge := apart.random() < EDGES:
        after = apart.randrange(1, rounds - 1)
        accidents.append(Accident(apart.choice(list(TO_EDGES)), after, apart.uniform(0.0, 0.1)))
    accidents.sort(key=lambda accident: accident.after)
    fleet = random.Random(f"{seed}/{number}/fleet").choice(FLEETS)
    machine = random.Random(f"{seed}/{number}/machine").choice(MACHINES)
    return Case(seed, number, method, tuple(accidents), edge, fleet, machine)
