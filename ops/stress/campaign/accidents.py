"""The accidents of a campaign: what may happen to a fleet, by name.

An accident only harms. Whoever plays the case starts again what has ended (``play.py``).
"""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from fedemu.ops.stress.campaign.damage import TARGETS, damage
from fedemu.ops.stress.campaign.relay import Relay
from fedemu.ops.stress.fleet import LiveFleet

FILE_BYTES = 2_000
"""The largest file that a process may write on a disk that is full."""
KINDS = ("device", "trainer", "zygote", "nursery")


@dataclass
class Scene:
    """Where an accident happens. ``relay`` is between the devices and the coordinator, in cases that need one."""

    fleet: LiveFleet
    relay: Relay | None
    chance: random.Random
    start_coordinator: Callable[[], None]
    start_devices: Callable[[], None]
    is_over: Callable[[], bool]
    full: set[int]
    """The process ids of coordinators and supervisors whose disk is full."""

    @property
    def coordinator(self) -> psutil.Process:
        """The coordinator, which may have ended."""
        assert self.fleet.coordinator is not None
        return self.fleet.coordinator

    @property
    def supervisor(self) -> psutil.Process:
        """The youngest supervisor, which may have ended."""
        return self.fleet.supervisors[-1]

    @property
    def edge(self) -> psutil.Process:
        """The youngest edge, in cases that have one. It may have ended."""
        return self.fleet.edges[-1]

    def everything(self) -> list[psutil.Process]:
        """All processes of the fleet that live."""
        kinds = [process for kind in KINDS for process in self.fleet.processes(kind)]
        return [self.coordinator, *self.fleet.edges, *self.fleet.supervisors, *kinds]

    def some(self, of: Sequence[psutil.Process]) -> list[psutil.Process]:
        """At least one of these, if there is one."""
        return self.chance.sample(of, self.chance.randint(1, len(of))) if of else []

    def send(self, to: Sequence[psutil.Process], number: int) -> None:
        """Send a signal to all of them that still live."""
        for process in to:
            self.fleet.signal(process, number)

    def end(self, processes: Sequence[psutil.Process], number: int = signal.SIGKILL) -> None:
        """End coordinators and supervisors by a signal, and wait for it."""
        self.send(processes, number)
        for process in processes:
            process.wait(120)


Play = Callable[[Scene], str]
"""Makes an accident happen, and says what it did."""


def _end_one(of: Callable[[Scene], psutil.Process], name: str, number: int) -> Play:
    def play(scene: Scene) -> str:
        scene.end([of(scene)], number)
        return f"{signal.Signals(number).name} to the {name}"

    return play


def _stop_one(of: Callable[[Scene], psutil.Process], name: str) -> Play:
    def play(scene: Scene) -> str:
        process, seconds = of(scene), scene.chance.uniform(0.2, 6.0)
        _still(scene, [process], seconds)
        return f"the {name} stood still for {seconds:.1f} s"

    return play


def _signal_some(kind: str, number: int) -> Play:
    def play(scene: Scene) -> str:
        victims = scene.fleet.processes(kind)
        struck = scene.some(victims)
        if number == signal.SIGSTOP:
            _still(scene, struck, scene.chance.uniform(0.2, 4.0))
        else:
            scene.send(struck, number)
        return f"{signal.Signals(number).name} to {len(struck)} of {len(victims)} processes: {kind}"

    return play


def _kill_at_once(scene: Scene) -> str:
    there = scene.everything()
    struck = scene.some(there)
    scene.send(struck, signal.SIGKILL)
    return f"SIGKILL to {len(struck)} of {len(there)} processes at once"


def _stop_at_once(scene: Scene) -> str:
    struck, seconds = scene.everything(), scene.chance.uniform(0.2, 5.0)
    scene.chance.shuffle(struck)
    _still(scene, struck, seconds)
    return f"all {len(struck)} processes stood still for {seconds:.1f} s"


def _still(scene: Scene, processes: Sequence[psutil.Process], seconds: float) -> None:
    scene.send(processes, signal.SIGSTOP)
    scene.fleet.pause(seconds)
    scene.send(processes, signal.SIGCONT)


