"""Pictures and tables, of which pages are made."""

from __future__ import annotations

import base64
from pathlib import Path

from matplotlib.figure import Figure

from fedemu.ops.pages.parts import Picture, draw_all, numbers_by_name
from fedemu.ops.pages.style import new_figure


def test_every_plot_that_has_data_is_kept_as_a_file_and_returned(tmp_path: Path) -> None:
    def draw(title: str) -> Figure | None:
        return new_figure(title, width=1.0, height=1.0)[0]

    (picture,) = draw_all({"first": draw, "second": lambda title: None}, "a title", tmp_path)
    assert picture.name == "first"
    assert picture.png.startswith(b"\x89PNG")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"first.png": picture.png}


def test_a_picture_stands_in_the_page_itself() -> None:
    kind, _, data = Picture("plot", b"\x00\xff").source.partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data) == b"\x00\xff"


def test_the_first_column_names_the_rows() -> None:
    table = numbers_by_name(("outcome", "devices", "share"), [("late", "1", "100%")])
    assert table.columns == [("outcome", "words"), ("devices", "number"), ("share", "number")]
    assert table.rows == [("late", "1", "100%")]
