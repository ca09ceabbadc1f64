"""Cells: the unit and the number of digits follow from the figure."""

from __future__ import annotations

import pytest

from fedemu.ops.compare.cells import NEVER, Cell, cosine, count, number, seconds, share, size, span
from fedemu.ops.compare.entry import Statistic


@pytest.mark.parametrize(
    ("cell", "values", "expected"),
    [
        (share, (0.125, 0.25), "18.8 ± 8.8 %"),
        (cosine, (-0.5,), "-0.500"),
        (number, (9.5,), "9.500"),
        (number, (10.0, 10.0), "10.0"),
        (number, (-999.5,), "-999.5"),
        (number, (1000.0, 1002.0), "1001 ± 1"),
        (count, (7.0,), "7"),
        (count, (7.0, None), "7 (1 of 2)"),
        (count, (7.0, 8.0), "7.5 ± 0.7"),
        (size, (999.0,), "999.0 B"),
        (size, (999.95,), "1.0 kB"),
        (size, (-2.5e6,), "-2.5 MB"),
        (size, (3e9, 5e9), "4.0 ± 1.4 GB"),
        (size, (7e15,), "7000.0 TB"),
        (seconds, (0.009,), "9.0 ms"),
        (seconds, (0.0095,), "10 ms"),
        (seconds, (-0.5,), "-500 ms"),
        (seconds, (0.995,), "0.99 s"),
        (seconds, (9.95,), "9.9 s"),
        (seconds, (-30.0,), "-30.0 s"),
        (seconds, (99.5,), "100 s"),
        (span, (179.0,), "179.0 s"),
        (span, (180.0,), "3.0 min"),
        (span, (3 * 3600.0,), "3.0 h"),
        (span, (2 * 86400.0, 4 * 86400.0), "3.0 ± 1.4 d"),
        (span, (None, None), NEVER),
    ],
)
def test_a_figure_is_written_in_a_unit_that_suits_it(
    cell: Cell, values: tuple[float | None, ...], expected: str
) -> None:
    assert cell(Statistic(values)) == expected
