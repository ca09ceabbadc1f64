"""What a run's page shows of what was generated."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import read_generated
from fedemu.coordinator.record.run_directory import RunDirectory, claim_folder
from fedemu.ops.report import figures
from fedemu.ops.report.generated import generated_plots, generator_table
from fedemu.ops.report.plots.generated import samples_of_task
from fedemu.ops.report.report import write_report
from fedemu.protocol.errors import ConfigurationError

JUDGED = {"cross_entropy": 0.5048, "diversity": -0.33, "recognised": 0.789}


def page(
    classes: list[int], samples: int, names: list[str], channels: int = 1, size: int = 8, real: bool = True
) -> dict[str, Any]:
    """Class c is of level c + 1, its real sample of level 200."""
    y = np.array(classes * samples)
    x = np.ones((len(y), channels, size, size), np.uint8) * (y[:, None, None, None] + 1).astype(np.uint8)
    shown = classes if real else []
    return {
        "x": x,
        "y": y,
        "real": np.full((len(shown), channels, size, size), 200, np.uint8),
        "real_y": np.array(shown, dtype=np.int64),
        "names": np.array(names),
    }


def labels(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text() not in ("real", "generated")]


def test_every_class_has_its_column_with_a_real_sample_on_top() -> None:
    figure = samples_of_task(2, page([0, 3], 2, list("0123456789")))
    assert figure is not None
    (axes,) = figure.axes
    assert labels(axes) == ["0", "3"]
    (image,) = axes.images
    assert image.get_interpolation() == "none"
    pixels = image.get_array()
    assert pixels.shape == (3 * 10, 10 * 10, 4)  # a row and a column are 8 pixels and a gap of one on either side
    assert pixels[1:9, 1:9].tolist() == [[[200, 200, 200, 255]] * 8] * 8
    assert (pixels[11:19, 1:9, :3] == 1).all()
    assert (pixels[21:29, 11:19, :3] == 4).all()
    assert (pixels[[0, 9, 10, 19, 20, 29], :, 3] == 0).all()  # the page is seen between the images
    assert (pixels[:, 20:, 3] == 0).all()


def test_colours_stay_colours() -> None:
    colourful = page([1], 1, ["a", "b"], channels=3)
    colourful["x"][:, 1], colourful["x"][:, 2] = 20, 30
    figure = samples_of_task(1, colourful)
    assert figure is not None
    assert figure.axes[0].images[0].get_array()[15, 5].tolist() == [2, 20, 30, 255]


def test_a_hundred_classes_stand_in_bands_of_twenty_each_with_its_name() -> None:
    names = [f"class {i}" for i in range(99)] + ["a very long name of a class"]
    figure = samples_of_task(9, page(list(range(100)), 8, names))
    assert figure is not None
    assert [len(labels(axes)) for axes in figure.axes] == [20] * 5
    assert labels(figure.axes[1])[0] == "class 20"
    assert labels(figure.axes[4])[-1] == "a very long n…"
    boxes = [axes.get_position() for axes in figure.axes]
    assert all(upper.y0 > lower.y1 for upper, lower in itertools.pairwise(boxes))
    assert figure.axes[0].images[0].get_array().shape == (4 * 10, 20 * 10, 4)


def test_columns_may_lack_samples_where_noise_tells_no_class() -> None:
    uneven = page([0, 1], 1, ["a", "b"], real=False)
    uneven["x"], uneven["y"] = np.full((4, 1, 8, 8), 7, np.uint8), np.array([0, 1, 1, 1])
    figure = samples_of_task(1, uneven)
    assert figure is not None
    pixels = figure.axes[0].images[0].get_array()
    assert pixels.shape[0] == 4 * 10
    assert (pixels[:10, :, 3] == 0).all()
    assert [(pixels[10 * row + 5, 5, :3] == 7).all() for row in (1, 2, 3)] == [True, False, False]


def test_a_long_stream_shows_a_dozen_tasks_and_among_them_the_last() -> None:
    pages = {task: page([0], 1, ["a"]) for task in range(1, 50)}
    shown = list(generated_plots(pages))
    assert (len(shown), shown[0], shown[-1]) == (12, "generated-1", "generated-49")
    assert list(generated_plots({1: page([0], 1, ["a"])})) == ["generated-1"]
    assert generated_plots({}) == {}


def test_a_line_tells_how_good_each_tasks_generator_is() -> None:
    rows = [
        Row(1, task=0),
        Row(2, task=1, remarks={"generator": JUDGED}),
        Row(3, task=1, remarks={"generator": JUDGED}),
        Row(4, task=2, remarks={"generator": {"cross_entropy": None, "recognised": 0.5}}),
    ]
    table = generator_table(rows)
    assert table is not None
    assert [title for title, _ in table.columns] == ["task", "cross entropy", "diversity", "recognised"]
    assert table.rows == [("2", "0.5048", "-0.33", "78.9 %"), ("3", "–", "–", "50.0 %")]
    assert generator_table([Row(1), Row(2)]) is None


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(figures, "PLOTS", {})
    claim_folder(tmp_path / "run")
    (tmp_path / "run" / "config.toml").write_text('name = "digits"\n')
    with RunDirectory(tmp_path / "run") as directory:
        directory.metrics(Row(round=2, task=1, remarks={"generator": JUDGED}))
    return tmp_path / "run"


def test_a_page_has_pictures_and_figures_of_generators(run: Path) -> None:
    with RunDirectory(run) as directory:
        for task in (2, 1):
            directory.generated(task, page([0, 3], 2, list("0123")))
    assert list(read_generated(run)) == [1, 2]
    text = write_report(run).read_text()
    assert "<h2>Generated samples</h2>" in text
    assert text.count("<svg") == 2
    assert text.index("Generated in task 2") < text.index("Generated in task 3")
    assert '<td class="number">78.9\N{NO-BREAK SPACE}%</td>' in text
    assert 'class="plots broad"' not in text
    assert {path.name for path in (run / "plots").iterdir()} == {"generated-1.png", "generated-2.png"}


def test_many_classes_take_the_width_of_the_page(run: Path) -> None:
    with RunDirectory(run) as directory:
        directory.generated(1, page([0, 3], 2, list("0123456789ab")))
    assert 'class="plots broad"' in write_report(run).read_text()


def test_a_run_that_generates_nothing_has_no_such_section(run: Path) -> None:
    (run / "metrics.jsonl").write_text(json.dumps({"round": 1, "task": 0}) + "\n")
    assert "Generated samples" not in write_report(run).read_text()


def test_a_failure_to_keep_pictures_is_told(run: Path) -> None:
    with RunDirectory(run) as directory:
        directory.event("join", 0.0, 0.0, device=0)
        directory.event("pictures_failed", 1.0, 1.0, task=3, detail="no <space> left")
    text = write_report(run).read_text()
    assert '<p class="bad">There are no pictures of task 4: no &lt;space&gt; left</p>' in text
    assert text.count("There are no pictures") == 1


def test_a_damaged_file_is_named(run: Path) -> None:
    (run / "generated").mkdir()
    (run / "generated" / "task-1.npz").write_bytes(b"nonsense")
    with pytest.raises(ConfigurationError, match=r"task-1\.npz cannot be read: it is no npz file; remove it"):
        write_report(run)
