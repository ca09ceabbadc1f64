"""Pictures and tables, of which pages are made."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fedemu.ops.pages.parts import about, bound, draw_all, numbers_by_name
from fedemu.ops.pages.style import new_figure
from fedemu.protocol.errors import FedemuError


def titled(title: str) -> Figure | None:
    """A figure with a title, for tests. None if the title is empty. It has no lines."""
    return new_figure(title, width=2.0, height=2.0)[0] if title else None


def test_every_plot_that_has_data_is_kept_as_a_file_and_stands_in_the_page_itself(tmp_path: Path) -> None:
    pictures = draw_all({"first": partial(titled, "a title"), "second": partial(titled, "")}, tmp_path)
    (picture,) = pictures
    assert picture.name == "first"
    assert picture.svg.startswith("<svg")
    assert "a title" in picture.svg
    (file,) = tmp_path.iterdir()
    assert file.name == "first.png"
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_the_disk_does_not_take_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(FedemuError, match=r"/one-first\.png cannot be written: the disk is full; make room there"):
        draw_all({"first": partial(titled, "a title")}, tmp_path, "one-")


def test_a_picture_is_explained_in_the_words_of_its_function_that_are_for_readers() -> None:
    (draw,) = bound({"plot": titled}, "title").values()
    assert about(draw) == "A figure with a title, for tests. It has no lines."


def test_the_first_column_names_the_rows() -> None:
    table = numbers_by_name(("outcome", "devices", "share"), [("late", "1", "100 %")])
    assert table.columns == [("outcome", "words"), ("devices", "number"), ("share", "number")]
    assert table.rows == [("late", "1", "100 %")]
