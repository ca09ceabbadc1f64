"""Sentences for people about a run whose result is to be doubted, and the cause of one that has none.

It has learnt nothing, many replies were lost, machines computed differently, or its last model was not tested. A run
without a result has diverged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedemu.coordinator.record.row import Row
from fedemu.ops.figures import percent
from fedemu.protocol.wording import counted

ERRORS = 2.0
"""An accuracy counts as better than chance if it is more than this number of standard errors above it."""
LOST_SHARE = 0.2
"""It is told if a larger share than this of the devices that did their work failed or sent what was rejected."""


def doubts(rows: Sequence[Row], summary: Mapping[str, Any]) -> list[str]:
    """The doubts about a run with these rows and this summary, one sentence each. Most runs have none.

    A run has learnt nothing if its last accuracy is not more than two standard errors above the share of the most
    frequent class among the test samples. Devices that dropped out, were late or were not needed do not count as lost.
    Machines that compute differently make a run that cannot be repeated to the bit. The last model of a run that ended
    early may never have been tested.
    """
    early = last_test(rows) if summary.get("outcome", "completed") != "completed" else ""
    untested = [f"the accuracy is that {early}, and not that of the last model"] if early else []
    return [*untested, *_learnt_nothing(rows, summary), *_lost_replies(rows), *_mixed(summary)]


def last_test(rows: Sequence[Row]) -> str:
    """What was tested last, in words, where that was not the last model with all test samples. Otherwise empty."""
    last = next((row for row in reversed(rows) if row.accuracy is not None), None)
    if last is None:
        return ""
    partly = last.class_accuracy is None and last.perplexity is None and last.test_samples is not None
    if last is rows[-1] and not partly:
        return ""
    on = f" on {counted(last.test_samples, 'test sample')}" if partly and last.test_samples is not None else ""
    return f"after round {last.round} of {rows[-1].round}{on}"


def cause_of(events: Iterable[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """The cause for which a run with these events and this summary diverged. Empty if it did not."""
    told = [str(event.get("detail")) for event in events if event.get("event") == "diverged"]
    return told[-1] if told and summary.get("outcome") == "diverged" else ""


def _learnt_nothing(rows: Sequence[Row], summary: Mapping[str, Any]) -> list[str]:
    last = next((row for row in reversed(rows) if row.accuracy is not None), None)
    chance = summary.get("chance_accuracy")
    if last is None or last.accuracy is None or chance is None or not last.test_samples:
        return []
    if last.accuracy > chance + ERRORS * math.sqrt(chance * (1 - chance) / last.test_samples):
        return []
    return [
        f"the model has learnt nothing: with an accuracy of {percent(last.accuracy)} it is no better than answering "
        f"always with the most frequent class, which is right for {percent(chance)} of the test samples"
    ]


def _lost_replies(rows: Sequence[Row]) -> list[str]:
    accepted, rejected, failed = (
        sum(row.outcomes[outcome] for row in rows) for outcome in ("accepted", "rejected", "failed")
    )
    replies = accepted + rejected + failed
    if not replies or (rejected + failed) / replies <= LOST_SHARE:
        return []
    return [
        f"many devices are missing from the model: of {replies:,} that did their work {rejected:,} sent replies that "
        f"were rejected, and {failed:,} failed; that is {percent((rejected + failed) / replies)}, and the events of "
        "the run say why"
    ]


def _mixed(summary: Mapping[str, Any]) -> list[str]:
    compute = summary.get("compute") or {}
    if not compute.get("mixed"):
        return []
    ways = [*compute.get("coordinator", ()), *compute.get("machines", ())]
    hosts = ", ".join(dict.fromkeys(str(way.get("host")) for way in ways))
    return [
        f"machines that compute differently took part ({hosts}; summary.json says how each computes), so the same "
        "experiment may end otherwise"
    ]
