"""The pictures of a run's rounds, where not every round was evaluated."""

import io

import matplotlib.image
import numpy as np
import pytest

from fedemu.coordinator.record.row import Row
from fedemu.ops.pages.behind import data_behind
from fedemu.ops.pages.style import drawn, saved
from fedemu.ops.report.plots.rounds import round_forgetting


@pytest.mark.parametrize("evaluations", [50, 150])
def test_what_rare_evaluations_found_forgotten_is_seen(evaluations: int) -> None:
    every = 200
    rows = [
        Row(round=round, round_forgetting=0.25 if round % every == 0 else None)
        for round in range(1, every * evaluations + 1)
    ]
    figure = drawn(round_forgetting, rows)
    assert figure is not None
    points = [(datum.x, datum.y) for datum in data_behind(figure)]
    assert points == [(pytest.approx(every * (place + 1)), 0.25) for place in range(evaluations)]
    picture = matplotlib.image.imread(io.BytesIO(saved(figure, "png")))[..., :3]
    line = picture[len(picture) // 2]  # half of what was lost, below the mean
    coloured = (np.abs(line - line[0]).max(axis=1) > 0.3).sum()
    assert coloured > 0.6 * len(line)
