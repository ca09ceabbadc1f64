"""Figures for papers: their size, their fonts, their texts, the data behind them, and files that are the same again."""

from __future__ import annotations

import csv
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Affine2D

from fedemu.ops.pages.behind import Datum, data_behind
from fedemu.ops.pages.files import write_figures
from fedemu.ops.pages.fitted import fit
from fedemu.ops.pages.paper import paper_of
from fedemu.ops.pages.style import bare_figure, drawn, legend_below, new_figure, saved
from fedemu.protocol.errors import ConfigurationError

LONG = "a method with a very long name and many settings, lr 0.1"


def two_lines() -> Figure | None:
    """Two methods over forty rounds."""
    figure, axes = new_figure("Accuracy of two methods")
    rounds = np.arange(1.0, 41.0)
    axes.fill_between(rounds, rounds / 50, rounds / 40, alpha=0.2, label="_fedavg")
    axes.plot(rounds, rounds / 45, label="fedavg")
    axes.plot(rounds, rounds / 60, label=LONG)
    axes.axhline(0.5)
    axes.set_ylabel("accuracy lost, mean over the classes and the devices\n(axis: 0 to 90 %)")
    return legend_below(figure, axes)


def panels() -> Figure | None:
    """A bar, a map with named rows, and dots that stand beside their place."""
    figure = bare_figure(5.6, 3.0)
    left, right = figure.subplots(1, 2)
    left.set_title("Kept")
    left.bar([1, 2], [3, 4], bottom=[0, 1], label="_period 1")
    right.set_title("Map")
    right.imshow([[0.25, np.nan], [0.5, 1.0]], aspect="auto")
    right.set_yticks([0, 1], ["old model", "new model"])
    right.plot([1], [0], "o", transform=Affine2D().translate(-0.4, 0) + right.transData, label="_held")
    return figure


def fitted(draw: Any, width: float = 3.25, titles: bool = False) -> Figure:
    figure = drawn(draw)
    assert figure is not None
    fit(figure, width, 8, titles)
    figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize("width", [3.25, 6.75])
def test_all_texts_have_the_size_that_was_asked_for_and_stand_inside_the_figure(width: float) -> None:
    figure = fitted(two_lines, width)
    assert figure.get_size_inches()[0] == width
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert {text.get_fontsize() for text in texts} == {8}
    whole = figure.bbox
    for text in (*figure.legends[0].get_texts(), figure.axes[0].yaxis.label, figure.axes[0].xaxis.label):
        box = text.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= whole.width
        assert box.y0 >= -1
        assert box.y1 <= whole.height + 1


def test_a_figure_has_no_title_unless_one_is_wanted_and_panels_keep_theirs() -> None:
    assert fitted(two_lines).axes[0].get_title(loc="left") == ""
    assert fitted(two_lines, titles=True).axes[0].get_title(loc="left") == "Accuracy of two methods"
    assert [axes.get_title(loc="left") for axes in fitted(panels).axes] == ["Kept", "Map"]


def test_lines_can_be_told_apart_without_colours_and_in_the_legend() -> None:
    figure = fitted(two_lines)
    first, second = figure.axes[0].lines[:2]
    assert first.get_linestyle() != second.get_linestyle()
    assert first.get_marker() != second.get_marker()
    shown = [(handle.get_linestyle(), handle.get_marker()) for handle in figure.legends[0].legend_handles]
    assert shown == [(line.get_linestyle(), line.get_marker()) for line in (first, second)]


def test_dots_without_a_line_are_all_drawn() -> None:
    def draw() -> Figure:
        figure, axes = new_figure("Losses")
        for height, name in ((1.0, "local models"), (2.0, "global model")):
            axes.plot(np.arange(40.0), np.full(40, height), "o", label=name)
        return figure

    first, second = fitted(draw).axes[0].lines
    assert first.get_marker() != second.get_marker()
    assert [line.get_markevery() for line in (first, second)] == [None, None]


