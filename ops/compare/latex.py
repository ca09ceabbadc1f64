"""A comparison as a table for LaTeX, in the style of booktabs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Final

from fedemu.ops.compare.compare import Comparison
from fedemu.ops.compare.entry import Entry, Statistic
from fedemu.ops.compare.paired import BETTER, LEVEL, Paired, best_of, least_wilcoxon, paired_tests
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
_NUMBERS: Final = ("consistency", "all_period_perplexity")
"""The figures that are no shares."""
_FIT: Final = 5
"""So many columns of figures fit on most pages."""
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


def latex(comparison: Comparison, wanted: Sequence[str] = ()) -> str:
    """The table of a comparison: a row for each experiment, a column for each figure, the best values in bold.

    ``wanted`` are the titles of columns; by default all figures that the runs have and that say how good a model is.
    Raises ConfigurationError if there is no such column.
    """
    columns = _chosen(comparison, wanted)
    tests = {key: paired_tests(comparison.entries, key) for key in columns.values()}
    any_test = any(test.adjusted is not None for of_column in tests.values() for test in of_column)
    cells = {key: _cells(comparison.entries, key, tests[key], any_test) for key in columns.values()}
    untested = any("ddagger" in cell for of_column in cells.values() for cell in of_column)
    partly = any(_some(entry.figures[key]) for entry in comparison.entries for key in columns.values())
    lines = [
        *(f"% {line}" for line in _head(comparison, len(columns), wanted)),
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_caption(comparison, tests, untested, partly)}}}",
        r"  \label{tab:comparison}",
        rf"  \begin{{tabular}}{{l{'r' * (1 + len(columns))}}}",
        r"    \toprule",
        "    " + _row(["Experiment", "Seeds", *(_heading(title, key) for title, key in columns.items())]),
        r"    \midrule",
        *(
            "    "
            + _row([escaped(entry.label), str(len(entry.runs)), *(cells[key][place] for key in columns.values())])
            for place, entry in enumerate(comparison.entries)
        ),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
        *(f"% {line}" for key in columns.values() for line in _told(key, tests[key])),
    ]
    return "\n".join(lines)


def escaped(text: str) -> str:
    """A text as LaTeX writes it."""
    return text.translate(_SPECIAL)


def _chosen(comparison: Comparison, wanted: Sequence[str]) -> dict[str, str]:
    """The keys of the columns, by their titles."""
    known = {
        _title(key, comparison.last): key
        for key in BETTER
        if any(entry.figures[key].mean is not None for entry in comparison.entries)
    }
    for title in wanted:
        if title not in known:
            meant = near(title, known)
            hint = f"did you mean {meant[0]}?" if meant else f"there are {', '.join(known) or 'none'}"
            raise ConfigurationError(f'the table has no column "{title}"; {hint}')
    titles = wanted or [title for title in known if title not in _NOT_USUAL]
    return {title: known[title] for title in titles}


def _title(key: str, last: int) -> str:
    return f"last {last}" if key == "last_accuracy" else _TITLES.get(key, key.replace("_", " "))


def _heading(title: str, key: str) -> str:
    unit = "" if key in _NUMBERS else r" (\%)"
    arrow = r"$\uparrow$" if BETTER[key] == "higher" else r"$\downarrow$"
    return f"{escaped(title).capitalize()}{unit} {arrow}"


def _cells(entries: Sequence[Entry], key: str, tests: Sequence[Paired], any_test: bool) -> list[str]:
    """The cell of each entry. Means that are written alike are best together.

    ``any_test`` says whether the table has tests, which its caption then explains.
    """
    best = best_of(entries, key)
    means = [_mean(entry.figures[key], key) for entry in entries]
    tested = {test.label: test.adjusted for test in tests if test.adjusted is not None}

    def mark(entry: Entry) -> str:
        if entry.label in tested:
            return r"^{\dagger}" if tested[entry.label] >= LEVEL else ""
        return r"^{\ddagger}" if any_test else ""

    return [
        _cell(entry.figures[key], key, best is not None and mean == means[best], mark(entry))
        for entry, mean in zip(entries, means, strict=True)
    ]


def _cell(figure: Statistic, key: str, best: bool, mark: str) -> str:
    mean = _mean(figure, key)
    if not mean:
        return "--"
    spread = rf" \pm {_number(figure.deviation, key)}" if figure.deviation is not None else ""
    shown = rf"\mathbf{{{mean}}}" if best else mean
    return f"${shown}{spread}{'' if best else mark}{_some(figure)}$"


def _some(figure: Statistic) -> str:
    """How many seeds have the figure, if some of them lack it. Empty if none or all have it."""
    return rf"\ ({len(figure.known)})" if 0 < len(figure.known) < len(figure.values) else ""


def _mean(figure: Statistic, key: str) -> str:
    return "" if figure.mean is None else _number(figure.mean, key)


def _number(value: float, key: str) -> str:
    if key == "consistency":
        return f"{value:.3f}"
    return f"{value:z.1f}" if key in _NUMBERS else f"{100 * value:z.1f}"


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _head(comparison: Comparison, columns: int, wanted: Sequence[str]) -> list[str]:
    chosen = ["--columns", ",".join(wanted)] if wanted else []
    command = shlex.join([*comparison.command, "--latex", *chosen])
    wide = f"{columns} columns may be too wide; choose some with --columns" if columns > _FIT else ""
    lines = [command.replace("\n", " "), r"The preamble needs \usepackage{booktabs}.", wide]
    return [line for line in lines if line]


def _caption(comparison: Comparison, tests: Mapping[str, Sequence[Paired]], untested: bool, partly: bool) -> str:
    several = any(len(entry.runs) > 1 for entry in comparison.entries)
    told = ["Mean $\\pm$ sample standard deviation over the seeds." if several else "One run each."]
    if partly:
        told.append("In parentheses: the number of seeds that have a value, where some have none.")
    told.append("The best mean of each column is bold.")
    pairs = {test.pairs for of_column in tests.values() for test in of_column if test.adjusted is not None}
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
