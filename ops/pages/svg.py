"""Makes matplotlib's SVG a part of a page: small, with ids of its own, and in the colours and the font of the page."""

from __future__ import annotations

import html
import re
from typing import Final

from fedemu.ops.pages.colours import NAMED, on_page

_DROPPED: Final = re.compile(
    r"<metadata>.*?</metadata>|<!--.*?-->|<defs>\s*<style.*?</style>\s*</defs>|"
    r'\s(?:xmlns(?::\w+)?|version|width(?=[^>]*viewBox)|height(?=[^>]*viewBox))="[^"]*"|'
    r" font-family: [^;\"]*;|\stransform=\"rotate\(-?0 [^)]*\)\"",
    re.DOTALL,
)
_ID: Final = re.compile(r'\sid="([^"]+)"')
_REFERENCE: Final = re.compile(r'(?:href="|url\()#([^")]+)')
_TAG: Final = re.compile(r"<[^>]+>")
_LONG_NUMBER: Final = re.compile(r"-?\d+\.\d{3,}(?!\d*[eE])")
_VIEW: Final = re.compile(r'viewBox="0 0 ([\d.]+) ')
_LARGEST: Final = 1.75
"""A picture is at most so many times as large as it was drawn, so that its texts stay small."""
_BROAD: Final = 450
_SMALLEST: Final = 0.8
"""A picture that was drawn broader than ``_BROAD`` points has at least so many pixels per point."""
_COLOUR: Final = re.compile("|".join(NAMED))


def inline_svg(svg: str, name: str, title: str) -> str:
    """An SVG that matplotlib wrote, as an element of an HTML page.

    Ids begin with ``name``, which no other picture of the page has. ``title`` is what a screen reader says. Colours
    that have a name become variables of the page's style, and texts take the page's font.
    """
    svg = _DROPPED.sub("", svg[svg.index("<svg") :].replace("base64,\n", "base64,")).replace("xlink:href", "href")
    used = {old: f"{name}-{place}" for place, old in enumerate(dict.fromkeys(_REFERENCE.findall(svg)))}
    svg = _ID.sub(lambda match: f' id="{used[match[1]]}"' if match[1] in used else "", svg)
    svg = _REFERENCE.sub(lambda match: match[0].replace(match[1], used[match[1]]), svg)
    svg = _TAG.sub(lambda match: _short(match[0]), svg)
    svg = re.sub(r">\s*\n\s*<", "><", svg).replace("<defs></defs>", "").strip()
    width = _VIEW.search(svg)
    size = f' style="{_size(float(width[1]))}"' if width else ""
    head = f'<svg role="img" aria-label="{html.escape(title)}"{size}'
    return svg.replace("<svg", head, 1)


def _size(points: float) -> str:
    """The CSS of a picture that was drawn ``points`` wide. A broad one scrolls before its texts become too small."""
    least = f"min-width: {_SMALLEST * points:.0f}px; " if points > _BROAD else ""
    return f"{least}max-width: {_LARGEST * points:.0f}px"


def _short(tag: str) -> str:
    """A tag with numbers of two decimals, without line breaks, and with the colours of the page."""
    if "base64," in tag:
        return tag
    tag = _LONG_NUMBER.sub(lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), tag)
    tag = _COLOUR.sub(lambda match: on_page(match[0]), tag)
    return re.sub(r'\s*\n\s*(")?', lambda match: match[1] or " ", tag)
