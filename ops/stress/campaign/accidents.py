"""The accidents of a campaign: what may happen to a fleet, by name.

An accident only harms, and notes whom it ended. Whoever plays the case starts again what has ended (``play.py``).
"""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from fedemu.ops.stress.campaign.damage import TARGETS, damage
from fedemu.ops.stress.campaign.relay import Relay
from fedemu.ops.stress.fleet import LiveFleet, lives

FILE_BYTES = 2_000
"""The largest file that a process may write on a disk that is full."""
KINDS = ("device", "trainer", "zygote", "nursery")


@dataclass(frozen=True)
class Deed:
    """What an accident did, in words. It ``struck`` nothing if there was nothing left to strike."""

    what: str
    struck: bool = True


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
    ended: set[int] = field(default_factory=set)
    """The process ids of coordinators, edges and supervisors that an accident ends, at once or when they hear of it."""

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

    def send(self, to: Sequence[psutil.Process], number: int) -> bool:
        """Send a signal to all of them that still live. False if none does."""
        living = [process for process in to if lives(process)]
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.ended.update(process.pid for process in living)
        if number == signal.SIGTERM and any(process in living for process in (self.coordinator, *self.fleet.edges)):
            # Before it ends, it tells those behind it to stop.
            self.ended.update(process.pid for process in (*self.fleet.edges, *self.fleet.supervisors))
        for process in living:
            self.fleet.signal(process, number)
        return bool(living)

    def end(self, processes: Sequence[psutil.Process], number: int = signal.SIGKILL) -> bool:
        """End coordinators and supervisors by a signal, and wait for it. False if all have ended before."""
        struck = self.send(processes, number)
        for process in processes:
            process.wait(120)
        return struck


Play = Callable[[Scene], Deed]
"""Makes an accident happen, and says what it did."""


def _end_one(of: Callable[[Scene], psutil.Process], name: str, number: int) -> Play:
    def play(scene: Scene) -> Deed:
        struck = scene.end([of(scene)], number)
        return Deed(f"{signal.Signals(number).name} to the {name}", struck)

    return play


def _stop_one(of: Callable[[Scene], psutil.Process], name: str) -> Play:
    def play(scene: Scene) -> Deed:
        process, seconds = of(scene), scene.chance.uniform(0.2, 6.0)
        struck = _still(scene, [process], seconds)
        return Deed(f"the {name} stood still for {seconds:.1f} s", struck)

    return play


def _signal_some(kind: str, number: int) -> Play:
    def play(scene: Scene) -> Deed:
        victims = scene.fleet.processes(kind)
        chosen = scene.some(victims)
        if number == signal.SIGSTOP:
            struck = _still(scene, chosen, scene.chance.uniform(0.2, 4.0))
        else:
            struck = scene.send(chosen, number)
        return Deed(f"{signal.Signals(number).name} to {len(chosen)} of {len(victims)} processes: {kind}", struck)

    return play


def _kill_at_once(scene: Scene) -> Deed:
    there = scene.everything()
    chosen = scene.some(there)
    struck = scene.send(chosen, signal.SIGKILL)
    return Deed(f"SIGKILL to {len(chosen)} of {len(there)} processes at once", struck)


def _stop_at_once(scene: Scene) -> Deed:
    there, seconds = scene.everything(), scene.chance.uniform(0.2, 5.0)
    scene.chance.shuffle(there)
    struck = _still(scene, there, seconds)
    return Deed(f"all {len(there)} processes stood still for {seconds:.1f} s", struck)


def _still(scene: Scene, processes: Sequence[psutil.Process], seconds: float) -> bool:
    """Stop processes for some seconds. False if all have ended before."""
    struck = scene.send(processes, signal.SIGSTOP)
    scene.fleet.pause(seconds)
    scene.send(processes, signal.SIGCONT)
    return struck


def _kill_both(scene: Scene) -> Deed:
    struck = scene.end([scene.coordinator, *scene.fleet.supervisors])
    return Deed("coordinator and machine killed", struck)


def _damage(target: str, harm: str) -> Play:
    def play(scene: Scene) -> Deed:
        _kill_both(scene)
        if scene.is_over():
            return Deed("all killed, then the run was over", struck=False)
        damaged = damage(scene.fleet, target, harm, scene.chance)
        if damaged is None:
            return Deed(f"all killed, then nothing to damage among {target}", struck=False)
        return Deed(f"all killed, then {harm} {damaged.name}")

    return play


def _fill_coordinator(scene: Scene) -> Deed:
    """Let no file of the coordinator grow: of the one that runs, or of one that is started for it."""
    if anew := scene.chance.random() < 0.5:
        scene.end([scene.coordinator])
        scene.start_coordinator()
    struck = _fill(scene, scene.coordinator)
    return Deed(f"the disk of the {'starting' if anew else 'running'} coordinator was full", struck)


def _fill_supervisor(scene: Scene) -> Deed:
    """Let no file of a machine grow: of the one that runs, or of one that is started for it."""
    if anew := scene.chance.random() < 0.5:
        scene.end([scene.supervisor])
        scene.start_devices()
    struck = _fill(scene, scene.supervisor)
    return Deed(f"the disk of the {'starting' if anew else 'running'} machine was full", struck)


def _fill(scene: Scene, process: psutil.Process) -> bool:
    """Let no file of a process and its children grow. False if it has ended before."""
    struck = lives(process)
    scene.full.add(process.pid)
    with suppress(psutil.Error):
        for each in (process, *process.children(recursive=True)):
            with suppress(OSError):
                resource.prlimit(each.pid, resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
    return struck


def _cut(*, all: bool) -> Play:
    def play(scene: Scene) -> Deed:
        assert scene.relay is not None
        cut, there = scene.relay.cut(scene.chance, all=all)
        return Deed(f"{cut} of {there} connections cut", struck=cut > 0)

    return play


def _silence(scene: Scene) -> Deed:
    assert scene.relay is not None
    seconds = scene.chance.uniform(0.2, 6.0)
    scene.relay.silence()
    scene.fleet.pause(seconds)
    scene.relay.resume()
    return Deed(f"the network was silent for {seconds:.1f} s")


def _shut(scene: Scene) -> Deed:
    assert scene.relay is not None
    seconds = scene.chance.uniform(0.2, 6.0)
    scene.relay.shut()
    scene.relay.cut(scene.chance, all=True)
    scene.fleet.pause(seconds)
    scene.relay.resume()
    return Deed(f"the network was down for {seconds:.1f} s")


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
            yield damage_of(target, harm), _damage(target, harm)


def damage_of(target: str, harm: str) -> str:
    """The name of the accident that damages a file of this kind in this way."""
    return f"{harm} {target}"


ACCIDENTS: dict[str, Play] = dict(_accidents())
"""Everything that can happen in a case, by name."""
TO_EDGES: dict[str, Play] = dict(_harms("edge", lambda scene: scene.edge))
"""What happens beside, in cases with an edge."""
TO_JOBS = frozenset(damage_of("jobs", harm) for harm in TARGETS["jobs"][1])
"""What can happen only to runs that have server jobs."""
