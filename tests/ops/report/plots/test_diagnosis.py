"""The pictures of diagnosed rounds: which round they show, which numbers, and what they do without some of them."""

import io
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from fedemu.ops.pages.behind import data_behind
from fedemu.ops.pages.style import drawn, saved
from fedemu.ops.report.plots.diagnosis import (
    DIAGNOSIS_PLOTS,
    forgetting_by_stage,
    in_and_out_local,
    loss_transition,
    mean_over_devices,
    weight_alignment,
)
from fedemu.ops.report.plots.one_round import (
    local_forgetting_of_last_round,
    local_forgetting_of_worst_round,
    models_of_last_round,
    models_of_worst_round,
)


def model(accuracy: list[float | None], loss: float | None) -> dict[str, Any]:
    return {"loss": loss, "class_accuracy": accuracy}


def diagnosed(round: int, **more: Any) -> dict[str, Any]:
    """Two devices, three classes, of which the last has no test samples."""
    return {
        "round": round,
        "devices": [4, 17],
        "label_counts": [[3, 0, 0], [0, 2, 1]],
        "before": model([0.5, 0.5, None], 1.0),
        "locals": {
            "loss": [2.0, None],
            "class_accuracy": [[0.75, 0.0, None], [0.25, 1.0, None]],
            "in_local": [0.75, 1.0],
            "out_local": [0.0, None],
        },
        "before_in_local": [0.5, 0.5],
        "before_out_local": [0.5, None],
        "after": model([0.5, 0.25, None], 0.5),
        "after_in_local": [0.5, 0.25],
        "after_out_local": [0.25, None],
        "local_forgetting": 0.2,
        "aggregation_forgetting": 0.1,
        "round_forgetting": 0.05,
        "alignment": {
            "features": {"locals": [0.5, 1.0], "after": 0.25},
            "logits": {"locals": [0.25, None], "after": None},
        },
        "validation": {"forgetting": [[-0.25, 0.5], [0.25, None]], "mean_forgetting": 0.375},
    } | more


def lines_of(figure: Any, label: str) -> list[list[tuple[float, float]]]:
    return [
        [(float(x), float(y)) for x, y in line.get_xydata()]
        for axes in figure.axes
        for line in axes.lines
        if line.get_label() == label
    ]


@pytest.mark.parametrize("name", DIAGNOSIS_PLOTS)
def test_every_picture_is_drawn_of_one_round_and_of_a_readable_size(name: str) -> None:
    png = saved(drawn(DIAGNOSIS_PLOTS[name], [diagnosed(1)]), "png")
    height, width, _ = matplotlib.image.imread(io.BytesIO(png)).shape
    assert 400 < width < 1000
    assert 350 < height < 1100


@pytest.mark.parametrize("name", DIAGNOSIS_PLOTS)
def test_a_picture_without_data_is_left_out(name: str) -> None:
    empty = {"round": 1, "devices": [], "before": None, "locals": None, "after": None, "validation": None}
    assert drawn(DIAGNOSIS_PLOTS[name], []) is None
    assert drawn(DIAGNOSIS_PLOTS[name], [empty]) is None
    assert DIAGNOSIS_PLOTS[name]([{"round": 1}]) is None
    assert DIAGNOSIS_PLOTS[name]([diagnosed(1), {"round": 2}]) is not None


@pytest.mark.parametrize("name", ["rows_worst_round", "rows_last_round", "local_forgetting_worst_round"])
def test_a_map_of_devices_is_left_out_where_no_device_is_told(name: str) -> None:
    unnamed = {key: value for key, value in diagnosed(1).items() if key != "devices"}
    assert DIAGNOSIS_PLOTS[name]([unnamed]) is None


def test_the_loss_goes_from_the_global_model_to_the_local_ones_and_back() -> None:
    figure = loss_transition([diagnosed(1), diagnosed(2), diagnosed(5)])
    assert lines_of(figure, "local models, mean") == [[(0.5, 2.0), (1.5, 2.0), (4.5, 2.0)]]
    # Round 2 begins with the model that round 1 ended with; what round 5 began with has a point of its own.
    assert lines_of(figure, "global model") == [[(0.0, 1.0), (1.0, 0.5), (2.0, 0.5), (4.0, 1.0), (5.0, 0.5)]]


