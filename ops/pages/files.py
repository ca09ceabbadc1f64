"""Writes figures for a paper into a folder: each at every width and in every format, and the data behind it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from fedemu.ops.pages.behind import csv_of, data_behind
from fedemu.ops.pages.fitted import fit, saved_for_paper
from fedemu.ops.pages.paper import Paper
from fedemu.ops.pages.parts import Draw, about
from fedemu.ops.pages.style import NO_LETTER, drawn, letters_without_form
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import usable, write_for_people

CAPTIONS = "captions.txt"
_NO_ROOM = "constrained_layout not applied"
"""How matplotlib warns of texts that leave no room for anything else."""


def write_figures(plots: Mapping[str, Draw], paper: Paper, say: Callable[[str], None]) -> list[str]:
    """Write every figure that there are data for, the data as CSV, and ``captions.txt``. Returns the figures' names.

    ``say`` gets a sentence if texts leave some figures no room for plots, and one if the font lacks letters. A file of
    the same name is overwritten; other files of the folder stay. Raises ConfigurationError if the folder can't be made,
    and FedemuError if the disk does not take a file.
    """
    _make(paper.folder)
    captions, crowded, lacking = [], dict[str, None](), dict[str, None]()
    for name, draw in plots.items():
        for width, inches in paper.widths:
            figure = drawn(draw)  # fitting changes a figure, so each width has its own
            if figure is None:
                break
            if width == paper.widths[0][0]:
                title = _title_of(figure)
                write_for_people(paper.folder / f"{name}.csv", csv_of(data_behind(figure)))
                captions.append(f"{name}: {f'{title}. ' if title else ''}{about(draw)}")
            lacking |= dict.fromkeys(letters_without_form("".join(map(_shown, figure.findobj(Text)))))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", _NO_ROOM)
                warnings.filterwarnings("ignore", NO_LETTER)
                fit(figure, inches, paper.font_size, paper.titles)
            for kind in paper.formats:
                content, has_room = _saved(figure, kind)
                write_for_people(paper.folder / f"{paper.stem(name, width)}.{kind}", content)
                if not has_room:
                    crowded[paper.stem(name, width)] = None
    write_for_people(paper.folder / CAPTIONS, "\n\n".join(captions) + "\n")
    if crowded:
        say(
            f"texts of {paper.font_size:g} points leave no room for the plots of {', '.join(crowded)}; "
            "choose a smaller --font-size or a larger --width"
        )
    if lacking:
        letters = " ".join(lacking)
        say(f"the font of figures has no {letters}, so boxes stand in their place; write these names otherwise")
    return [caption.partition(":")[0] for caption in captions]


def _saved(figure: Figure, kind: str) -> tuple[bytes, bool]:
    """A fitted figure as a file, and whether its texts leave room for its plots."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", NO_LETTER)
        warnings.filterwarnings("error", _NO_ROOM)
        try:
            return saved_for_paper(figure, kind), True
        except UserWarning:
            warnings.filterwarnings("ignore", _NO_ROOM)
            return saved_for_paper(figure, kind), False


def _shown(text: Any) -> str:
    return str(text.get_text()) if text.get_visible() else ""


def _make(folder: Path) -> None:
    try:
        with usable(folder, "name another folder"):
            folder.mkdir(parents=True, exist_ok=True)
    except ConfigurationError as error:
        if isinstance(error.__cause__, FileExistsError):
            raise ConfigurationError(f"{folder} is a file; name a folder with --figures") from None
        raise


def _title_of(figure: Figure) -> str:
    """The title of a figure, or those of its panels."""
    titles = [axes.get_title(loc=place) for axes in figure.axes for place in ("left", "center")]
    return "; ".join(dict.fromkeys(" ".join(title.split()) for title in titles if title))
