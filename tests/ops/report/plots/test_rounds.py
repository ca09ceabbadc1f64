"""The pictures of a run's rounds, where not every round was evaluated."""

import io
import re
from collections.abc import Callable

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from fedemu.coordinator.record.row import Row
from fedemu.ops.pages.behind import data_behind
from fedemu.ops.pages.style import Rows, drawn, saved
from fedemu.ops.report.plots import rounds
from fedemu.ops.report.plots.rounds import accuracy_and_loss, fleet_over_time, outcomes, round_forgetting


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


def test_the_dots_of_accuracy_and_loss_after_a_single_round_do_not_hide_each_other() -> None:
    figure = accuracy_and_loss([Row(1, accuracy=0.5, loss=1.8)])
    assert figure is not None
    (of_accuracy, of_loss) = (axes.transData.transform(axes.lines[0].get_xydata()[0]) for axes in figure.axes)
    assert of_loss[1] - of_accuracy[1] > 20


@pytest.mark.parametrize("draw", [outcomes, fleet_over_time])
def test_the_areas_of_a_very_long_run_take_little_of_the_page_and_keep_their_data(
    draw: Callable[[Rows], Figure | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "MOST_STEPS", 1000, raising=False)
    random = np.random.default_rng(1)
    rows = [
        Row(
            round=round, virtual_time=60.0 * round, joined=20, online=int(random.integers(5, 20)), selected=7,
            accepted=int(random.integers(3, 6)), dropped=int(random.integers(0, 3)), crashed=0,
        )
        for round in range(1, 2001)
    ]  # fmt: skip
    figure = drawn(draw, rows)
    assert figure is not None
    assert len(data_behind(figure)) >= 2 * len(rows)
    shapes = re.findall(r' d="([^"]*)"', saved(figure, "svg").decode())
    assert sum(map(len, shapes)) < 60 * len(rows), "a line takes 45 bytes for each round, and two areas 200 each"