def _kill_both(scene: Scene) -> str:
    scene.end([scene.coordinator, *scene.fleet.supervisors])
    return "coordinator and machine killed"


def _damage(target: str, harm: str) -> Play:
    def play(scene: Scene) -> str:
        _kill_both(scene)
        did = "the run was over" if scene.is_over() else damage(scene.fleet, target, harm, scene.chance)
        return f"all killed, then {did}"

    return play


def _fill_coordinator(scene: Scene) -> str:
    """Let no file of the coordinator grow: of the one that runs, or of one that is started for it."""
    if anew := scene.chance.random() < 0.5:
        scene.end([scene.coordinator])
        scene.start_coordinator()
    _fill(scene, scene.coordinator)
    return f"the disk of the {'starting' if anew else 'running'} coordinator was full"


def _fill_supervisor(scene: Scene) -> str:
    """Let no file of a machine grow: of the one that runs, or of one that is started for it."""
    if anew := scene.chance.random() < 0.5:
        scene.end([scene.supervisor])
        scene.start_devices()
    _fill(scene, scene.supervisor)
    return f"the disk of the {'starting' if anew else 'running'} machine was full"


def _fill(scene: Scene, process: psutil.Process) -> None:
    scene.full.add(process.pid)
    with suppress(psutil.Error):
        for each in (process, *process.children(recursive=True)):
            with suppress(OSError):
                resource.prlimit(each.pid, resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))


def _cut(*, all: bool) -> Play:
    def play(scene: Scene) -> str:
        assert scene.relay is not None
        cut, there = scene.relay.cut(scene.chance, all=all)
        return f"{cut} of {there} connections cut"

    return play


def _silence(scene: Scene) -> str:
    assert scene.relay is not None
    seconds = scene.chance.uniform(0.2, 6.0)
    scene.relay.silence()
    scene.fleet.pause(seconds)
    scene.relay.resume()
    return f"the network was silent for {seconds:.1f} s"


def _shut(scene: Scene) -> str:
    assert scene.relay is not None
    seconds = scene.chance.uniform(0.2, 6.0)
    scene.relay.shut()
    scene.relay.cut(scene.chance, all=True)
    scene.fleet.pause(seconds)
    scene.relay.resume()
    return f"the network was down for {seconds:.1f} s"


NETWORK: dict[str, Play] = {
    "cut some connections": _cut(all=False),
    "cut all connections": _cut(all=True),
    "silent network": _silence,
    "network down": _shut,
}
"""The accidents that need a relay."""


def _harms(name: str, of: Callable[[Scene], psutil.Process]) -> Iterator[tuple[str, Play]]:
    """What may happen to a coordinator, an edge or a supervisor."""
    yield f"kill {name}", _end_one(of, name, signal.SIGKILL)
    yield f"interrupt {name}", _end_one(of, name, signal.SIGTERM)
    yield f"stop {name}", _stop_one(of, name)


def _accidents() -> Iterator[tuple[str, Play]]:
    yield from _harms("coordinator", lambda scene: scene.coordinator)
    yield from _harms("supervisor", lambda scene: scene.supervisor)
    for kind in KINDS:
        yield f"kill {kind}", _signal_some(kind, signal.SIGKILL)
        yield f"interrupt {kind}", _signal_some(kind, signal.SIGTERM)
        yield f"stop {kind}", _signal_some(kind, signal.SIGSTOP)
    yield "kill everything", _kill_both
    yield "kill some at once", _kill_at_once
    yield "stop all at once", _stop_at_once
    yield "full disk of the coordinator", _fill_coordinator
    yield "full disk of the machine", _fill_supervisor
    yield from NETWORK.items()
    for target, (_, harms) in TARGETS.items():
        for harm in harms:
            yield f"{harm} {target}", _damage(target, harm)


ACCIDENTS: dict[str, Play] = dict(_accidents())
"""Everything that can happen in a case, by name."""
TO_EDGES: dict[str, Play] = dict(_harms("edge", lambda scene: scene.edge))
"""What happens beside, in cases with an edge."""
