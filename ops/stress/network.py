"""``fedemu stress network``: a coordinator, two machines and perhaps an edge, with bad wires between them.

No model and no row may change.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.figures import span
from fedemu.ops.running.folder import claim
from fedemu.ops.running.together import run_together
from fedemu.ops.stress.fleet import FleetTimeout, LiveFleet, start_interpreter
from fedemu.ops.stress.invariants import ended_as_undisturbed
from fedemu.ops.stress.undisturbed import Undisturbed
from fedemu.ops.stress.warm import WarmStart
from fedemu.ops.stress.wires import Quality, Wires
from fedemu.ops.terminal import say

COORDINATOR: Final = "coordinator"
EDGE: Final = "edge"
MACHINES: Final = ("first", "second")
PORT: Final = 5577
LONGEST_SECONDS: Final = 900.0


@dataclass(frozen=True)
class Weather:
    """What happens to the wires: their quality, and who is cut off after round 2, for how many seconds.

    With an ``edge`` both machines reach the coordinator through it. Then a coordinator is cut off at the wire above the
    edge, and a machine at its wire below the edge.
    """

    name: str
    what: str
    quality: Quality
    cut: tuple[str, ...] = ()
    seconds: float = 0.0
    edge: bool = False


WEATHERS: Final = (
    Weather("far", "100 ms from one machine to the other", Quality(delay=0.1)),
    Weather("lossy", "20 ms, and 2 % of all packets are lost", Quality(delay=0.02, loss=0.02)),
    Weather("narrow", "20 ms, and 4 Mbit/s from each machine", Quality(delay=0.02, rate=5e5)),
    Weather("partition", "one machine is cut off for 15 s", Quality(delay=0.02), ("first",), 15.0),
    Weather("split", "the coordinator is cut off for 15 s", Quality(delay=0.02), (COORDINATOR,), 15.0),
    Weather("below-edge", "a machine is cut off from its edge for 15 s", Quality(0.02), ("first",), 15.0, edge=True),
    Weather("above-edge", "an edge is cut off upwards for 15 s", Quality(0.02), (COORDINATOR,), 15.0, edge=True),
)


@dataclass(frozen=True)
class WeatherResult:
    """How a run in a weather ended. ``complaint`` is empty if it passed."""

    name: str
    seconds: float
    digest: str
    complaint: str

    @property
    def passed(self) -> bool:
        """Whether the run ended with the model and the rows of the run alone."""
        return not self.complaint


def play_network(
    folder: Path, weathers: Sequence[Weather] = WEATHERS, rounds: int = 20, warm: WarmStart | None = None
) -> Iterator[WeatherResult]:
    """Play a run alone, and then one in each weather, whose result comes as it ends. People read on stderr how it goes.

    ``warm`` starts the commands, in place of an interpreter for each. Raises ConfigurationError if this user may not
    make network namespaces.
    """
    Wires(MACHINES, Quality()).close()
    settings = [f"rounds={rounds}", "runtime.report=false", "runtime.log_level=warning"]
    experiment, runtime = load_experiment("digits-small", [*settings, "runtime.transport=memory"], {})
    say("a run alone, for comparison ...")
    alone = claim(experiment, folder / "alone")
    run_together(alone, experiment, runtime, new=True, print_summary=False)
    expected = Undisturbed.read(alone)
    for weather in weathers:
        say(f"{weather.name}: {weather.what} ...")
        result = play(folder / weather.name, weather, settings, expected, warm)
        why = "" if result.passed else f": {result.complaint}"
        say(f"  {'passed' if result.passed else 'FAILED'} in {span(result.seconds)}{why}")
        yield result


def play(
    folder: Path, weather: Weather, settings: Sequence[str], expected: Undisturbed, warm: WarmStart | None = None
) -> WeatherResult:
    """Play one run, and compare its model and its rows with the expected ones."""
    began = time.monotonic()
    with _fleet(folder, weather.quality, settings, warm) as (fleet, wires):
        fleet.start_coordinator("--insecure")
        place = f"tcp://{wires.addresses[EDGE]}:{PORT}"
        if weather.edge:
            fleet.start_edge(place, "--insecure")
        for name in MACHINES:
            fleet.start_devices(10, "--trainers", "1", state=name, address=place if weather.edge else None)
        try:
            if weather.cut:
                fleet.wait_for_round(2, LONGEST_SECONDS)
                wires.cut(weather.cut)
                fleet.pause(weather.seconds)
                wires.heal()
            code = fleet.wait_for_end(LONGEST_SECONDS)
        except FleetTimeout as error:
            return WeatherResult(weather.name, time.monotonic() - began, "", str(error))
        if code:
            return WeatherResult(weather.name, time.monotonic() - began, "", f"exit code {code}\n{fleet.tail()}")
        summary = fleet.summary()
    complaint = "; ".join(ended_as_undisturbed(fleet.rows(), summary, expected.digest, expected.rows))
    return WeatherResult(weather.name, time.monotonic() - began, summary["model_digest"], complaint)


@contextmanager
def _fleet(
    folder: Path, quality: Quality, settings: Sequence[str], warm: WarmStart | None
) -> Iterator[tuple[LiveFleet, Wires]]:
    """A fleet whose coordinator, machines and edges are in namespaces of their own."""
    with closing(Wires([COORDINATOR, *MACHINES, EDGE], quality)) as wires:

        def start(words: Sequence[str], log: Path, environment: Mapping[str, str]) -> psutil.Popen:
            name = Path(words[words.index("--state") + 1]).name if words[0] == "device" else words[0]
            if warm is not None:
                return warm.start(words, log, environment, network=wires.keeper(name))
            return start_interpreter(words, log, environment, wires.inside(name))

        address = f"tcp://{wires.addresses[COORDINATOR]}:{PORT}"
        with LiveFleet(folder, address=address, overrides=settings, experiment="digits-small", start=start) as fleet:
            yield fleet, wires
