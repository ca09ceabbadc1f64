"""Plays attacks against a live run, and holds its model, its pace, its memory and its processor time against bounds."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from fedemu.ops.keys.store import KeyFolder
from fedemu.ops.running.launch import free_address
from fedemu.ops.stress.fleet import FleetTimeout, LiveFleet, Start, finished_rounds
from fedemu.ops.stress.invariants import ended_as_undisturbed
from fedemu.ops.stress.strangers.attacks import ATTACKS, DEVICES
from fedemu.ops.stress.strangers.refusals import counted, not_refused
from fedemu.ops.stress.undisturbed import Undisturbed
from fedemu.protocol.code.source import interpreter

SETTINGS = (
    f"fleet.devices={DEVICES}",
    "fleet.per_round=8",
    "fleet.start_timeout=120.0",
    "fleet.give_up=90.0",
    "liveness.heartbeat_seconds=1.0",
    "runtime.report=false",
)
SETTLED = 5
"""The rounds of a beginning, whose pace does not count."""
QUIET = 1 / 3
"""Before an attack, the run goes on undisturbed for this part of the attack's time."""
PROBE = 15
"""The rounds of the first undisturbed run, which tells the pace."""
MOST_MEMORY = 500 * 2**20
"""The most bytes that the coordinator may hold more than without an attack. A message without an end comes at a
gigabyte per second within one machine, and is noticed after 64 MiB, or later if the coordinator is busy."""
MOST_PROCESSORS = 1.5
"""The most processors that the coordinator may use more than without an attack: it has one thread that decides, and one
that reads."""
SLOWEST = 0.5
"""The least share of the undisturbed pace."""


@dataclass(frozen=True)
class Calm:
    """An undisturbed run of so many ``rounds``: what it ended with, and the coordinator's part.

    Attacks begin after the round ``begin``. ``pace`` are the rounds per second before it, and ``change`` is the pace
    after it as a multiple of that.
    """

    rounds: int
    begin: int
    end: Undisturbed
    pace: float
    change: float
    memory: int
    processors: float


@dataclass(frozen=True)
class AttackResult:
    """What became of a run that was attacked. ``counted`` tells refusals.

    ``pace`` is that of the rounds during the attack, as a multiple of the pace before it in the same run, divided by
    the ``change`` of the undisturbed run. So the machine, other programs and keys do not count. ``memory`` is in bytes
    beyond that of the undisturbed run; ``processors`` is a mean.
    """

    attacks: tuple[str, ...]
    keys: bool
    seconds: float
    pace: float = 0.0
    memory: int = 0
    processors: float = 0.0
    counted: dict[str, int] = field(default_factory=dict)
    complaints: tuple[str, ...] = ()
    edge: bool = False
    """Whether an edge was attacked, and not the coordinator."""

    @property
    def passed(self) -> bool:
        """Whether there are no complaints."""
        return not self.complaints


def undisturbed(folder: Path, seconds: float, start: Start | None = None) -> Calm:
    """A run that nobody attacks, and that goes on for about ``seconds`` after the moment when attacks would begin."""
    pace = _calm(folder / "probe", PROBE, PROBE, start).pace
    begin = max(SETTLED + 1, SETTLED + math.ceil(pace * seconds * QUIET))
    return _calm(folder / "undisturbed", begin + math.ceil(pace * seconds), begin, start)


