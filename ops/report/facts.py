"""The figures and tables of a run's page, apart from those of its periods and its generators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedemu.coordinator.record.row import Row, updates_per_second
from fedemu.coordinator.record.run import Line
from fedemu.coordinator.record.summary import forgetting_of
from fedemu.ops.figures import per_second, percent, readable_bytes, span, time_unit
from fedemu.ops.pages.parts import Table, numbers_by_name
from fedemu.ops.report.periods import period_cards
from fedemu.ops.results.periods import PeriodResults
from fedemu.protocol.messages import OUTCOMES

_FACTS = ("wall_time", "virtual_time", "versions", "machine")
"""The fields of the summary that the page shows as facts below its plots."""


def cards(rows: Sequence[Row], results: PeriodResults | None) -> list[tuple[str, str]]:
    """Labels and figures of the whole run, with those of the periods first if the run has any."""
    forgot = forgetting_of(rows)
    accuracies = [row.accuracy for row in rows if row.accuracy is not None]
    virtual = (rows[-1].virtual_time or 0.0) if rows else 0.0
    divisor, unit = time_unit(virtual)
    accepted = sum(row.accepted or 0 for row in rows)
    speed = updates_per_second(accepted, sum(row.round_seconds or 0.0 for row in rows))
    return [
        *(period_cards(results) if results else []),
        ("final accuracy", percent(accuracies[-1]) if accuracies else "–"),
        ("best accuracy", percent(max(accuracies)) if accuracies else "–"),
        *([] if results else [("forgetting", "–" if forgot is None else percent(forgot))]),
        ("rounds", f"{len(rows)}"),
        ("device updates accepted", f"{accepted:,}"),
        ("updates per second", "–" if speed is None else per_second(speed)),
        ("time of the experiment", f"{virtual / divisor:.1f} {unit}"),
        ("bytes down, emulated", readable_bytes(sum(row.bytes_down or 0 for row in rows))),
        ("bytes up, emulated", readable_bytes(sum(row.bytes_up or 0 for row in rows))),
    ]


def outcomes_table(rows: Sequence[Row]) -> Table:
    """How many devices ended in each outcome, over all rounds, and their share of all selected devices."""
    totals = {outcome: sum(row.outcomes[outcome] for row in rows) for outcome in OUTCOMES}
    selected = sum(totals.values())
    lines = [(name, f"{count:,}", percent(count / selected) if selected else "–") for name, count in totals.items()]
    return numbers_by_name(("outcome", "devices", "share"), lines)


def events_table(events: Sequence[Line]) -> Table:
    """How often each event occurred, the most frequent first."""
    counts = Counter(str(event.get("event", "?")) for event in events)
    return numbers_by_name(("event", "count"), [(name, f"{count:,}") for name, count in counts.most_common()])


def facts_table(summary: Mapping[str, Any]) -> Table:
    """The facts of the run and its machine that the summary holds."""
    known = {key: summary[key] for key in _FACTS if summary.get(key) is not None}
    lines = [(key.replace("_", " "), _fact(key, value)) for key, value in known.items()]
    return Table([("fact", "words"), ("value", "words")], lines)


def _fact(key: str, value: Any) -> str:
    """A value of the summary as people read it, with its unit."""
    match value:
        case Mapping():
            return ", ".join(f"{name.removesuffix('_bytes')} {_fact(name, item)}" for name, item in value.items())
        case int() | float() if key.endswith("_bytes"):
            return readable_bytes(value)
        case int() | float() if key.endswith("_time"):
            return span(value)
    return str(value)
