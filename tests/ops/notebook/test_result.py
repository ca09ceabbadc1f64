"""What a result shows of itself, and its pandas frame."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedemu
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run_directory import RunDirectory
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import write_frozen
from fedemu.ops.notebook.frames import Rows
from fedemu.protocol.errors import ConfigurationError, FedemuError


@pytest.fixture
def directory(tmp_path: Path, write_summary: Callable[..., None]) -> Path:
    """A run of three rounds, the second of which was not evaluated."""
    folder = tmp_path / "runs" / "tiny-1"
    folder.mkdir(parents=True)
    write_frozen(Experiment(name="tiny", rounds=3), folder)
    with RunDirectory(folder) as run:
        for round, accuracy in ((1, 0.5), (2, None), (3, 0.875)):
            run.metrics(Row(round=round, accuracy=accuracy, accepted=5, device_metrics={"loss": 1.5 / round}))
    write_summary(folder)
    return folder


def test_a_result_is_told_in_a_few_lines_and_on_a_small_card(directory: Path) -> None:
    (directory / "report.html").write_text("<html></html>")
    result = fedemu.open_run(directory)
    lines = repr(result).splitlines()
    assert lines[0] == "tiny: completed"
    for words in ("fedavg", "digits", "3 rounds in 4.2 s", "87.5 %, best 87.5 %", "abababab", str(directory)):
        assert any(words in line for line in lines[1:]), words
    html = result._repr_html_()
    assert len(html.replace(str(directory), "")) < 3000
    assert 'report.html" target="_blank">report</a>' in html
    assert "data:" not in html
    assert "<img" not in html


def test_a_result_stays_that_of_its_run_when_the_working_folder_changes(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(directory.parent)
    result = fedemu.open_run("tiny-1")
    assert "  folder        tiny-1" in repr(result).splitlines()
    monkeypatch.chdir(tmp_path)
    assert "  folder        runs/tiny-1" in repr(result).splitlines()
    assert "accuracy" in result.figures
    assert fedemu.compare(result).frame()["final_accuracy"].tolist() == [0.875]


def test_an_unfinished_run_says_how_far_it_is(directory: Path) -> None:
    (directory / "summary.json").unlink()
    write_frozen(Experiment(name="tiny", rounds=40), directory)
    result = fedemu.open_run(directory)
    assert repr(result).splitlines()[0] == "tiny: unfinished"
    assert "3 of 40 rounds" in repr(result)
    assert "report" not in repr(result)


def test_a_completed_run_that_has_not_got_the_rounds_of_a_resume_is_interrupted(directory: Path) -> None:
    write_frozen(Experiment(name="tiny", rounds=40), directory)
    result = fedemu.open_run(directory)
    assert (result.outcome, result.facts["rounds"]) == ("interrupted", "3 of 40 rounds in 4.2 s")
    assert result.to_text().startswith("tiny: interrupted, 3 rounds in 4.2 s")


def test_a_card_tells_that_a_run_has_learnt_nothing(directory: Path, write_summary: Callable[..., None]) -> None:
    assert "doubt" not in repr(fedemu.open_run(directory))
    with RunDirectory(directory) as run:
        run.metrics(Row(round=4, accuracy=0.1, test_samples=360, accepted=5))
    write_summary(directory, rounds=4, chance_accuracy=0.1, final_accuracy=0.1)
    result = fedemu.open_run(directory)
    assert "the model has learnt nothing" in repr(result)
    assert "the model has learnt nothing" in result._repr_html_()


def test_text_of_an_experiment_is_no_html(directory: Path) -> None:
    config = directory / "config.toml"
    config.write_text(config.read_text().replace('"digits"', '"<b>digits</b>"'))
    assert "&lt;b&gt;digits&lt;/b&gt;" in fedemu.open_run(directory)._repr_html_()


def test_settings_that_are_damaged_are_told_in_one_sentence(directory: Path) -> None:
    (directory / "config.toml").write_text("rounds 3\n")
    for read in (fedemu.open_run, fedemu.compare):
        with pytest.raises(ConfigurationError, match=r"config.toml is not valid TOML: a line must be a "):
            read(directory)
    (directory / "config.toml").unlink()
    assert fedemu.open_run(directory).settings == {}


def test_rows_are_a_tuple_and_called_a_frame(directory: Path) -> None:
    rows = fedemu.open_run(directory).rows
    assert rows[-1].accuracy == 0.875
    assert repr(rows) == "<3 rows, the last accuracy 0.8750; call rows() for a pandas frame>"
    frame = rows()
    assert list(frame["round"]) == [1, 2, 3]
    assert frame["accuracy"].dtype == float
    assert math.isnan(frame["accuracy"][1])
    assert list(frame["device_metrics.loss"]) == [1.5, 0.75, 0.5]
    assert frame["loss"].dtype == float, "a column of which nothing is known is one of numbers too"
    none = Rows()()
    assert [*none.columns] == [column for column in frame.columns if column != "device_metrics.loss"]
    assert (len(none), none["accuracy"].dtype) == (0, float)


def test_a_frame_can_be_written_as_parquet(directory: Path, tmp_path: Path) -> None:
    frame = fedemu.open_run(directory).rows()
    frame.to_parquet(tmp_path / "rows.parquet")
    assert frame.remarks.isna().all()
    told = {"replay": {"samples": 3.0, "labels": [1, 2]}}
    some = Rows([Row(round=1), Row(round=2, remarks=told)])()
    some.to_parquet(tmp_path / "rows.parquet")
    assert some.remarks.tolist() == [{}, told]


def test_numbers_that_a_method_remarks_have_columns_of_a_frame() -> None:
    rows = Rows([Row(round=1, remarks={"norm": 2.5, "word": "a", "replay": {"period": 0}}), Row(round=2)])
    frame = rows()
    assert [column for column in frame.columns if column.startswith("remarks")] == ["remarks", "remarks.norm"]
    assert frame["remarks.norm"].dtype == float
    assert frame["remarks.norm"][0] == 2.5
    assert math.isnan(frame["remarks.norm"][1])


def test_a_frame_without_pandas_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        FedemuError, match="a frame needs pandas, which is not installed; install it: pip install pandas"
    ):
        Rows()()


def test_a_figure_is_found_by_its_name(directory: Path) -> None:
    result = fedemu.open_run(directory)
    assert "accuracy" in result.figures
    (axes, *_) = result.figure("accuracy").axes
    assert axes.get_xlabel() == "round"
    with pytest.raises(ConfigurationError, match='no figure "acuracy"; did you mean accuracy'):
        result.figure("acuracy")
    with pytest.raises(ConfigurationError, match='no figure "moon"; it has accuracy'):
        result.figure("moon")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"seeds": 0}, "seeds = 0 is no number of seeds"),
        ({"seeds": True}, "seeds = True is no number of seeds"),
        ({"seeds": 1.5}, "seeds = 1.5 is no number of seeds"),
        ({"seeds": np.int64(1001)}, "the seeds 1-1001 are more than 1,000"),
        ({"seeds": [1, 1]}, "the seeds 1,1 have 1 more than once"),
        ({"seeds": 2, "seed": 3}, "leave out seed"),
        ({"resume": "there"}, "there is no run directory"),
        ({"resume": "there", "out": "here"}, "leave out out"),
        ({"resume": "there", "experiment": "digits"}, "leave out an experiment"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(
    arguments: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=said):
        fedemu.run(**arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"target": 90}, "target = 90 must be above 0 and at most 1; it is a share, as in 0.9"),
        ({"target": math.nan}, "target = nan must be above 0"),
        ({"last": 0}, "last = 0 must be at least 1; it is a number of rounds"),
    ],
)
def test_a_target_and_a_number_of_rounds_out_of_range_are_refused(
    arguments: dict[str, Any], said: str, directory: Path
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        fedemu.compare(directory, **arguments)