def play(
    attacks: Sequence[str],
    calm: Calm,
    folder: Path,
    *,
    keys: bool,
    edge: bool = False,
    noticed: str = "",
    options: Sequence[str] = (),
    seconds: float = 600.0,
    start: Start | None = None,
) -> AttackResult:
    """Play these attacks at once against a run with or without keys, until the run is over.

    With an ``edge``, all devices are behind it, and it is attacked in place of the coordinator. Without one, the
    coordinator has to have counted what ``REFUSED`` names for each attack.
    With ``noticed``, the run stands still until the coordinator has counted something under this name; then neither its
    pace nor its processor time has to be within its bound. ``options`` are those of the machine of the devices. A wait
    that takes longer than ``seconds`` ends with a complaint.
    """
    began = time.monotonic()
    complaints: list[str] = []
    watch = None
    with _fleet(folder, calm.rounds, start, attacks) as fleet, _attacker(folder) as attacker:
        place = free_address() if edge else fleet.address
        known = _start(fleet, folder, keys, place, options)
        try:
            fleet.wait_for_round(calm.begin, seconds)
            watch = _Watch(fleet)
            begun = finished_rounds(fleet.run_directory)
            with _standing_still(fleet) if noticed else nullcontext():
                _begin(attacker, fleet, place, attacks, known)
                fleet.wait_until(lambda: not noticed or noticed in counted(fleet), f"counting {noticed}", seconds)
            code = fleet.wait_for_end(seconds)
            if code:
                complaints.append(f"the coordinator ended with exit {code}: {fleet.tail(4)}")
            if attacker.poll() is not None:
                complaints.append(f"the attacker ended by itself: {(folder / 'attacker.log').read_text()[-500:]}")
        except FleetTimeout as error:
            complaints.append(str(error))
        finally:
            if watch is not None:
                watch.stop()
        used = watch.figures() if watch is not None else (0, 0.0)
        pace = 0.0
        if not complaints:
            complaints += ended_as_undisturbed(fleet.rows(), fleet.summary(), calm.end.digest, calm.end.rows)
            before, after = _paces(fleet, begun)
            pace = after / before / calm.change if before else 0.0
        if not complaints and not edge:
            complaints += not_refused(attacks, keys, counted(fleet))
    victim = "the edge" if edge else "the coordinator"
    memory, processors = max(0, used[0] - calm.memory), used[1]
    if memory > MOST_MEMORY:
        complaints.append(f"{victim} held {memory / 2**20:,.0f} MiB more than without an attack")
    if not noticed and not complaints:
        if pace < SLOWEST:
            complaints.append(f"the run went at {pace:.3f} of its pace")
        if processors > calm.processors + MOST_PROCESSORS:
            complaints.append(f"{victim} used {processors:.1f} processors, undisturbed {calm.processors:.1f}")
    return AttackResult(
        attacks=tuple(attacks),
        keys=keys,
        seconds=time.monotonic() - began,
        pace=pace,
        memory=memory,
        processors=processors,
        counted=counted(fleet),
        complaints=tuple(complaints),
        edge=edge,
    )


class _Watch(threading.Thread):
    """Samples the memory of who is attacked until it is stopped, and the processor time that it uses meanwhile."""

    def __init__(self, fleet: LiveFleet) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process(_attacked(fleet).pid)
        self._done = threading.Event()
        self._memory = 0
        self._samples: list[tuple[float, float]] = []
        self.start()

    def run(self) -> None:
        while True:
            try:
                times = self._process.cpu_times()
                self._samples.append((time.monotonic(), times.user + times.system))
                self._memory = max(self._memory, self._process.memory_info().rss)
            except psutil.Error:
                return
            if self._done.wait(0.1):
                return

    def stop(self) -> None:
        self._done.set()
        self.join(5)

    def figures(self) -> tuple[int, float]:
        """The most resident bytes, and the mean number of processors."""
        if len(self._samples) < 2:
            return self._memory, 0.0
        (began, before), (ended, after) = self._samples[0], self._samples[-1]
        return self._memory, (after - before) / (ended - began)


def _fleet(folder: Path, rounds: int, start: Start | None, attacks: Sequence[str] = ()) -> LiveFleet:
    settings = dict.fromkeys(setting for name in attacks for setting in ATTACKS[name].settings)
    return LiveFleet(
        folder,
        address=free_address(),
        overrides=(*SETTINGS, *settings, f"rounds={rounds}"),
        experiment="digits-small",
        start=start,
    )