def test_a_loss_that_explodes_is_drawn_on_a_logarithmic_axis() -> None:
    figure = loss_transition([diagnosed(1), diagnosed(2, after=model([0.0, 0.0, None], 900.0))])
    assert figure is not None
    assert figure.axes[0].get_yscale() == "log"
    figure.draw_without_rendering()
    written = [label.get_text() for label in figure.axes[0].get_yticklabels(which="both")]
    assert {"1", "10", "100", "1,000"} <= {*written}
    assert not any("$" in text for text in written), "plain numbers, no powers"


def test_in_and_out_local_accuracy_is_the_mean_over_the_devices_that_have_one() -> None:
    figure = in_and_out_local([diagnosed(3)])
    assert lines_of(figure, "local models, mean and spread") == [[(3.0, 0.875)], [(3.0, 0.0)]]
    assert lines_of(figure, "old global model") == [[(3.0, 0.5)], [(3.0, 0.5)]]
    assert lines_of(figure, "new global model") == [[(3.0, 0.375)], [(3.0, 0.25)]]


def test_alignment_is_that_of_the_local_models_and_of_the_new_global_one_by_layer() -> None:
    figure = weight_alignment([diagnosed(2), {"round": 3}])
    assert lines_of(figure, "local models, mean and spread") == [[(2.0, 0.75)], [(2.0, 0.25)]]
    assert lines_of(figure, "new global model")[0] == [(2.0, 0.25)]


def test_the_rows_of_a_round_are_the_old_global_model_the_local_ones_and_the_new_one() -> None:
    figure = models_of_last_round([diagnosed(1), diagnosed(2)])
    assert figure is not None
    axes = figure.axes[0]
    assert axes.get_title().startswith("Round 2, ")
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "old global",
        "device 4",
        "device 17",
        "new global",
    ]
    table = np.ma.filled(axes.images[0].get_array(), np.nan)
    assert table[:, :2].tolist() == [[0.5, 0.5], [0.75, 0.0], [0.25, 1.0], [0.5, 0.25]]
    assert np.isnan(table[:, 2]).all()


def test_the_data_behind_a_map_name_every_device_also_where_the_axis_has_no_room_for_all() -> None:
    devices = [3 * number for number in range(41)]
    forgetting = [[0.0] * 41] * 41
    line = diagnosed(1, devices=devices, label_counts=None, validation={"forgetting": forgetting})
    line["locals"] = {"class_accuracy": [[0.5, 0.5, None]] * 41}
    of_models, of_devices = models_of_last_round([line]), local_forgetting_of_last_round([line])
    assert of_models is not None
    assert of_devices is not None
    rows = [*dict.fromkeys(datum.series for datum in data_behind(of_models))]
    assert rows == ["old global", *(f"device {device}" for device in devices), "new global"]
    cells = [(datum.series, datum.x) for datum in data_behind(of_devices)]
    assert cells == [(f"local model of device {of}", on) for of in devices for on in devices]


def test_the_worst_round_is_the_one_with_the_largest_round_forgetting() -> None:
    rounds = [diagnosed(1), diagnosed(2, round_forgetting=0.3), diagnosed(3), diagnosed(4, round_forgetting=None)]
    figure = models_of_worst_round(rounds)
    assert figure is not None
    assert figure.axes[0].get_title() == "Round 2, model by model (most forgotten)"


def test_the_matrix_of_local_forgetting_is_coloured_evenly_around_zero() -> None:
    figure = local_forgetting_of_last_round([diagnosed(1), diagnosed(2, validation=None)])
    assert figure is not None
    image = figure.axes[0].images[0]
    assert image.get_clim() == (-0.5, 0.5)
    assert np.ma.filled(image.get_array(), np.nan)[0].tolist() == [-0.25, 0.5]
    assert "round 1" in figure.axes[0].get_title()


def test_the_worst_matrix_is_that_of_the_round_with_the_largest_mean_forgetting() -> None:
    less = {"forgetting": [[0.0, 0.1], [0.1, 0.0]], "mean_forgetting": 0.1}
    figure = local_forgetting_of_worst_round([diagnosed(1), diagnosed(2, validation=less)])
    assert figure is not None
    assert figure.axes[0].get_title() == "Local forgetting, round 1 (most forgotten)"


def test_a_stage_without_numbers_has_no_line() -> None:
    figure = forgetting_by_stage([diagnosed(1, aggregation_forgetting=None)])
    assert figure is not None
    assert [line.get_ydata()[0] for line in figure.axes[0].lines] == [0.2, 0.05]


def test_a_mean_over_devices_ignores_those_without_a_number() -> None:
    assert mean_over_devices(diagnosed(1), "loss") == 2.0
    assert np.isnan(mean_over_devices({"round": 1, "locals": {"loss": [None]}}, "loss"))
