"""The SVG of a picture as a part of a page."""

from __future__ import annotations

import re

import numpy as np

from fedemu.ops.pages.colours import BLUE, INK, NAMED
from fedemu.ops.pages.measures import TEMPLATES
from fedemu.ops.pages.style import cell_map, drawn, new_figure, saved
from fedemu.ops.pages.svg import inline_svg


def picture(name: str) -> str:
    def draw():  # type: ignore[no-untyped-def]
        figure, axes = new_figure("a title & more", width=3.0, height=2.0)
        axes.plot([1, 2, 3], [0.123456, 2, 1], color=BLUE, marker="o")
        axes.fill_between([1, 3], [0, 0], [1, 1], color="#123456")
        return figure

    return inline_svg(saved(drawn(draw), "svg").decode(), name, name)  # type: ignore[arg-type]


def test_ids_are_those_that_are_used_and_no_two_pictures_share_one() -> None:
    first, second = picture("first"), picture("second")
    of_first, of_second = (re.findall(r'\sid="([^"]+)"', svg) for svg in (first, second))
    assert of_first
    assert len(of_first) == len(set(of_first))
    assert not {*of_first} & {*of_second}
    assert {*re.findall(r'(?:href="|url\()#([^")]+)', first)} == {*of_first}


def test_a_picture_needs_nothing_from_elsewhere_and_has_texts() -> None:
    svg = picture("p")
    assert svg.startswith("<svg ")
    assert svg.endswith("</svg>")
    assert "http" not in svg
    assert "xlink" not in svg
    assert "<style" not in svg
    assert "font-family" not in svg
    assert ">a title &amp; more</text>" in svg


def test_numbers_are_short() -> None:
    tags = "".join(re.findall(r"<[^>]+>", picture("p")))
    assert not re.search(r"\d\.\d{3}", tags)
    assert "\n" not in tags


def test_named_colours_follow_the_page_and_others_stay() -> None:
    svg = picture("p")
    assert "var(--blue)" in svg
    assert "var(--ink)" in svg
    assert "#123456" in svg
    assert not any(colour in svg for colour in (BLUE, INK))


def test_the_page_has_a_light_and_a_dark_tone_for_every_colour() -> None:
    style = (TEMPLATES / "style.css").read_text()
    light, dark = style.split("prefers-color-scheme: dark")
    for colour, name in NAMED.items():
        assert f"--{name}: " in light
        assert f"--{name}: " in dark
        assert f"--{name}: {colour}" in light or name == "card"


def test_a_map_is_an_image_of_one_pixel_for_each_cell_with_sharp_edges() -> None:
    def draw():  # type: ignore[no-untyped-def]
        figure, axes = new_figure("map")
        cell_map(axes, np.zeros((100, 500)))
        return figure

    svg = inline_svg(saved(drawn(draw), "svg").decode(), "map", "map")  # type: ignore[arg-type]
    assert "image-rendering:crisp-edges;image-rendering:pixelated" in svg
    assert len(svg) < 20_000