def test_the_name_beside_all_panels_stays_above_the_legend() -> None:
    def draw() -> Figure | None:
        figure = bare_figure(8.4, 3.9)
        for axes in figure.subplots(1, 2, sharey=True):
            axes.plot([1, 2], [3, 4], label="naive uniform")
            axes.set_xlabel("tested on period")
        figure.supylabel("accuracy, percentage points against no replay", fontsize=9.5)
        return legend_below(figure, figure.axes[0])

    figure = fitted(draw)
    name = figure._supylabel.get_window_extent()  # type: ignore[attr-defined]
    assert name.y0 >= figure.legends[0].get_window_extent().y1
    assert name.y1 <= figure.bbox.y1


def test_long_names_that_are_alike_in_the_legend_keep_their_lines() -> None:
    figure, axes = new_figure("a title")
    for letter, colour in (("x", "red"), ("y", "blue")):
        axes.plot([1, 2], [3, 4], color=colour, label=100 * "a" + letter + 100 * "b")
    assert legend_below(figure, axes) is figure
    fit(figure, 3.25, 8.0, titles=False)
    assert [handle.get_color() for handle in figure.legends[0].legend_handles] == ["red", "blue"]


@pytest.mark.parametrize(("rows", "named"), [(12, 12), (100, 25)])
def test_a_figure_grows_until_each_row_has_its_name_but_not_beyond_a_page(rows: int, named: int) -> None:
    def dots() -> Figure:
        figure = bare_figure(5.6, 2.0)
        left, right = figure.subplots(1, 2, sharey=True)
        left.set_title("Final accuracy")
        right.set_title("Forgetting")
        for place in range(rows):
            left.plot([0.5], [place], "o")
        left.set_yticks(range(rows), [f"my method,\nlr 0.{place}" for place in range(rows)])
        return figure

    figure = fitted(dots)
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert len(boxes) == named
    assert all(low.y1 <= high.y0 for low, high in pairwise(boxes))
    assert figure.get_size_inches()[1] < 9


def test_numbers_of_rows_that_touch_each_other_are_left_out() -> None:
    def numbered() -> Figure:
        figure = bare_figure(5.6, 2.0)
        axes = figure.subplots()
        axes.imshow(np.eye(40), aspect="auto")
        axes.set_yticks(range(40), [str(place) for place in range(40)])
        return figure

    figure = fitted(numbered)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0", "8", "16", "24", "32"]
    assert figure.get_size_inches()[1] < 2


def test_the_data_behind_a_line_have_the_ends_of_its_band() -> None:
    figure = drawn(two_lines)
    assert figure is not None
    data = data_behind(figure)
    assert len(data) == 80
    name = "accuracy lost, mean over the classes and the devices"
    assert data[0] == Datum("", "fedavg", 1.0, pytest.approx(1 / 45), 0.02, 0.025, "round", name)
    assert data[-1] == Datum("", LONG, 40.0, pytest.approx(2 / 3), None, None, "round", name)


def test_the_data_behind_a_point_have_its_own_error_bar_also_after_a_point_that_is_not_known() -> None:
    figure, axes = new_figure("Perplexity by size")
    axes.errorbar([10, 20, 40], [np.nan, 0.5, 0.7], yerr=[np.nan, 0.125, 0.25], label="reservoir")
    axes.errorbar([2.0, 2.5], [7.0, 8.0], xerr=[0.5, 0.25])  # level bars have their ends along x
    told = [(datum.x, datum.y, datum.low, datum.high) for datum in data_behind(figure)]
    assert told[:2] == [(20.0, 0.5, 0.375, 0.625), (40.0, 0.7, pytest.approx(0.45), pytest.approx(0.95))]
    assert told[2:] == [(2.0, 7.0, 1.5, 2.5), (2.5, 8.0, 2.25, 2.75)]


