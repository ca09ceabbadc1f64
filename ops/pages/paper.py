"""What a paper wants of figures: their formats, their widths and the size of their texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedemu.protocol.errors import ConfigurationError

FORMATS: Final = ("pdf", "svg", "png")
WIDTHS: Final = {"single": 3.25, "double": 6.75}
"""The widths of one column and of two columns, in inches, as in the styles of ICML and many others."""
NARROWEST, BROADEST = 2.0, 20.0
"""The least and the largest width of a figure, in inches."""
FONT_SIZE: Final = 8.0


@dataclass(frozen=True)
class Paper:
    """How the figures in ``folder`` are made. ``widths`` are inches by name, ``font_size`` is points.

    ``titles`` says whether a figure has its title inside. A paper has captions instead.
    """

    folder: Path
    formats: tuple[str, ...] = ("pdf",)
    widths: tuple[tuple[str, float], ...] = (("single", WIDTHS["single"]),)
    font_size: float = FONT_SIZE
    titles: bool = False

    def stem(self, figure: str, width: str) -> str:
        """The name of a file without its ending. It names the width if there are several."""
        return figure if len(self.widths) == 1 else f"{figure}-{width}"


def paper_of(
    folder: Path | None, formats: Sequence[str], widths: Sequence[str], font_size: float | None, titles: bool
) -> Paper | None:
    """What the options of a command say. None without ``folder``.

    Raises ConfigurationError if a width is none, or if an option says how figures look, but not where they go.
    """
    if folder is None:
        given = {"--format": formats, "--width": widths, "--font-size": font_size, "--titles": titles}
        if named := [option for option, value in given.items() if value]:
            verb = "needs" if len(named) == 1 else "need"
            raise ConfigurationError(f"{' and '.join(named)} {verb} --figures FOLDER, where the figures go")
        return None
    return Paper(
        folder,
        tuple(dict.fromkeys(formats)) or ("pdf",),
        tuple(dict.fromkeys(_width(width) for width in widths)) or (("single", WIDTHS["single"]),),
        font_size or FONT_SIZE,
        titles,
    )


def _width(text: str) -> tuple[str, float]:
    """A width by its name: ``single``, ``double``, or a number of inches."""
    if text in WIDTHS:
        return text, WIDTHS[text]
    try:
        inches = float(text.removesuffix("in"))
    except ValueError:
        inches = 0.0
    if not NARROWEST <= inches <= BROADEST:
        raise ConfigurationError(
            f"--width is {text}, and must be single, double, or {NARROWEST:g} to {BROADEST:g} inches, as in 5.5"
        )
    return f"{inches:g}in", inches
