"""Renders a page from a template of ``templates/``.

Python computes what a page shows, and the template says how the page shows it. A page needs no other file: its style
and its pictures stand inside it. What it explains by a click needs no script.
"""

from __future__ import annotations

from collections.abc import Mapping

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fedemu.ops.pages.measures import TEMPLATES, Measure, measure_of


def render(template: str, context: Mapping[str, object]) -> str:
    """Fill ``template``, a file name in ``templates/``, with the values of ``context``. Returns the page.

    A value is shown as text and never taken for markup. Bytes of a path that are no UTF-8 are shown as escapes. Raises
    jinja2.UndefinedError if the template uses a name that ``context`` does not have.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    shown: dict[str, Measure] = {}

    def explained(title: str) -> Measure | None:
        """The measure of a title, None if there is none. The page explains it at its end."""
        measure = measure_of(title)
        if measure is not None:
            shown[measure.id] = measure
        return measure

    environment.filters["unbroken"] = unbroken
    environment.filters["explained"] = explained
    environment.filters["joined"] = lambda text: text.replace(" %", "\N{NO-BREAK SPACE}%")
    environment.globals["explanations"] = shown
    text = environment.get_template(template).render(context)
    return text.encode(errors="backslashreplace").decode()


def unbroken(text: str) -> str:
    """Replace the spaces of a text by no-break spaces, so that a number and its unit stay on one line.

    A line may still end after a comma, and before a deviation or a bracket.
    """
    kept = text.replace(" ", "\N{NO-BREAK SPACE}")
    for parted in (" ±", " (", ", "):
        kept = kept.replace(parted.replace(" ", "\N{NO-BREAK SPACE}"), parted)
    return kept
