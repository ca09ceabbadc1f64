"""Colours of the live page and of the report: what they mean, and whether every colour vision tells them apart."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from fedemu.ops.live.server import STATIC, STYLE
from fedemu.ops.pages.colours import NAMED
from fedemu.ops.report.plots.rounds import OUTCOME_COLOURS

VISIONS = {
    "all": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""What somebody sees of red, green and blue light (Machado, Oliveira and Fernandes, 2009, at full severity)."""
LEAST = 10.0
"""Colours whose distance is smaller (CIE 1976) look alike where they do not touch."""


def named(name: str) -> list[str]:
    """A list of words in ``words.js``."""
    found = re.search(rf"\b{name} = \[([^\]]*)\]", (STATIC / "words.js").read_text())
    assert found is not None
    return re.findall(r'"([^"]+)"', found[1])


def tones(scheme: str) -> dict[str, str]:
    """The colours of a light or a dark page, by their names."""
    light, dark = STYLE.read_text().split("@media (prefers-color-scheme: dark)")[:2]
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})\b", light if scheme == "light" else dark))


def seen(tone: str, vision: str) -> NDArray[np.float64]:
    """A colour as somebody with this vision sees it: lightness, and two axes between opposite colours."""
    value = np.array([int(tone[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    light = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(matrix @ np.clip(VISIONS[vision] @ light, 1e-3, 1) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["STATE_COLOURS", "OUTCOME_COLOURS", "TONES"])
def test_any_colour_vision_tells_the_colours_of_a_kind_apart(kind: str, scheme: str) -> None:
    of = tones(scheme)
    close = {
        (one, other, vision): round(float(distance), 1)
        for one, other in combinations(named(kind), 2)
        for vision in VISIONS
        if (distance := np.linalg.norm(seen(of[one], vision) - seen(of[other], vision))) < LEAST
    }
    assert close == {}


def test_an_outcome_has_one_colour_in_the_report_and_on_the_live_page() -> None:
    live = dict(zip(named("OUTCOMES"), named("OUTCOME_COLOURS"), strict=True))
    assert live.pop("never asked") == "line"
    assert live == {name: NAMED[colour] for name, colour in OUTCOME_COLOURS.items()}
