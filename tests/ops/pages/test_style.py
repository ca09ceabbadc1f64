"""What all pictures need: colours, ticks, legends, and numbers with gaps."""

from __future__ import annotations

import io

import matplotlib
import matplotlib.image
import numpy as np
import pytest

from fedemu.coordinator.record.row import Row
from fedemu.ops.pages.style import (
    LINE_STYLES,
    PALETTE,
    STYLE,
    class_map,
    drawn,
    evenly_spaced,
    legend_below,
    legend_columns,
    line_look,
    marker,
    new_figure,
    numbers,
    plain_log_axis,
    saved,
    sequence_colours,
    series,
    wrapped,
)


def test_a_picture_is_drawn_in_fedemus_style_which_no_other_figure_keeps() -> None:
    seen: list[float] = []

    def draw(width: float) -> matplotlib.figure.Figure:
        seen.append(matplotlib.rcParams["font.size"])
        return new_figure("a title", width=width, height=2.0)[0]

    png = saved(drawn(draw, 3.0), "png")
    assert matplotlib.image.imread(io.BytesIO(png)).shape[:2] == (240, 360)  # 120 dots per inch
    assert seen == [STYLE["font.size"]]
    assert matplotlib.rcParams["font.size"] != STYLE["font.size"]
    with matplotlib.rc_context({"text.usetex": True, "lines.linewidth": 9.0, "axes.titlepad": 40.0}):
        assert saved(drawn(draw, 3.0), "png") == png, "what people have set for pictures of their own is no matter"
    assert drawn(lambda: None) is None


@pytest.mark.parametrize(
    ("count", "first"), [(0, []), (1, [0]), (12, [0, 1]), (13, [0, 2]), (64, [0, 10]), (1211, [0, 101])]
)
def test_ticks_are_few_and_evenly_spaced(count: int, first: list[int]) -> None:
    assert evenly_spaced(count)[: len(first)] == first
    assert len(evenly_spaced(count)) <= 12


@pytest.mark.parametrize("letters", [2, 7, 12, 13, 21, 22, 23, 200])
def test_a_long_name_has_three_lines_with_its_beginning_and_its_end(letters: int) -> None:
    name = f"a{' '.join([letters * 'b'] * 20)}z"
    lines = wrapped(name, 22).split("\n")
    assert len(lines) <= 3
    assert max(map(len, lines)) <= 22
    assert (lines[0][0], lines[-1][-1]) == ("a", "z")
    assert "…" in "".join(lines)
    assert wrapped("fedavg, lr 0.1", 22) == "fedavg, lr 0.1"


def test_a_series_leaves_out_rounds_in_which_nothing_was_measured() -> None:
    rows = [Row(1, accuracy=0.5), Row(2), Row(3, accuracy=0.0)]
    assert series(rows, "accuracy") == ([1, 3], [0.5, 0.0])
    assert series(rows, "loss") == ([], [])


def test_missing_numbers_are_not_a_number() -> None:
    assert np.isnan(numbers([[1, None], [2.5, 3]])).tolist() == [[False, True], [False, False]]


def test_every_line_that_is_compared_looks_different() -> None:
    looks = [tuple(line_look(place).values()) for place in range(len(PALETTE) * len(LINE_STYLES))]
    assert len(set(looks)) == len(looks)
    assert looks[0] == (PALETTE[0], "-")
    assert looks[len(PALETTE)] == (PALETTE[0], "--")


def test_periods_have_colours_of_their_own() -> None:
    colours = sequence_colours(5)
    assert colours.shape == (5, 4)
    assert len({tuple(colour) for colour in colours.tolist()}) == 5


@pytest.mark.parametrize(("longest", "columns"), [(20, 3), (21, 2), (34, 2), (35, 1)])
def test_long_names_get_fewer_columns(longest: int, columns: int) -> None:
    assert legend_columns(["a", "b" * longest]) == columns


def test_a_figure_without_a_named_line_is_not_shown() -> None:
    figure, axes = new_figure("title")
    axes.plot([1, 2], [1, 2])
    assert legend_below(figure, axes) is None
    axes.plot([1, 2], [2, 1], label="named")
    assert legend_below(figure, axes) is figure
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["named"]


def test_only_short_lines_have_dots() -> None:
    assert [marker(points) for points in (14, 15)] == ["o", ""]


def test_a_round_that_was_not_evaluated_shows_the_last_one() -> None:
    _, axes = new_figure("title")
    image = class_map(axes, [1, 4], np.array([[0.25, 0.75], [0.0, np.nan]]))
    assert image.get_array()[0].tolist() == [0.25, 0.25, 0.25, 0.75]  # the first evaluation reaches up to round 4
    assert image.get_extent()[:2] == [0.5, 4.5]
    assert image.get_clim() == (0, 1)


def test_a_logarithmic_axis_counts_by_1_2_and_5() -> None:
    _, axes = new_figure("title")
    axes.set_xlim(1, 100)
    plain_log_axis(axes, "x")
    assert axes.get_xscale() == "log"
    ticks = axes.xaxis.get_major_locator().tick_values(1, 100)
    assert [tick for tick in ticks if 1 <= tick <= 100] == pytest.approx([1, 2, 5, 10, 20, 50, 100])
