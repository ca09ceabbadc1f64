"""Growth: points are measured, slopes are those of the points, and the plot is drawn."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fedemu.ops.bench.growth import growth, point
from fedemu.ops.bench.growth.curve import Curve, Point
from fedemu.ops.bench.growth.growth import AXES, Axis, Growth
from fedemu.ops.bench.measuring.measure import QUICK, Effort, Sample
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.errors import ConfigurationError

SQUARE = Curve(
    "devices", ("10", "100", "1,000"), (Point(10, 1.0, 1.0), Point(100, 1.0, 10.0), Point(1000, 1.0, 1000.0))
)


@pytest.mark.usefixtures("forks")
def test_a_point_is_the_cost_of_the_rounds_of_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path))
    monkeypatch.setattr(point, "SAMPLES", 1000)
    sample = point.rounds(["fleet.devices=4", "fleet.per_round=2", "availability={kind='always'}"], 1, 2)()
    assert sample.work == 2
    assert sample.wall > 0
    assert sample.cpu > 0


def test_every_point_of_every_axis_is_an_experiment_of_its_size() -> None:
    for axis in AXES:
        assert set(axis.settings) == set(axis.sizes)
        for size in (axis.sizes[0], axis.sizes[-1]):
            experiment, _ = load_experiment("digits", list(axis.settings[size]), {})
            sizes = experiment.fleet.devices, experiment.fleet.per_round, 44 * experiment.model.hidden[0]
            assert any(found == pytest.approx(size, rel=0.01) for found in sizes)


def test_less_effort_leaves_the_largest_sizes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "_measured", lambda settings, effort: Sample(2.0, 4.0, float(len(settings[0]))))
    axis = Axis("devices", (1, 100, 1000), {1: ("a",), 100: ("aaaa",), 1000: ("aaaaaaaa",)})
    told: list[str] = []
    *_, found = growth.grow(QUICK, None, told.append, [axis])
    (curve,) = found.curves
    assert curve.points == (Point(1, 2.0, 0.5), Point(100, 2.0, 2.0))
    assert told == ["growth: devices: 1", "growth: devices: 100"]
    grown = [made.curves for made in growth.grow(Effort(), None, told.append, [axis, axis])]
    assert [[len(curve.points) for curve in curves] for curves in grown] == [[2], [3], [3, 2], [3, 3]]
    assert [len(curve.labels) for curve in grown[2]] == [3, 2]


def test_slopes_tell_how_cost_grows() -> None:
    assert SQUARE.slope == pytest.approx(1.5)
    assert SQUARE.last_slope == pytest.approx(2.0)
    assert not SQUARE.met
    shown = io.StringIO()
    Console(file=shown, width=150).print(Growth((SQUARE,), Path("there")))
    assert "plot: there/growth.png" in shown.getvalue()
    assert "slope 1.50, last slope 2.00; wanted 1.1 or less: missed" in shown.getvalue()
    assert Growth((SQUARE,)).table()["curves"][0]["slope"] == pytest.approx(1.5)


def test_a_folder_that_takes_no_plot_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "plots").touch()
    told: list[str] = []
    with pytest.raises(ConfigurationError, match=r"plots cannot be written: File exists; name another.* --plots"):
        next(growth.grow(QUICK, tmp_path / "plots", told.append))
    assert told == []


def test_the_plot_is_drawn_as_png_and_svg_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = {"a": 1.0, "b": 10.0, "c": 1000.0}
    monkeypatch.setattr(growth, "_measured", lambda settings, effort: Sample(1.0, 1.0, cpu[settings[0]]))
    axis = Axis("devices", (10, 100, 1000), {10: ("a",), 100: ("b",), 1000: ("c",)})
    growing = growth.grow(Effort(), tmp_path / "new" / "plots", lambda line: None, [axis])
    grown = [(made.plots, [plot.exists() for plot in made.plots]) for made in growing]
    assert [there for _, there in grown] == [[False, False], [False, False]]
    png, svg = grown[-1][0]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "slope 1.50, at the end 2.00" in svg.read_text()
