"""The paired tests of a comparison as a table of words: each experiment beside the best one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from fedemu.ops.compare.cells import NEVER
from fedemu.ops.compare.entry import Entry
from fedemu.ops.compare.paired import Paired, best_of, paired_tests
from fedemu.ops.results.words import at
from fedemu.protocol.wording import counted

_SHOWN: Final[Mapping[str, str]] = {
    "final accuracy": "final_accuracy",
    "forgetting": "forgetting",
    "round forgetting": "round_forgetting",
    "average accuracy": "average_accuracy",
    "average forgetting": "average_forgetting",
}
"""The shares that are tested here, by their titles. ``compare.json`` has the tests of all figures."""
_SHOWN_OF_TASKS: Final[Mapping[str, str]] = {"average incremental accuracy": "average_incremental_accuracy"}
"""Those that are tested here if classes come task by task: on other streams no table shows them."""
_LEAST_P: Final = 0.001


def beside_best(entries: Sequence[Entry]) -> tuple[str, dict[str, list[str]]] | None:
    """The title and the table by column, each with one cell per entry. None if no two entries share two seeds."""
    by_task = any(at(entry.experiment, ("stream", "kind")) == "classes" for entry in entries)
    shown = {**_SHOWN, **_SHOWN_OF_TASKS} if by_task else _SHOWN
    tests = {title: paired_tests(entries, key) for title, key in shown.items()}
    tests = {title: made for title, made in tests.items() if any(test.pairs > 1 for test in made)}
    if not tests:
        return None
    table = {"experiment": [entry.label for entry in entries]}
    for title, made in tests.items():
        best, of = best_of(entries, shown[title]), {test.label: test for test in made}
        table[title] = ["best" if place == best else _cell(of.get(entry.label)) for place, entry in enumerate(entries)]
    pairs = sorted({test.pairs for made in tests.values() for test in made})
    seeds = counted(pairs[0], "shared seed") if len(pairs) == 1 else f"{pairs[0]} to {pairs[-1]} shared seeds"
    return f"difference to the best in percentage points, over {seeds}, and p of a paired t-test (Holm)", table


def _cell(test: Paired | None) -> str:
    if test is None:
        return NEVER
    number = f"{100 * test.difference:+.1f}"
    if test.adjusted is None:
        return f"{number} in each seed" if test.pairs > 1 else number
    return f"{number}, p < {_LEAST_P:g}" if test.adjusted < _LEAST_P else f"{number}, p {test.adjusted:.3f}"
