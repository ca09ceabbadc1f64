"""The picture of local training by epoch."""

from __future__ import annotations

from typing import Any

import pytest

from fedemu.ops.pages.style import drawn
from fedemu.ops.report.plots.local_curves import local_curves

FOUND: dict[str, Any] = {
    "round": 3,
    "devices": [4, 9],
    "epochs": [0, 1, 2],
    "in_local": [[0.5, 0.25], [0.75, 0.75], [1.0, 0.5]],
    "out_local": [[0.5, None], [0.25, None], [None, None]],
}


def test_the_curves_are_means_over_the_devices_that_have_a_value() -> None:
    figure = local_curves(FOUND)
    assert figure is not None
    drawn = {str(line.get_label()): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert drawn == {
        "in-local, mean and spread": [[0, 0.375], [1, 0.75], [2, 0.75]],
        "out-local, mean and spread": [[0, 0.5], [1, 0.25]],
    }


@pytest.mark.parametrize("found", [{}, FOUND | {"in_local": [[None, None]] * 3, "out_local": [[None, None]] * 3}])
def test_without_values_there_is_no_picture(found: dict[str, Any]) -> None:
    assert drawn(local_curves, found) is None
