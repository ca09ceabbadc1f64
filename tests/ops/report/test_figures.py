"""The figures of a run by name, for notebooks."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import pytest

from fedemu.ops.pages.behind import data_behind
from fedemu.ops.pages.style import STYLE
from fedemu.ops.report.figures import figure, figure_names
from fedemu.protocol.errors import ConfigurationError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [{"round": n, "accuracy": n / 10, "loss": 1.0} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_figure_is_drawn_by_its_name_and_leaves_no_style_behind(run: Path) -> None:
    before = matplotlib.rcParams["font.size"]
    drawn = figure(run, "accuracy")
    assert drawn.axes[0].get_title(loc="left").startswith("Accuracy and loss (best 20.0 %, round 2)")
    assert drawn.axes[0].yaxis.label.get_fontsize() == STYLE["font.size"]
    assert matplotlib.rcParams["font.size"] == before


def test_the_data_behind_name_the_dot_of_the_best_accuracy(run: Path) -> None:
    told = [(one.series, one.x, one.y) for one in data_behind(figure(run, "accuracy"))]
    assert told[:3] == [("accuracy", 1, 0.1), ("accuracy", 2, 0.2), ("best accuracy", 2, 0.2)]


def test_the_data_behind_name_both_axes_also_where_another_panel_has_the_name_of_one(run: Path) -> None:
    told = {(one.x_name, one.y_name) for one in data_behind(figure(run, "accuracy"))}
    assert told == {("round", "test accuracy"), ("round", "test loss (dashed)")}


def test_the_names_are_those_for_which_the_run_has_data(run: Path) -> None:
    assert figure_names(run) == ["accuracy"]


def test_a_name_that_the_run_lacks_is_an_error_with_those_that_it_has(run: Path) -> None:
    with pytest.raises(ConfigurationError, match='has no figure "accurcy"; did you mean accuracy'):
        figure(run, "accurcy")
    with pytest.raises(ConfigurationError, match='has no figure "outcomes"; it has accuracy'):
        figure(run, "outcomes")
    with pytest.raises(ConfigurationError, match="nowhere does not exist; name the folder of a run"):
        figure(run / "nowhere", "accuracy")


@pytest.mark.parametrize(
    ("told", "names"),
    [
        ('{"class_names": ["rose", "a tulip that is rather long"]}', ["rose", "a tulip …er long"]),
        ('{"class_names": ["0", "1"]}', []),
        ('{"class_names": ["rose", "\\u82b1"]}', []),  # the font lacks this letter
        ('{"class_names": ["rose", "tulip", "daisy"]}', []),
        ('{"class_names": 3}', []),
        ("[", []),
    ],
)
def test_classes_have_their_names_if_the_run_tells_them(run: Path, told: str, names: list[str]) -> None:
    model = {"class_accuracy": [0.5, 1.0]}
    local = {"class_accuracy": [[0.5, 0.5]]}
    line = {"round": 1, "devices": [3], "before": model, "after": model, "locals": local, "round_forgetting": 0.0}
    (run / "diagnosis.jsonl").write_text(json.dumps(line) + "\n")
    (run / "metrics.jsonl").write_text("".join(json.dumps({"round": n, **model}) + "\n" for n in (1, 2)))
    (run / "data.json").write_text(told)
    upwards = figure(run, "class_accuracy")
    numbers = ["class 0", "class 1"]
    assert [*dict.fromkeys(datum.series for datum in data_behind(upwards))] == (names or numbers)
    for name in ("rows_worst_round", "rows_last_round"):
        across = figure(run, name).axes[0].xaxis
        assert [label.get_text() for label in across.get_ticklabels() if names] == names


def test_the_fleet_is_shown_at_the_start_of_its_round_and_crashes_at_its_end(run: Path) -> None:
    rows = [{"round": n, "virtual_time": 10.0 * n, "online": 4 - n, "joined": 4, "crashed": 1} for n in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = {line.get_label(): line.get_xydata().tolist() for line in figure(run, "fleet").axes[0].lines}
    assert shown["on-line"] == [[0.0, 3.0], [10.0, 2.0], [20.0, 1.0], [30.0, 1.0]]
    assert shown["crashed so far"] == [[10.0, 1.0], [20.0, 2.0], [30.0, 3.0]]
