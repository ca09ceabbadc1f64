"""What the page of a run on a stream of periods shows: curves, the matrix, the buffers and coordination."""

import io
import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import Run
from fedemu.ops.pages.behind import data_behind
from fedemu.ops.pages.fitted import fit
from fedemu.ops.pages.style import drawn, saved
from fedemu.ops.report import figures
from fedemu.ops.report.periods import period_cards, period_table
from fedemu.ops.report.plots.periods import PERIOD_PLOTS, period_curves, period_matrix
from fedemu.ops.report.plots.replay import REPLAY_PLOTS, buffers, coordination, objective
from fedemu.ops.report.report import write_report
from fedemu.ops.results.periods import PeriodResults, period_results

MATRIX = [[0.75, 0.25, 0.0], [0.5, 1.0, 0.25], [0.25, 0.5, 0.75]]
"""The accuracy after each period on each period."""


def row(round: int, accuracy: Sequence[float | None], **more: Any) -> dict[str, Any]:
    """A row. A period has two rounds, test sets are of one size, and a perplexity is 100 · (1 - accuracy) + 1."""
    known = [value for value in accuracy if value is not None]
    loss = [None if value is None else math.log(100 * (1 - value) + 1) for value in accuracy]
    task = (round - 1) // 2
    seen = [value is not None and place <= task for place, value in enumerate(accuracy)]
    return {
        "round": round,
        "task": task,
        "seen_accuracy": float(np.mean(np.array(accuracy)[seen].astype(float))),
        "seen_loss": float(np.mean(np.array(loss)[seen].astype(float))),
        "accuracy": float(np.mean(known)),
        "loss": float(np.mean([value for value in loss if value is not None])),
        "period_accuracy": list(accuracy),
        "period_loss": loss,
        "remarks": {},
    } | more


def run(rows: list[dict[str, Any]], *, language: bool = False) -> Run:
    if language:
        rows = [line | {"perplexity": math.exp(line["loss"])} for line in rows]
    return Run(Path("run"), "", tuple(map(Row.read, rows)), [], {})


