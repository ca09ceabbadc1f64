"""The soak: what it samples of a real fleet, how it judges, and what it shows."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedemu.ops.cli import commands
from fedemu.ops.pages.style import drawn
from fedemu.ops.running.codes import INTERRUPTED
from fedemu.ops.stress import leftovers
from fedemu.ops.stress.fleet import FleetTimeout, LiveFleet
from fedemu.ops.stress.soak.play import QUANTITIES, Sample, SoakResult, judge, look, soak, write_samples
from fedemu.ops.stress.soak.slopes import slope_of
from fedemu.ops.stress.soak.telling import draw, show, verdict
from fedemu.ops.stress.warm import WarmStart

CALM = dict.fromkeys(QUANTITIES, 10.0)


def result_of(minutes: int, growing: str, by: float) -> SoakResult:
    """A made-up soak with a sample a minute, in which one quantity grows ``by`` so much an hour."""
    seconds = tuple(60.0 * minute for minute in range(minutes))
    samples = tuple(CALM | {growing: 10.0 + by * moment / 3600} for moment in seconds)
    return SoakResult(seconds, samples, judge(seconds, samples), 7, {"processes of devices": 3}, ())


@pytest.mark.parametrize(("by", "word"), [(0.0, "flat"), (2.0, "within"), (9.0, "GROWS"), (-9.0, "falls")])
def test_what_grows_by_more_than_its_limit_is_found(by: float, word: str) -> None:
    result = result_of(40, "memory of coordinator", by)
    slope = result.slopes["memory of coordinator"]
    assert slope.slope == pytest.approx(by)
    assert verdict(slope, QUANTITIES["memory of coordinator"].limit) == word
    assert result.slopes["processes"].flat


def test_the_warm_up_does_not_count() -> None:
    seconds = [60.0 * minute for minute in range(40)]
    samples = [CALM | {"processes": min(10.0, 1.0 + minute)} for minute in range(40)]
    assert judge(seconds, samples)["processes"].slope == 0.0


def test_the_warm_up_of_a_short_soak_is_as_long_as_that_of_a_fleet() -> None:
    seconds = [5.0 * number for number in range(120)]
    samples = [CALM | {"memory of coordinator": 280.0 + min(1.0, moment / 170)} for moment in seconds]
    slope = judge(seconds, samples)["memory of coordinator"]
    assert (slope.slope, slope.low, slope.high, slope.middle) == (0.0, 0.0, 0.0, 281.0)


def test_what_grows_in_too_short_a_time_is_unknown() -> None:
    result = result_of(6, "memory of coordinator", 99.0)
    slope = result.slopes["memory of coordinator"]
    assert verdict(slope, 8.0) == "unknown"
    assert slope.middle == pytest.approx(10.0 + 99.0 * 2.5 / 60)
    assert verdict(result_of(11, "memory of coordinator", 99.0).slopes["memory of coordinator"], 8.0) == "GROWS"


def test_a_soak_that_is_too_short_tells_which_one_is_long_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = CliRunner().invoke(commands.app, ["stress", "soak", "--minutes", "9.5", "--out", str(tmp_path / "out")])
    assert ended.exit_code == 2
    assert ended.stderr == (
        "fedemu: --minutes is 9.5; a soak needs 10 or more to tell whether anything grows, because its first 3 min 0 s "
        "do not count\n"
    )
    assert not (tmp_path / "out").exists()
    fleet = MagicMock(**{"wait_for_end.return_value": INTERRUPTED, "supervisors": [], "edges": []})
    fleet.leftovers.return_value = []
    monkeypatch.setattr("fedemu.ops.stress.soak.play.LiveFleet", lambda *_, **__: nullcontext(fleet))
    assert soak(tmp_path, 0.0).complaints == (
        "too few samples to tell whether anything grows: 0 in 0.0 s; a soak of 10 minutes has enough",
    )


def test_a_fleet_is_sampled_and_goes_without_a_trace(
    tmp_path: Path, warm: WarmStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_memory = tmp_path / "shm"
    shared_memory.mkdir()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", shared_memory)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left: list[Path] = []

    def leave(seconds: float, sample: Sample) -> None:
        """Somebody leaves a temporary folder, and uses shared memory as such a folder and leaves a piece of it."""
        (shared_memory / "folder").mkdir(exist_ok=True)
        (shared_memory / "piece").touch()
        (temporary,) = tmp_path.glob("soak-*")
        left.append(Path(tempfile.mkdtemp(prefix=f"left-{len(left)}-", dir=temporary)))

    result = soak(tmp_path / "soak", 0.05, devices=6, every=1.5, told=leave, start=warm.start)
    assert result.complaints == tuple(f"left behind: {path}" for path in left)
    first = result.samples[0]
    assert set(first) == set(QUANTITIES)
    assert first["memory of coordinator"] > 20
    assert first["descriptors of supervisor"] > 5
    assert first["processes"] >= 4
    assert result.samples[-1]["temporary files"] == first["temporary files"] + len(left) - 1
    assert first["files of devices"] > 0
    assert [sample["files in shared memory"] for sample in result.samples] == [0] + [1] * (len(result.samples) - 1)
    assert result.rounds >= 1

    write_samples(result, tmp_path / "soak.csv")
    rows = list(csv.reader((tmp_path / "soak.csv").open()))
    assert rows[0] == ["seconds", *QUANTITIES]
    assert len(rows) == 1 + len(result.samples)


def test_a_process_that_the_coordinator_has_started_and_an_empty_folder_count(tmp_path: Path) -> None:
    def start(words: Sequence[str], log: Path, environment: Mapping[str, str]) -> psutil.Popen:
        return psutil.Popen(["sh", "-c", "sleep 60; true"], start_new_session=True)

    (tmp_path / "temporary" / "folder").mkdir(parents=True)
    with LiveFleet(tmp_path / "soak", address="tcp://127.0.0.1:1", start=start) as fleet:
        coordinator = fleet.start_coordinator()
        fleet.wait_until(lambda: bool(coordinator.children()), "its child", 20.0)
        sample = look(fleet, tmp_path / "temporary", set())
        for child in coordinator.children():
            child.kill()
    assert (sample["processes"], sample["temporary files"]) == (2, 1)


@pytest.mark.parametrize("waits", ["wait_until", "wait_for_end"])
def test_a_fleet_that_does_not_begin_or_does_not_end_is_a_complaint_beside_what_was_sampled(
    waits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = MagicMock(**{f"{waits}.side_effect": FleetTimeout("it did not happen within 60 s")})
    fleet.leftovers.return_value = []
    monkeypatch.setattr("fedemu.ops.stress.soak.play.LiveFleet", lambda *_, **__: nullcontext(fleet))
    assert soak(tmp_path, 0.0).complaints == ("it did not happen within 60 s",)
    assert fleet.wait_until.called


def test_an_interrupted_soak_keeps_and_tells_what_was_sampled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = MagicMock(**{"coordinator.poll.return_value": None, "rounds.return_value": 5, "supervisors": []})
    fleet.start_coordinator.return_value.poll.return_value = None
    fleet.pause.side_effect = [None, None, KeyboardInterrupt]
    fleet.processes.return_value = []
    fleet.all_processes.return_value = [1, 2, 3]
    fleet.leftovers.return_value = []
    monkeypatch.setattr("fedemu.ops.stress.soak.play.LiveFleet", lambda *_, **__: nullcontext(fleet))
    monkeypatch.setattr("fedemu.ops.stress.soak.play.look", lambda *_: CALM)
    words = ["stress", "soak", "--out", str(tmp_path / "out"), "--format", "json"]
    ended = CliRunner().invoke(commands.app, words)
    assert ended.exit_code == 4
    assert "interrupted; the table covers 3 samples before that" in ended.stderr
    assert ended.stderr.endswith("fedemu: interrupted\n")
    told = json.loads(ended.stdout)
    assert (told["passed"], told["interrupted"], told["rounds"], told["complaints"]) == (False, True, 5, [])
    assert len(told["samples"]) == 3
    assert len((tmp_path / "out" / "soak.csv").read_text().splitlines()) == 1 + 3
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"soak.csv", "soak.svg", "soak.png"}
    assert not fleet.wait_for_end.called


@pytest.mark.parametrize(
    ("leaves", "complaint"),
    [
        ({"return_value": 5}, "a supervisor ended with exit 5: "),
        ({"side_effect": psutil.TimeoutExpired(30)}, "a supervisor did not leave within 30 s after the run: "),
    ],
)
def test_a_supervisor_that_does_not_leave_well_is_a_complaint(
    leaves: dict[str, Any], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = MagicMock(**{"wait_for_end.return_value": INTERRUPTED, "tail.return_value": "its last lines"})
    fleet.supervisors = [MagicMock(**{f"wait.{key}": value for key, value in leaves.items()})]
    fleet.leftovers.return_value = []
    monkeypatch.setattr("fedemu.ops.stress.soak.play.LiveFleet", lambda *_, **__: nullcontext(fleet))
    assert soak(tmp_path, 0.0).complaints == (f"{complaint}its last lines",)


def test_people_see_each_quantity_with_its_slope_and_a_plot() -> None:
    text = io.StringIO()
    result = result_of(40, "memory of trainers", 99.0)
    show(Console(file=text, width=80), result)
    (line,) = [line for line in text.getvalue().splitlines() if line.startswith("memory of trainers")]
    assert line.split() == ["memory", "of", "trainers", "48.8", "MiB", "+99.0", "+99.0", "to", "+99.0", "16", "GROWS"]
    figure = drawn(draw, result)
    assert figure is not None
    assert text.getvalue().endswith("passed: nothing grows beyond its limit\n")
    assert figure.axes[0].get_title(loc="left") == "memory of coordinator (MiB)"
    assert len(figure.axes) == len(QUANTITIES)


def test_a_short_soak_is_strict_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    short = SoakResult((1.0,), ({},), {"processes": slope_of([1.0], [2.0])}, 3, {}, ())
    monkeypatch.setattr("fedemu.ops.stress.soak.telling.play_soak", lambda *_, **__: short)
    with pytest.raises(SystemExit) as ended:
        commands.command(["stress", "soak", "--format", "json"], prog_name="fedemu")
    told = capsys.readouterr().out
    assert (ended.value.code, "Infinity" in told) == (0, False)
    assert json.loads(told)["slopes"]["processes"] == {"slope": 0.0, "low": None, "high": None, "middle": 2.0}
