"""The first page of the results: every claim says whether it was seen, and cites figures of the section it links to."""

from __future__ import annotations

import re

import pytest
from pages import ROOT

VERDICTS = ("seen", "partly seen", "not seen", "contradicted", "not tried")
FOLDER = ROOT / "docs"
PAGE = (FOLDER / "results.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and re.search(r"\*\*(?:" + "|".join(VERDICTS) + r")\*\*", line)
]
NUMBER = re.compile(r"(?<![\w.,])\d+(?:[.,]\d+)*")


def section(link: str) -> str:
    """The text of a section, with its subsections, from a link such as ``results/classes.md#what-was-seen``."""
    path, _, anchor = link.partition("#")
    text = (FOLDER / path).read_text(encoding="utf-8")
    if not anchor:
        return text
    for heading in re.finditer(r"^(#+) +(.+?) *$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-")
        if slug == anchor:
            rest = text[heading.end() :]
            end = re.search(rf"^#{{1,{len(heading[1])}}} ", rest, re.MULTILINE)
            return rest[: end.start()] if end else rest
    raise AssertionError(f"{path} has no heading {anchor}")


def test_every_paper_has_its_claims() -> None:
    papers = [line.removeprefix("## ") for line in PAGE.splitlines() if line.startswith("## ")]
    for paper in ("Flashback", "FedNTD", "Re-weighted softmax", "MFCL", "Coordinated replay"):
        assert any(title.startswith(paper) for title in papers), paper
    assert len(ROWS) > 15


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:40] for row in ROWS])
def test_the_figures_of_a_claim_are_those_of_the_section_that_it_links_to(row: list[str]) -> None:
    _, _, seen, where = row
    links = re.findall(r"\]\(([^)]+)\)", where)
    assert links
    text = "".join(section(link) for link in links)
    assert [
        number for number in NUMBER.findall(seen) if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d])", text)
    ] == []
