"""Axes of shares: limits that fit what is drawn, and labels that say where an axis begins."""

from __future__ import annotations

import math

import pytest

from fedemu.ops.pages.axes import POINTS, SHARES, fit_shares, limits, say_cut
from fedemu.ops.pages.style import new_figure


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.912, 0.925, 0.918], (0.91, 0.926)),  # methods that are a point apart fill the axis
        ([0.1, 0.5, 0.92], (0.0, 1.0)),
        ([0.3, 0.3], (0.294, 0.306)),  # one point at least
        ([1.0, 0.99], (0.988, 1.0)),
        ([0.0, math.nan, 0.02], (0.0, 0.025)),
        ([], (0.0, 1.0)),
        ([math.nan], (0.0, 1.0)),
    ],
)
def test_limits_are_round_numbers_around_the_values(values: list[float], expected: tuple[float, float]) -> None:
    low, high = limits(values)
    assert (low, high) == pytest.approx(expected, abs=0.0051)
    assert 0 <= low < high <= 1
    assert all(low <= value <= high for value in values if not math.isnan(value))


def test_values_a_point_apart_take_most_of_the_axis() -> None:
    low, high = limits([0.912, 0.922])
    assert 0.010 / (high - low) > 0.6


def test_an_axis_that_does_not_begin_at_zero_says_so() -> None:
    _, axes = new_figure("title")
    fit_shares(axes, [0.912, 0.922], "test accuracy")
    assert axes.get_ylabel() == "test accuracy (axis: 91.0 to 92.4 %)"
    assert axes.get_ylim() == pytest.approx((0.91, 0.924))
    fit_shares(axes, [0.0, 0.5], "test accuracy")
    assert axes.get_ylabel() == "test accuracy"
    assert axes.get_ylim()[0] == 0


def test_a_line_at_the_top_is_seen_whole() -> None:
    _, axes = new_figure("title")
    fit_shares(axes, [0.0, 1.0], "test accuracy")
    assert axes.get_ylim() == pytest.approx((0, 1.02))


def test_other_numbers_say_only_that_they_do_not_begin_at_zero() -> None:
    _, axes = new_figure("title")
    axes.set_ylim(0, 3)
    axes.set_ylabel("loss")
    say_cut(axes)
    assert axes.get_ylabel() == "loss"
    axes.set_ylim(2, 3)
    say_cut(axes)
    assert axes.get_ylabel() == "loss\n(axis not from 0)"


def test_ticks_are_percent_and_points() -> None:
    assert [SHARES(value, 0) for value in (0.0, 0.125, 1.0)] == ["0 %", "12.5 %", "100 %"]
    assert [POINTS(value, 0) for value in (-0.05, 0.0, 0.1)] == ["-5", "0", "+10"]
