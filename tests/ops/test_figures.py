"""Numbers as people read them."""

from __future__ import annotations

import pytest

from fedemu.ops.figures import percent, readable_bytes, time_unit


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (123_456, "123 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (2.5e6, "2.5 MB"),
        (3e12, "3.0 TB"),
    ],
)
def test_bytes_are_written_as_people_read_them(size: float, text: str) -> None:
    assert readable_bytes(size) == text


def test_a_span_is_given_in_the_unit_in_which_it_reads_well() -> None:
    assert [time_unit(seconds) for seconds in (10.0, 600.0, 20000.0, 5e5)] == [
        (1.0, "seconds"),
        (60.0, "minutes"),
        (3600.0, "hours"),
        (86400.0, "days"),
    ]


def test_a_share_is_shown_in_percent() -> None:
    assert [percent(0.9624), percent(1.0), percent(0.00049, 2)] == ["96.2 %", "100.0 %", "0.05 %"]
    assert percent(-0.0004) == "0.0 %", "which is no less than nothing"
