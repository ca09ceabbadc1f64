"""Pages that are rendered from templates: the skeleton, what is escaped, and where lines end."""

from __future__ import annotations

import html.parser
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from fedemu.ops.pages import page
from fedemu.ops.pages.head import Fact, Swatch
from fedemu.ops.pages.page import TEMPLATES, render, unbroken
from fedemu.ops.pages.parts import Picture, Table

NBSP = "\N{NO-BREAK SPACE}"
ONE_ROW = Table([("experiment", "words"), ("accuracy", "number"), ("directory", "code")], [("a b", "91.1 %", "/b c")])
REPORT: dict[str, Any] = {
    "name": "digits",
    "outcome": "completed",
    "cause": "",
    "doubts": ["nothing was learnt"],
    "head": [Fact("method", "fedavg"), Fact("again", "fedemu run digits", "code")],
    "swatches": [Swatch(("#0072b2",), "accuracy")],
    "perturbed": False,
    "directory": "run",
    "cards": [("final accuracy", "91.1 %")],
    "before": {"Periods": [Picture("matrix", Markup("<svg></svg>"))], "Replay": []},
    "after": {"Diagnosed rounds": [Picture("path", Markup("<svg></svg>"))]},
    "rounds": [Picture("accuracy", Markup("<svg></svg>"), "What it shows.")],
    "periods": None,
    "generated": [],
    "generated_is_broad": False,
    "generators": None,
    "missing": [],
    "outcomes": ONE_ROW,
    "events": ONE_ROW,
    "facts": ONE_ROW,
    "configuration": "seed = 1\n",
}
PART: dict[str, Any] = {
    "experiments": 1,
    "runs": 2,
    "head": [],
    "swatches": [],
    "warnings": [],
    "table": ONE_ROW,
    "notes": "",
    "sections": [{"heading": "Tasks", "pictures": [], "large_pictures": [], "tables": []}],
    "pictures": [],
    "large_pictures": [],
    "every_run": ONE_ROW,
}
COMPARISON: dict[str, Any] = {"parts": [PART], "overview": None}


class Outline(html.parser.HTMLParser):
    """The headings of a page, the addresses that it refers to, and its open elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data.strip())


def test_a_report_has_its_sections_in_order_and_needs_no_other_file() -> None:
    text = render("report.html", REPORT)
    outline = Outline(text)
    assert text.startswith("<!doctype html>\n")
    assert outline.headings == [
        "digits",
        "Periods",
        "Round by round",
        "Outcomes of the selected devices",
        "Events",
        "Diagnosed rounds",
        "Machine",
    ]
    assert outline.addresses == []
    assert outline.open == []
    assert "<title>digits · fedemu</title>" in text
    assert '<p class="bad">Nothing was learnt.</p>' in text
    assert (TEMPLATES / "style.css").read_text() in text


def test_both_kinds_of_pages_have_the_same_head() -> None:
    report, comparison = render("report.html", REPORT), render("comparison.html", COMPARISON)
    heads = [
        text[: text.index("<main")].replace(title, "")
        for text, title in ((report, "digits"), (comparison, "Comparison"))
    ]
    assert heads[0] == heads[1]
    assert Outline(comparison).headings == ["Comparison", "Plots", "Runs"]
    assert "1 experiment, 2 runs" in comparison
    assert "No run has an evaluated round yet." in comparison


def test_sections_without_pictures_or_tables_are_left_out() -> None:
    for outcome, told in (("diverged", "No round has finished."), ("unfinished", "No round has finished yet.")):
        assert told in render("report.html", REPORT | {"rounds": [], "outcome": outcome})
    section = {
        "heading": "Tasks",
        "pictures": [],
        "large_pictures": [Picture("t", Markup("<svg></svg>"))],
        "tables": [("by task", ONE_ROW)],
    }
    outline = Outline(render("comparison.html", {"parts": [PART | {"sections": [section]}], "overview": None}))
    assert outline.headings == ["Comparison", "Tasks", "by task", "Plots", "Runs"]


def test_several_comparisons_stand_on_one_page_each_below_its_name() -> None:
    parts = [PART | {"name": name} for name in ("rates", "losses")]
    text = render("comparison.html", {"parts": parts, "overview": ("All parts", ONE_ROW, "a note")})
    outline = Outline(text)
    assert outline.headings == ["Comparison", "All parts", "rates", "Plots", "Runs", "losses", "Plots", "Runs"]
    assert outline.addresses == ["#part-rates", "#part-losses"]
    assert "2 parts, 2 experiments, 4 runs" in text


@pytest.mark.parametrize("name", ["name", "outcome", "directory", "configuration"])
def test_a_value_is_never_taken_for_markup(name: str) -> None:
    text = render("report.html", REPORT | {name: '<b "x">&'})
    assert '<b "x">' not in text
    assert "&lt;b &#34;x&#34;&gt;&amp;" in text


def test_a_name_that_the_context_lacks_is_an_error_and_no_empty_place() -> None:
    with pytest.raises(UndefinedError, match="'outcome' is undefined"):
        render("report.html", {name: value for name, value in REPORT.items() if name != "outcome"})


def test_the_cells_of_a_table_have_the_kind_of_their_column() -> None:
    text = render("report.html", REPORT)
    assert '<th class="words">experiment</th><th class="number">accuracy</th><th class="code">directory</th>' in text
    assert f'<tr><td class="words">a b</td><td class="number">91.1{NBSP}%</td><td class="code">/b c</td></tr>' in text


def test_a_template_is_read_anew_so_that_it_can_be_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "TEMPLATES", tmp_path)
    (tmp_path / "own.html").write_text("{{ name }}: {{ figure | unbroken }}\n")
    assert render("own.html", {"name": "a", "figure": "1 s"}) == f"a: 1{NBSP}s\n"
    (tmp_path / "own.html").write_text("{{ name }}\n")
    assert render("own.html", {"name": "a"}) == "a\n"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("37.5 ± 17.7%", f"37.5 ±{NBSP}17.7%"),
        ("3 min 20 s", f"3{NBSP}min{NBSP}20{NBSP}s"),
        ("alpha 0.1, devices 3 (a b)", f"alpha{NBSP}0.1, devices{NBSP}3 (a{NBSP}b)"),
    ],
)
def test_lines_end_only_where_no_number_loses_its_unit(text: str, kept: str) -> None:
    assert unbroken(text) == kept


def test_on_paper_all_columns_and_whole_pictures_are_there_and_the_colours_too(browser: Any) -> None:
    wide = Table([("experiment", "words"), *[(f"figure {place}", "number") for place in range(20)]], [["95.8 %"] * 21])
    tall = Picture("tall", Markup('<svg viewBox="0 0 10 90"></svg>'))
    part = PART | {"swatches": [Swatch(("#0072b2",), "accuracy")], "table": wide, "large_pictures": [tall]}
    paper = browser.new_page(viewport={"width": 718, "height": 1000})
    paper.emulate_media(media="print")
    paper.set_content(render("comparison.html", {"parts": [part], "overview": None}))
    style = "element => { const { overflow, printColorAdjust, columnCount } = getComputedStyle(element); return "
    assert paper.eval_on_selector(".table", style + "overflow }") == "visible"
    assert paper.eval_on_selector(".swatches i", style + "printColorAdjust }") == "exact"
    assert paper.eval_on_selector(".plots.broad", style + "columnCount }") == "auto"
    assert paper.eval_on_selector("svg", "svg => svg.getBoundingClientRect().height") <= 1000
    paper.close()
