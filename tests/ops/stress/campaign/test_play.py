"""What a case of a campaign complains of, and what its accidents note. Shells take the place of the fleet."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from fedemu.coordinator.record.json_lines import plain
from fedemu.coordinator.record.summary import summarize
from fedemu.ops.stress.campaign.accidents import ACCIDENTS, TO_EDGES, TO_JOBS, Deed, Scene
from fedemu.ops.stress.campaign.cases import WITH_JOBS, Accident, Case, CaseResult, case
from fedemu.ops.stress.campaign.play import play_case
from fedemu.ops.stress.fleet import LiveFleet
from fedemu.ops.stress.undisturbed import Undisturbed
from fedemu.ops.stress.warm import WarmStart

CALM = Undisturbed("a" * 64, ())
TRACEBACK = "Traceback (most recent call last):\n"


class Shells(WarmStart):
    """Starts a line of the shell in place of each command, by the first word of the command."""

    def __init__(self, lines: Mapping[str, str]) -> None:
        super().__init__()
        self._lines = lines

    def start(self, words: Sequence[str], log: Path, *_: object) -> psutil.Popen:  # type: ignore[override]
        log.touch()
        return psutil.Popen(["sh", "-c", self._lines[words[0]]])


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A fleet of an edge, a coordinator and a machine that do nothing."""
    lines = dict.fromkeys(("coordinator", "edge", "device"), "exec sleep 60")
    with LiveFleet(tmp_path, address="tcp://127.0.0.1:1", start=Shells(lines).start) as fleet:
        fleet.start_edge("tcp://127.0.0.1:2")
        fleet.start_devices(1)
        fleet.start_coordinator()
        yield Scene(fleet, None, random.Random(1), lambda: None, lambda: None, lambda: False, set())


@pytest.mark.parametrize("code", [0, 4])
def test_an_end_that_no_accident_caused_is_a_complaint(code: int, tmp_path: Path) -> None:
    shells = Shells({"coordinator": "exec sleep 60", "device": f"exit {code}"})
    result = play_case(Case(1, 0, "fedavg", ()), tmp_path, CALM, shells)
    (complaint,) = result.complaints
    assert complaint.startswith(f"the supervisor ended with exit {code}: ")


def test_a_traceback_is_found_in_every_log_of_the_run_and_of_the_devices(tmp_path: Path) -> None:
    summary = summarize((), name="x", outcome="completed", seed=1, model_digest=CALM.digest, data_digest="")
    for name, text in (
        ("run/summary.json", json.dumps(plain(asdict(summary)))),
        ("run/logs/coordinator.log", TRACEBACK),
        ("state/0/logs/devices.log", "all is well\n"),
        ("state/0/logs/device-3.log", f"a line before it\n{TRACEBACK}"),
        ("run/logs/devices.out", TRACEBACK),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shells = Shells({"coordinator": "exit 0", "device": "exit 0"})
    assert play_case(Case(1, 0, "fedavg", ()), tmp_path, CALM, shells).complaints == (
        "run/logs/coordinator.log holds a traceback",
        "run/logs/devices.out holds a traceback",
        "state/0/logs/device-3.log holds a traceback",
    )


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("kill coordinator", {"coordinator"}),
        ("interrupt coordinator", {"coordinator", "edge", "supervisor"}),
        ("kill edge", {"edge"}),
        ("interrupt edge", {"edge", "supervisor"}),
        ("interrupt supervisor", {"supervisor"}),
        ("kill everything", {"coordinator", "supervisor"}),
        ("stop all at once", set()),
    ],
)
def test_an_accident_notes_whom_it_ends_and_who_is_told_to_stop(name: str, ends: set[str], scene: Scene) -> None:
    kinds = {scene.coordinator.pid: "coordinator", scene.edge.pid: "edge", scene.supervisor.pid: "supervisor"}
    assert {**ACCIDENTS, **TO_EDGES}[name](scene).struck
    assert {kinds[pid] for pid in scene.ended} == ends


def test_an_accident_that_finds_nothing_has_not_happened(scene: Scene) -> None:
    assert ACCIDENTS["interrupt nursery"](scene) == Deed("SIGTERM to 0 of 0 processes: nursery", struck=False)
    assert ACCIDENTS["cut jobs"](scene) == Deed("all killed, then nothing to damage among jobs", struck=False)
    assert ACCIDENTS["kill coordinator"](scene) == Deed("SIGKILL to the coordinator", struck=False), "it has ended"
    names = ("kill nursery", "kill device", "kill nursery", "kill zygote")
    played = Case(1, 0, "fedavg", tuple(Accident(name, 1, 0.0) for name in names))
    done = (Deed("none", struck=False), Deed("none", struck=False), Deed("one"))
    assert CaseResult(played, 1.0, done, ()).happened == {"kill nursery"}


def test_jobs_are_damaged_only_in_runs_that_have_them() -> None:
    cases = [case(1, number) for number in range(600)]
    damaged = {each.method for each in cases if TO_JOBS & {accident.name for accident in each.accidents}}
    assert damaged == WITH_JOBS
