"""How benchmarks measure: in turns, pair by pair, bounded in time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedemu.ops.bench.measuring import measure
from fedemu.ops.bench.measuring.measure import Effort, Figure, Sample, Spread, cost, paired, rate


def side(name: str, order: list[str]) -> Callable[[], Sample]:
    def run() -> Sample:
        order.append(name)
        return Sample(1.0, 1.0, 1.0)

    return run


def test_after_a_warm_up_the_sides_take_turns_in_going_first() -> None:
    order: list[str] = []
    pairs = paired(side("ours", order), side("floor", order), Effort(pairs=3))
    assert len(pairs) == 3
    assert order == ["ours", "floor", "ours", "floor", "floor", "ours", "ours", "floor"]


def test_two_pairs_are_enough_where_time_is_short() -> None:
    assert len(paired(side("ours", []), side("floor", []), Effort(pairs=50, seconds=0.0))) == 2


def test_a_ratio_is_taken_within_a_pair() -> None:
    slow, quick = Sample(10.0, 10.0, 5.0), Sample(10.0, 1.0, 1.0)
    figure = rate("s", "n", "x/s", [(slow, slow), (quick, quick), (quick, slow)], reach=1.0)
    assert figure.ratio == Spread(1.0, 1.0, 10.0)
    assert figure.cpu_ratio == Spread(1.0, 1.0, 5.0)
    assert figure.ours == Spread(10.0, 1.0, 10.0)
    assert figure.met is True


def test_a_rate_below_its_reach_is_missed() -> None:
    assert rate("s", "n", "x/s", [(Sample(1.0, 2.0, 1.0), Sample(1.0, 1.0, 1.0))], reach=0.6).met is False


def test_a_cost_is_held_against_its_limit_and_shown_as_a_multiple_of_its_floor() -> None:
    figure = cost("s", "n", "MB", [5.0, 6.0, 7.0], [2.0, 2.0, 2.0], limit=6.0)
    assert figure.ratio == Spread(3.0, 2.5, 3.5)
    assert figure.met is True
    assert cost("s", "n", "MB", [6.5], limit=6.0).met is False


def test_without_a_promise_nothing_is_met_or_missed() -> None:
    assert cost("s", "n", "MB", [5.0]).met is None


@pytest.mark.parametrize(
    ("scale", "whole", "multiple", "count"), [(1.0, 300, 1, 300), (0.1, 300, 10, 30), (0.001, 300, 10, 10)]
)
def test_work_is_scaled_to_a_positive_multiple(scale: float, whole: int, multiple: int, count: int) -> None:
    assert Effort(scale=scale).count(whole, multiple) == count


def test_a_figure_becomes_a_table_for_json() -> None:
    table = Figure("wire", "n", "MB/s", Spread(1.0, 1.0, 1.0), limit=2.0).table()
    assert table["ours"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    assert table["met"] is True
    assert table["floor"] is None
    assert measure.QUICK.scale < 1.0
