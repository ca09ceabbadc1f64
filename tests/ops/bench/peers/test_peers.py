"""The comparison with other simulators, without them: nothing is installed here."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedemu.ops.bench.measuring.measure import Effort
from fedemu.ops.bench.peers import peers
from fedemu.ops.bench.peers.environments import Absent, last_words
from fedemu.ops.bench.peers.observe import lines_of, observe
from fedemu.ops.bench.peers.work import DIGITS

TINY = Effort(pairs=1, scale=0.001)
SIDE = """
import json, sys
for round in range(3):
    open(sys.argv[1], "a").write("\\n")
    round or sys.stdin.readline()
sys.stdin.read()
print("a library says something", json.dumps({"accuracy": 0.5}), sep="\\n")
"""


@pytest.mark.usefixtures("forks")
def test_a_plain_loop_does_the_work_and_a_simulator_that_does_not_install_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(name: str, folder: Path) -> tuple[Path, str]:
        raise Absent("No matching distribution found")

    monkeypatch.setattr(peers, "environment", refuse)
    told: list[str] = []
    before, comparison = peers.compare(TINY, tmp_path, told.append, ["plain", "fedjax"], (DIGITS,))
    assert before.standings == []
    (standing,) = comparison.standings
    assert (standing.work, standing.side) == (DIGITS.title, "a plain PyTorch loop")
    assert standing.updates_per_second.least > 0
    assert standing.peak_megabytes.least > 50
    assert standing.first_round.least > 0
    assert standing.accuracy is not None
    assert 0.0 < standing.accuracy <= 1.0
    assert comparison.absent == {"FedJAX": "No matching distribution found"}
    assert told == [
        f"peers: the environment of FedJAX in {tmp_path / 'fedjax'}",
        f"peers: {DIGITS.title}: a plain PyTorch loop",
    ]
    shown = io.StringIO()
    Console(file=shown, width=150).print(comparison)
    assert "left out: FedJAX: No matching distribution found" in shown.getvalue()
    assert json.loads(json.dumps(comparison.table()))["absent"] == comparison.absent


@pytest.mark.usefixtures("forks")
def test_the_trainer_learns_in_the_same_rounds(tmp_path: Path) -> None:
    seen = peers._Race(DIGITS, 8, tmp_path, {}).run("trainer", 0)
    assert seen.rounds == 7
    assert seen.accuracy is not None
    assert seen.accuracy > 0.5


def test_a_side_is_watched_until_its_last_round_and_then_let_go(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    seen = observe([sys.executable, "-c", SIDE, str(progress)], os.environ, lines_of(progress), 3)
    assert (seen.accuracy, seen.rounds) == (0.5, 2)
    assert seen.first > 0


def test_the_time_of_a_side_that_does_not_wait_counts_from_its_rounds_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = 0.0

    def look(watch: object) -> float:
        nonlocal now
        now += 5.0  # with hundreds of processes this takes a while, in which such a side plays on
        return 0.0

    monkeypatch.setattr("fedemu.ops.bench.peers.observe._Watch.cpu", look)
    clock = SimpleNamespace(monotonic=lambda: now, sleep=time.sleep)
    monkeypatch.setattr("fedemu.ops.bench.peers.observe.time", clock)
    progress = tmp_path / "progress"
    assert observe([sys.executable, "-c", SIDE, str(progress)], os.environ, lines_of(progress), 3).wall == 5.0


def test_a_side_that_fails_is_absent_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(Absent, match=r"^ModuleNotFoundError: No module named 'no_such_simulator'$"):
        observe([sys.executable, "-c", "import no_such_simulator"], os.environ, lines_of(tmp_path / "none"), 3)


def test_the_last_error_of_many_lines_is_told() -> None:
    assert last_words("jax.errors.KeyError: 3\nat work\n---\nFor simplicity, frames are left out\n") == (
        "jax.errors.KeyError: 3"
    )
    assert last_words(" \n") == "it ended without a word"
