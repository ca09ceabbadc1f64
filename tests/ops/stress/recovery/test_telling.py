"""What people see of kills: the table, the plot, and the exit code."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedemu.ops.cli.commands import app
from fedemu.ops.pages.style import drawn
from fedemu.ops.stress.recovery import telling
from fedemu.ops.stress.recovery.play import FLEETS, Kill, RecoveryResult
from fedemu.ops.stress.recovery.telling import draw, show

KILLS = (*(Kill("coordinator", seconds / 10) for seconds in range(11, 0, -1)), Kill("edge", 7.0))


def test_the_table_has_the_median_and_the_longest_time_of_each_kind() -> None:
    text = io.StringIO()
    results = [RecoveryResult("both", 30, KILLS, ()), RecoveryResult("devices sleep", 1, (), ("it did not start",))]
    show(Console(file=text, width=80), results)
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert lines[1] == ["both", "coordinator", "11", "0.60", "s", "1.00", "s", "1.10", "s"]
    assert lines[2] == ["both", "edge", "1", *["7.00", "s"] * 3]
    assert text.getvalue().splitlines()[3:] == ["devices sleep: it did not start", "12 kills in 31 rounds; FAILED"]


def test_the_plot_has_a_row_for_each_kind_of_each_fleet_and_none_without_kills() -> None:
    results = [RecoveryResult("both", 30, KILLS, ()), RecoveryResult("shared connection", 9, KILLS[-1:], ())]
    figure = drawn(draw, results)
    assert figure is not None
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "both: coordinator", "both: edge", "shared connection: edge",
    ]  # fmt: skip
    assert axes.lines[0].get_xdata().tolist() == [seconds / 10 for seconds in range(1, 12)]
    assert draw([RecoveryResult("both", 0, (), ("it did not start",))]) is None


@pytest.mark.parametrize("complaints", [(), ("another digest",)])
def test_each_fleet_is_played_for_an_equal_part_and_one_that_fails_ends_with_code_1(
    complaints: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recover(name: str, folder: Path, seconds: float, *_: Any, **__: Any) -> RecoveryResult:
        assert seconds == 60.0
        folder.mkdir()
        return RecoveryResult(name, 3, KILLS, complaints if name == "both" else ())

    monkeypatch.setattr(telling, "WarmStart", nullcontext)
    monkeypatch.setattr(telling, "recover", recover)
    words = ["stress", "recovery", "--minutes", "4", "--out", str(tmp_path / "out"), "--format", "json"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == len(complaints)
    assert [(each["fleet"], each["passed"]) for each in json.loads(ended.stdout)] == [
        (name, not complaints or name != "both") for name in FLEETS
    ]
    assert {path.suffix for path in (tmp_path / "out").glob("recovery.*")} == {".svg", ".png"}


def test_fleets_that_were_played_before_an_interruption_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recover(name: str, folder: Path, *_: Any, **__: Any) -> RecoveryResult:
        if name == "devices sleep":
            raise KeyboardInterrupt
        folder.mkdir()
        return RecoveryResult(name, 3, KILLS, ())

    monkeypatch.setattr(telling, "WarmStart", nullcontext)
    monkeypatch.setattr(telling, "recover", recover)
    words = ["stress", "recovery", "--out", str(tmp_path / "out"), "--format", "json"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 4
    assert [each["fleet"] for each in json.loads(ended.stdout)] == ["as by default", "shared connection"]
    assert "24 kills in 6 rounds; " in ended.stderr
    assert {path.suffix for path in (tmp_path / "out").glob("recovery.*")} == {".svg", ".png"}
