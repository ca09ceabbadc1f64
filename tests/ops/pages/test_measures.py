"""The explanations of measures."""

from __future__ import annotations

import pytest

from fedemu.ops.compare.text import _OF_TASKS, _columns
from fedemu.ops.pages.measures import Measure, measure_of, measures
from fedemu.ops.report.periods import _TITLES
from fedemu.protocol.messages import OUTCOMES


@pytest.mark.parametrize("title", [*_columns(0.9, 100), *_OF_TASKS, *_TITLES[1:], *OUTCOMES])
def test_every_column_of_figures_and_every_outcome_is_explained(title: str) -> None:
    measure = measure_of(title)
    assert measure is not None
    assert measure.words.endswith(".")


def test_a_title_with_a_number_in_it_is_explained_too() -> None:
    assert measure_of("to 71.2 %") is measure_of("rounds to an accuracy")
    assert measure_of("last 20") is measure_of("mean of the last rounds")
    assert measure_of("experiment") is None


def test_indices_of_an_equation_are_set_low_and_nothing_is_taken_for_markup() -> None:
    measure = Measure("m", "x_1 & more", "max_{t<T} A_{t,c}")
    assert str(measure.formula) == "max<sub>t&lt;T</sub> A<sub>t,c</sub>"
    assert str(measure.explanation) == "x<sub>1</sub> &amp; more"


def test_no_two_measures_have_one_id() -> None:
    different = {measure.name: measure.id for measure in measures().values()}
    assert len(set(different.values())) == len(different)
