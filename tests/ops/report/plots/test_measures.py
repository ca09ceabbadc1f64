"""The picture of what a method of one's own measures."""

from __future__ import annotations

import math
from typing import Any

from fedemu.coordinator.record.row import Row
from fedemu.ops.pages.behind import data_behind
from fedemu.ops.pages.colours import ORANGE, PURPLE
from fedemu.ops.pages.fitted import fit
from fedemu.ops.pages.style import drawn, saved
from fedemu.ops.report.plots.measures import measures
from fedemu.ops.results.own_measures import LARGEST, MOST, own_measures


def row(round: int, devices: dict[str, Any], method: dict[str, Any]) -> Row:
    return Row(round=round, device_metrics={"loss": 1.0, "replay_samples": 3.0, **devices}, remarks=method)


def test_numbers_of_devices_and_of_the_method_are_drawn_by_round() -> None:
    odd = {"words": "fine", "many": [1, 2], "replay": {"devices": 3}, "sure": True, "endless": math.inf, "lost": None}
    rows = [row(1, {"norm": 0.5}, odd), row(2, {"norm": None}, {"move": 2}), row(3, {"norm": 0.25}, {"move": 1.5})]
    figure = drawn(measures, rows)
    assert figure is not None
    told = [(datum.panel, datum.series, datum.x, datum.y, datum.x_name) for datum in data_behind(figure)]
    assert told == [
        ("move", "move", 2, 2, "round"),
        ("move", "move", 3, 1.5, "round"),
        ("norm", "norm", 1, 0.5, "round"),
        ("norm", "norm", 3, 0.25, "round"),
    ]
    assert [axes.lines[0].get_color() for axes in figure.axes] == [PURPLE, ORANGE]


def test_numbers_within_a_remark_have_its_name_before_theirs_and_what_fedemu_remarks_is_none_of_them() -> None:
    told = {"norm": {"top": 2, "inner": {"first": 0.5, "word": "a"}}, "importance": {"period": 1, "devices": 3}}
    remarked = own_measures(row(1, {}, {"best": 1.0, **told}))
    named = {("best", 1.0), ("norm.top", 2.0), ("norm.inner.first", 0.5)}
    assert {(measure.name, value) for measure, value in remarked.items()} == named
    assert [measure.column for measure in remarked] == ["remarks.best", "remarks.norm.top", "remarks.norm.inner.first"]


def test_numbers_whose_squares_do_not_fit_into_a_float_are_left_out() -> None:
    large = {"a": LARGEST, "b": -LARGEST, "c": 1e151, "d": -1.7e308, "e": 10**400, "f": math.nan}
    assert {measure.name for measure in own_measures(row(1, large, {}))} == {"a", "b"}
    figure = drawn(measures, [row(1, large, {}), row(2, {"a": -LARGEST, "b": LARGEST}, {})])
    assert figure is not None
    assert saved(figure, "png")


def test_a_single_measure_names_the_axis_because_papers_have_no_title() -> None:
    figure = drawn(measures, [row(1, {"norm": 0.5}, {}), row(2, {"norm": 0.25}, {})])
    assert figure is not None
    assert {datum.y_name for datum in data_behind(figure)} == {"norm"}
    fit(figure, 3.25, 8, titles=False)
    assert (figure.axes[0].get_title(loc="left"), figure.axes[0].get_ylabel()) == ("", "norm")


def test_nothing_is_drawn_of_what_fedemu_itself_measures() -> None:
    assert drawn(measures, [row(1, {}, {}), row(2, {}, {"replay": {"samples": 3}})]) is None


def test_of_very_many_measures_the_first_by_name_are_drawn() -> None:
    figure = drawn(measures, [row(1, {f"m{number:03}": 1.0 for number in range(50)}, {})])
    assert figure is not None
    assert [axes.lines[0].get_label() for axes in figure.axes] == [f"m{number:03}" for number in range(MOST)]
