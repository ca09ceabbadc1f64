"""A column of the table for LaTeX: its heading, and a cell for each experiment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from fedemu.ops.compare.entry import Entry, Statistic
from fedemu.ops.compare.paired import BETTER, LEVEL, Better, Paired, best_of, paired_tests

_UNITS: Final = {"consistency": ("", 1.0, 3), "all_period_perplexity": ("", 1.0, 1)}
"""The figures that are no shares: their unit, what they are multiplied by, and how many digits follow the point."""
_SMALL, _LARGE = 0.01, 1e6
"""Own measures between these two need no power of ten."""
_SPECIAL: Final = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        # LaTeX's default encoding has other characters in these places.
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        **{character: f"\\{character}" for character in "&%$#_{}"},
    }
)


@dataclass(frozen=True)
class Column:
    """A column of the table: a figure of each entry, and the paired tests of it.

    ``better`` says which of two values is better. Without it no value is bold, and none is tested. ``unit`` follows the
    title, and numbers are the values times ``factor`` with this number of ``digits``.
    """

    title: str
    key: str
    figures: Sequence[Statistic]
    better: Better | None
    best: int | None
    tests: Sequence[Paired]
    unit: str
    factor: float
    digits: int

    @property
    def heading(self) -> str:
        """The title as LaTeX writes it, with the unit and with an arrow towards better values."""
        arrow = {"higher": r" $\uparrow$", "lower": r" $\downarrow$", None: ""}[self.better]
        return f"{escaped(self.title)}{self.unit}{arrow}"

    def number(self, value: float) -> str:
        """A value as it stands in the column."""
        return f"{value * self.factor:z.{self.digits}f}"

    def cells(self, entries: Sequence[Entry], any_test: bool) -> list[str]:
        """The cell of each entry. Means that are written alike are best together. A value alone is not the best of any.

        ``any_test`` says whether the table has tests, which its caption then explains.
        """
        means = [None if figure.mean is None else self.number(figure.mean) for figure in self.figures]
        best = means[self.best] if self.best is not None and len(entries) - means.count(None) > 1 else None
        tested = {test.label: test.adjusted for test in self.tests if test.adjusted is not None}

        def mark(entry: Entry) -> str:
            if entry.label in tested:
                return r"^{\dagger}" if tested[entry.label] >= LEVEL else ""
            return r"^{\ddagger}" if any_test and best is not None else ""

        def cell(figure: Statistic, mean: str | None, entry: Entry) -> str:
            if mean is None:
                return "--"
            spread = rf" \pm {self.number(figure.deviation)}" if figure.deviation is not None else ""
            if mean == best:
                return rf"$\mathbf{{{mean}}}{spread}{some(figure)}$"
            return f"${mean}{spread}{mark(entry)}{some(figure)}$"

        return [cell(*each) for each in zip(self.figures, means, entries, strict=True)]


def of_figure(entries: Sequence[Entry], title: str, key: str) -> Column:
    """The column of a figure of fedemu's own."""
    unit, factor, digits = _UNITS.get(key, (r" (\%)", 100.0, 1))
    figures = [entry.figures[key] for entry in entries]
    best, tests = best_of(entries, key), paired_tests(entries, key)
    return Column(title.capitalize(), key, figures, BETTER[key], best, tests, unit, factor, digits)


def of_measure(entries: Sequence[Entry], name: str, figures: Sequence[Statistic], better: Better | None) -> Column:
    """The column of an own measure, in powers of ten if its values are very small or very large."""
    largest = max((abs(figure.mean) for figure in figures if figure.mean is not None), default=0.0)
    power = 0 if largest == 0 or _SMALL <= largest < _LARGE else math.floor(math.log10(largest))
    unit = rf" ($10^{{{power}}}$)" if power else ""
    digits = 2 if power else 3 if largest < 10 else 1 if largest < 1000 else 0
    pairs = zip(entries, figures, strict=True)
    held = [replace(entry, figures={**entry.figures, name: figure}) for entry, figure in pairs]
    best, tests = (best_of(held, name, better), paired_tests(held, name, better)) if better else (None, [])
    return Column(name, name, figures, better, best, tests, unit, 10.0**-power, digits)


def some(figure: Statistic) -> str:
    """How many seeds have the figure, if some of them lack it. Empty if none or all have it."""
    return rf"\ ({len(figure.known)})" if 0 < len(figure.known) < len(figure.values) else ""


def escaped(text: str) -> str:
    """A text as LaTeX writes it, also at the beginning of a row."""
    # After the end of a row and after \midrule LaTeX takes "[" and "*" for an option, also if spaces come before them.
    guard = "{}" if text.lstrip().startswith(("[", "*")) else ""
    return guard + text.translate(_SPECIAL)
