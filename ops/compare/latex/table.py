"""A comparison as a table for LaTeX, in the style of booktabs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Final

from fedemu.ops.compare.compare import Comparison
from fedemu.ops.compare.latex.column import Column, escaped, of_figure, of_measure, some
from fedemu.ops.compare.measured import measured
from fedemu.ops.compare.paired import BETTER, LEVEL, Better, Paired, least_wilcoxon
from fedemu.ops.experiment.near import near
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.wording import counted

_TITLES: Final[Mapping[str, str]] = {
    "all_period_perplexity": "perplexity",
    "best_accuracy": "best",
}
"""Titles that are not the key with spaces in place of its underscores. They are those of the table in the terminal."""
_NOT_USUAL: Final = ("best",)
"""A column that is left out unless it is named: the best round of a run is chosen by the test set."""
_FIT: Final = 5
"""So many columns of figures fit on most pages."""


def latex(comparison: Comparison, wanted: Sequence[str] = ()) -> str:
    """The table of a comparison: a row for each experiment, a column for each figure, the best values in bold.

    ``wanted`` are the titles of columns; by default all figures that the runs have and that say how good a model is.
    The title of an own measure is its name, such as ``device_metrics.norm``. ``:higher`` or ``:lower`` after it says
    which values are better. Raises ConfigurationError if there is no such column.
    """
    columns = _chosen(comparison, wanted)
    any_test = any(test.adjusted is not None for column in columns for test in column.tests)
    cells = [column.cells(comparison.entries, any_test) for column in columns]
    untested = any("ddagger" in cell for of_column in cells for cell in of_column)
    lines = [
        *(f"% {line}" for line in _head(comparison, len(columns), wanted)),
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_caption(comparison, columns, untested)}}}",
        r"  \label{tab:comparison}",
        rf"  \begin{{tabular}}{{l{'r' * (1 + len(columns))}}}",
        r"    \toprule",
        "    " + _row(["Experiment", "Seeds", *(column.heading for column in columns)]),
        r"    \midrule",
        *(
            "    " + _row([escaped(entry.label), str(len(entry.runs)), *of_entry])
            for entry, *of_entry in zip(comparison.entries, *cells, strict=True)
        ),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
        *(f"% {line}" for column in columns for line in _told(column.key, column.tests)),
    ]
    return "\n".join(lines)


def _chosen(comparison: Comparison, wanted: Sequence[str]) -> list[Column]:
    """The columns, in the order in which they are ``wanted``."""
    figures = {
        _title(key, comparison.last): key
        for key in BETTER
        if any(entry.figures[key].mean is not None for entry in comparison.entries)
    }
    own = {measure.column: found for measure, found in measured(comparison.entries).items()}
    columns = []
    for title in wanted or [title for title in figures if title not in _NOT_USUAL]:
        name, better = _with_direction(title)
        if title in figures:
            columns.append(of_figure(comparison.entries, title, figures[title]))
        elif name in own:
            columns.append(of_measure(comparison.entries, name, own[name], better))
        else:
            raise ConfigurationError(f'the table has no column "{title}"; {_hint(title, [*figures], [*own])}')
    return columns


def _hint(title: str, figures: Sequence[str], own: Sequence[str]) -> str:
    """What is wrong with the title of a column that is none of ``figures`` and of the ``own`` measures."""
    before, _, after = title.rpartition(":")
    if before.strip() in figures:
        return f'leave out ":{after}", which only measures of your own take'
    if before.strip() in own:
        return 'which values are better is said by ":higher" or ":lower"'
    name, better = _with_direction(title)
    meant = near(name, [*figures, *own])
    if not meant:
        return f"there are {', '.join([*figures, *own]) or 'none'}"
    return f"did you mean {meant[0]}{f':{better}' if better and meant[0] in own else ''}?"


def _with_direction(title: str) -> tuple[str, Better | None]:
    """The name of an own measure, and which values are better if the title ends in ``:higher`` or ``:lower``."""
    name, _, better = title.rpartition(":")
    match better.strip():
        case "higher" | "lower" as better:
            return name.strip(), better
    return title, None


def _title(key: str, last: int) -> str:
    return f"last {last}" if key == "last_accuracy" else _TITLES.get(key, key.replace("_", " "))


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _head(comparison: Comparison, columns: int, wanted: Sequence[str]) -> list[str]:
    chosen = ["--columns", ",".join(wanted)] if wanted else []
    command = shlex.join([*comparison.command, "--latex", *chosen])
    wide = f"{columns} columns may be too wide; choose some with --columns" if columns > _FIT else ""
    lines = [command, r"The preamble needs \usepackage{booktabs}.", wide]
    return [line.replace("\n", " ") for line in (*lines, *comparison.warnings) if line]


def _caption(comparison: Comparison, columns: Sequence[Column], untested: bool) -> str:
    several = any(len(entry.runs) > 1 for entry in comparison.entries)
    told = ["Mean $\\pm$ sample standard deviation over the seeds." if several else "One run each."]
    if comparison.seeds_differ:
        told.append("The rows have different seeds.")
    if any(some(figure) for column in columns for figure in column.figures):
        told.append("In parentheses: the number of seeds that have a value, where some have none.")
    short = {entry.outcome == "completed" for entry in comparison.entries} == {True, False}
    among = " among completed runs" if short else ""
    if all(column.better for column in columns):
        told.append(f"The best mean of each column{among} is bold.")
    elif any(column.better for column in columns):
        told.append(f"The best mean{among} of each column with an arrow is bold.")
    pairs = {test.pairs for column in columns for test in column.tests if test.adjusted is not None}
    if pairs:
        told.append(
            rf"$\dagger$: not significantly different from it ($p \geq {LEVEL:g}$, paired t-test over "
            f"{' or '.join(map(str, sorted(pairs)))} shared seeds, Holm's correction over the rows of a column)."
        )
        if untested:
            told.append(r"$\ddagger$: not tested against it.")
    return " ".join(told)


def _told(key: str, tests: Sequence[Paired]) -> list[str]:
    """The tests of a column as sentences, for those who want to report the p-values."""
    lines = []
    for test in tests:
        if test.t is None or test.adjusted is None:
            why = "one pair is too few" if test.pairs < 2 else "all pairs differ equally"
            lines.append(f"{key}: {test.label} and {test.best}: not tested, because {why}")
            continue
        least = least_wilcoxon(test.pairs)
        never = f" (never below {least:.3g} with so few pairs)" if least >= LEVEL else ""
        rank = "" if test.wilcoxon is None else f", Wilcoxon p = {test.wilcoxon:.3g}{never}"
        lines.append(
            f"{key}: {test.label} minus {test.best}: {test.difference:+.4g} over {counted(test.pairs, 'pair')}, "
            f"paired t p = {test.t:.3g}, after Holm {test.adjusted:.3g}{rank}"
        )
    return [line.replace("\n", " ") for line in lines]