def test_the_data_of_bars_maps_and_dots_are_told_by_panel_and_name() -> None:
    figure = drawn(panels)
    assert figure is not None
    told = [datum[:6] for datum in data_behind(figure)]
    assert told == [
        ("Kept", "period 1", 1.0, 3.0, None, None),
        ("Kept", "period 1", 2.0, 4.0, 1.0, 5.0),
        ("Map", "held", 1.0, 0.0, None, None),
        ("Map", "old model", 0.0, 0.25, None, None),
        ("Map", "new model", 0.0, 0.5, None, None),
        ("Map", "new model", 1.0, 1.0, None, None),
    ]


def test_files_embed_their_fonts_and_are_the_same_when_they_are_written_again(tmp_path: Path) -> None:
    plots, told = {"two": two_lines, "none": lambda: None}, list[str]()
    for folder in ("a", "b"):
        paper = paper_of(tmp_path / folder, ["pdf", "svg"], ["single", "5.5"], None, False)
        assert paper is not None
        assert write_figures(plots, paper, told.append) == ["two"]
    assert told == []
    names = {"two-single.pdf", "two-5.5in.pdf", "two-single.svg", "two-5.5in.svg", "two.csv", "captions.txt"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    pdf = (tmp_path / "a" / "two-single.pdf").read_bytes()
    assert b"/FontFile2" in pdf  # TrueType, embedded
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf
    (box,) = re.findall(rb"/MediaBox \[ ?0 0 ([\d.]+) ", pdf)
    assert float(box) == pytest.approx(72 * 3.25)
    svg = (tmp_path / "a" / "two-5.5in.svg").read_text()
    assert "<text" not in svg  # letters are outlines
    assert f'width="{72 * 5.5:g}pt"' in svg
    with (tmp_path / "a" / "two.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert lines[0] | {"low": "0.02", "high": "0.025"} == lines[0]
    assert (tmp_path / "a" / "captions.txt").read_text() == (
        "two: Accuracy of two methods. Two methods over forty rounds.\n"
    )


@pytest.mark.filterwarnings("error")
def test_texts_that_leave_no_room_for_a_plot_are_told_in_one_sentence(tmp_path: Path) -> None:
    told: list[str] = []
    paper = paper_of(tmp_path / "paper", ["pdf", "png"], ["2", "20"], 24, False)
    assert paper is not None
    write_figures({"two": two_lines}, paper, told.append)
    assert told == [
        "texts of 24 points leave no room for the plots of two-2in; choose a smaller --font-size or a larger --width"
    ]
    assert (paper.folder / "two-2in.pdf").is_file()


@pytest.mark.filterwarnings("error")
def test_letters_that_the_font_lacks_are_told_in_one_sentence(tmp_path: Path) -> None:
    def named() -> Figure:
        figure = bare_figure(3, 1)
        figure.text(0, 0.5, "own:方法")
        return figure

    told: list[str] = []
    paper = paper_of(tmp_path, ["png", "pdf"], [], None, False)
    assert paper is not None
    write_figures({"own": named}, paper, told.append)
    assert told == ["the font of figures has no 方 法, so boxes stand in their place; write these names otherwise"]
    assert "own:方法" in saved(named(), "svg").decode()  # a browser has a font for them


@pytest.mark.parametrize(
    ("folder", "width", "why"),
    [
        (None, ["single"], "--width needs --figures FOLDER"),
        (Path("here"), ["broad"], "--width is broad, and must be single, double, or 2 to 20 inches"),
        (Path("here"), ["0.1"], "--width is 0.1"),
        (Path("here"), ["nan"], "--width is nan"),
    ],
)
def test_a_wrong_width_is_refused(folder: Path | None, width: list[str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        paper_of(folder, [], width, None, False)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        paper = paper_of(folder, [], [], None, False)
        assert paper is not None
        with pytest.raises(ConfigurationError):
            write_figures({}, paper, lambda text: None)