def _calm(folder: Path, rounds: int, begin: int, start: Start | None) -> Calm:
    with _fleet(folder, rounds, start) as fleet:
        _start(fleet, folder, keys=False, place=fleet.address)
        fleet.wait_for_round(min(begin, rounds - 1), 600.0)
        watch = _Watch(fleet)
        code = fleet.wait_for_end(600.0)
        watch.stop()
        if code:
            raise FleetTimeout(f"the undisturbed run ended with exit {code}: {fleet.tail(4)}")
        pace, after = _paces(fleet, begin)
        end = Undisturbed.read(fleet.run_directory)
        return Calm(rounds, begin, end, pace, after / pace, *watch.figures())


def _attacked(fleet: LiveFleet) -> psutil.Popen:
    """The edge if there is one, else the coordinator."""
    assert fleet.coordinator is not None
    return fleet.edges[0] if fleet.edges else fleet.coordinator


def _start(
    fleet: LiveFleet, folder: Path, keys: bool, place: str, options: Sequence[str] = ()
) -> dict[str, str] | None:
    """Start coordinator and devices, which connect to ``place``: that of an edge if it is not the coordinator's.

    With keys, the result are keys that a second machine has, which are approved.
    """
    edge = place != fleet.address
    if not keys:
        fleet.start_coordinator()
        if edge:
            fleet.start_edge(place)
        fleet.start_devices(DEVICES, *options, address=place)
        return None
    here, other = KeyFolder(folder / "keys"), KeyFolder(folder / "other-keys")
    server = here.new()
    here.approve("other", other.new())
    fleet.start_coordinator("--keys", str(here.path))
    own = ("--keys", str(here.path), "--server-key", server)
    if edge:
        fleet.start_edge(place, *own)
    fleet.start_devices(DEVICES, *own, *options, address=place)
    public, secret = other.pair()
    return {"public": public, "secret": secret, "server": server}


@contextmanager
def _attacker(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ready to attack. It is killed at the end of the block."""
    with (folder / "attacker.log").open("wb") as log:
        process = subprocess.Popen(
            [*interpreter(), "-m", "fedemu.ops.stress.strangers.attacker"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _standing_still(fleet: LiveFleet) -> Iterator[None]:
    """The supervisor does nothing in this block, so no job reaches a trainer, and no round ends."""
    for process in fleet.supervisors:
        fleet.signal(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in fleet.supervisors:
            fleet.signal(process, signal.SIGCONT)


def _begin(
    attacker: subprocess.Popen[bytes],
    fleet: LiveFleet,
    place: str,
    attacks: Sequence[str],
    keys: dict[str, str] | None,
) -> None:
    """Let the attacks on ``place`` begin."""
    assert attacker.stdin is not None
    said = {"address": place, "attacks": list(attacks), "lease": _lease(fleet), "keys": keys}
    attacker.stdin.write(json.dumps(said).encode() + b"\n")
    attacker.stdin.flush()


def _lease(fleet: LiveFleet) -> str:
    """The lease of the fleet, as somebody learns it who listens to a run without keys."""
    line = (fleet.run_directory / "checkpoint" / "leases.jsonl").read_text().splitlines()[0]
    return str(json.loads(line[: line.rindex("}") + 1])["grant"])


def _paces(fleet: LiveFleet, begin: int) -> tuple[float, float]:
    """Rounds per second of real time up to the round ``begin``, without those of a beginning, and after it.

    0 where there are no such rounds.
    """
    before: list[float] = []
    after: list[float] = []
    for row in fleet.rows():
        if row.round > SETTLED:
            (before if row.round <= begin else after).append(row.round_seconds or 0.0)
    return _per_second(before), _per_second(after)


def _per_second(seconds: Sequence[float]) -> float:
    return len(seconds) / max(1e-9, sum(seconds))


def names(wanted: Sequence[str], keys: bool) -> list[str]:
    """The attacks of these names, all if there are none, that are to be played against a run with or without keys."""
    chosen = [ATTACKS[name] for name in dict.fromkeys(wanted or ATTACKS)]
    return [attack.name for attack in chosen if keys or not attack.stopped_by_keys]
