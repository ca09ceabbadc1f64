"""The rows of a run as the page draws them: columns of numbers, thinned out where a screen could not show them all."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fedemu.ops.results.own_measures import OwnMeasure, first_of, measures_of

COLUMNS: Final = (
    "round",
    "task",
    "virtual_time",
    "wall_time",
    "accuracy",
    "loss",
    "perplexity",
    "seen_accuracy",
    "round_forgetting",
    "online",
    "selected",
    "accepted",
    "dropped",
    "late",
    "cancelled",
    "failed",
    "rejected",
    "attempts",
    "bytes_down",
    "bytes_up",
    "wire_bytes_down",
    "wire_bytes_up",
    "round_seconds",
    "device_seconds",
    "coordinator_seconds",
    "server_seconds",
)
"""The columns of ``metrics.jsonl`` that the page draws. To them come ``forgetting`` (F) and ``own``, the measures of
the method by their columns, such as ``device_metrics.norm``."""
MOST_POINTS: Final = 2000
LATEST: Final = 10
"""The number of last rows that tell the pace of a run."""
MOST_CELLS: Final = 200_000
"""The most cells of a heat map in one message."""


class Rows:
    """The rows so far, one dictionary for each with the columns of the page.

    It keeps one row for each group of rows that follow each other. Groups grow with the run, so that there are at most
    twice as many as a viewer gets.
    """

    def __init__(self) -> None:
        self._groups: list[dict[str, Any]] = []
        """The row that stands for each whole group."""
        self._group = 1
        """The number of rows in a group."""
        self._begun: list[dict[str, Any]] = []
        """The rows of the last group, which is not whole."""
        self._latest: deque[dict[str, Any]] = deque(maxlen=LATEST)
        self._best: list[float] = []
        self._measures: list[OwnMeasure] = []
        """The own measures so far that the page draws."""
        self.totals: dict[str, float] = {}
        """The sums over all rounds, by column."""
        self.best: float | None = None
        """The best accuracy so far."""

    @property
    def last(self) -> Mapping[str, Any]:
        """The last row. Empty if there is none."""
        return self._latest[-1] if self._latest else {}

    @property
    def latest(self) -> Sequence[Mapping[str, Any]]:
        """The last rows, ``LATEST`` at most."""
        return self._latest

    def add(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Add a line of ``metrics.jsonl`` of the form of ``is_row``, and return what the page gets of it."""
        row: dict[str, Any] = {name: line.get(name) for name in COLUMNS}
        row["class_accuracy"] = _rounded(line.get("class_accuracy"))
        row["period_accuracy"] = _rounded(line.get("period_accuracy"))
        row["forgetting"] = self._forgotten(row["class_accuracy"])
        row["own"] = self._measured(line)
        for name in ("selected", "accepted", "dropped", "late", "cancelled", "failed", "rejected", "round_seconds"):
            self.totals[name] = self.totals.get(name, 0) + (row[name] or 0)
        if row["accuracy"] is not None:
            self.best = max(self.best or 0.0, row["accuracy"])
        self._latest.append(row)
        self._begun.append(row)
        if len(self._begun) == self._group:
            self._groups.append(_standing_for(self._begun))
            self._begun = []
        if len(self._groups) == 2 * MOST_POINTS:
            self._groups = _thinned_out(self._groups, 2)
            self._group *= 2
        return row

    def thinned(self) -> list[dict[str, Any]]:
        """The rows for a viewer who comes new: ``MOST_POINTS`` and the last one at most, and fewer lists of classes.

        Of rounds that follow each other the last evaluated one is kept, if there is one.
        """
        rows = [*self._groups, *_thinned_out(self._begun, self._group)]
        kept = _thinned_out(rows, max(1, math.ceil(len(rows) / MOST_POINTS)))
        if kept and kept[-1] is not self.last:
            kept.append(self._latest[-1])
        lists = [number for number, row in enumerate(kept) if row["class_accuracy"]]
        wide = max((len(kept[number]["class_accuracy"]) for number in lists), default=0)
        shown = {*lists[:: -max(1, math.ceil(len(lists) * wide / MOST_CELLS))]}
        return [
            {**row, "class_accuracy": None, "period_accuracy": None}
            if row["class_accuracy"] and number not in shown
            else row
            for number, row in enumerate(kept)
        ]

    def _measured(self, line: Mapping[str, Any]) -> dict[str, float]:
        told = measures_of(line.get("device_metrics") or {}, line.get("remarks") or {})
        self._measures = first_of([*self._measures, *told])
        return {measure.column: told[measure] for measure in self._measures if measure in told}

    def _forgotten(self, now: Sequence[float | None] | None) -> float | None:
        """F after this row: the mean over classes of the best earlier accuracy minus the present one."""
        if now is None:
            return None
        known = [-1.0 if value is None else value for value in now]
        best, self._best = self._best, [max(pair) for pair in zip(known, self._best or known, strict=False)]
        lost = [old - new for old, new in zip(best, known, strict=False) if new >= 0 and old >= 0]
        return sum(lost) / len(lost) if lost else None


def _thinned_out(rows: Sequence[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """One row for each ``step`` rows."""
    return [_standing_for(rows[start : start + step]) for start in range(0, len(rows), step)]


def _standing_for(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row that is shown in place of these."""
    return next((row for row in reversed(rows) if row["accuracy"] is not None), rows[-1])


def _rounded(values: Sequence[float | None] | None) -> list[float | None] | None:
    return [None if value is None else round(float(value), 4) for value in values] if values else None
