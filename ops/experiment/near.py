"""Suggestions for a mistyped name: the nearest known ones, and none if nothing is near."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.66
"""The least similarity of a suggestion, as difflib counts it. A lower one shows people names that they did not mean."""
_COMMON = "fed"
"""Many methods begin with it, so that two of them are no nearer to each other for it."""


def near(given: str, known: Iterable[str], most: int = 1, cutoff: float = _CUTOFF) -> list[str]:
    """The names that are most like ``given``, the most similar one first. Capital letters do not count."""
    found = [(_similarity(given.lower(), name.lower()), name) for name in known]
    return [name for ratio, name in sorted(found, key=lambda pair: -pair[0])[:most] if ratio >= cutoff]


def did_you_mean(given: str, known: Iterable[str], most: int = 1, cutoff: float = _CUTOFF) -> str:
    """``; did you mean ...?`` with the nearest names. Empty if none is near."""
    found = near(given, known, most, cutoff)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _similarity(one: str, other: str) -> float:
    if one.startswith(_COMMON) and other.startswith(_COMMON):
        one, other = one.removeprefix(_COMMON), other.removeprefix(_COMMON)
    return difflib.SequenceMatcher(None, one, other).ratio()