def results(*, language: bool = False) -> PeriodResults:
    rows = [row(round, MATRIX[(round - 1) // 2]) for round in range(1, 7)]
    found = period_results(run(rows, language=language))
    assert found is not None
    return found


def lines_of(figure: Any, label: str) -> list[tuple[list[float], list[float]]]:
    return [
        ([float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()])
        for axes in figure.axes
        for line in axes.lines
        if line.get_label() == label
    ]


def test_the_matrix_is_of_the_last_evaluated_round_of_each_period_reached() -> None:
    rows = [row(1, [0.5, 0.0]), row(2, [0.75, 0.0]), {"round": 3, "task": 1, "period_accuracy": None}]
    found = period_results(run([*rows, row(4, [0.5, None])]))
    assert found is not None
    assert found.rounds == (2, 4)
    assert found.accuracy[0].tolist() == [0.75, 0.0]
    assert found.accuracy[1, 0] == 0.5
    assert math.isnan(found.accuracy[1, 1])


def test_a_matrix_of_which_nothing_is_known_is_a_figure_for_a_paper_too() -> None:
    unknown = {"period_accuracy": [None, None], "seen_accuracy": None, "period_loss": None, "seen_loss": None}
    found = period_results(run([{"round": 1, "task": 0, **unknown}]))
    assert found is not None
    figure = drawn(period_matrix, found)
    assert figure is not None
    fit(figure, 3.25, 8.0, titles=False)
    assert figure.legends == []


def test_a_static_stream_has_no_periods() -> None:
    assert (
        period_results(run([{"round": 1, "task": 0, "accuracy": 0.5, "period_accuracy": None}, {"round": 2}])) is None
    )


def test_the_curves_beside_the_matrix_are_over_the_periods_seen_by_each_model() -> None:
    found = results()
    assert found.after_each("average_accuracy").tolist() == [0.75, 0.75, 0.5]
    # After the last period 0.5 of its best is lost on period 0 and on period 1; those were also their first values.
    assert found.after_each("average_forgetting")[1:].tolist() == [0.25, 0.5]
    assert found.after_each("backward_transfer")[1:].tolist() == [-0.25, -0.5]
    assert math.isnan(found.after_each("average_forgetting")[0])
    figure = period_matrix(found)
    assert lines_of(figure, "average accuracy") == [([0.75, 0.75, 0.5], [0.0, 1.0, 2.0])]
    behind = [(one.x, one.y, one.y_name) for one in data_behind(figure) if one.series == "average forgetting"]
    assert behind == [(0.25, 2, "model after period"), (0.5, 3, "model after period")]


def test_forward_transfer_is_told_where_the_untrained_model_was_tested() -> None:
    """Period 1 went from 0.125 to 0.25 before it began, and period 2 from 0.5 to 0.25."""
    first = row(1, MATRIX[0], untrained_period_accuracy=[0.75, 0.125, 0.5])
    found = period_results(run([first, *(row(round, MATRIX[(round - 1) // 2]) for round in range(2, 7))]))
    assert found is not None
    assert found.forward_transfer == (0.125 - 0.25) / 2
    assert period_cards(found)[-1] == ("forward transfer", "-6.2 %")
    assert math.isnan(results().forward_transfer)


def test_the_matrix_of_language_data_holds_perplexities() -> None:
    found = results(language=True)
    assert found.perplexity[2] == pytest.approx([76, 51, 26])
    # Period 0 went from its best, 26, to 51 and to 76, period 1 from 1 to 51.
    assert found.relative_forgetting_after_each()[1:] == pytest.approx([51 / 26 - 1, (76 / 26 - 1 + 50) / 2])
    assert [label for label, _ in period_cards(found)][:2] == ["perplexity, all periods", "relative forgetting, mean"]
    assert period_table(found).rows[0] == ("1", "2", "26", "76", "192.3 %", "26", f"{(26 * 76 * 101) ** (1 / 3):.4g}")
    assert period_table(found).rows[1][5] == f"{(51 * 1) ** (1 / 2):.4g}"


def test_the_cards_and_the_table_of_labelled_data_are_accuracies() -> None:
    found = results()
    assert period_cards(found) == [
        ("average accuracy", "50.0 %"),
        ("average incremental accuracy", "66.7 %"),
        ("average forgetting", "50.0 %"),
        ("backward transfer", "-50.0 %"),
    ]
    assert period_table(found).rows == [
        ("1", "2", "75.0 %", "25.0 %", "50.0 %", "75.0 %", "33.3 %"),
        ("2", "4", "100.0 %", "50.0 %", "50.0 %", "75.0 %", "58.3 %"),
        ("3", "6", "75.0 %", "75.0 %", "–", "50.0 %", "50.0 %"),
    ]


def test_with_own_orders_a_test_set_is_that_of_a_task_and_counts_from_the_period_that_first_brings_it() -> None:
    since = [0, 0, 1]
    found = period_results(run([row(round, MATRIX[(round - 1) // 2], period_since=since) for round in range(1, 7)]))
    assert found is not None
    assert [line[2:5] for line in period_table(found).rows] == [
        ("75.0 %", "25.0 %", "50.0 %"),
        ("25.0 %", "50.0 %", "50.0 %"),
        ("25.0 %", "75.0 %", "-50.0 %"),
    ]
    cards = dict(period_cards(found))
    assert (cards["average forgetting"], cards["backward transfer"]) == ("16.7 %", "8.3 %")
    curves, matrix = period_curves(found), period_matrix(found)
    assert curves is not None
    assert matrix is not None
    thick = [line for line in curves.axes[0].lines if line.get_linewidth() == 1.6]
    assert [line.get_xdata()[0] for line in thick] == [1, 1, 3]
    assert matrix.axes[0].get_xlabel() == "tested on task"


def test_a_period_that_was_not_reached_is_known_by_the_latest_model_only() -> None:
    found = period_results(run([row(1, MATRIX[0])]))
    assert found is not None
    assert period_table(found).rows[1] == ("2", "–", "–", "25.0 %", "–", "–", "–")
    assert [value for _, value in period_cards(found)] == ["75.0 %", "75.0 %", "–", "–"]


def test_a_curve_is_thin_before_its_period_begins_and_periods_are_parted() -> None:
    figure = period_curves(results())
    assert figure is not None
    lines = figure.axes[0].lines
    thick = [line for line in lines if line.get_linewidth() == 1.6]
    assert [line.get_xdata().tolist() for line in thick] == [[1, 2, 3, 4, 5, 6], [3, 4, 5, 6], [5, 6]]
    assert [line.get_xdata()[0] for line in lines if line.get_linestyle() == ":"] == [2.5, 4.5]
    assert (
        len({line.get_color() if isinstance(line.get_color(), str) else tuple(line.get_color()) for line in thick}) == 3
    )


def test_a_loss_too_large_for_a_perplexity_is_left_out() -> None:
    found = period_results(run([row(1, [0.5, 0.5], period_loss=[1e9, 0.0])], language=True))
    assert found is not None
    assert math.isnan(found.perplexity[0, 0])
    assert saved(drawn(period_matrix, found), "png")
    assert saved(drawn(period_curves, found), "png")


@pytest.mark.parametrize("language", [False, True])
@pytest.mark.parametrize(("periods", "reached"), [(1, 1), (20, 20)])
def test_pictures_are_drawn_of_few_periods_and_of_many(periods: int, reached: int, language: bool) -> None:
    rows = [row(2 * period + 1, [0.5] * periods) for period in range(reached)]
    found = period_results(run(rows, language=language))
    assert found is not None
    for draw in PERIOD_PLOTS.values():
        png = saved(drawn(draw, found), "png")
        height, width, _ = matplotlib.image.imread(io.BytesIO(png)).shape
        assert (width, height > 350, height < 900) == (672, True, True)


def test_numbers_in_the_cells_of_a_matrix_do_not_touch_on_a_page_and_in_a_paper() -> None:
    found = period_results(run([row(2 * period + 1, [0.9] * 16) for period in range(3)], language=True))
    assert found is not None
    figure = drawn(period_matrix, found)
    assert figure is not None
    for width in (None, 3.25):
        if width is not None:
            fit(figure, width, 8.0, titles=False)
            figure.set_dpi(300)  # that of a paper; earlier versions of matplotlib round boxes to dots
        figure.draw_without_rendering()
        numbers = figure.axes[0].texts
        assert [text.get_text() for text in numbers] == ["11.0"] * 48
        assert all(text.get_visible() and text.get_fontsize() > 4 for text in numbers)
        boxes = [text.get_window_extent() for text in numbers]
        assert all(left.x1 <= right.x0 or left.x0 > right.x1 for left, right in pairwise(boxes))
        assert all(above.y0 >= below.y1 for above, below in zip(boxes, boxes[16:], strict=False))


def replayed(period: int, **said: Any) -> Row:
    replay = {"period": period, "devices": 3, "samples": 6} | said
    return Row(2 * period + 2, task=period, remarks={"replay": replay})


def test_the_buffers_are_stacked_by_period_and_by_label() -> None:
    rows = [
        Row(1, task=0),
        replayed(0, periods=[6, 0], labels=[1, 2, 3]),
        replayed(1, samples=7, periods=[2, 5], labels=[7, 0, 0]),
    ]
    figure = buffers(rows)
    assert figure is not None
    by_period, by_label = figure.axes[:2]
    heights = [[float(bar.get_height()) for bar in container] for container in by_period.containers]
    assert heights == [[6, 2], [0, 5]]
    assert [bar.get_y() for bar in by_period.containers[1]] == [6, 2]
    assert [[float(bar.get_height()) for bar in container] for container in by_label.containers] == [
        [1, 7],
        [2, 0],
        [3, 0],
    ]
    assert [text.get_text() for text in by_period.texts] == ["6", "7"]


def test_many_periods_are_drawn_as_one_shape_for_each() -> None:
    periods = 120
    rows = [
        replayed(
            period,
            samples=5 if period else 3,
            periods=[3 * (place == period) + 2 * (place == period - 1) for place in range(periods)],
        )
        for period in range(periods)
    ]
    figure = buffers(rows)
    assert figure is not None
    axes = figure.axes[0]
    assert (len(axes.patches), axes.containers) == (periods, [])
    drawn = [(datum.series, datum.x, datum.low, datum.high) for datum in data_behind(figure)]
    assert drawn[:4] == [("period 1", 1, 0, 3), ("period 1", 2, 0, 2), ("period 2", 2, 2, 5), ("period 2", 3, 0, 2)]
    assert drawn[-1] == ("period 120", 120, 2, 5)


def test_without_a_census_only_the_totals_are_drawn() -> None:
    figure = buffers([replayed(0), replayed(1, samples=9)])
    assert figure is not None
    (axes,) = figure.axes
    assert [float(bar.get_height()) for bar in axes.containers[0]] == [6, 9]


def test_a_single_label_is_no_picture_of_its_own() -> None:
    figure = buffers([replayed(0, periods=[6, 0], labels=[6]), replayed(1, periods=[3, 3], labels=[6])])
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == ["Kept, by period"]


def test_the_objective_of_the_kept_samples_is_drawn_by_sample_beside_the_relaxed_ones() -> None:
    first, last = replayed(1, objective=9.0), replayed(2, objective=3.0)
    # 3 devices keep 6 samples. 4 had answered in the first iteration, and 6 in the end, with 2 samples each.
    said: dict[str, Any] = {"coordination": {"devices": 6, "answered": [4, 6], "objective": [24.0, 24.0]}}
    figure = objective([replayed(0), Row(4, task=1, remarks={**first.remarks, **said}), last])
    assert figure is not None
    drawn = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines[:-1]}
    assert drawn["kept"] == [[2.0, 1.5], [3.0, 0.5]]
    assert drawn["relaxed, last iteration"][0] == [2.0, 2.0]
    assert drawn["relaxed, first iteration"][0] == [2.0, 3.0]
    del said["coordination"]["answered"]
    earlier = objective([Row(4, task=1, remarks={**first.remarks, **said})])
    assert earlier is not None
    assert {line.get_label() for line in earlier.axes[0].lines} >= {"kept", "relaxed, last iteration"}
    assert "relaxed, first iteration" not in {line.get_label() for line in earlier.axes[0].lines}
    alone = objective([last])
    assert alone is not None
    assert [line.get_label() for line in alone.axes[0].lines] == ["kept", "gradients at right angles"]


def test_counts_of_another_form_are_left_out_of_the_bars() -> None:
    figure = buffers([replayed(0, labels=5, periods={"a": 1})])
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes] == ["Kept"]


def test_the_coordinated_objective_is_relative_to_its_first_value() -> None:
    said = {"devices": 3, "objective": [8.0, 4.0, 2.0]}
    figure = coordination([Row(2, task=0, remarks={"coordination": said})])
    assert figure is not None
    (line,) = figure.axes[0].lines
    assert line.get_xydata().tolist() == [[1.0, 1.0], [2.0, 0.5], [3.0, 0.25]]


@pytest.mark.parametrize(
    "remarks",
    [
        {},
        {"coordination": {"objective": [3.0]}},
        {"coordination": {"objective": 3.0}},
        {"replay": {}},
        {"replay": {"objective": 1.0, "samples": 2}},
        {"replay": {"period": "first", "objective": [1.0], "samples": [2]}},
    ],
)
def test_rows_without_remarks_are_not_drawn(remarks: Any) -> None:
    rows = [Row(1, task=0, remarks=remarks), Row(2)]
    assert [name for name, draw in REPLAY_PLOTS.items() if draw(rows) is not None] == []


def test_the_page_has_the_periods_and_the_replay_of_an_unfinished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "PLOTS", {})
    rows = [row(round, MATRIX[(round - 1) // 2]) for round in range(1, 5)]
    rows[1]["remarks"] = {"replay": {"period": 0, "devices": 2, "samples": 4, "periods": [4, 0, 0]}}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    page = write_report(tmp_path).read_text()
    assert "<b>75.0 %</b>" in page
    assert "<h2>Periods</h2>" in page
    assert "<h2>Replay</h2>" in page
    assert (
        '<td class="words">1</td><td class="number">2</td><td class="number">75.0 %</td><td class="number">50.0 %</td>'
        in page.replace("\N{NO-BREAK SPACE}", " ")
    )
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == {*PERIOD_PLOTS, "buffers"}
