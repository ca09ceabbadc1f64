"""The pictures of a comparison: axes on which close experiments can be told apart, and colours that stay the same."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedemu.algorithms.names import LOSSES, METHODS
from fedemu.ops.compare.compare import Comparison, compare
from fedemu.ops.compare.looks import COLOURS, places
from fedemu.ops.compare.page.experiments import (
    accuracy,
    accuracy_late,
    class_accuracy,
    forgetting_and_accuracy,
    round_forgetting,
)
from fedemu.ops.compare.page.head import head, swatches
from fedemu.ops.compare.page.page import all_figures, write_comparison
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import write_frozen
from fedemu.ops.pages.behind import data_behind
from fedemu.ops.pages.colours import on_page
from fedemu.ops.pages.files import write_figures
from fedemu.ops.pages.fitted import fit
from fedemu.ops.pages.paper import paper_of
from fedemu.ops.pages.style import drawn


def write_run(directory: Path, accuracies: Sequence[float], **settings: Any) -> Path:
    directory.mkdir(parents=True)
    write_frozen(Experiment.parse({"name": "run", **settings}), directory)
    rows = [
        {"round": round, "accuracy": accuracy, "class_accuracy": [accuracy, 0.5], "bytes_down": 1000}
        for round, accuracy in enumerate(accuracies, 1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"outcome": "completed", "ended": "2026-03-01T12:30:00+00:00", "model_digest": "d" * 64}
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


@pytest.fixture
def close(tmp_path: Path) -> Comparison:
    """Three methods whose accuracies end one point apart, with two seeds each."""
    for place, method in enumerate(("fedavg", "fedprox", "scaffold")):
        for seed in (1, 2):
            late = [0.9 + 0.01 * place + 0.002 * seed] * 4
            write_run(tmp_path / method / f"seed-{seed}", [0.1, 0.4, 0.7, *late], seed=seed, algorithm={"name": method})
    return compare([tmp_path / name for name in ("fedavg", "fedprox", "scaffold")])


def lines(figure: Any) -> dict[str, str]:
    return {line.get_label(): line.get_color() for line in figure.axes[0].lines if line.get_label()[0] != "_"}


def test_experiments_of_few_rounds_are_drawn_or_named_as_those_without_values(tmp_path: Path) -> None:
    for method, rounds in (("fedavg", 61), ("fedprox", 3), ("scaffold", 1)):
        path = write_run(tmp_path / method, [], algorithm={"name": method})
        rows = [
            {"round": place + 1, "accuracy": 0.5, "round_forgetting": 0.1 * place or None} for place in range(rounds)
        ]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    comparison = compare([tmp_path / name for name in ("fedavg", "fedprox", "scaffold")])
    figure = round_forgetting(comparison)
    assert figure is not None
    long, short, none = figure.axes[0].lines
    assert [line.get_label() for line in (long, short, none)] == ["fedavg", "fedprox", "scaffold (no values)"]
    assert len(long.get_xdata()) == 58
    assert [*short.get_xdata(), *short.get_ydata()] == pytest.approx([2.5, 0.15])
    assert len(none.get_xdata()) == 0
    assert {datum.series for datum in data_behind(figure)} == {"fedavg", "fedprox"}


def test_the_date_of_a_run_stays_on_one_line_however_long_the_path_is(tmp_path: Path) -> None:
    write_run(tmp_path / "long" / "run", [0.5])
    (tmp_path / "page" / "plots").mkdir(parents=True)
    text = write_comparison(compare([tmp_path / "long" / "run"]), tmp_path / "page").read_text()
    assert '<td class="date">2026-03-01\N{NO-BREAK SPACE}12:30\N{NO-BREAK SPACE}UTC</td>' in text
    assert ".date { white-space: nowrap }" in text


def test_methods_a_point_apart_fill_the_axis_of_the_second_half(close: Comparison) -> None:
    figure = accuracy_late(close)
    assert figure is not None
    low, high = figure.axes[0].get_ylim()
    assert 0.89 <= low < 0.902
    assert 0.924 < high <= 0.935
    assert "axis: " in figure.axes[0].get_ylabel()
    assert min(line.get_xdata()[0] for line in figure.axes[0].lines) >= 4


def test_the_dots_of_final_accuracy_are_on_an_axis_of_their_own(close: Comparison) -> None:
    figure = forgetting_and_accuracy(close)
    assert figure is not None
    low, high = figure.axes[0].get_xlim()
    assert low > 0.88
    assert high < 0.94
    assert figure.axes[0].get_xlabel().startswith("axis: ")
    written = [text.get_text() for text in figure.axes[0].texts]
    assert written == ["90.3 %", "91.3 %", "92.3 %"]
    means = [one for one in data_behind(figure) if one.panel == "Final accuracy" and one.series.endswith(", mean")]
    assert [one.high for one in means] == [pytest.approx(one.x + 0.002 / 2**0.5) for one in means]
    assert len(means) == 3


def test_the_numbers_of_forty_experiments_stand_between_their_dots(tmp_path: Path) -> None:
    for place in range(40):
        write_run(tmp_path / f"rate-{place}", [0.5, 0.6 if place else 0.0], local={"lr": 0.01 * (place + 1)})
    figure = forgetting_and_accuracy(compare([tmp_path]))
    assert figure is not None
    figure.draw_without_rendering()
    axes = figure.axes[0]
    first, second = (line for line in axes.lines[:2])
    upper, lower = (axes.transData.transform(line.get_xydata()[0])[1] for line in (first, second))
    number = axes.texts[1].get_window_extent()
    radius = first.get_markersize() / 2 * figure.dpi / 72
    assert lower + radius < number.y0 < number.y1 < upper - radius
    assert axes.texts[0].get_text() == "0.0 %"
    assert axes.texts[0].get_window_extent().x0 >= axes.get_window_extent().x0  # and not over the names at the axis


def test_a_run_of_one_seed_has_no_deviation(tmp_path: Path) -> None:
    figure = forgetting_and_accuracy(compare([write_run(tmp_path / "one", [0.5, 0.75])]))
    assert figure is not None
    assert [len(axes.collections) for axes in figure.axes] == [0, 0]
    assert accuracy_late(compare([tmp_path / "one"])) is None


def test_maps_of_classes_show_the_rounds_of_all_experiments_whatever_their_order(tmp_path: Path) -> None:
    long = write_run(tmp_path / "long", [0.1, 0.4, 0.7, 0.8, 0.9])
    short = write_run(tmp_path / "short", [0.2, 0.5], algorithm={"name": "scaffold"})
    for paths in ([long, short], [short, long]):
        figure = class_accuracy(compare(paths))
        assert figure is not None
        assert [axes.get_xlim() for axes in figure.axes[:2]] == [(0.5, 5.5), (0.5, 5.5)]


def test_a_method_has_one_colour_in_every_picture_and_in_the_head(close: Comparison) -> None:
    first, late = accuracy(close), accuracy_late(close)
    assert lines(first) == lines(late)
    assert len(set(lines(first).values())) == 3
    told = {swatch.meaning: swatch.style for swatch in swatches(close)}
    for name, colour in lines(first).items():
        assert told[name] == f"background: {on_page(colour)}"


def test_a_method_keeps_its_colour_whatever_it_is_compared_with(close: Comparison, tmp_path: Path) -> None:
    own = write_run(tmp_path / "slow", [0.5, 0.6], algorithm={"name": "fedprox"}, local={"lr": 0.001})
    others = compare([tmp_path / "scaffold", own, tmp_path / "fedprox"])
    before, after = lines(accuracy(close)), lines(accuracy(others))
    assert after["scaffold"] == before["scaffold"]
    slow, usual = (name for name in after if name.startswith("fedprox"))
    assert after[slow] == before["fedprox"]  # the first one of the method
    assert len(set(after.values())) == 3
    assert usual != slow


def test_every_method_with_every_loss_has_a_look_of_its_own() -> None:
    tables = [{"algorithm": {"name": method, "loss": loss}} for method in METHODS for loss in LOSSES]
    found = places([*tables, {}, {}])
    assert len(set(found)) == len(found)
    colours = [place % COLOURS for place in found]
    assert [place % COLOURS for place in places(tables[::7])] == colours[: len(tables) : 7]


def test_every_picture_is_a_figure_for_a_paper_too(close: Comparison, tmp_path: Path) -> None:
    paper = paper_of(tmp_path / "paper", ["pdf"], [], None, False)
    assert paper is not None
    names = write_figures(all_figures(close), paper, lambda text: None)
    assert names == ["accuracy", "accuracy_late", "forgetting_and_accuracy", "accuracy_by_bytes", "class_accuracy"]
    assert {path.name for path in paper.folder.iterdir()} == {
        "captions.txt",
        *(f"{name}.{kind}" for name in names for kind in ("pdf", "csv")),
    }
    with (paper.folder / "accuracy.csv").open() as file:
        told = [line for line in csv.DictReader(file) if line["series"] == "scaffold"]
    assert [float(line["y"]) for line in told] == pytest.approx([0.1, 0.4, 0.7, *[0.923] * 4])
    assert float(told[-1]["high"]) == pytest.approx(0.923 + 0.002 / 2**0.5)


@pytest.mark.parametrize("experiments", [3, 5])
def test_maps_of_any_number_of_experiments_stand_in_two_columns_of_a_paper(experiments: int, tmp_path: Path) -> None:
    for number in range(experiments):
        write_run(tmp_path / "runs" / f"{number}", [0.1, 0.4], local={"lr": 0.1 + number})
    figure = drawn(class_accuracy, compare([tmp_path / "runs"]))
    assert figure is not None
    behind = data_behind(figure)
    fit(figure, 3.25, 8.0, titles=False)
    figure.draw_without_rendering()
    assert {(datum.series, datum.x_name) for datum in behind} == {("class 0", "round"), ("class 1", "round")}
    panels = [axes.get_position() for axes in figure.axes if axes.images]
    assert len(panels) == experiments
    assert len({round(panel.x0, 3) for panel in panels}) == 2


@pytest.mark.parametrize("other", [["rose", "tulip"], ["tulip", "rose"]])
def test_maps_name_their_classes_if_all_runs_call_them_alike(other: list[str], tmp_path: Path) -> None:
    for number, names in enumerate([["rose", "tulip"]] * 3 + [other]):
        run = write_run(tmp_path / f"{number}", [0.1, 0.4], local={"lr": 0.1 + number})
        (run / "data.json").write_text(json.dumps({"class_names": names}))
    figure = drawn(class_accuracy, compare([tmp_path]))
    assert figure is not None
    alike = other == ["rose", "tulip"]
    shown = {"rose", "tulip"} if alike else {"class 0", "class 1"}
    assert {datum.series for datum in data_behind(figure)} == shown
    fit(figure, 3.25, 8.0, titles=False)
    figure.draw_without_rendering()
    maps = [axes for axes in figure.axes if axes.images]
    at_left = [any(label.get_visible() for label in axes.get_yticklabels()) for axes in maps]
    assert at_left == ([True, False, True, False] if alike else [True] * 4)
    assert len({round(axes.get_position().x0, 3) for axes in maps}) == 2, "four stand in two columns, too"


def test_a_name_with_dollar_signs_is_no_formula(tmp_path: Path) -> None:
    for name in (r"$\bad$", "a$x$b"):
        (write_run(tmp_path / name, [0.1, 0.4, 0.7]) / "config.toml").unlink()  # so that the folder is the name
    shown = []
    for name, draw in all_figures(compare([tmp_path])).items():
        if figure := draw():
            figure.draw_without_rendering()
            told = {
                text.removesuffix(", mean") for datum in data_behind(figure) for text in (datum.series, datum.panel)
            }
            shown += [name] if {r"$\bad$", "a$x$b"} <= told else []
    assert {"accuracy", "forgetting_and_accuracy", "class_accuracy"} <= {*shown}


def test_folders_whose_names_are_no_utf_8_are_compared_too(tmp_path: Path) -> None:
    """As on a disk of an old system, or after a run was moved there."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    for name in ("one", os.fsdecode(b"tw\xf6")):
        (write_run(folder / name, [0.1, 0.4, 0.7]) / "config.toml").unlink()
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "plots").mkdir()
    page = write_comparison(compare([folder]), tmp_path / "page").read_text()
    assert r"caf\udce9/one" in page
    assert page.count(r">tw\udcf6<") > 2


def test_a_name_that_begins_with_an_underscore_is_in_the_legend_and_in_the_data(tmp_path: Path) -> None:
    for name in ("_first", "second"):
        (write_run(tmp_path / name, [0.1, 0.4, 0.7]) / "config.toml").unlink()  # so that the folder is the name
    figure = accuracy(compare([tmp_path / "_first", tmp_path / "second"]))
    assert figure is not None
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["_first", "second"]
    assert {datum.series for datum in data_behind(figure)} == {"_first", "second"}


def test_the_head_tells_what_the_experiments_share_and_how_to_compare_them_again(
    close: Comparison, tmp_path: Path
) -> None:
    facts = {fact.name: fact.value for fact in head(close, Path("out"))}
    assert facts["method"] == "fedavg | fedprox | scaffold"
    assert facts["rounds"] == "7"
    assert facts["seeds"] == "1, 2"
    assert facts["date"] == "2026-03-01 12:30 UTC"
    places = " ".join(str(tmp_path / name) for name in ("fedavg", "fedprox", "scaffold"))
    assert facts["make again"] == f"fedemu compare {places} --out out"
